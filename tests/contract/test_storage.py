"""How the fields of dataclasses are stored."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from qsample.contract.storage import Storage, storage_of, stored


@dataclass
class Fields:
    plain: str
    bounded: int = field(metadata=stored(omitted=3, least=-2, limit=5))
    optional: float | None = field(default=None, metadata=stored(omitted=None))
    anything: Any = 0


def test_how_a_field_is_stored() -> None:
    by_name = {entry.name: storage_of(entry) for entry in fields(Fields)}
    assert by_name["bounded"] == Storage(3, -2, 5)
    assert by_name["plain"] == Storage()
    assert (by_name["plain"].least, by_name["plain"].limit) == (0, 2**31)
    assert by_name["optional"] == Storage(None, 0, 2**31)
    # A field that may have any value is never left out.
    assert by_name["anything"].omitted not in (None, 0, False, "")
