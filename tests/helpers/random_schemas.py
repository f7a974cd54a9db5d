"""Random JSON schemas of the keywords that qsample.request.structured.schema keeps, near misses, and random texts of
an automaton."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsample.request.structured.automaton import ByteAutomaton
from qsample.request.structured.state_graph import distances_to

NAMES = ["a", "name", 'quo"te', "back\\slash", "é", "日本", "a.b*c", "", "x/y~z", "tab\t", "$ref"]
VALUES = [
    *(0, 1, True, False, None, -7, 1.5, 1.0, 1e300, "", "yes", 'a"b', "\\", "日本😊", "(x)|[y]"),
    *([], [1, "two", None], {}, {"k": [True], "é": 0.5}, "line\nfeed", "\x07"),
]
PATTERNS = [
    r"^\d{3}-\d{4}$",
    r"^[A-Z][a-z]*$",
    r"b+",
    r"^(yes|no)$",
    r"^a|b$",
    r"(x|^y)z?",
    r"(a|b)(y|1)(9|z$)",
    r"\w+@\w+\.com$",
    r"^[^a-f\s]{1,5}$",
    r"^\S+\s\S+$",
    r"^\W\D.$",
    r'^"\\?$',
    r"^[é-ü日]{2}$",
    r"",
    r"^(?:a(?:b|c){0,2}){1,3}?$",
    r"\n",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
NEAR_MISSES: list[dict[str, Any]] = [
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "integer", "multipleOf": 3},
    {"type": "number", "minimum": 0},
    {"type": "string", "minLength": 2, "pattern": "a"},
    {"type": "string", "format": "date", "maxLength": 4},
    {"type": "string", "format": "uri"},
    {"type": "string", "pattern": r"\bx"},
    {"type": "string", "pattern": "(?i)x"},
    {"type": "string", "pattern": "(?=x)x"},
    {"type": "string", "pattern": r"(x)\1"},
    {"type": "string", "pattern": "("},
    {"type": "object"},
    {"type": "array"},
    {},
    {"type": "object", "properties": {"a": True}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
    {"type": "object", "properties": {}, "additionalProperties": {"type": "null"}},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    {"type": "object", "properties": {}, "patternProperties": {"a": {}}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]},
    {"oneOf": [{"const": 1}, {"type": "integer"}]},
    {"allOf": [{"type": "integer"}, {"type": "integer"}]},
    {"enum": [1, 2], "const": 1},
    {"enum": [1, 2], "minimum": 2},
    {"anyOf": [{"type": "null"}], "type": "null"},
    {"$ref": "#"},
    {"$ref": "https://example.com/schema"},
    {"$ref": "#/$defs/missing"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"not": {"type": "null"}},
    {"if": {"type": "null"}, "type": "null"},
    {"type": "array", "items": [{"type": "null"}]},
    {"type": "array", "items": {"type": "null"}, "contains": {"type": "null"}},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "prefixItems": [{"type": "null"}],
    },
    {"type": "integer", "exclusiveMinimum": True},
    {"type": "string", "minLength": -1},
    {"type": "thing"},
    {"type": "null", "x-unknown": 1},
]


def random_schema(rng: np.random.Generator) -> dict[str, Any]:
    """A schema with a few definitions, all of whose keywords are kept."""
    definitions = {f"d{number}": _part(rng, 1, []) for number in range(int(rng.integers(0, 3)))}
    root = _part(rng, 3, list(definitions))
    if definitions:
        root["$defs"] = definitions
    return root


def _part(rng: np.random.Generator, depth: int, references: list[str]) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["array", "object", "object", "map", "tuple", "anyOf", "oneOf", "allOf", "types"]
    if references:
        kinds += ["$ref", "$ref"]
    kind = kinds[rng.integers(len(kinds))]

    def inner() -> dict[str, Any]:
        return _part(rng, depth - 1, references)

    part: dict[str, Any] = {}
    if kind == "string":
        part = {"type": "string", **_string_keywords(rng)}
    elif kind == "integer":
        part = {"type": "integer", **_bounds(rng)}
    elif kind in ("number", "boolean", "null"):
        part = {"type": kind}
    elif kind == "enum":
        part = {"enum": [VALUES[number] for number in rng.integers(len(VALUES), size=4)]}
        if rng.random() < 0.3:
            part["enum"].append(5)
            part["type"] = ["integer", "object"]
    elif kind == "const":
        part = {"const": VALUES[rng.integers(len(VALUES))]}
    elif kind == "array":
        part = {"type": "array", "items": inner(), **_limits(rng, "minItems", "maxItems")}
    elif kind == "tuple":
        part = {"type": "array", "prefixItems": [inner() for _ in range(rng.integers(1, 4))]}
        if rng.random() < 0.5:
            part["items"] = inner() if rng.random() < 0.5 else False
        part |= _limits(rng, "minItems", "maxItems") if "items" not in part else {}
    elif kind == "object":
        part = _object(rng, inner)
    elif kind == "map":
        part = {"type": "object", "additionalProperties": inner()}
    elif kind == "anyOf":
        part = {"anyOf": [inner() for _ in range(rng.integers(1, 4))]}
    elif kind == "oneOf":
        part = {"oneOf": [{"type": "null"}, {"type": "string"}, {"enum": [1, 2]}, {"const": 3}]}
    elif kind == "allOf":
        part = {"allOf": [inner()]}
    elif kind == "types":
        part = {"type": ["null", "integer", "string"], "maximum": 99, "maxLength": 3}
    else:
        part = {"$ref": f"#/$defs/{references[rng.integers(len(references))]}"}
    if rng.random() < 0.2:
        part |= {"title": "T", "description": "d", "default": 1, "examples": [2]}
    return part


def _string_keywords(rng: np.random.Generator) -> dict[str, Any]:
    draw = rng.random()
    if draw < 0.3:
        return {"pattern": PATTERNS[rng.integers(len(PATTERNS))]}
    if draw < 0.5:
        return {"format": FORMATS[rng.integers(len(FORMATS))]}
    return _limits(rng, "minLength", "maxLength")


def _limits(rng: np.random.Generator, least: str, most: str) -> dict[str, Any]:
    low = int(rng.integers(0, 3))
    limits = {least: low, most: low + int(rng.integers(0, 4))}
    return {name: value for name, value in limits.items() if rng.random() < 0.5}


def _bounds(rng: np.random.Generator) -> dict[str, Any]:
    low = int(rng.integers(-(10 ** rng.integers(1, 7)), 10 ** rng.integers(1, 7)))
    high = low + int(rng.integers(2, 10 ** rng.integers(1, 6)))
    names = [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")][rng.integers(2)]
    bounds = {names[0]: low, names[1]: high + 0.5}
    return {name: value for name, value in bounds.items() if rng.random() < 0.7}


def _object(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    names = list(rng.permutation(NAMES)[: rng.integers(0, 5)])
    part: dict[str, Any] = {"type": "object", "properties": {str(name): inner() for name in names}}
    required = [str(name) for name in names if rng.random() < 0.5]
    if required:
        part["required"] = required
    if rng.random() < 0.5:
        part["additionalProperties"] = bool(rng.integers(2))
    return part


def random_text(automaton: ByteAutomaton, rng: np.random.Generator, longest: int = 60) -> bytes:
    """A text of an automaton. After `longest` bytes it takes the shortest way to an end."""
    transitions = automaton.transitions[:, :256]
    distances = distances_to(np.flatnonzero(automaton.final), transitions)
    state = 0
    text = bytearray()
    while True:
        ends = automaton.final[state] and (len(text) >= longest or rng.random() < 0.1)
        symbols = np.flatnonzero(transitions[state] >= 0)
        if ends or not len(symbols):
            assert automaton.final[state]
            return bytes(text)
        if len(text) >= longest:
            nearest = distances[transitions[state, symbols]]
            symbols = symbols[nearest == nearest.min()]
        # Each next state is as likely as the others, or strings would never end.
        targets = transitions[state, symbols]
        symbol = int(rng.choice(symbols[targets == rng.choice(np.unique(targets))]))
        text.append(symbol)
        state = int(transitions[state, symbol])
