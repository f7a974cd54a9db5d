"""How the fields of dataclasses are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from qsample.contract.storage import Storage, storage_of, stored


@dataclass
class Inner:
    sizes: tuple[int, ...] = field(default=(), metadata=stored(least=1, limit=10))
    kind: Literal["a", "b"] = "a"


@dataclass
class Outer:
    name: str
    count: int = field(metadata=stored(omitted=3, least=-2, limit=5))
    ratio: float | None = field(default=None, metadata=stored(omitted=None))
    inner: Inner | None = None
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    anything: Any = 0
    is_on: bool = False


def test_how_a_field_is_stored() -> None:
    by_name = {entry.name: storage_of(entry) for entry in fields(Outer)}
    assert by_name["count"] == Storage(3, -2, 5)
    assert by_name["name"] == Storage()
    assert (by_name["name"].least, by_name["name"].limit) == (0, 2**31)
    assert by_name["ratio"].omitted is None
    # A field that may have any value is never left out.
    assert by_name["anything"].omitted not in (None, 0, False, "")
