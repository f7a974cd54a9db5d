"""Places in a document: the examples of RFC 6901, and places that are not there."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.request.schemas.pointers import followed, pointer_step, step_name

DOCUMENT = {
    "foo": ["bar", "baz"],
    "": 0,
    "a/b": 1,
    "c%d": 2,
    "e^f": 3,
    "g|h": 4,
    "i\\j": 5,
    'k"l': 6,
    " ": 7,
    "m~n": 8,
}
PLACES = {
    "#": DOCUMENT,
    "#/foo": ["bar", "baz"],
    "#/foo/0": "bar",
    "#/": 0,
    "#/a~1b": 1,
    "#/c%25d": 2,
    "#/e%5Ef": 3,
    "#/g%7Ch": 4,
    "#/i%5Cj": 5,
    "#/k%22l": 6,
    "#/%20": 7,
    "#/m~0n": 8,
}


@pytest.mark.parametrize(("reference", "value"), PLACES.items())
def test_places_of_rfc_6901(reference: str, value: Any) -> None:
    assert (followed(DOCUMENT, reference) or [])[-1] == value


@pytest.mark.parametrize(
    "reference", ["#/x", "#/foo/2", "#/foo/-1", "#/foo/bar", "#/foo/0/x", "#/foo/²"]
)
def test_other_places_are_not_there(reference: str) -> None:
    assert followed(DOCUMENT, reference) is None


def test_the_way_to_a_place() -> None:
    assert followed({"a": [{"b": 1}]}, "#/a/0/b") == [[{"b": 1}], {"b": 1}, 1]


@pytest.mark.parametrize("name", ["", "a/b", "~", "~1", "~0", "~01", "/~/", "é"])
def test_steps_are_names(name: str) -> None:
    assert "/" not in pointer_step(name)
    assert step_name(pointer_step(name)) == name
