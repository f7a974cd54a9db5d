"""Messages whose roles a chat template refuses → the same texts under roles that it takes.

Agents write conversations for OpenAI's and Anthropic's models: with the role "developer", several
system prompts, system prompts in the middle, messages of the user that follow each other. Many
templates raise an error for some of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
_SYSTEM_ROLES = ("system", "developer")


def rewritings(messages: Sequence[Message], knows_developer: bool) -> Iterator[Sequence[Message]]:
    """The messages as they are, and then with more and more changes: the role "developer" becomes
    "system", as OpenAI does for its earlier models; system prompts at the beginning become a single
    one; later ones become messages of the user; messages of the user that follow each other become
    a single one; the system prompt becomes a message of the user.

    A change that changes nothing is left out.

    Args:
        messages: the conversation.
        knows_developer: whether the template knows the role "developer". Otherwise the first
            conversation has no such role.
    """
    if not knows_developer:
        messages = _without_developer(messages)
    yield messages
    for change in (
        _without_developer,
        _with_one_system_prompt,
        _without_late_system_prompts,
        _with_user_turns,
        _without_system_prompt,
    ):
        changed = change(messages)
        if changed != messages:
            messages = changed
            yield messages


def _without_developer(messages: Sequence[Message]) -> Sequence[Message]:
    return [_in_role("system", message, _is_developer) for message in messages]


def _with_one_system_prompt(messages: Sequence[Message]) -> Sequence[Message]:
    first = _number_of_first_system_prompts(messages)
    return [*_joined(messages[:first]), *messages[first:]]


def _without_late_system_prompts(messages: Sequence[Message]) -> Sequence[Message]:
    first = _number_of_first_system_prompts(messages)
    later = [_in_role("user", message, _is_system) for message in messages[first:]]
    return [*messages[:first], *later]


def _with_user_turns(messages: Sequence[Message]) -> Sequence[Message]:
    turns: list[Message] = []
    for message in messages:
        if message.get("role") == "user" and turns and turns[-1].get("role") == "user":
            turns[-1:] = _joined([turns[-1], message])
        else:
            turns.append(message)
    return turns


def _without_system_prompt(messages: Sequence[Message]) -> Sequence[Message]:
    return _with_user_turns([_in_role("user", message, _is_system) for message in messages])


def _is_developer(message: Message) -> bool:
    return message.get("role") == "developer"


def _is_system(message: Message) -> bool:
    return message.get("role") in _SYSTEM_ROLES


def _in_role(role: str, message: Message, matches: Callable[[Message], bool]) -> Message:
    """The message, in another role if it matches."""
    return {**message, "role": role} if matches(message) else message


def _number_of_first_system_prompts(messages: Sequence[Message]) -> int:
    for place, message in enumerate(messages):
        if not _is_system(message):
            return place
    return len(messages)


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Messages of one role as a single message; none if there are none."""
    if len(messages) < 2:
        return list(messages)
    contents = [message.get("content") or "" for message in messages]
    if all(isinstance(content, str) for content in contents):
        return [{**messages[0], "content": "\n".join(contents)}]
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{**messages[0], "content": parts}]
