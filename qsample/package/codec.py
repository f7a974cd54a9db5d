"""Dataclasses ↔ JSON values. `encode` and `decode` walk over the same fields, as `contract.storage`
describes them."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from qsample.contract.storage import Storage, storage_of

# Keys of packages that older versions wrote; nothing reads them.
_FORMER_KEYS: Final = frozenset({"verify", "weight_hash", "timing", "seed"})
_MAX_LISTED_KEYS: Final = 5


class DecodeError(ValueError):
    """A JSON value does not fit the type that it is read as.

    Attributes:
        where: The place of the value in its document, such as "manifest.source".
        problem: The rest of a sentence that begins with the place.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}{problem}")
        self.where = where
        self.problem = problem


def encode(value: Any) -> Any:
    """Make a JSON value of a dataclass, or of anything in one of its fields.

    JSON has no NaN and no infinities: they become texts.
    """
    if is_dataclass(value):
        encoded = {}
        for entry in fields(value):
            item = getattr(value, entry.name)
            if item != storage_of(entry).omitted:
                encoded[entry.name] = encode(item)
        return encoded
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def decode(kind: Any, value: Any, where: str, storage: Storage | None = None) -> Any:
    """Read a JSON value as an annotated type.

    Args:
        kind: A dataclass, or the type of one of its fields.
        value: The JSON value.
        where: The place of the value in its document.
        storage: How the field is stored that the value belongs to.

    Raises:
        DecodeError: A key is unknown or missing, or a value is mistyped or out of range.
    """
    if kind is Any:
        return value
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin in (Union, types.UnionType):  # The other option is None.
        if value is None and types.NoneType in arguments:
            return None
        option = next(option for option in arguments if option is not types.NoneType)
        return decode(option, value, where, storage)
    if is_dataclass(kind) and isinstance(value, dict):
        return _decode_record(kind, value, where)
    if origin is tuple and isinstance(value, list):
        items = enumerate(value)
        return tuple(decode(arguments[0], item, f"{where}[{i}]", storage) for i, item in items)
    if origin is Mapping and isinstance(value, dict):
        return {
            key: decode(arguments[1], item, place_of(where, key), storage)
            for key, item in value.items()
        }
    if not _has_type(value, kind):
        raise DecodeError(where, f" is {value!r:.80}; it must be {_type_name(kind)}")
    if kind is int:
        _check_range(value, where, storage or Storage())
    return value


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value has a type without parts. A bool is no int, as in JSON and unlike in
    Python."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) is kind


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return getattr(get_origin(kind) or kind, "__name__", str(kind))


def _check_range(number: int, where: str, storage: Storage) -> None:
    if not storage.least <= number < storage.limit:
        raise DecodeError(
            where,
            f" is {number}; it must be {storage.least} or more, and less than {storage.limit}",
        )


def _decode_record(kind: Any, value: dict[str, Any], where: str) -> Any:
    """Read a JSON object as a dataclass."""
    entries = fields(kind)
    unknown = sorted(value.keys() - {entry.name for entry in entries} - _FORMER_KEYS)
    problems = [f"unknown {shown_key(key)}" for key in unknown[:_MAX_LISTED_KEYS]]
    for entry in entries:
        # A field with a default may be younger than the package.
        has_default = entry.default is not MISSING or entry.default_factory is not MISSING
        if entry.name not in value and not has_default:
            problems.append(f"missing {entry.name}")
    if problems:
        raise DecodeError(where, f" does not fit this qsample: {', '.join(problems)}")
    hints = get_type_hints(kind)
    arguments = {}
    for entry in entries:
        if entry.name in value:
            place = f"{where}.{entry.name}"
            item = value[entry.name]
            arguments[entry.name] = decode(hints[entry.name], item, place, storage_of(entry))
    try:
        return kind(**arguments)
    except ValueError as error:
        raise DecodeError(where, f": {error!s:.300}") from error


def place_of(where: str, key: str) -> str:
    """The place of a key's value in the object at `where`."""
    return f"{where}.{shown_key(key)}"[:200]


def shown_key(key: str) -> str:
    """A key, whatever it contains, as a message may show it."""
    return key if key.isprintable() and len(key) <= 60 else f"{key[:50]!r}…"
