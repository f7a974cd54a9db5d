"""Arguments that a model writes as bare texts; the jsonschema library says which values are valid."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest

from qsample.request.text.tool_arguments import argument_value

TEXT, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
DEFINITIONS = {
    "n": {"anyOf": [INTEGER, NULL]},
    "t": {"$ref": "#/$defs/s"},
    "s": TEXT,
    "loop": {"$ref": "#/$defs/loop"},
    "outer": {"type": "integer", "properties": {"inner": TEXT}},
}


def value_of(text: str, schema: Any) -> Any:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    return argument_value(text, "a", parameters)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *((TEXT, text, text) for text in ("5", "null", "true", '"x"', "[1]", "NaN", "", " a\n")),
        *((schema, "5", 5) for schema in (INTEGER, {"type": "number"}, True, {}, {"title": "T"})),
        (INTEGER, "5.0", 5.0),
        (INTEGER, "x", "x"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        (NULL, "None", None),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
        ({"type": "array"}, "[1", "[1"),
        # Several types: a value comes before a text, as in vLLM.
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": ["string", "integer"]}, "x", "x"),
        ({"type": ["string", "number"]}, "5", 5),
        ({"type": ["string", "object"]}, '{"b": 1}', {"b": 1}),
        ({"anyOf": [TEXT, NULL]}, "5", "5"),
        ({"anyOf": [TEXT, NULL]}, "null", None),
        ({"oneOf": [INTEGER, NULL]}, "5", 5),
        ({"oneOf": [TEXT, {"type": "boolean"}]}, "True", True),
        ({"anyOf": [TEXT, {"type": "array", "items": TEXT}]}, '["x"]', ["x"]),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": False}, "null", "null"),
        ({"type": "integer", "nullable": True}, "5", 5),
        ({"$ref": "#/$defs/n"}, "null", None),
        ({"$ref": "#/$defs/n"}, "5", 5),
        ({"$ref": "#/$defs/t"}, "5", "5"),
        ({"$ref": "#/$defs/t", "description": "d"}, "null", "null"),
        ({"allOf": [{"$ref": "#/$defs/t"}], "default": "x"}, "5", "5"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "5", 5),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/outer/properties/inner"}, "5", "5"),
        ({"$ref": "#/$defs/missing"}, "5", 5),
        ({"$ref": 5}, "5", 5),
        # Values.
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "1"]}, "1", 1),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["x", None]}, "null", None),
        ({"enum": ["x", True]}, "true", True),
        ({"enum": ["x", "y"]}, '"x"', "x"),
        ({"enum": ["x", "y"]}, "5", "5"),
        ({"enum": [1, 2]}, "5", 5),
        ({"anyOf": [{"enum": ["x", "y"]}, NULL]}, "5", "5"),
        ({"const": "5"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"type": "string", "enum": ["1"]}, "7", "7"),
        ({"anyOf": [{"const": "auto"}, INTEGER]}, "auto", "auto"),
        ({"anyOf": [{"const": "auto"}, INTEGER]}, "5", 5),
        # Numbers that JSON lacks.
        *(({"type": "number"}, text, text) for text in ("NaN", "Infinity", "-Infinity", "1e999", "nan")),
        *((schema, "[NaN]", "[NaN]") for schema in ({"type": "array"}, {}, TEXT)),
        # Things that are no schemas.
        (5, "5", 5),
        ({"type": "str"}, "5", 5),
        ({"type": 5, "enum": 5, "anyOf": 5, "allOf": {}}, "5", 5),
        (False, "5", 5),
    ],
    ids=str,
)  # fmt: skip
def test_values_follow_the_schema(schema: Any, text: str, value: Any) -> None:
    found = value_of(text, schema)
    assert found == value
    assert type(found) is type(value)


SCHEMAS: list[Any] = [
    *({"type": name} for name in ("string", "integer", "number", "boolean", "null", "object", "array")),
    *({"type": ["null", name]} for name in ("string", "integer", "boolean", "array")),
    {"anyOf": [TEXT, INTEGER]}, {"oneOf": [{"type": "boolean"}, TEXT]}, {"enum": ["1", None, 2, True]},
    {"const": "null"}, {"$ref": "#/$defs/n"}, {"$ref": "#/$defs/t"}, {"allOf": [{"type": ["integer", "null"]}]},
]  # fmt: skip
TEXTS = [
    "1",
    "2",
    "5",
    "null",
    "None",
    "true",
    "x",
    "[]",
    "{}",
    "5.5",
    "1.0",
    "NaN",
    '"1"',
    "",
    "-0",
    "[null]",
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_value_is_valid_if_a_reading_is(schema: Any) -> None:
    judge = jsonschema.Draft202012Validator({**schema, "$defs": DEFINITIONS})
    for text in TEXTS:
        found = value_of(text, schema)
        json.dumps(found, allow_nan=False)
        readings: list[Any] = [text]
        if text not in ("NaN", "x", "", "None"):
            readings.append(json.loads(text))
        if any(map(judge.is_valid, readings)):
            assert judge.is_valid(found), (text, found)
        assert found == text or not isinstance(found, str) or json.dumps(found) == text


def test_arguments_are_found_in_combined_schemas() -> None:
    own = {"properties": {"a": TEXT}}
    for parameters in (
        own,
        {"allOf": [{"type": "object"}, own]},
        {"anyOf": [own, {"properties": {"b": INTEGER}}]},
        {"$ref": "#/$defs/own", "$defs": {"own": own}},
        {"additionalProperties": TEXT},
    ):
        assert argument_value("5", "a", parameters) == "5"
    several = {"oneOf": [own, {"properties": {"a": INTEGER}}]}
    assert argument_value("5", "a", several) == 5
    assert argument_value("x", "a", several) == "x"
    for nothing in (None, True, {}, {"properties": 5}, {"properties": {"b": TEXT}}, {"$ref": "#"}):
        assert argument_value("5", "a", nothing) == 5
        assert argument_value("None", "a", nothing) is None
        assert argument_value("NaN", "a", nothing) == "NaN"


def test_deep_texts_are_texts() -> None:
    text = "[" * 100_000
    assert value_of(text, {"type": "array"}) == text
    assert not isinstance(value_of("9" * 400, INTEGER), float)
    assert math.isfinite(value_of("1e308", {"type": "number"}))


def test_sixteen_levels_of_combined_schemas_are_read() -> None:
    for depth, found in ((16, "5"), (17, 5)):
        schema: dict[str, Any] = TEXT
        parameters: dict[str, Any] = {"properties": {"a": TEXT}}
        for _ in range(depth):
            schema, parameters = {"anyOf": [schema]}, {"allOf": [parameters]}
        assert value_of("5", schema) == argument_value("5", "a", parameters) == found
