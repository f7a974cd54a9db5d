"""The formats of strings that answers are kept to. They are expressions that mean the same in Rust's
regex crate, in Python and in JavaScript, and no character of theirs is escaped in JSON."""

from __future__ import annotations

from typing import Final

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

# The content of a string by the name of its format.
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": _UUID,
    "ipv4": _IPV4,
    "email": _EMAIL,
}

# The formats that llguidance has beside these.
HOST_FORMATS: Final = frozenset({"duration", "hostname", "ipv6", "uri"})
