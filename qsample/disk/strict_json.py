"""JSON from strangers: what RFC 8259 leaves open is refused, and so is what would take too much memory or stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

LARGEST_FILE: Final = 1 << 26  # bytes; a tokenizer's configuration with 100,000 added tokens has a quarter of that
_DEEPEST: Final = 64


def parse_json(text: str, *, infinities: bool = False) -> Any:
    """The value of a JSON document.

    infinities: take `Infinity` and `-Infinity`, which Python writes, and transformers into some configurations. Raises
    ValueError, one line, for bad syntax, a key that comes twice, NaN, other infinities, a number that no float holds,
    and arrays and objects more than 64 deep.
    """
    constant = _infinity if infinities else _no_constant
    try:
        value = json.loads(
            text, object_pairs_hook=_no_key_twice, parse_constant=constant, parse_float=_finite, parse_int=_integer
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} deep") from None
    _check_depth(value)
    return value


def read_json(path: Path, largest: int = LARGEST_FILE, *, infinities: bool = False) -> Any:
    """`parse_json` of a UTF-8 file. Raises OSError as well, and ValueError where `read_text` does."""
    return parse_json(read_text(path, largest), infinities=infinities)


def read_text(path: Path, largest: int = LARGEST_FILE) -> str:
    """A UTF-8 file. Raises ValueError where it is no plain file, larger than `largest` bytes, or not UTF-8."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError("it is not a plain file")
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest >> 20} MiB")
    return content.decode("utf-8")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise ValueError(f"{name!r:.80} comes twice in one object")
        value[name] = item
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _infinity(name: str) -> float:
    return _no_constant(name) if name == "NaN" else float(name)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _integer(text: str) -> int:
    if len(text) > 400:  # more digits than the largest float has; Python's own limit is a setting
        raise ValueError(f"{text:.40}… is too large for a number")
    return int(text)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _DEEPEST + 1:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        level = children
