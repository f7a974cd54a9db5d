"""Random JSON schemas: of the keywords that tables keep, near misses, and of all keywords as clients write them. Random
texts of an automaton and of masks."""

from __future__ import annotations

from typing import Any

import jsonschema
import llguidance
import llguidance.numpy
import numpy as np

from qsample.request.grammar import Grammar, GrammarTokenizer, compile_grammar
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
# Schemas that masks keep, and tables do not.
NEAR_MISSES: list[dict[str, Any]] = [
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
    {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    {"type": "object", "properties": {}, "patternProperties": {"a": {}}},
    {"enum": [1, 2], "minimum": 2},
    {"anyOf": [{"type": "null"}], "type": "null"},
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"not": {"type": "null"}},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "prefixItems": [{"type": "null"}],
    },
]
_TWO_OBJECTS = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
# Schemas that answers cannot be kept to, and the place of the fault.
REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "array", "items": {"enum": [*range(6)]}, "uniqueItems": True}, "#/uniqueItems"),
    ({"uniqueItems": True}, "#/uniqueItems"),
    ({"type": "string", "not": {"const": "x"}}, "#/not"),
    ({"properties": {"a": {"type": "string", "not": {"pattern": "x"}}}}, "#/properties/a/not"),
    ({"type": "number", "not": {"type": "integer"}}, "#/not"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
    ({"oneOf": [{"type": "string"}, {"pattern": "x"}], "type": "string"}, "#/oneOf"),
    ({"if": {"pattern": "x"}, "then": {"maxLength": 1}}, "#/if"),
    ({"type": "array", "items": {"type": "null"}, "contains": {"const": None}}, "#/contains"),
    ({"type": "array", "contains": {"type": "null"}}, "#/contains"),
    ({"propertyNames": {"minLength": 1}}, "#/propertyNames"),
    ({"unevaluatedProperties": False, "anyOf": [{}]}, "#/unevaluatedProperties"),
    ({"unevaluatedItems": False, "$ref": "#/$defs/a", "$defs": {"a": {}}}, "#/unevaluatedItems"),
    (_TWO_OBJECTS | {"minProperties": 1}, "#/minProperties"),
    (_TWO_OBJECTS | {"maxProperties": 1}, "#/maxProperties"),
    ({"type": "object", "minProperties": 2}, "#/minProperties"),
    ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
    ({"items": {"$recursiveRef": "#"}}, "#/items/$recursiveRef"),
    ({"$ref": "https://example.com/schema"}, "#/$ref"),
    ({"$ref": "a.json#/b"}, "#/$ref"),
    ({"$ref": "#/$defs/missing"}, "#/$ref"),
    ({"$ref": "#missing"}, "#/$ref"),
    ({"$ref": 5}, "#/$ref"),
    ({"items": {"$id": "https://a/b", "$ref": "#/$defs/a"}, "$defs": {"a": {}}}, "#/items/$id"),
    ({"$defs": {"a": {"not": {"pattern": "x"}}}, "items": {"$ref": "#/$defs/a"}}, "#/$defs/a/not"),
    ({"$schema": "https://example.com/mine"}, "#/$schema"),
    ({"type": "thing"}, "#/type"),
    ({"type": []}, "#/type"),
    ({"type": None}, "#/type"),
    ({"enum": []}, "#/enum"),
    ({"enum": {"a": 1}}, "#/enum"),
    ({"const": float("nan")}, "#/const"),
    ({"enum": [1, [float("inf")]]}, "#/enum"),
    ({"const": "\ud800"}, "#/const"),
    ({"anyOf": []}, "#/anyOf"),
    ({"anyOf": [5]}, "#/anyOf/0"),
    ({"oneOf": {}}, "#/oneOf"),
    ({"allOf": [{}, {"oneOf": None}]}, "#/allOf/1/oneOf"),
    ({"type": "string", "minLength": -1}, "#/minLength"),
    ({"type": "string", "maxLength": "a"}, "#/maxLength"),
    ({"type": "string", "pattern": 5}, "#/pattern"),
    ({"type": "integer", "minimum": "a"}, "#/minimum"),
    ({"type": "number", "maximum": float("inf")}, "#/maximum"),
    ({"type": "number", "multipleOf": 0}, "#/multipleOf"),
    ({"properties": []}, "#/properties"),
    ({"properties": {"\ud800": {}}}, "#/properties"),
    ({"properties": {"a/b~c": 5}}, "#/properties/a~1b~0c"),
    ({"required": "a"}, "#/required"),
    ({"required": [5]}, "#/required"),
    ({"items": 5}, "#/items"),
    ({"prefixItems": {}}, "#/prefixItems"),
    ({"items": [{"type": "null"}, 5]}, "#/items/1"),
    ({"dependentRequired": []}, "#/dependentRequired"),
    ({"dependentRequired": {"a": 5}}, "#/dependentRequired/a"),
    ({"dependentSchemas": {"a": 5}}, "#/dependentSchemas/a"),
    (5, "#"),
    (None, "#"),
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


# All keywords, as clients write them.

CLIENT_NAMES = ["a", "b", "kind", "x/y~z", "é", "x-guidance"]
CLIENT_VALUES = [0, 1, True, False, None, "a", "b", 1.0, 1.5, [1], {"a": 1}, "é"]
CLIENT_FORMATS = [*FORMATS, "uri", "ipv6", "path", "uuid4", "int64", "password", "regex", 5, None]
CLIENT_PATTERNS = ["^a", "b$", "^[ab]*$", "x|y", r"^\d+$"]
FORMAT_CHECKER = jsonschema.FormatChecker(formats=())
# jsonschema asserts formats that are annotations here, such as "regex".
FORMAT_CHECKER.checkers = {
    name: jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers[name]
    for name in (*FORMATS, "ipv6", "uri")
    if name in jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers
}


def is_valid(document: Any, schema: Any) -> bool:
    """Whether a document is valid, by jsonschema. Formats that are not kept restrict nothing."""
    judge = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
    return bool(judge.is_valid(document))


def random_client_schema(rng: np.random.Generator) -> Any:
    """A schema of any keywords, in any places, that references may make recursive."""
    schema = _client_part(rng, int(rng.integers(4)))
    if isinstance(schema, dict):
        schema["$defs"] = {"d": _client_part(rng, 1), "e": _client_part(rng, 2)}
    return schema


def random_document(rng: np.random.Generator, depth: int = 3) -> Any:
    """A document of the names and values of `random_client_schema`, or of similar ones."""
    draw = rng.random() if depth else 1.0
    if draw < 0.45:
        names = [*CLIENT_NAMES, "ax", "zz"]
        return {name: random_document(rng, depth - 1) for name in names if rng.random() < 0.4}
    if draw < 0.6:
        return [random_document(rng, depth - 1) for _ in range(rng.integers(0, 4))]
    more_values = ["c", "ab", "xx", "12", 5, -2, 2.5, "2023-02-29", "a@b.co", "::1"]
    return _one_of(rng, CLIENT_VALUES + more_values)


def _one_of(rng: np.random.Generator, things: list[Any]) -> Any:
    return things[rng.integers(len(things))]


def _some(rng: np.random.Generator, keywords: dict[str, Any], share: float = 0.5) -> dict[str, Any]:
    return {keyword: value for keyword, value in keywords.items() if rng.random() < share}


def _client_part(rng: np.random.Generator, depth: int) -> Any:
    if rng.random() < 0.04:
        return bool(rng.integers(2))
    makers = [_client_scalar] if not depth else [_client_scalar, *_CLIENT_MAKERS, _client_object]
    part: dict[str, Any] = {}
    for _ in range(rng.integers(1, 4)):
        part |= _one_of(rng, makers)(rng, lambda: _client_part(rng, depth - 1))
    return part | _some(rng, {"x-guidance": {"lenient": True}, "title": "T", "x-other": 5}, 0.1)


def _client_scalar(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    types = ["string", "integer", "number", "null", "boolean", "object", "array"]
    limits = {
        "minimum": int(rng.integers(-3, 3)),
        "maximum": int(rng.integers(0, 9)),
        "exclusiveMinimum": -2.5,
        "exclusiveMaximum": 8,
        "multipleOf": _one_of(rng, [1, 2, 5]),
    }
    texts = {
        "minLength": int(rng.integers(0, 3)),
        "maxLength": int(rng.integers(0, 5)),
        "pattern": _one_of(rng, CLIENT_PATTERNS),
    }
    parts: list[dict[str, Any]] = [
        {"type": _one_of(rng, types)},
        {"type": [str(name) for name in rng.permutation(types)[:2]]},
        {"enum": [_one_of(rng, CLIENT_VALUES) for _ in range(3)]},
        {"const": _one_of(rng, CLIENT_VALUES)},
        {"type": "number", **_some(rng, limits)},
        {"type": "integer", **_some(rng, limits)},
        {"type": "string", **_some(rng, texts)},
        {"format": _one_of(rng, CLIENT_FORMATS)},
    ]
    return dict(_one_of(rng, parts))


def _client_object(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    properties = {name: inner() for name in CLIENT_NAMES if rng.random() < 0.4}
    if "kind" in properties:
        properties["kind"] = {"enum": ["a", "b", "c"]}
    required = [name for name in CLIENT_NAMES if rng.random() < 0.25]
    part = {"type": "object", "properties": properties, "required": required}
    return part | _some(rng, {"additionalProperties": False if rng.random() < 0.6 else inner()})


def _client_array(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    limits = {"minItems": int(rng.integers(0, 3)), "maxItems": int(rng.integers(0, 4))}
    part = {"type": "array", "items": inner(), **_some(rng, limits)}
    return part | _some(rng, {"prefixItems": [inner(), inner()]}, 0.3)


def _client_items(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    items = _one_of(rng, [{"enum": ["a", 1, 1.0]}, {"type": "boolean"}, {"type": "null"}, inner()])
    parts: list[dict[str, Any]] = [
        {"type": "array", "items": items, "uniqueItems": bool(rng.random() < 0.9)},
        {"type": "array", "items": items, "contains": items, "minContains": 2, "maxContains": 3},
        {"contains": inner(), "minContains": 0},
        {"unevaluatedItems": _one_of(rng, [False, inner()])},
    ]
    return dict(_one_of(rng, parts))


def _client_combination(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    keyword = _one_of(rng, ["anyOf", "oneOf", "allOf"])
    return {keyword: [inner() for _ in range(rng.integers(1, 4))]}


def _client_condition(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    name, other = (_one_of(rng, CLIENT_NAMES) for _ in range(2))
    simple = [
        {"required": [name]},
        {"properties": {"kind": {"const": "a"}}},
        {"type": _one_of(rng, ["null", "string", ["object", "number"]])},
        {"minimum": 1},
        {"enum": ["a", 1]},
        inner(),
    ]
    cases = {"then": inner(), "else": _one_of(rng, simple)}
    parts: list[dict[str, Any]] = [
        {"not": _one_of(rng, simple)},
        {"if": _one_of(rng, simple), **_some(rng, cases, 0.8)},
        {"dependentRequired": {name: [other]}},
        {"dependentSchemas": {name: inner()}},
    ]
    return dict(_one_of(rng, parts))


def _client_names(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    names = [{"enum": ["a", "b"]}, {"pattern": "^a"}, {"type": "string"}, inner()]
    patterns = {_one_of(rng, ["^a", "^x", "e$"]): inner() for _ in range(rng.integers(1, 3))}
    counts = {"minProperties": int(rng.integers(0, 3)), "maxProperties": int(rng.integers(0, 3))}
    parts: list[dict[str, Any]] = [
        {"propertyNames": _one_of(rng, names)},
        {"patternProperties": patterns},
        {"unevaluatedProperties": _one_of(rng, [False, True, inner()])},
        _some(rng, counts, 0.7),
    ]
    return dict(_one_of(rng, parts))


def _client_reference(rng: np.random.Generator, inner: Any) -> dict[str, Any]:
    return {"$ref": _one_of(rng, ["#", "#/$defs/d", "#/$defs/e"])}


_CLIENT_MAKERS = [
    _client_array,
    _client_items,
    _client_combination,
    _client_condition,
    _client_names,
    _client_reference,
]


def byte_tokenizer() -> GrammarTokenizer:
    """A tokenizer whose tokens are the bytes."""
    tokenizer = llguidance.LLTokenizer("byte")
    return GrammarTokenizer(tokenizer, tokenizer.vocab_size - 1, tokenizer.vocab_size - 1, {})


def random_masked_text(
    grammar: Grammar, rng: np.random.Generator, longest: int = 40
) -> bytes | None:
    """A text that llguidance lets through, byte by byte; None if it does not end soon after `longest` bytes."""
    bytes_alone = byte_tokenizer()
    tokenizer = bytes_alone.tokenizer
    matcher = compile_grammar(grammar, bytes_alone).matcher
    mask = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    text = bytearray()
    while len(text) < 4 * longest:
        if matcher.is_accepting() and (rng.random() < 0.3 or len(text) > longest):
            break
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = [int(byte) for byte in allowed if byte < 256]
        if not allowed:
            break
        closing = [byte for byte in allowed if chr(byte) in '"}],:']
        plain = [byte for byte in allowed if 32 <= byte < 127]
        if len(text) > longest and closing:
            allowed = closing
        elif plain and rng.random() < 0.5:
            allowed = plain
        text.append(_one_of(rng, allowed))
        assert matcher.consume_token(text[-1])
    return bytes(text) if matcher.is_accepting() else None
