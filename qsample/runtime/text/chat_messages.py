"""What a caller gives a chat template (messages, tools, documents), checked and as plain JSON data.

Plain, because a template comes from a stranger: an object of the caller's would lend it its methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

import numpy as np

from qsample.errors import shown

# Names of what a model thought before its answer; templates read the first, older hosts write the others.
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_WITH_TEXT: Final = ("system", "developer", "user", "assistant")  # other roles may hold any JSON, a tool's result say
_DEEPEST: Final = 100
_FORM: Final = 'give a list of {"role": "user", "content": "..."}'


def plain(what: str, value: Any, depth: int = 0) -> Any:
    """A copy of `value` in JSON's types. what: has it, for the message. Raises ValueError for anything else."""
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    if depth > _DEEPEST:
        raise ValueError(f"{what} is nested more than {_DEEPEST} levels deep; give less")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(what, key, depth + 1): plain(what, item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(what, item, depth + 1) for item in value]
    raise ValueError(f"{what} holds a {type(value).__name__}; give text, numbers, lists and mappings, as JSON has them")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A plain copy of a conversation: entries that are None left out, reasoning under every name that templates read.

    Raises ValueError for what is no message, has no content, or has a part that is no text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"the chat messages are {shown(messages)}; {_FORM}")
    if not messages:
        raise ValueError(f"the conversation is empty; {_FORM}")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError(f"a chat message is {shown(given)}; {_FORM}")
    what = f"chat message {index}"
    message = {name: value for name, value in given.items() if value is not None}
    if "content" in message:
        message["content"] = _content(what, message["role"], message["content"])
    elif message["role"] != "assistant" or len(message) == 1:  # an assistant may have called tools, or only thought
        raise ValueError(f"{what} ({message['role']}) has no content; give a text, or parts of type text")
    message = plain(what, message)
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(what: str, role: str, content: Any) -> Any:
    if isinstance(content, list | tuple) and all(isinstance(part, str) or _is_part(part) for part in content):
        return [_part(what, part) for part in content]
    if isinstance(content, str) or role not in _WITH_TEXT:
        return content
    raise ValueError(
        f'the content of {what} ({role}) is {shown(content)}; give a text, or parts [{{"type": "text", "text": "..."}}]'
    )


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _part(what: str, part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part["type"] != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"{what} has a part of type {shown(part['type'])}; the model reads text only: "
            '{"type": "text", "text": "..."}'
        )
    return part


def is_parts(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether the content of a checked message is a list of text parts."""
    return isinstance(content, list) and len(content) > 0 and all(_is_part(part) for part in content)
