"""Single values that a caller gave, checked: each is returned as qsample keeps it, or a ValueError names it, the given
value and the accepted ones. Needs the standard library only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, TypeGuard

from qsample.errors import shown

INT32_MAX: Final = 2**31 - 1
FLOAT32_MAX: Final = 3.4028235e38
FLOAT32_TINY: Final = 1.1754944e-38  # the least that float32 holds in full
LONGEST_TEXT: Final = 256  # characters: more are no token, and no word to forbid


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
        raise ValueError(f"{name} is {shown(value)}; give an integer >= {least}, or None")


def checked_timeout(timeout: Any) -> float | None:
    """Seconds as `threading` takes them; None = for ever. Raises ValueError."""
    if timeout is None:
        return None
    if not is_number(timeout):
        raise ValueError(f"timeout is {shown(timeout)}; give seconds, or None to wait as long as it takes")
    return float(min(max(timeout, 0), threading.TIMEOUT_MAX))


def number(name: str, value: Any, least: float, most: float, accepted: str) -> float:
    """A real number from `least` to `most`. accepted: what to tell the caller, as for the functions below."""
    if not is_number(value, least, most):
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    return float(value)


def integer(name: str, value: Any, least: int, most: int, accepted: str) -> int:
    """An integer from `least` to `most`."""
    if not is_integer(value, least, most):
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    return int(value)


def optional_integer(name: str, value: Any, least: int, most: int, accepted: str) -> int | None:
    """An integer from `least` to `most`, or None."""
    return None if value is None else integer(name, value, least, most, accepted)


def one_of(name: str, value: Any, choices: Sequence[int], accepted: str) -> int:
    """One of some integers."""
    if not is_integer(value) or value not in choices:
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    return int(value)


def token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Token ids, each once; a single id is a list of one. None stays."""
    if value is None:
        return None
    accepted = "a token id >= 0, or a list of them"
    return tuple(dict.fromkeys(_token_id(name, item, accepted) for item in (value if _is_list(value) else (value,))))


def ids_or_texts(name: str, value: Any) -> tuple[int | str, ...] | None:
    """Token ids, and texts that stand for one; None for none of either."""
    accepted = f"a list of token ids, and of texts up to {LONGEST_TEXT} characters that are one token, or None"
    items = _items(name, value, accepted)
    return tuple(dict.fromkeys(item if _is_text(item) else _token_id(name, item, accepted) for item in items)) or None


def texts(name: str, value: Any) -> tuple[str, ...] | None:
    """Texts, each once; None for none."""
    items = _items(name, value, accepted := f"a list of texts of 1 to {LONGEST_TEXT} characters, or None")
    if not all(map(_is_text, items)):
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    return tuple(dict.fromkeys(items)) or None


def id_sequences(name: str, value: Any, most: int) -> tuple[tuple[int, ...], ...] | None:
    """Sequences of 1 to `most` token ids, each once; None for none."""
    accepted = f"a list of lists of 1 to {most} token ids, or None"
    sequences = [_items(name, item, accepted) for item in _items(name, value, accepted)]
    if not all(1 <= len(sequence) <= most for sequence in sequences):
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    checked = (tuple(_token_id(name, item, accepted) for item in sequence) for sequence in sequences)
    return tuple(dict.fromkeys(checked)) or None


def bias(name: str, value: Any) -> dict[int, float] | None:
    """Token ids and what is added to their logits; None for none."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}; give a mapping of token ids to numbers, or None")
    checked = {}
    for token, amount in value.items():
        token = integer(f"{name} (token id)", token, 0, INT32_MAX, "an integer >= 0")
        least = amount if amount == -math.inf else -FLOAT32_MAX
        accepted = "a finite number, or -inf to forbid the token"
        checked[token] = number(f"{name} of token {token}", amount, least, FLOAT32_MAX, accepted)
    return checked or None


def plain(value: Any) -> Any:
    """A value that compares with others: an array, which does so number by number, as a list."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _token_id(name: str, value: Any, accepted: str) -> int:
    return integer(name, value, 0, INT32_MAX, accepted)


def _items(name: str, value: Any, accepted: str) -> list[Any]:
    """The items of a list, a tuple, an array; None has none."""
    if value is not None and not _is_list(value):
        raise ValueError(f"{name} is {shown(value)}; give {accepted}")
    return [] if value is None else [plain(item) for item in value]


def _is_list(value: Any) -> bool:
    return isinstance(plain(value), Iterable) and not isinstance(value, str | bytes | Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_TEXT
