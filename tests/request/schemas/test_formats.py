"""The formats of strings, beside Python's own readers of dates, times, addresses and UUIDs."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import re
import uuid

import pytest

from qsample.request.schemas.formats import FORMATS, HOST_FORMATS


def has_format(name: str, text: str) -> bool:
    return re.fullmatch(FORMATS[name], text) is not None


def test_the_names() -> None:
    """Those of JSON Schema, without those that only llguidance has."""
    assert set(FORMATS) == {"date", "time", "date-time", "uuid", "ipv4", "email"}
    assert {"duration", "hostname", "ipv6", "uri"} == HOST_FORMATS


def is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@pytest.mark.parametrize("year", [0, 1, 4, 9, 10, 96, 100, 400, 999, 1900, 2000, 2023, 2024, 9999])
def test_dates_are_those_of_the_calendar(year: int) -> None:
    for month, day in itertools.product(range(14), range(33)):
        text = f"{year:04d}-{month:02d}-{day:02d}"
        assert has_format("date", text) == is_date(text), text


def test_leap_years_of_every_century() -> None:
    for year in range(10_000):
        text = f"{year:04d}-02-29"
        assert has_format("date", text) == is_date(text), text
    for text in ("2024-1-01", "2024-01-1", "2024/01/01", "24-01-01", "02024-01-01", "2024-01-011"):
        assert not has_format("date", text)


def test_times_have_a_zone() -> None:
    for hour, minute in itertools.product(range(26), (0, 9, 10, 59, 60)):
        is_time = hour < 24 and minute < 60
        for text in (
            f"{hour:02d}:{minute:02d}:00Z",
            f"00:{minute:02d}:{min(hour, 23):02d}Z" if is_time else "24:60:60Z",
            f"12:00:00+{hour:02d}:{minute:02d}",
            f"12:00:00-{hour:02d}:{minute:02d}",
        ):
            assert has_format("time", text) == is_time, text
    for fraction, fits in (("", True), (".0", True), (".123456", True), (".1234567", False), (".", False)):  # fmt: skip
        assert has_format("time", f"12:00:59{fraction}Z") == fits
    for text in ("12:00:60Z", "12:00Z", "12:00:00", "1:00:00Z", "12:00:00z", "12:00:00+1:00"):
        assert not has_format("time", text)


def test_a_date_and_a_time() -> None:
    assert has_format("date-time", "2024-02-29T23:59:59.5+01:00")
    for text in ("2024-02-30T00:00:00Z", "2024-02-29 00:00:00Z", "2024-02-29T24:00:00Z", "T12:00:00Z"):  # fmt: skip
        assert not has_format("date-time", text)


def test_addresses_of_four_octets() -> None:
    for number, place in itertools.product(range(300), range(4)):
        octets = ["1", "20", "0", "255"]
        octets[place] = str(number)
        text = ".".join(octets)
        assert has_format("ipv4", text) == (number < 256), text
        if number < 256:
            ipaddress.IPv4Address(text)
    for text in ("1.2.3", "1.2.3.4.5", "01.2.3.4", "1.2.3.", "1,2,3,4", "1.2.3.00"):
        assert not has_format("ipv4", text)


def test_uuids() -> None:
    text = str(uuid.UUID(int=0x0123456789ABCDEF << 64 | 0xFEDCBA9876543210))
    assert has_format("uuid", text)
    assert has_format("uuid", text.upper())
    assert not has_format("uuid", text.replace("-", ""))
    for place in range(len(text)):
        assert not has_format("uuid", text[:place] + text[place + 1 :])
        assert not has_format("uuid", text[:place] + "g" + text[place + 1 :])


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("a@b.cd", True),
        ("first.last+tag@mail.example-1.co.uk", True),
        ("!#$%&'*+/=?^_`{|}~-@b.cd", True),
        (f"{'a' * 30}.{'b' * 30}@{'c' * 30}.{'d' * 20}", True),
        ("a@b.c.d.ef", True),
        ("a@b.c.d.e.fg", False),
        ("a.b.c@d.ef", False),
        ("@b.cd", False),
        ("a@", False),
        ("a@b", False),
        ("a@b.c", False),
        ("a@b.c1", False),
        ("a@-b.cd", False),
        ("a@b-.cd", False),
        (".a@b.cd", False),
        ("a.@b.cd", False),
        ('a"@b.cd', False),
        (f"{'a' * 31}@b.cd", False),
        (f"a@{'c' * 31}.cd", False),
        (f"a@b.{'d' * 21}", False),
    ],
)
def test_addresses_of_mail(text: str, fits: bool) -> None:
    assert has_format("email", text) == fits
