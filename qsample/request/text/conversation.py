"""Chat messages as their authors write them → messages in plain JSON types, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

import numpy as np

from qsample.errors import shown

# The names of the thoughts of a model before its answer. Templates read the first name, older hosts
# write the others.
REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
# The types of parts that hold an image. Templates know the first type.
IMAGE_TYPES: Final = ("image", "image_url", "input_image")
# The types of parts that hold a text, each with the field of the text. Templates know the first
# type; the others are those of OpenAI's responses, which clients also put into chats.
TEXT_FIELDS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
# The roles whose content is a text or parts. The content of other roles may be any JSON: the result
# of a tool, for example.
_TEXT_ROLES: Final = ("system", "developer", "user", "assistant")
_MAX_DEPTH: Final = 100  # levels
_MESSAGE_FORM: Final = 'give a list of {"role": "user", "content": "..."}'


def check_messages(messages: Any, text_only: str | None = None) -> list[dict[str, Any]]:
    """A plain copy of a conversation: without entries that are None and without empty lists of
    calls, with reasoning under each of its names, with {"type": "text"} for each text of a part, and
    with {"type": "image"} for each image.

    A content without a text is "", whether it is None, has no parts or empty ones. An assistant's
    message may lack a content.

    Args:
        messages: the conversation.
        text_only: the name of a reader that takes no images; None if images are accepted.

    Raises ValueError for a message that is not a mapping with a role, lacks its content, or has a
    part that is neither text nor an accepted image.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"the chat messages are {shown(messages)}; {_MESSAGE_FORM}")
    if not messages:
        raise ValueError(f"the conversation is empty; {_MESSAGE_FORM}")
    return [_message(index, message, text_only) for index, message in enumerate(messages)]


def _message(index: int, given: Any, text_only: str | None) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError(f"a chat message is {shown(given)}; {_MESSAGE_FORM}")
    what = f"chat message {index}"
    role = given["role"]
    message = {name: value for name, value in given.items() if value is not None}
    if message.get("tool_calls") == []:  # Clients write it into answers that call nothing.
        del message["tool_calls"]
    if "content" in message:
        message["content"] = _content(what, role, message["content"], text_only)
    elif role == "tool" or (role != "assistant" and "content" in given):
        message["content"] = ""
    elif role != "assistant":
        raise ValueError(f"{what} ({role}) has no content; give a text, or parts of type text")
    # OpenAI's answers have a refusal in place of a content.
    if role == "assistant" and not message.get("content") and "refusal" in message:
        message["content"] = _content(what, role, message["refusal"], text_only)
    message = plain(what, message)
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(what: str, role: str, content: Any, text_only: str | None) -> Any:
    """The checked content of a message."""
    has_parts = isinstance(content, list | tuple) and all(
        isinstance(part, str) or _is_part(part) for part in content
    )
    if has_parts:
        parts = [_part(what, part, text_only) for part in content]
        says_nothing = all(part.get("text") == "" for part in parts)
        return "" if says_nothing and role in _TEXT_ROLES else parts
    if isinstance(content, str) or role not in _TEXT_ROLES:
        return content
    raise ValueError(
        f'the content of {what} ({role}) is {shown(content)}; give a text, or parts [{{"type": "text", "text": "..."}}]'
    )


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _part(what: str, part: Any, text_only: str | None) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part["type"] in IMAGE_TYPES and text_only is None:
        return {"type": IMAGE_TYPES[0]}
    text = part.get(TEXT_FIELDS.get(part["type"], ""))
    if not isinstance(text, str):
        known = "give parts of text or images"
        if text_only is not None:
            known = f"{text_only} reads text only"
        form = '{"type": "text", "text": "..."}'
        raise ValueError(f"{what} has a part of type {shown(part['type'])}; {known}: {form}")
    return part if part["type"] == "text" else {"type": "text", "text": text}


def is_parts(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether the content of a checked message is a list of parts."""
    return (
        isinstance(content, list) and len(content) > 0 and all(_is_part(part) for part in content)
    )


def plain(what: str, value: Any, depth: int = 0) -> Any:
    """A copy of `value` in JSON's types. Raises ValueError for other types, with the name
    `what`."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if depth > _MAX_DEPTH:
        raise ValueError(f"{what} is nested more than {_MAX_DEPTH} levels deep; give less")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, Mapping):
        return {
            plain(what, key, depth + 1): plain(what, item, depth + 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(what, item, depth + 1) for item in value]
    raise ValueError(
        f"{what} holds a {type(value).__name__}; give text, numbers, lists and mappings, as JSON has them"
    )


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message whose calls have objects as arguments, as templates take them. In OpenAI's
    API, arguments are texts. Texts that are not JSON objects stay."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _object_of(function["arguments"])}}


def _object_of(text: str) -> Any:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
