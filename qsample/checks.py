"""Values that a caller gave, checked: each is returned as qsample keeps it, or a ValueError names it, the given value
and what is accepted. `number`, `integer`, `choice`, `flag`, `instance` and `checked` are fields of dataclasses, for
`check_fields`. Needs the standard library only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, TypeGuard, TypeVar

from qsample.errors import ArgumentError, shown, unknown

T = TypeVar("T")


def is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Whether `value` is an integer from `least` to `most`; a bool is not, an integer of NumPy is."""
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
    """Seconds as `threading` takes them, or None to wait for ever. Raises ValueError."""
    if timeout is None:
        return None
    if not is_number(timeout):
        raise ValueError(
            f"timeout is {shown(timeout)}; give seconds, or None to wait as long as it takes"
        )
    return float(min(max(timeout, 0), threading.TIMEOUT_MAX))


def plain(value: Any) -> Any:
    """A value that can be compared: an array, compared number by number, as a list."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


class Limits(NamedTuple):
    """The numbers that a field accepts, and in words, `accepted`; hosts in other languages get them from here."""

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
    """A field for a number from `least` to `most`.
    default: kept as it is, within the limits or not; None implies `optional`. accepted: the limits in words, the object
    of "give". metadata: of the field, for its doors: the help of a flag, for example."""
    return _ranged(default, Limits(least, most, accepted, float), is_number, optional, metadata)


def integer(
    default: Any, least: int, most: float, accepted: str, *, optional: bool = False, **metadata: Any
) -> Any:
    """A field for an integer from `least` to `most`; see `number`."""
    return _ranged(default, Limits(least, most, accepted, int), is_integer, optional, metadata)


def _ranged(
    default: Any, limits: Limits, is_valid: Callable[..., bool], optional: bool, metadata: Any
) -> Any:
    def check(name: str, value: Any) -> Any:
        if optional and value is None:
            return None
        return (
            limits.kind(value)
            if is_valid(value, *limits[:2])
            else refuse(name, value, limits.accepted)
        )

    return checked(default, check, limits=limits, **metadata)


def choice(
    default: Any, choices: Collection[Any], *, optional: bool = False, **metadata: Any
) -> Any:
    """A field for one of `choices`; see `number`."""
    listed = ", ".join(map(str, choices)) + (", or None" if optional or default is None else "")

    def check(name: str, value: Any) -> Any:
        # Of equal values of other types, such as True and 1, none is a choice; compared first, as a list has no hash.
        if (optional and value is None) or any(
            type(value) is type(item) and value == item for item in choices
        ):
            return value
        raise ArgumentError(f"{name} is {shown(value)}; choose one of {listed}", name)

    return checked(default, check, choices=choices, **metadata)


def flag(default: bool | None, **metadata: Any) -> Any:
    """A field for True or False, and None if that is the default."""
    return instance(bool, "True or False", default, **metadata)


def instance(kind: Any, accepted: str, default: Any = MISSING, **metadata: Any) -> Any:
    """A field for a value of a type, or of several: `str | None`; see `number`, and `checked` for `factory`."""

    def check(name: str, value: Any) -> Any:
        return value if isinstance(value, kind) else refuse(name, value, accepted)

    return checked(default, check, **metadata)


def checked(
    default: Any = MISSING,
    check: Callable[[str, Any], Any] | None = None,
    *,
    factory: Any = MISSING,
    hashed: bool | None = None,
    **metadata: Any,
) -> Any:
    """A field that keeps the default, or the result of `check(name, value)` for another value; without `check`, any
    value. `check` raises ValueError; see `refuse`.
    factory: makes the default, in place of `default`. hashed: whether the value counts for the dataclass's hash; by
    default, if it counts for equality."""
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
    """Raise ArgumentError. name: of the field; details may follow, after a space. accepted: the object of "give"."""
    raise ArgumentError(f"{name} is {shown(value)}; give {accepted}", name.partition(" ")[0])


def check_fields(options: Any, error: type[Exception] | None = None) -> None:
    """Check a dataclass's fields, from its `__post_init__`, and keep the results; `error` replaces ArgumentError."""
    for entry in fields(options):
        value, check = getattr(options, entry.name), entry.metadata.get("check")
        if check is None or value is entry.default:
            continue
        try:
            object.__setattr__(options, entry.name, check(entry.name, value))
        except ArgumentError as refused:
            if error is None:
                raise
            raise error(str(refused)) from None
