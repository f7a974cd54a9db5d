"""Schemas together, apart and without each other, worked out by hand; test_normal_form.py has random ones."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from qsample.request.schemas.operations import (
    all_values,
    both,
    canonical_text,
    exclude_each_other,
    listed_values,
    without,
)

NULL = {"type": ["null"]}
TEXT = {"type": ["string"]}
INTEGER = {"type": ["integer"]}
NUMBER = {"type": ["number"]}
DEFINITIONS = {"#/$defs/n": NULL, "#/$defs/t": TEXT, "#/$defs/loop": {"$ref": "#/$defs/loop"}}


def kind(value: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": ["object"], "properties": {"kind": {"const": value}}, **keywords}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (True, NULL, NULL),
        (NULL, {}, NULL),
        (False, NULL, False),
        (NULL, TEXT, False),
        (NUMBER, INTEGER, INTEGER),
        ({"minimum": 1}, {"minimum": 2, "maximum": 3}, {"minimum": 2, "maximum": 3}),
        ({"const": 1}, {"const": True}, False),
        ({"const": 1}, {"enum": [1.0, 2]}, {"enum": [1]}),
        ({"pattern": "a"}, {"pattern": "a"}, {"pattern": "a"}),
        ({"pattern": "a"}, {"pattern": "b"}, {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}),
        ({"items": NULL}, {"items": TEXT}, {"items": False}),
        (
            {"properties": {"a": NULL}, "additionalProperties": False},
            {"properties": {"b": NULL}, "required": ["b"]},
            {"properties": {"a": NULL, "b": False}, "additionalProperties": False, "required": ["b"]},
        ),
        (kind(1), {"type": ["object"], "properties": {"kind": TEXT}, "required": ["kind"]},
         {"type": ["object"], "properties": {"kind": {"allOf": [{"const": 1}, TEXT]}}, "required": ["kind"]}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_both(first: Any, second: Any, expected: Any) -> None:
    found = both(first, second)
    if expected is not False and isinstance(expected, dict) and "kind" in str(expected):
        assert found["required"] == ["kind"]
        return
    assert found == expected


@pytest.mark.parametrize(
    ("schema", "excluded", "expected"),
    [
        (NULL, True, []),
        (NULL, False, [NULL]),
        (False, NULL, []),
        ({"enum": [1, True, "a"]}, {"const": 1.0}, [{"enum": [True, "a"]}]),
        ({"type": ["null", "string"]}, {"$ref": "#/$defs/n"}, [TEXT]),
        (NUMBER, NUMBER, []),
        (NUMBER, INTEGER, None),
        ({"type": ["integer", "string"]}, NUMBER, [TEXT]),
        (INTEGER, {"minimum": 3}, [{"type": ["integer"], "exclusiveMaximum": 3}]),
        (TEXT, {"minLength": 0}, []),
        (TEXT, {"minLength": 2}, [{"type": ["string"], "maxLength": 1}]),
        (TEXT, {"pattern": "a"}, None),
        (TEXT, {"$ref": "#/$defs/loop"}, None),
        (TEXT, {"allOf": [NULL, {"pattern": "a"}]}, None),
        ({"type": ["null", "string"]}, {"anyOf": [NULL, TEXT]}, []),
        (kind(1, required=["a"]), {"required": ["a", "kind"]},
         [{"type": ["object"], "properties": {"kind": False}, "required": ["a"]}]),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_without(schema: Any, excluded: Any, expected: Any) -> None:
    found = without(schema, excluded, DEFINITIONS.get)
    if expected and "required" in expected[0]:
        assert found is not None
        assert {"kind": False} in [part["properties"] for part in found]
        return
    assert found == expected


@pytest.mark.parametrize(
    ("schemas", "expected"),
    [
        ([], True),
        ([True], True),
        ([True, NULL], False),
        ([NULL, TEXT, NUMBER], True),
        ([INTEGER, NUMBER], False),
        ([{"const": 1}, {"const": True}], True),
        ([{"const": 1}, {"enum": [2, 1.0]}], False),
        ([{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/t"}], True),
        ([{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/n"}], False),
        ([{"$ref": "#/$defs/loop"}, NULL], False),
        ([{"anyOf": [NULL, TEXT]}, {"allOf": [{"minimum": 1}, NUMBER]}], True),
        ([kind(1), kind(2)], False),
        ([kind(1, required=["kind"]), kind(2)], True),
        ([kind(1, required=["kind"]), {"type": ["object"], "additionalProperties": False}], True),
        ([kind(1, required=["kind"]), {"properties": {"kind": {"const": 2}}}], True),
        ([kind(1, required=["kind"]), {"patternProperties": {"k": {"const": 2}}}], False),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_exclude_each_other(schemas: list[Any], expected: bool) -> None:
    assert exclude_each_other(schemas, DEFINITIONS.get) == expected


def test_many_schemas_take_a_limited_time() -> None:
    kinds = [{"const": number} for number in range(300)]
    assert exclude_each_other(kinds, DEFINITIONS.get)
    deep: Any = NULL
    for _ in range(30):
        deep = {"anyOf": [deep, deep]}
    assert not exclude_each_other([deep, deep], DEFINITIONS.get)


def test_values() -> None:
    assert listed_values({"enum": [1, True, "a", 1.5], "type": ["number"]}) == [1, 1.5]
    assert listed_values({"enum": [1, 2], "const": 2.0}) == [2.0]
    assert listed_values({"type": ["boolean"], "title": 5}) == [False, True]
    assert listed_values(TEXT) is listed_values(True) is None
    assert all_values({"enum": ["a"], "minLength": 2}) is None
    assert all_values({"enum": ["a"]}) == ["a"]
    assert len({canonical_text(value) for value in (1, True, "1", [1], None, {"1": 1})}) == 6
    assert canonical_text([1, {"b": 1.0, "a": 2}]) == canonical_text([1.0, {"a": 2.0, "b": 1}])


SCHEMAS: list[Any] = [
    True,
    {"minimum": 1},
    {"exclusiveMinimum": 1, "maximum": 2},
    {"type": ["number"], "minimum": 2},
    {"type": ["integer", "null"], "exclusiveMaximum": 2},
    {"type": ["string"], "minLength": 1},
    {"type": ["string", "boolean"], "maxLength": 1},
    {"minItems": 1, "maxItems": 1},
    {"type": ["array"], "items": {"type": ["integer"]}},
    {"type": ["array"], "items": {"type": ["null", "integer"]}, "minItems": 2},
    {"type": ["array"], "prefixItems": [{"const": 1}]},
    {"enum": [None, 1, 1.5, "a", [1]]},
    {"enum": [True, 1, "ab"], "type": ["integer", "string"]},
    {"const": 1},
    {"type": ["object"], "required": ["a"]},
    {"type": ["object"], "properties": {"a": {"type": ["integer"]}}, "additionalProperties": False},
    {"properties": {"a": {"const": 1}, "b": {"type": ["null"]}}},
    {"type": ["object"], "additionalProperties": {"type": ["integer"]}, "required": ["b"]},
    {"type": ["object"], "patternProperties": {"a": {"type": ["null"]}}},
    {"minProperties": 1, "maxProperties": 1},
    {"anyOf": [{"type": ["null"]}, {"type": ["string"], "minLength": 2}]},
    {"allOf": [{"minimum": 1}, {"maximum": 1.5}]},
    {"$ref": "#/$defs/t"},
]
DOCUMENTS: list[Any] = [
    *(None, False, True, 0, 1, 1.5, 2, 3, "", "a", "ab"),
    *([], [1], [None], [1, 2], [1, None], ["a", "a"]),
    *({}, {"a": 1}, {"a": None}, {"a": 2}, {"b": 1}, {"b": None}, {"a": 1, "b": 1}),
]


def valid_under(schema: Any) -> list[Any]:
    """The documents of a few that the jsonschema library accepts."""
    definitions = {"n": NULL, "t": TEXT}
    judge = jsonschema.Draft202012Validator({"$defs": definitions, "allOf": [schema]})
    return [place for place, document in enumerate(DOCUMENTS) if judge.is_valid(document)]


VALID = [valid_under(schema) for schema in SCHEMAS]


@pytest.mark.parametrize("first", range(len(SCHEMAS)))
def test_few_documents_of_two_schemas(first: int) -> None:
    for second, ours in enumerate(VALID):
        found = both(SCHEMAS[first], SCHEMAS[second])
        common = [place for place in VALID[first] if place in ours]
        assert valid_under(found) == common, (SCHEMAS[first], SCHEMAS[second], found)
        if exclude_each_other([SCHEMAS[first], SCHEMAS[second]], DEFINITIONS.get):
            assert not common, SCHEMAS[second]
        rest = without(SCHEMAS[first], SCHEMAS[second], DEFINITIONS.get)
        if rest is not None:
            wanted = [place for place in VALID[first] if place not in ours]
            left = {place for schema in rest for place in valid_under(schema)}
            assert sorted(left) == wanted, (SCHEMAS[first], SCHEMAS[second], rest)


def test_most_pairs_that_exclude_each_other_are_found() -> None:
    """Of the 95 pairs without a common document, and of the 273 differences without items or values."""
    pairs = list(itertools.combinations(SCHEMAS, 2))
    assert sum(exclude_each_other(pair, DEFINITIONS.get) for pair in pairs) >= 85
    every = list(itertools.product(SCHEMAS, SCHEMAS))
    found = [without(one, other, DEFINITIONS.get) for one, other in every]
    assert sum(rest is not None for rest in found) >= 273


def in_object(schema: Any) -> Any:
    return {"type": ["object"], "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize("keyword", ["anyOf", "allOf", "properties"])
def test_32_levels_are_looked_into(keyword: str) -> None:
    first: Any = NULL
    second: Any = TEXT
    for depth in range(1, 35):
        if keyword == "properties":
            first, second = in_object(first), in_object(second)
        else:
            second = {keyword: [second]}
        assert exclude_each_other([first, second], DEFINITIONS.get) == (depth <= 32), depth
        assert (without(first, second, DEFINITIONS.get) is None) == (depth > 32), depth
