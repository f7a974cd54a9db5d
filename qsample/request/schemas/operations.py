"""What can be said of two schemas in normal form: the documents that are valid under both, those of
one that are not valid under the other, and whether there are any of both.

References are followed by a function that returns the schema a `$ref` leads to, or None if that is
not known yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

Resolve = Callable[[str], Any]

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_OBJECT_KEYWORDS: Final = ("properties", "patternProperties", "additionalProperties")
_ARRAY_KEYWORDS: Final = ("prefixItems", "items")
_LEAST: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
# The documents beyond a limit: their type, and their own limit, which is so much larger.
_BEYOND: Final[Mapping[str, tuple[str, str, int]]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
# The limit of the schemas that describe the documents of one and not of the other: conditions
# multiply them.
MAX_SCHEMAS: Final = 64
# The comparisons that find out whether schemas exclude each other.
_MAX_COMPARISONS: Final = 1 << 14
_MAX_DEPTH: Final = 32


# The documents of both.


def both(first: Any, second: Any) -> Any:
    """The documents that are valid under two schemas."""
    if first is False or second is False:
        return False
    if first is True or first == {}:
        return second
    if second is True or second == {}:
        return first
    merged = _merged(first, second)
    return {"allOf": [*_conjuncts(first), *_conjuncts(second)]} if merged is None else merged


def _conjuncts(schema: dict[str, Any]) -> list[Any]:
    return list(schema["allOf"]) if schema.keys() == {"allOf"} else [schema]


def _merged(first: dict[str, Any], second: dict[str, Any]) -> Any:
    """The keywords of two schemas in one; None if no schema without allOf has the same meaning."""
    if {"enum", "const"} & first.keys() and {"enum", "const"} & second.keys():
        return _with_common_values(first, second)
    merged = {**second, **first}
    for keyword in first.keys() & second.keys():
        if keyword in (*_OBJECT_KEYWORDS, *_ARRAY_KEYWORDS):
            continue
        merged[keyword] = _common_value(keyword, first[keyword], second[keyword])
        if merged[keyword] is None:
            return None
    for keywords, merge in ((_OBJECT_KEYWORDS, _both_members), (_ARRAY_KEYWORDS, _both_items)):
        ours = {keyword: first[keyword] for keyword in keywords if keyword in first}
        theirs = {keyword: second[keyword] for keyword in keywords if keyword in second}
        if ours and theirs:
            members = merge(ours, theirs)
            if members is None:
                return None
            merged = {keyword: merged[keyword] for keyword in merged if keyword not in keywords}
            merged |= members
    return False if merged.get("type") == [] or _lacks_a_member(merged) else merged


def _common_value(keyword: str, ours: Any, theirs: Any) -> Any:
    """The value of a keyword that means both of two values; None if there is no such value."""
    if keyword in _LEAST:
        return max(ours, theirs)
    if keyword in _MOST:
        return min(ours, theirs)
    if keyword == "required":
        return list(dict.fromkeys([*ours, *theirs]))
    if keyword == "type":
        return _common_types(ours, theirs)
    return ours if _are_equal(ours, theirs) else None


def _with_common_values(first: dict[str, Any], second: dict[str, Any]) -> Any:
    texts = {canonical_text(value) for value in listed_values(second) or []}
    values = [value for value in listed_values(first) or [] if canonical_text(value) in texts]
    if not values:
        return False
    rest = both(_without_values(first), _without_values(second))
    return {"enum": values} if rest is True or rest == {} else both(rest, {"enum": values})


def _common_types(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The types of two lists. Integers are numbers."""
    common = [name for name in first if name in second]
    both_have_integers = all({"integer", "number"} & {*names} for names in (first, second))
    if both_have_integers and not {"integer", "number"} & {*common}:
        common.append("integer")
    return common


def _both_members(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any] | None:
    """`properties` and `additionalProperties` of two schemas together."""
    if "patternProperties" in first or "patternProperties" in second:
        return first if _are_equal(first, second) else None
    others = [schema.get("additionalProperties", True) for schema in (first, second)]
    properties = [schema.get("properties", {}) for schema in (first, second)]
    members: dict[str, Any] = {
        "properties": {
            name: both(properties[0].get(name, others[0]), properties[1].get(name, others[1]))
            for name in [*properties[0], *properties[1]]
        }
    }
    more = both(*others)
    return members if more is True else {**members, "additionalProperties": more}


def _both_items(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any] | None:
    """`items` of two schemas together."""
    if "prefixItems" in first or "prefixItems" in second:
        return first if _are_equal(first, second) else None
    return {"items": both(first["items"], second["items"])}


def _lacks_a_member(schema: dict[str, Any]) -> bool:
    """Whether a schema describes objects only, and forbids a property that it requires."""
    if schema.get("type") != ["object"]:
        return False
    return any(_member(schema, name) is False for name in schema.get("required", []))


def _member(schema: dict[str, Any], name: str) -> Any:
    """The schema of a property, or one with more documents."""
    properties = schema.get("properties", {})
    if name in properties:
        return properties[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


# The documents of one and not of the other.


def without(schema: Any, excluded: Any, resolve: Resolve, depth: int = 0) -> list[Any] | None:
    """Schemas of the documents that are valid under a schema and not under another.

    Args:
        schema: the schema of all documents.
        excluded: the schema of the documents that are left out.
        resolve: follows a reference.
        depth: the number of schemas around it.

    Returns:
        Each of the documents is valid under one of these, at least; None if there are no such
        schemas, or they are hard to find.
    """
    if schema is False or excluded is True or excluded == {}:
        return []
    if excluded is False:
        return [schema]
    schema = {} if schema is True else target_of(schema, resolve)
    excluded = target_of(excluded, resolve)
    if schema is None or excluded is None or depth > _MAX_DEPTH:
        return None
    if isinstance(schema, bool) or isinstance(excluded, bool):
        return without(schema, excluded, resolve, depth + 1)
    remaining: list[Any] = []
    for keyword, value in excluded.items():
        rest = _violating(schema, keyword, value, resolve, depth)
        if rest is None or len(rest) > MAX_SCHEMAS:
            return None
        remaining += rest
    return distinct(remaining)


def target_of(schema: Any, resolve: Resolve) -> Any:
    """The schema that a schema of nothing but a reference leads to, or else the schema itself; None
    if that is not known, or the reference leads back to itself."""
    seen: set[str] = set()
    while isinstance(schema, dict) and schema.keys() == {"$ref"}:
        reference = schema["$ref"]
        if reference in seen:
            return None
        seen.add(reference)
        schema = resolve(reference)
    return schema


def _violating(
    schema: dict[str, Any], keyword: str, value: Any, resolve: Resolve, depth: int
) -> list[Any] | None:
    """Schemas of the documents of a schema that violate a keyword; None as `without`."""
    match keyword:
        case "type":
            return _without_types(schema, value)
        case "enum" | "const":
            texts = {canonical_text(item) for item in (value if keyword == "enum" else [value])}
            values = listed_values(schema)
            if values is None:
                return None
            rest = [item for item in values if canonical_text(item) not in texts]
            return [{**_without_values(schema), "enum": rest}] if rest else []
        case "required":
            return [
                both(schema, {"type": ["object"], "properties": {name: False}}) for name in value
            ]
        case "properties":
            return _with_other_members(schema, value, resolve, depth)
        case "allOf":
            parts = [without(schema, part, resolve, depth + 1) for part in value]
            return None if None in parts else [item for part in parts for item in part or []]
        case "anyOf" | "oneOf":
            return without_all([schema], value, resolve, depth + 1)
    if keyword in _BEYOND:
        kind, opposite, more = _BEYOND[keyword]
        limit = value + more
        is_possible = kind == "number" or limit >= 0
        return [both(schema, {"type": [kind], opposite: limit})] if is_possible else []
    return None


def without_all(
    schemas: list[Any], excluded: Iterable[Any], resolve: Resolve, depth: int = 0
) -> list[Any] | None:
    """Schemas of the documents that are valid under some schemas, and not under any of others; None
    as `without`."""
    for part in excluded:
        remaining: list[Any] = []
        for schema in schemas:
            rest = without(schema, part, resolve, depth)
            if rest is None:
                return None
            remaining += rest
        schemas = distinct(remaining)
        if len(schemas) > MAX_SCHEMAS:
            return None
    return schemas


def _without_types(schema: dict[str, Any], excluded: Sequence[str]) -> list[Any] | None:
    types = schema.get("type", [name for name in TYPES if name != "integer"])
    if "integer" in excluded and "number" in types and "number" not in excluded:
        return None  # Numbers with a fraction are no type.
    also_excluded = ["integer"] if "number" in excluded else []
    rest = [name for name in types if name not in (*excluded, *also_excluded)]
    return [{**schema, "type": rest}] if rest else []


def _with_other_members(
    schema: dict[str, Any], members: Mapping[str, Any], resolve: Resolve, depth: int
) -> list[Any] | None:
    """Schemas of the objects of a schema with a property that is not valid under its schema of
    `members`."""
    if "patternProperties" in schema:
        return None
    found: list[Any] = []
    for name, excluded in members.items():
        rest = without(_member(schema, name), excluded, resolve, depth + 1)
        if rest is None:
            return None
        for member in rest:
            properties = {**schema.get("properties", {}), name: member}
            found.append(
                both({**schema, "properties": properties}, {"type": ["object"], "required": [name]})
            )
    return found


# Whether there are documents of both.


@dataclass(slots=True)
class _Comparison:
    """Finds out whether schemas exclude each other, with a limit of time."""

    resolve: Resolve
    num_left: int = _MAX_COMPARISONS

    def exclude(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Whether no document is valid under two schemas. It may be False even then."""
        self.num_left -= 1
        if first is False or second is False:
            return True
        if self.num_left < 0 or depth > _MAX_DEPTH or first is True or second is True:
            return False
        for one, other in ((first, second), (second, first)):
            for parts, is_one_enough in self._parts(one):
                found = (self.exclude(part, other, depth + 1) for part in parts)
                if any(found) if is_one_enough else all(found):
                    return True
        types = _possible_types(first) & _possible_types(second)
        values = [listed_values(first), listed_values(second)]
        if values[0] is not None and values[1] is not None:
            texts = [{canonical_text(value) for value in listed or []} for listed in values]
            return not texts[0] & texts[1]
        if types - {"object"}:
            return False
        # Each object of both has the properties that one of them requires.
        names = dict.fromkeys([*first.get("required", []), *second.get("required", [])])
        return not types or any(
            self.exclude(_member(first, name), _member(second, name), depth + 1) for name in names
        )

    def _parts(self, schema: dict[str, Any]) -> list[tuple[list[Any], bool]]:
        """The schemas that a schema consists of, and whether its documents are valid under all of
        them or one of them."""
        parts = [(schema[name], False) for name in ("anyOf", "oneOf") if name in schema]
        if "allOf" in schema:
            parts.append((schema["allOf"], True))
        target = self.resolve(schema["$ref"]) if "$ref" in schema else None
        return parts if target is None else [*parts, ([target], True)]


def exclude_each_other(schemas: Sequence[Any], resolve: Resolve) -> bool:
    """Whether no document is valid under two of some schemas. It may be False even then."""
    listed = [listed_values(schema) for schema in schemas]
    if None not in listed:
        texts = [{canonical_text(value) for value in values or []} for values in listed]
        return sum(map(len, texts)) == len(set().union(*texts))
    comparison = _Comparison(resolve)
    return all(comparison.exclude(first, second) for first, second in combinations(schemas, 2))


def _possible_types(schema: dict[str, Any]) -> set[str]:
    """The types that the documents of a schema may have; "number" for integers, too."""
    values = listed_values(schema)
    types = schema.get("type", TYPES) if values is None else map(type_of, values)
    return {"number" if name == "integer" else name for name in types}


# Values.


def listed_values(schema: Any) -> list[Any] | None:
    """The values of which a schema allows some, as its other keywords say; None if they are not
    listed."""
    if not isinstance(schema, dict):
        return None
    types = schema.get("type", TYPES)
    if "const" in schema:
        values = [schema["const"]]
        if "enum" in schema:
            values = (
                _with_common_values({"const": values[0]}, {"enum": schema["enum"]}) or {}
            ).get("enum", [])
    elif "enum" in schema:
        values = schema["enum"]
    elif {*types} <= {"null", "boolean"}:
        values = [None, False, True]
    else:
        return None
    return [
        value
        for value in values
        if type_of(value) in types or (type_of(value) == "integer" and "number" in types)
    ]


def all_values(schema: Any) -> list[Any] | None:
    """The documents of a schema; None if it may have others than these."""
    is_listed = isinstance(schema, dict) and schema.keys() <= {"type", "enum", "const"}
    return listed_values(schema) if is_listed else None


def _without_values(schema: dict[str, Any]) -> dict[str, Any]:
    return {keyword: schema[keyword] for keyword in schema if keyword not in ("enum", "const")}


def type_of(value: Any) -> str:
    """The type of a document; "integer" for a number without a fraction."""
    if isinstance(value, bool):  # A bool of Python is an int.
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def distinct(schemas: Iterable[Any]) -> list[Any]:
    """Some schemas without `false` and those that come again."""
    return list({_ordered_text(part): part for part in schemas if part is not False}.values())


def _ordered_text(schema: Any) -> str:
    """A text of a schema. The order of properties counts."""
    return json.dumps(schema)


def _are_equal(first: Any, second: Any) -> bool:
    return canonical_text(first) == canonical_text(second)


def canonical_text(value: Any) -> str:
    """A text that equal documents share: 1 and 1.0 are equal, and true and 1 are not."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    """A document in which whole numbers are integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value
