"""Expressions of schemas: all their texts are valid documents; the jsonschema library is the judge."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from qsample.request.grammar import InvalidGrammarError
from qsample.request.schemas.normal_form import InvalidSchemaError
from qsample.request.structured.automaton import ByteAutomaton, automaton_of
from qsample.request.structured.json_text import LARGEST_INTEGER, integers
from qsample.request.structured.not_regular import NEVER, NotRegularError
from qsample.request.structured.schema import expression_of_schema
from tests.helpers.random_schemas import (
    NEAR_MISSES,
    REFUSED,
    is_valid,
    random_client_schema,
    random_schema,
    random_text,
)


def check_sound(schema: Any, rng: np.random.Generator, count: int) -> int:
    """Check some documents of a schema; returns their number."""
    try:
        automaton = automaton_of(expression_of_schema(schema))
    except InvalidGrammarError:
        return 0
    judge = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for _ in range(count):
        text = random_text(automaton, rng).decode("utf-8")
        document = json.loads(text, parse_constant=pytest.fail)
        problem = jsonschema.exceptions.best_match(judge.iter_errors(document))
        assert problem is None, (schema, text)
        for number in numbers_of(document):
            assert math.isfinite(number), text
    return count


def numbers_of(document: Any) -> list[float]:
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        return [number for item in document for number in numbers_of(item)]
    return [document] if isinstance(document, float) else []


@pytest.mark.parametrize("seed", range(10))
def test_random_documents_are_valid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    checked = sum(check_sound(random_schema(rng), rng, 5) for _ in range(40))
    assert checked > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_more_random_documents_are_valid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        check_sound(random_schema(rng), rng, 10)


@pytest.mark.parametrize("schema", NEAR_MISSES, ids=lambda schema: json.dumps(schema)[:60])
def test_other_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(NotRegularError):
        expression_of_schema(schema)


@pytest.mark.parametrize(("schema", "pointer"), REFUSED[:20], ids=lambda value: repr(value)[:60])
def test_schemas_that_nobody_keeps_are_refused(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidSchemaError) as caught:
        expression_of_schema(schema)
    assert caught.value.pointer == pointer


def check_client_schemas(start: int, count: int) -> int:
    """Check documents of schemas of all keywords, if they have tables; returns the number of these."""
    num_checked = 0
    for seed in range(start, start + count):
        rng = np.random.default_rng(seed)
        schema = random_client_schema(rng)
        try:
            automaton = automaton_of(expression_of_schema(schema))
        except (NotRegularError, InvalidSchemaError, InvalidGrammarError):
            continue
        for _ in range(5):
            text = random_text(automaton, rng)
            assert is_valid(json.loads(text), schema), (schema, text)
        num_checked += 1
    return num_checked


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_documents_of_any_keywords_are_valid(start: int) -> None:
    assert check_client_schemas(start, 50) > 1


@pytest.mark.slow
def test_more_documents_of_any_keywords_are_valid() -> None:
    assert check_client_schemas(1000, 4000) > 200


def matches(schema: Any, text: str) -> bool:
    return accepts(automaton_of(expression_of_schema(schema)), text)


def accepts(automaton: ByteAutomaton, text: str) -> bool:
    state = 0
    for byte in text.encode():
        state = int(automaton.transitions[state, byte])
        if state < 0:
            return False
    return bool(automaton.final[state])


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "boolean"}},
}
PET = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "é": {"$ref": "#/$defs/age"}},
    "required": ["kind"],
    "$defs": {"age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 30.5}},
}


@pytest.mark.parametrize(
    ("schema", "documents"),
    [
        (OBJECT, [{}, {"a": 1}, {"b": None}, {"a": -3, "c": True}, {"b": None, "c": False}]),
        (OBJECT | {"required": ["b"]}, [{"b": None}, {"a": 1, "b": None, "c": True}]),
        (PET, [{"kind": "cat"}, {"kind": "cat", "é": 30}]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, [[], [None], [None] * 2]),
        ({"type": "array", "items": {"type": "number"}}, [[], [1, 2.5, -0.125, 1e20]]),
        ({"type": "string"}, ["", "é😊", 'a"\\\n\b\x07', "\u2028"]),
        ({"type": "string", "maxLength": 2}, ["", "😊😊", "\n\n"]),
        ({"type": "string", "pattern": "^[é-ü]+$"}, ["éü"]),
        ({"type": "string", "pattern": 'a"b'}, ['xa"by\n']),
        (
            {"type": "object", "additionalProperties": {"type": "null"}},
            [{}, {"x": None, "é": None}],
        ),
        ({"anyOf": [{"type": "null"}, {"enum": [[1, {"k": "v"}]]}]}, [None, [1, {"k": "v"}]]),
        ({"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29", "1999-12-31"]),
        ({"type": "string", "format": "email"}, ["jane.doe@example.co.uk"]),
        ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59.5+01:00"]),
        ({"type": ["string", "null"]}, ["x", None]),
        ({"enum": [1, True, "1", 1.5], "type": ["integer", "boolean"]}, [1, True]),
        (
            {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}]},
            [[], [None], [None, 1]],
        ),
        # Of these, the normal form has other words.
        ({"type": "string", "format": "path"}, ["", "a/b"]),
        ({"type": "null", "x-guidance": {"lenient": True}, "nullable": True}, [None]),
        ({"enum": ["a", "b", 1], "not": {"const": "b"}}, ["a", 1]),
        ({"type": "boolean", "not": {"const": True}}, [False]),
        (
            {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True},
            [[], ["x"], ["y", "x"], ["x", "y"]],
        ),
        (
            {"allOf": [OBJECT, {"required": ["b"]}, {"properties": {"d": {"const": 1}}}]},
            [{"b": None}, {"a": 1, "b": None, "d": 1}],
        ),
        (OBJECT | {"dependentRequired": {"a": ["b"]}}, [{}, {"b": None}, {"a": 1, "b": None}]),
        (
            OBJECT | {"if": {"required": ["a"]}, "else": {"required": ["c"]}},
            [{"a": 1}, {"c": True}],
        ),
        (OBJECT | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": None}]),
        (
            {
                "type": "object",
                "propertyNames": {"enum": ["k"]},
                "additionalProperties": {"const": 1},
            },
            [{}, {"k": 1}],
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_plain_documents_match(schema: Any, documents: list[Any]) -> None:
    for document in documents:
        assert matches(schema, json.dumps(document, ensure_ascii=False)), document


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (OBJECT, ['{"d": 1}', '{"b": null, "a": 1}', '{"a":1}', "{", '{"a": 1, }', '{"a": 1.0}']),
        (PET, ['{"é": 3}', '{"kind": "cat", "é": 31}', '{"kind": "cat", "é": -1}']),
        ({"type": "string", "format": "date"}, ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"']),
        ({"type": "string", "format": "date"}, ['"2023-04-31"', '"2023-13-01"', '"2023-1-01"']),
        ({"type": "string", "format": "time"}, ['"24:00:00Z"', '"12:60:00Z"', '"12:00:00"']),
        ({"type": "string", "format": "ipv4"}, ['"256.1.1.1"', '"01.1.1.1"', '"1.1.1"']),
        ({"type": "string", "maxLength": 1}, ['"ab"', r'"\u0041\u0042"', r'"\ud83d\ude0a"']),
        (
            {"type": "string"},
            [r'"\ud800"', r'"\ud912"', r'"\uDFFF"', '"\n"', '"\\x"', '"\x00"', '"'],
        ),
        ({"type": "integer"}, ["1.0", "01", "1e2", "+1", "-", "1" * 19]),
        ({"enum": [1, True], "type": "integer"}, ["true", "1.0"]),
        (
            OBJECT | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a": 1, "b": null}', "{}"],
        ),
        (OBJECT | {"dependentRequired": {"a": ["b"]}}, ['{"a": 1}']),
        (
            {"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True},
            ["[1, 1]", "[1, 1.0]"],
        ),
        (
            {"type": "string", "format": "date", "x-guidance": {"lenient": True}},
            ['"2023-02-29"', '""'],
        ),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1},
            ["[]", "[null,null]", "[null, ]"],
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_other_texts_do_not_match(schema: Any, texts: list[str]) -> None:
    for text in texts:
        assert not matches(schema, text), text


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (7, 7), (1, 120), (-5, 5), (-1203, -17), (99, 10000), (-1, 0), (-999, 4096), (5, 4)],
)
def test_integers_are_those_of_their_range(low: int, high: int) -> None:
    expression = integers(low, high)
    if low > high:
        assert expression == NEVER
        return
    for number in range(-1500, 10100):
        assert bool(re.fullmatch(expression, str(number))) == (low <= number <= high)


def test_integers_have_at_most_18_digits() -> None:
    schema = {"type": "integer", "minimum": -(10**30), "maximum": 10**19}
    assert matches(schema, str(LARGEST_INTEGER))
    assert not matches(schema, str(LARGEST_INTEGER + 1))


@pytest.mark.parametrize(
    ("depth", "error"), [(49, NotRegularError), (100, NotRegularError), (5000, InvalidSchemaError)]
)
def test_a_deep_schema_is_refused(depth: int, error: type[Exception]) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    with pytest.raises(error, match="deep"):
        expression_of_schema(schema)


def test_a_schema_that_grows_exponentially_is_refused_at_once() -> None:
    links = {
        f"d{number}": {
            "type": "array",
            "prefixItems": [{"$ref": f"#/$defs/d{number + 1}"}] * 4,
        }
        for number in range(12)
    }
    schema = {"$defs": {**links, "d12": {"type": "null"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(NotRegularError, match="characters"):
        expression_of_schema(schema)


def test_a_reason_names_the_path_and_the_keyword() -> None:
    schema = {
        "type": "object",
        "properties": {"a/b": {"type": "integer", "multipleOf": 3}},
    }
    with pytest.raises(NotRegularError) as caught:
        expression_of_schema(schema)
    assert caught.value.reason == "#/properties/a~1b: multipleOf"


def items(schema: Any) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}


@pytest.mark.parametrize(
    "outer",
    [
        items,
        lambda schema: {"type": "array", "prefixItems": [{"type": "null"}, schema]},
        lambda schema: {"type": "object", "properties": {"a": schema}},
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda schema: {"anyOf": [{"type": "null"}, schema]},
        lambda schema: {"$ref": "#/$defs/a", "$defs": {"a": schema}},
    ],
    ids=["items", "prefixItems", "properties", "additionalProperties", "anyOf", "$ref"],
)
def test_each_part_is_a_level_and_48_are_the_most(outer: Callable[[Any], Any]) -> None:
    schema: Any = {"type": "boolean"}
    for _ in range(47):
        schema = items(schema)
    expression_of_schema(outer(schema))
    with pytest.raises(NotRegularError, match="nested more than 48 deep"):
        expression_of_schema(outer(items(schema)))


MEMBERS = [("a", 1), ("b", None), ("c", True)]
DOCUMENTS: list[Any] = [
    *(None, True, *range(-9, 10), *("\n" * size for size in range(6))),
    *(
        list(values)
        for size in range(5)
        for values in itertools.product([None, True, 1], repeat=size)
    ),
    *(dict(members) for size in range(4) for members in itertools.combinations(MEMBERS, size)),
]
TWO: dict[str, Any] = {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}]}
CLOSED = TWO | {"items": False}
MORE = TWO | {"items": {"type": "boolean"}}
NULLS = {"type": "array", "items": {"type": "null"}}
EACH_KEYWORD: list[Any] = [
    *(CLOSED | {"minItems": least} for least in (0, 1, 2)),
    *(MORE | {"minItems": least} for least in (0, 1, 2, 3)),
    *(MORE | {"maxItems": most} for most in (0, 1, 2, 3)),
    *(MORE | {"minItems": 1, "maxItems": 3}, NULLS | {"minItems": 2, "maxItems": 3}, items({"type": "null"})),
    *(CLOSED | {"prefixItems": [{"const": 1}, False, {"const": 1}]}, NULLS | {"items": False}),
    {"type": "array", "maxItems": 0},
    *(OBJECT | {"required": list(names)} for names in ("", "a", "c", "ab", "bc", "abc")),
    OBJECT | {"properties": {"a": {"const": 1}, "b": False, "c": {"type": "boolean"}}},
    *({"type": "object", "additionalProperties": values} for values in (False, {"type": "null"})),
    {"type": "object", "properties": {}, "additionalProperties": False},
    *({"oneOf": [{"type": "null"}, {"const": 1}]}, {"anyOf": [CLOSED, OBJECT, {"enum": [True, [None]]}]}),
    {"type": "integer", "minimum": -2.5, "maximum": 2.5},
    {"type": "integer", "exclusiveMinimum": -2.5, "exclusiveMaximum": 2.5},
    {"type": "integer", "exclusiveMinimum": -2, "exclusiveMaximum": 2, "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5, "minimum": -2, "maximum": 2},
    *({"type": "string", "minLength": least, "maxLength": most} for least, most in ((2, 3), (2, 2), (0, 0))),
    *({"type": "string", "minLength": 1}, {"type": "string", "maxLength": 2}),
]  # fmt: skip


@pytest.mark.parametrize("schema", EACH_KEYWORD, ids=lambda schema: json.dumps(schema)[:80])
def test_every_valid_document_of_a_few_matches_and_no_other(schema: Any) -> None:
    """Except for objects with properties that the schema does not list."""
    judge = jsonschema.Draft202012Validator(schema)
    automaton = automaton_of(expression_of_schema(schema))
    for document in DOCUMENTS:
        expected = judge.is_valid(document)
        if isinstance(document, dict) and document.keys() - schema.get("properties", document):
            expected = False
        assert accepts(automaton, json.dumps(document)) == expected, document


def test_what_a_schema_does_not_say() -> None:
    """No items follow those that it lists; whole numbers of a list are written as their type asks."""
    assert expression_of_schema(TWO) == expression_of_schema(CLOSED)
    for kind, texts in (("integer", ["1"]), ("number", ["1.0", "2.5"])):
        schema = {"enum": [1.0, 2.5], "type": kind}
        assert [text for text in ("1", "1.0", "2", "2.5") if matches(schema, text)] == texts


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (True, "#: any JSON"),
        ({"type": "array", "items": {"type": "array"}}, "#/items: an array without items"),
        (
            {"type": "object", "additionalProperties": {"type": "object"}},
            "#/additionalProperties: ",
        ),
        ({"type": "array", "prefixItems": [{"type": "number", "minimum": 1}]}, "#/prefixItems/0: "),
        ({"anyOf": [{"type": "null"}, {"type": "array"}]}, "#/anyOf/1: an array without items"),
        (OBJECT | {"additionalProperties": {"type": "null"}}, "additionalProperties with"),
        (OBJECT | {"required": ["z"]}, "required names a property without a schema"),
        ({"$defs": {"a": items({"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"}, "is recursive"),
        ({"type": "string", "format": "hostname"}, "#: format 'hostname'"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_the_reason_of_a_schema_without_tables(schema: Any, reason: str) -> None:
    with pytest.raises(NotRegularError) as caught:
        expression_of_schema(schema)
    assert reason in caught.value.reason
