"""Normal forms of schemas: the same documents are valid under both; the jsonschema library is the judge."""

from __future__ import annotations

import json
from itertools import combinations, product
from typing import Any

import jsonschema
import numpy as np
import pytest

from qsample.request.schemas.normal_form import InvalidSchemaError, normal_schema
from tests.helpers.random_schemas import (
    REFUSED,
    is_valid,
    random_client_schema,
    random_document,
)

FORMATS = ("path", "password", "binary", "uri-reference", "uuid4", "int64", "regex", "Date", "")
# Keywords of documents that a normal form has.
KEYWORDS = {
    *(
        "type",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "properties",
        "required",
    ),
    *("additionalProperties", "patternProperties", "minProperties", "maxProperties", "items"),
    *("prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


def check_equal(seed: int) -> bool:
    """Check a random schema; whether it has a normal form."""
    rng = np.random.default_rng(seed)
    schema = random_client_schema(rng)
    try:
        normal = normal_schema(schema)
    except InvalidSchemaError:
        return False
    assert isinstance(normal, bool) or normal.keys() <= KEYWORDS
    for _ in range(20):
        document = random_document(rng)
        try:
            expected = is_valid(document, schema)
            found = is_valid(document, normal)
        except RecursionError:  # It refers to itself, and to nothing else.
            return False
        assert found == expected, (schema, normal, document)
    return True


@pytest.mark.parametrize("start", range(0, 400, 40))
def test_the_same_documents_are_valid(start: int) -> None:
    assert sum(map(check_equal, range(start, start + 40))) > 10


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 6000, 500))
def test_the_same_documents_are_valid_of_more_schemas(start: int) -> None:
    assert sum(map(check_equal, range(start, start + 500))) > 150


SCALARS = [None, False, True, 0, 1, 2, 1.5, "", "a", "b", "ab", "abc"]
MEMBERS = [dict(zip("abc", values, strict=True)) for values in product([None, 1, "a"], repeat=3)]
DOCUMENTS: list[Any] = [
    *SCALARS,
    *(list(items) for size in range(4) for items in product([None, 1, "a"], repeat=size)),
    *(
        {name: members[name] for name in names}
        for size in range(4)
        for names in combinations("abc", size)
        for members in MEMBERS
    ),
    {"ab": 1},
    {"": None},
    [[], [1], {}],
    {"a": {"b": 1}},
    {"a": {}},
]
NULL: dict[str, Any] = {"type": "null"}
ONE_OF_THREE: dict[str, Any] = {"enum": [None, 1, "a"]}
LIMITS = [
    *({keyword: limit} for keyword in ("minLength", "maxLength") for limit in (0, 1, 2)),
    *({keyword: limit} for keyword in ("minItems", "maxItems") for limit in (0, 1, 2)),
    *({keyword: limit} for keyword in ("minimum", "maximum") for limit in (0, 1)),
    *({keyword: 1} for keyword in ("exclusiveMinimum", "exclusiveMaximum")),
]
ARRAY: dict[str, Any] = {"type": "array"}
OBJECT: dict[str, Any] = {"type": "object"}
A_AND_B: dict[str, Any] = {"properties": {"a": NULL, "b": {"type": "integer"}}}
# Each keyword beside the others that it meets in the code.
EACH_KEYWORD: list[Any] = [
    *({"allOf": [first, second]} for first, second in combinations(LIMITS, 2)),
    *({"not": limit} for limit in LIMITS),
    *({"anyOf": [limit, NULL]} for limit in LIMITS),
    *({**ARRAY, "items": ONE_OF_THREE, "uniqueItems": True, **limits}
      for limits in ({}, {"minItems": 2}, {"maxItems": 2}, {"minItems": 1, "maxItems": 2}, {"minItems": 4})),
    {**ARRAY, "prefixItems": [ONE_OF_THREE], "items": False, "uniqueItems": True},
    {**ARRAY, "maxItems": 1, "uniqueItems": True},
    {"maxItems": 1, "uniqueItems": True},
    {**ARRAY, "items": {"const": 1}, "uniqueItems": True},
    {**ARRAY, "items": NULL, "contains": NULL, "minContains": 2},
    {**ARRAY, "items": NULL, "contains": NULL, "maxContains": 1},
    {**ARRAY, "prefixItems": [NULL], "items": ONE_OF_THREE},
    {"allOf": [{"prefixItems": [NULL]}, {"items": ONE_OF_THREE}]},
    {"allOf": [{"prefixItems": [NULL, NULL]}, {"prefixItems": [ONE_OF_THREE], "items": False}]},
    {"unevaluatedItems": False, "prefixItems": [NULL]},
    *({**OBJECT, **A_AND_B, "propertyNames": names}
      for names in ({"enum": ["a", "c"]}, {"const": "a"}, {"enum": [1]}, {"type": "string"}, True)),
    {**OBJECT, "propertyNames": {"pattern": "^a"}},
    {**OBJECT, "propertyNames": {"pattern": "^a"}, "additionalProperties": NULL},
    {**OBJECT, "propertyNames": {"type": "string", "pattern": "b$"}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentRequired": {"a": ["b", "c"], "b": []}},
    {"dependentRequired": {"a": []}, **OBJECT, **A_AND_B},
    {"dependentSchemas": {"a": {"required": ["c"]}}},
    {"dependentSchemas": {"a": {"properties": {"b": NULL}}, "c": False}},
    *({**OBJECT, "not": excluded}
      for excluded in ({"required": ["a"]}, {"required": ["a", "b"]}, {"properties": {"a": NULL}}, OBJECT, ARRAY,
                       {"properties": {"a": NULL, "c": {"type": "string"}}, "required": ["a", "c"]})),
    {**OBJECT, "properties": {"a": ONE_OF_THREE}, "not": {"properties": {"a": {"const": 1}}}},
    {**OBJECT, "properties": {"a": ONE_OF_THREE}, "not": {"properties": {"a": {"const": 1}}, "required": ["a", "b"]}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}, **OBJECT},
    {"if": {"properties": {"a": NULL}}, "then": {"properties": {"b": NULL}}, **OBJECT},
    {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"not": ARRAY}},
    {"if": NULL, "else": {"type": ["integer", "string"]}},
    {"oneOf": [{**OBJECT, "required": ["a"]}, ARRAY, NULL]},
    {"oneOf": [{"minimum": 1, "type": "integer"}, {"maximum": 0, "type": "integer"}]},
    {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
               {"properties": {"a": {"const": None}}, "required": ["a"]}], **OBJECT},
    *({**OBJECT, "minProperties": count} for count in (0, 1)),
    {**OBJECT, "maxProperties": 0},
    {**OBJECT, **A_AND_B, "required": ["a", "b"], "minProperties": 2},
    {**OBJECT, **A_AND_B, "additionalProperties": False, "maxProperties": 2},
    *({"allOf": [{**OBJECT, "minProperties": 1}, {**OBJECT, "minProperties": count}]} for count in (0, 1)),
    {"allOf": [{**OBJECT, "maxProperties": 0}, {**OBJECT, "minProperties": 0}]},
    {"allOf": [A_AND_B, {"additionalProperties": NULL}]},
    {"allOf": [{"additionalProperties": NULL}, {"properties": {"a": ONE_OF_THREE}}]},
    {"allOf": [{"patternProperties": {"^a": NULL}}, A_AND_B]},
    {"unevaluatedProperties": False, **A_AND_B},
    {"type": ["object", "null"], "required": ["a"], "enum": [None, {"a": 1}, {"b": 1}, 1]},
    {"enum": [1, "a", None], "allOf": [{"enum": ["a", None, 2]}], "not": {"const": None}},
    {"allOf": [{"const": 1}, {"enum": [1, 2]}]},
    {"allOf": [{"const": 1}, {"type": "number"}, {"minimum": 1}]},
    {"type": "boolean", "not": {"const": True}},
    {"type": ["boolean", "null"], "not": {"enum": [None, False]}},
    {"type": ["integer", "string"], "not": {"type": "integer"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", EACH_KEYWORD, ids=lambda schema: json.dumps(schema)[:60])
def test_of_all_small_documents_the_same_are_valid(schema: Any) -> None:
    try:
        normal = normal_schema(schema)
    except InvalidSchemaError as error:
        pytest.fail(str(error))
    judge, judge_of_normal = (jsonschema.Draft202012Validator(form) for form in (schema, normal))
    for document in DOCUMENTS:
        expected = judge.is_valid(document)
        assert judge_of_normal.is_valid(document) == expected, (normal, document)


@pytest.mark.parametrize(("schema", "pointer"), REFUSED, ids=lambda value: repr(value)[:60])
def test_other_schemas_are_refused_by_their_place(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidSchemaError) as caught:
        normal_schema(schema)
    assert caught.value.pointer == pointer
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert f" {pointer}: " in message
    assert "; " in message  # the advice
    for foreign in ("lenient", "guidance", "coerce"):
        assert foreign not in message
    of_tool = caught.value.of_function("weather")
    assert of_tool.pointer == pointer
    assert f"the schema of the arguments of weather: {pointer}: " in str(of_tool)


@pytest.mark.parametrize("name", [*FORMATS, None, 5, ["date"], {"a": 1}])
def test_unknown_formats_are_annotations(name: Any) -> None:
    text = {"type": "string", "format": name}
    plain = {"type": ["string"]}
    assert normal_schema(text) == plain
    nested = {
        "type": "object",
        "properties": {"a": {"anyOf": [text, {"type": "null"}]}},
        "patternProperties": {"^b": text},
        "additionalProperties": {"type": "array", "items": {"$ref": "#/$defs/t"}},
        "$defs": {"t": text},
    }
    normal = normal_schema(nested)
    assert normal["properties"]["a"]["anyOf"][0] == plain
    assert normal["patternProperties"]["^b"] == plain
    assert normal["$defs"] == {"#/$defs/t": plain}
    # They do not restrict the other documents either, so `not` excludes all of them.
    assert normal_schema({"not": {"format": name}}) is False


@pytest.mark.parametrize("name", ["date", "uuid", "email", "ipv6", "uri", "hostname", "duration"])
def test_known_formats_stay(name: str) -> None:
    assert normal_schema({"type": "string", "format": name})["format"] == name
    with pytest.raises(InvalidSchemaError):
        normal_schema({"not": {"format": name}})


def test_options_of_llguidance_are_dropped_at_any_depth() -> None:
    options = {"lenient": True}
    schema = {
        "x-guidance": options,
        "type": "object",
        "properties": {
            "x-guidance": {"type": "array", "items": {"type": "null", "x-guidance": options}},
            "a": {"const": {"x-guidance": 5}, "x-guidance": options},
        },
        "required": ["x-guidance"],
        "$defs": {"b": {"x-guidance": options}},
    }
    assert normal_schema(schema) == {
        "type": ["object"],
        "properties": {
            "x-guidance": {"type": ["array"], "items": {"type": ["null"]}},
            "a": {"const": {"x-guidance": 5}},
        },
        "required": ["x-guidance"],
    }
    with pytest.raises(InvalidSchemaError):
        normal_schema({"x-guidance": options, "type": "string", "not": {"pattern": "x"}})


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
X = {"type": ["null"]}
KINDS = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "normal"),
    [
        (True, True),
        (False, False),
        ({}, True),
        ({"title": "T", "nullable": True, "x-other": {"not": 5}}, True),
        ({"enum": [1, "a", None], "not": {"enum": ["a", 1.0]}}, {"enum": [None]}),
        ({"enum": [0, False], "not": {"const": False}}, {"enum": [0]}),
        ({"type": "boolean", "not": {"const": True}}, {"type": ["boolean"], "enum": [False]}),
        ({"type": ["string", "null"], "not": {"type": "null"}}, {"type": ["string"]}),
        ({"type": "null", "not": {"type": "null"}}, False),
        ({"type": "string", "not": {}}, False),
        ({"type": "string", "not": False}, {"type": ["string"]}),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, {"anyOf": [{"enum": [1]}, {"enum": [3]}]}),
        ({"allOf": [{"minimum": 1}, {"minimum": 2, "type": "integer"}]}, {"minimum": 2, "type": ["integer"]}),
        ({"uniqueItems": False}, True),
        ({"maxItems": 1, "uniqueItems": True}, {"maxItems": 1}),
        ({"contains": {}, "type": "array"}, {"type": ["array"], "minItems": 1}),
        ({"contains": {"type": "null"}, "minContains": 0}, True),
        ({"minContains": 5}, True),
        ({"then": {"type": "null"}}, True),
        (
            {"unevaluatedProperties": False, "properties": {}},
            {"properties": {}, "additionalProperties": False},
        ),
        (
            {"unevaluatedProperties": {}, "anyOf": [{"type": "null"}]},
            {"anyOf": [{"type": ["null"]}]},
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"const": 1}},
            {"properties": {"a": {"const": 1}}, "additionalProperties": False},
        ),
        (
            {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
            {"type": ["integer"], "minimum": 1, "exclusiveMinimum": 1},
        ),
        (
            {"items": [{"const": 1}], "additionalItems": False},
            {"prefixItems": [{"const": 1}], "items": False},
        ),
        ({"$schema": DRAFT_7, "prefixItems": [{"type": "null"}]}, True),
        (
            {"items": {"$ref": "#here"}, "x": [{"$anchor": "here", "const": 1}]},
            {"items": {"$ref": "#/$defs/%23here"}, "$defs": {"#here": {"const": 1}}},
        ),
        (
            KINDS | {"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}},
            {"anyOf": [
                {"type": ["object"], "properties": {"kind": {"enum": ["a"]}, "x": X}, "required": ["x"]},
                {"type": ["object"], "properties": {"kind": {"enum": ["b"]}, "x": X}, "required": ["kind"]},
            ]},
        ),
        (
            KINDS | {"dependentRequired": {"x": ["kind"]}, "required": ["x"]},
            {"type": ["object"], "properties": {"kind": {"enum": ["a", "b"]}, "x": X}, "required": ["x", "kind"]},
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_normal_forms(schema: Any, normal: Any) -> None:
    assert normal_schema(schema) == normal


def test_references_lead_anywhere_in_the_document() -> None:
    """Also to unknown keywords, with escapes, from a root with an id, and back."""
    schema = {
        "$id": "https://example.com/a",
        "components": {"a/b ~": [{"type": "null"}]},
        "anyOf": [
            {"$ref": "#/components/a~1b%20~0/0"},
            {"$ref": "https://example.com/a#/components/a~1b%20~0/0"},
            {"type": "array", "items": {"$ref": "#"}},
        ],
    }
    normal = normal_schema(schema)
    for document in (None, [], [None, [[None]]], 5, [[5]]):
        assert is_valid(document, normal) == is_valid(document, schema), document


@pytest.mark.parametrize("keyword", ["propertyNames", "items", "not", "if", "contains"])
def test_references_that_lead_to_themselves_end(keyword: str) -> None:
    loop = {"$ref": "#/$defs/a"}
    schema = {"type": "array", "uniqueItems": True, "then": {}, keyword: loop}
    for definitions in ({"a": loop}, {"a": {"$ref": "#/$defs/b"}, "b": loop}):
        with pytest.raises(InvalidSchemaError):
            normal_schema({**schema, "$defs": definitions})


def test_a_schema_that_refers_to_itself_is_a_one_of() -> None:
    tree = {"type": "object", "properties": {"left": {"oneOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert "oneOf" in normal_schema(tree)["properties"]["left"]


@pytest.mark.parametrize("count", [7, 40])
def test_conditions_do_not_grow_without_limit(count: int) -> None:
    many = {"dependentRequired": {f"n{number}": ["a"] for number in range(count)}}
    nested: Any = {"type": "null"}
    for _ in range(count):
        condition = {"if": {"required": ["c"]}, "then": {"required": ["b"]}}
        nested = {"properties": {"a": nested}, **condition}
    exclusive = {"not": {"anyOf": [{"required": [f"{n}", f"a{n}"]} for n in range(count)]}}
    for schema in (many, nested, exclusive) if count > 7 else (many, exclusive):
        with pytest.raises(InvalidSchemaError):
            normal_schema(schema)


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidSchemaError, match="nested too deep"):
        normal_schema(schema)
