"""Checks of the values that a caller gives. A ValueError names the argument, the given value and
the accepted values.

`number`, `integer`, `choice`, `flag`, `instance` and `checked` are fields of dataclasses for
`check_fields`. This module needs only the standard library.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar

from qsample.errors import ArgumentError, shown, unknown

T = TypeVar("T")


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Whether `value` is an integer from `least` to `most`; a bool is not, an integer of NumPy
    is."""
    return _is_a(Integral, value) and least <= value <= most


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> TypeGuard[float]:
    """Whether `value` is a real number from `least` to `most`; a bool and NaN are not."""
    return _is_a(Real, value) and least <= value <= most


def _is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`, or None."""
    if value is not None and not is_integer(value, least):
        raise ArgumentError(f"{name} is {shown(value)}; give an integer >= {least}, or None", name)


def checked_timeout(timeout: Any) -> float | None:
    """Seconds that `threading` accepts, or None to wait without limit. Raises ValueError."""
    if timeout is None:
        return None
    if not is_number(timeout):
        raise ValueError(
            f"timeout is {shown(timeout)}; give seconds, or None to wait as long as it takes"
        )
    return float(min(max(timeout, 0), threading.TIMEOUT_MAX))


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """A path that a caller gives.

    Args:
        name: The name of the argument.
        value: The path as a text or an object.

    Raises:
        ArgumentError: It is something else, or an empty text, which `Path` would take for the
            current folder.
    """
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(
            f"{name} is {shown(value)}, a {type(value).__name__}; give a path", name
        )
    if value == "":
        raise ArgumentError(f'{name} is empty; give a path (the current folder is ".")', name)
    return Path(value)


def plain(value: Any) -> Any:
    """A value that can be compared: an array becomes a list."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


class Limits(NamedTuple):
    """The numbers that a field accepts, also for hosts in other languages.

    Attributes:
        least: The smallest number.
        most: The largest number.
        accepted: The numbers in words.
        kind: The type, int or float.
    """

    least: float
    most: float
    accepted: str
    kind: type


def number(
    default: Any,
    least: float,
    most: float,
    accepted: str,
    *,
    optional: bool = False,
    **metadata: Any,
) -> Any:
    """A dataclass field for a number.

    Args:
        default: The default, which may lie outside the limits.
        least: The smallest number.
        most: The largest number.
        accepted: The accepted numbers in words, which complete the sentence "give …".
        optional: Whether None is accepted.
        metadata: Further metadata of the field, such as the help of a flag.
    """
    return _ranged(default, Limits(least, most, accepted, float), is_number, optional, metadata)


def integer(
    default: Any, least: int, most: float, accepted: str, *, optional: bool = False, **metadata: Any
) -> Any:
    """A dataclass field for an integer; for the arguments see `number`."""
    return _ranged(default, Limits(least, most, accepted, int), is_integer, optional, metadata)


def _ranged(
    default: Any, limits: Limits, is_valid: Callable[..., bool], optional: bool, metadata: Any
) -> Any:
    def check(name: str, value: Any) -> Any:
        if optional and value is None:
            return None
        if not is_valid(value, limits.least, limits.most):
            refuse(name, value, limits.accepted)
        return limits.kind(value)

    return checked(default, check, limits=limits, **metadata)


def choice(
    default: Any, choices: Collection[Any], *, optional: bool = False, **metadata: Any
) -> Any:
    """A dataclass field for one of `choices`; for the other arguments see `number`."""
    listed = ", ".join(map(str, choices))
    if optional or default is None:
        listed += ", or None"

    def check(name: str, value: Any) -> Any:
        if optional and value is None:
            return value
        # Equal values of another type, such as True and 1, are not accepted. A list has no hash, so
        # the values are compared one by one.
        if any(type(value) is type(item) and value == item for item in choices):
            return value
        raise ArgumentError(f"{name} is {shown(value)}; choose one of {listed}", name)

    return checked(default, check, choices=choices, **metadata)


def flag(default: bool | None, **metadata: Any) -> Any:
    """A dataclass field for True or False. A default of None is kept."""
    return instance(bool, "True or False", default, **metadata)


def instance(kind: Any, accepted: str, default: Any = MISSING, **metadata: Any) -> Any:
    """A dataclass field for a value of a type.

    Args:
        kind: The type, or a union such as `str | None`.
        accepted: The accepted values in words, which complete the sentence "give …".
        default: The default.
        metadata: `factory`, see `checked`, and further metadata of the field.
    """

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            refuse(name, value, accepted)
        return value

    return checked(default, check, **metadata)


def checked(
    default: Any = MISSING,
    check: Callable[[str, Any], Any] | None = None,
    *,
    factory: Any = MISSING,
    hashed: bool | None = None,
    **metadata: Any,
) -> Any:
    """A dataclass field that keeps the default, or the checked value.

    Args:
        default: The default.
        check: A function of the name and the value that returns the value to keep, or raises
            ValueError; see `refuse`. None accepts any value.
        factory: A function that makes the default, in place of `default`.
        hashed: Whether the value counts for the hash of the dataclass; by default, if it counts for
            equality.
        metadata: Further metadata of the field.
    """
    metadata["check"] = check
    return field(default=default, default_factory=factory, hash=hashed, metadata=metadata)


def from_keywords(kind: type[T], function: str, given: Mapping[str, Any]) -> T:
    """An instance of the dataclass `kind`, whose fields are the keywords of `function`. Raises TypeError for an unknown
    keyword."""
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            raise TypeError(unknown(f"{function} has no argument", name, names))
    return kind(**given)


def refuse(name: str, value: Any, accepted: str) -> NoReturn:
    """Raise ArgumentError.

    Args:
        name: The name of the field; details may follow after a space.
        value: The given value.
        accepted: The accepted values in words, which complete the sentence "give …".
    """
    raise ArgumentError(f"{name} is {shown(value)}; give {accepted}", name.partition(" ")[0])


def check_fields(options: Any, error: type[Exception] | None = None) -> None:
    """Check the fields of a dataclass in its `__post_init__`, and keep the results.

    Args:
        options: The dataclass.
        error: The type of exception that replaces ArgumentError, if any.
    """
    for entry in fields(options):
        value = getattr(options, entry.name)
        check = entry.metadata.get("check")
        if check is None or value is entry.default:
            continue
        try:
            object.__setattr__(options, entry.name, check(entry.name, value))
        except ArgumentError as refused:
            if error is None:
                raise
            raise error(str(refused)) from None
