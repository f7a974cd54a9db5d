"""Single values that a caller gave, checked: each is returned as qsample keeps it, or a ValueError names it, the given
value and the accepted ones. Needs the standard library only.
"""

from __future__ import annotations

import math
import threading
from numbers import Integral, Real
from typing import Any, Final, TypeGuard

from qsample.errors import ArgumentError, shown

# How much is compared before a package is published; docs/architecture.md has what each level proves.
DEFAULT: Final = "default"
FULL: Final = "full"
VERIFY_LEVELS: Final = (DEFAULT, FULL)


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


def check_verify(value: Any) -> None:
    """Raise ValueError unless `value` is a level of VERIFY_LEVELS."""
    if value not in VERIFY_LEVELS:
        raise ArgumentError(f"verify is {shown(value)}; choose one of {', '.join(VERIFY_LEVELS)}", "verify")


def checked_timeout(timeout: Any) -> float | None:
    """Seconds as `threading` takes them; None = for ever. Raises ValueError."""
    if timeout is None:
        return None
    if not is_number(timeout):
        raise ValueError(f"timeout is {shown(timeout)}; give seconds, or None to wait as long as it takes")
    return float(min(max(timeout, 0), threading.TIMEOUT_MAX))


def plain(value: Any) -> Any:
    """A value that compares with others: an array, which compares number by number, as a list."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value
