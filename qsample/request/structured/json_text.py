"""Expressions of the scalars of JSON: strings, formats, numbers, and integers of a range.

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

# Years from 0001, as Python's dates.
_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_MULTIPLE_OF_FOUR: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_MULTIPLE_OF_FOUR}|{_MULTIPLE_OF_FOUR}00)"
_DAY_OF_COMMON_YEAR: Final = (
    r"(?:(?:0[13578]|1[02])\-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)\-(?:0[1-9]|[12][0-9]|30)"
    r"|02\-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE: Final = rf"(?:{_YEAR}\-{_DAY_OF_COMMON_YEAR}|{_LEAP_YEAR}\-02\-29)"
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_MINUTE: Final = "[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_HOUR}:{_MINUTE})"
_HEX: Final = "[0-9a-fA-F]"
_UUID: Final = rf"{_HEX}{{8}}\-{_HEX}{{4}}\-{_HEX}{{4}}\-{_HEX}{{4}}\-{_HEX}{{12}}"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
# Local parts of at most 61 characters, and domains of at most 113: RFC 5321 allows 64 and 255.
_EMAIL_ATOM: Final = r"[A-Za-z0-9!#$%\&'*+/=?\^_`{|}\~\-]{1,30}"
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,28}[A-Za-z0-9])?"
_EMAIL: Final = rf"{_EMAIL_ATOM}(?:\.{_EMAIL_ATOM})?@(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,20}}"

# The formats that are kept: the content of the string by the name of the format.
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": _UUID,
    "ipv4": _IPV4,
    "email": _EMAIL,
}


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
    if not num_rest:
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
