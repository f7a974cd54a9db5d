"""Expressions of the scalars of JSON: strings, numbers, and integers of a range.

Texts are those of json.dumps without ASCII escapes; strings may have escapes, too. Numbers have so
few digits that Python and JavaScript read them as finite numbers.
"""

from __future__ import annotations

from typing import Final

from qsample.request.structured.not_regular import NEVER, alternatives

_MAX_INTEGER_DIGITS: Final = 18
LARGEST_INTEGER: Final = 10**_MAX_INTEGER_DIGITS - 1

# An escape of a code point that is no surrogate.
_CODE_POINT_ESCAPE: Final = r"u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
# A code point of a string.
CHARACTER: Final = rf'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|{_CODE_POINT_ESCAPE}))'
STRING: Final = f'"{CHARACTER}*"'
NULL: Final = "null"
BOOLEAN: Final = "(?:true|false)"
INTEGER: Final = rf"-?(?:0|[1-9][0-9]{{0,{_MAX_INTEGER_DIGITS - 1}}})"
NUMBER: Final = rf"{INTEGER}(?:\.[0-9]{{1,17}})?(?:[eE][+\-]?[0-9]{{1,2}})?"


def integers(least: int, most: int) -> str:
    """The expression of the integers from `least` to `most` that have at most 18 digits."""
    least = max(least, -LARGEST_INTEGER)
    most = min(most, LARGEST_INTEGER)
    if least > most:
        return NEVER
    if (least, most) == (-LARGEST_INTEGER, LARGEST_INTEGER):
        return INTEGER
    parts = []
    if least < 0:
        positive = alternatives(_naturals(max(1, -most), -least))
        parts.append(f"-{positive}")
    if most >= 0:
        parts += _naturals(max(least, 0), most)
    return alternatives(parts)


def _naturals(least: int, most: int) -> list[str]:
    """Expressions of the natural numbers from `least` to `most`."""
    parts = []
    for num_digits in range(len(str(least)), len(str(most)) + 1):
        first = 10 ** (num_digits - 1) if num_digits > 1 else 0
        last = 10**num_digits - 1
        low = max(least, first)
        high = min(most, last)
        parts += _digits(str(low), str(high))
    return parts


def _digits(low: str, high: str) -> list[str]:
    """Expressions of the digits from `low` to `high`, two texts of the same length."""
    num_rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return [f"[0-9]{{{len(low)}}}"]
    if num_rest == 0:
        return [f"[{low}-{high}]"]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _digits(low[1:], high[1:])]
    parts = []
    first_whole = int(low[0])
    last_whole = int(high[0])
    if low[1:] != "0" * num_rest:
        parts += [low[0] + rest for rest in _digits(low[1:], "9" * num_rest)]
        first_whole += 1
    if high[1:] != "9" * num_rest:
        parts += [high[0] + rest for rest in _digits("0" * num_rest, high[1:])]
        last_whole -= 1
    if first_whole <= last_whole:
        parts.append(f"[{first_whole}-{last_whole}][0-9]{{{num_rest}}}")
    return parts
