"""Places in a schema: JSON pointers (RFC 6901)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

# JSON pointers write / and ~ in this way.
_ESCAPES: Final = (("~1", "/"), ("~0", "~"))


def pointer_step(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def step_name(step: str) -> str:
    """The name that a step of a JSON pointer stands for."""
    for written, character in _ESCAPES:
        step = step.replace(written, character)
    return step


def followed(root: Any, reference: str) -> list[Any] | None:
    """The values on the way from a document's root to the place that a reference names, that place
    last.

    Args:
        root: the document.
        reference: "#" and a JSON pointer, such as "#/$defs/person".

    Returns:
        The values without the root, unless it is the place; None if there is no such place.
    """
    values: list[Any] = []
    value = root
    for step in unquote(reference[1:]).split("/")[1:]:
        if isinstance(value, list) and step.isascii() and step.isdigit():
            value = value[int(step)] if int(step) < len(value) else None
        else:
            value = value.get(step_name(step)) if isinstance(value, Mapping) else None
        if value is None:
            return None
        values.append(value)
    return values or [root]
