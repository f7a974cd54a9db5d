"""A JSON schema in normal form, of which tables and masks are made.

JSON Schema has several words for most things, and others that restrict nothing. A normal form has
neither. Its parts are booleans, or objects of these keywords, each well-formed:

- `type`, `enum`, `const`, `anyOf`, `oneOf` of schemas that exclude each other, `allOf`, `$ref` to
  an entry of `$defs`, which only the root has;
- `properties`, `required`, `additionalProperties`, `patternProperties`, `minProperties`,
  `maxProperties`, `items`, `prefixItems`, `minItems`, `maxItems`;
- `minLength`, `maxLength`, `pattern`, a `format` of `formats`; `minimum`, `maximum`,
  `exclusiveMinimum`, `exclusiveMaximum`, `multipleOf`.

The same documents are valid under both. A keyword that restricts documents and that these cannot
express is refused by its place. All other keywords, formats too, are annotations, as JSON Schema says
(https://json-schema.org/specification): they are dropped, and so are options of llguidance
(`x-guidance`), which are the server's and not the client's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property, reduce
from itertools import permutations
from typing import Any, Final
from urllib.parse import quote, unquote

from qsample.checks import is_integer
from qsample.errors import ArgumentError, shown
from qsample.request.schemas.formats import FORMATS, HOST_FORMATS
from qsample.request.schemas.operations import (
    MAX_SCHEMAS,
    TYPES,
    all_values,
    both,
    canonical_text,
    distinct,
    exclude_each_other,
    target_of,
    without_all,
)
from qsample.request.schemas.pointers import followed, pointer_step, step_name

# Names of dialects, without http or https.
_NEWEST_DIALECT: Final = "//json-schema.org/draft/2020-12/schema"
# Before 2020-12, `items` is a list where it is `prefixItems` now, and `additionalItems` are `items`.
_OLDER_DIALECTS: Final = (
    "//json-schema.org/draft/2019-09/schema",
    "//json-schema.org/draft-07/schema",
    "//json-schema.org/draft-06/schema",
    "//json-schema.org/draft-04/schema",
)
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# A bound that draft 4 turns into an exclusive one by the value true.
_INCLUSIVE_BOUNDS: Final = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_ARRAY_TYPE: Final = ("array", ["array"])
_COMBINATIONS: Final = ("anyOf", "oneOf", "allOf")
# Keywords that look at the properties or items that other keywords of the same place looked at.
_APPLICATORS: Final = (
    *_COMBINATIONS,
    *("$ref", "not", "if", "dependentSchemas", "dependencies", "contains"),
)
# The limit of the text of alternatives. Nested conditions would double it at each level.
_MAX_ALTERNATIVE_CHARACTERS: Final = 1 << 18
# Arrays of distinct values are listed: 5 values have 326.
_MAX_DISTINCT_VALUES: Final = 5
_MAX_DISTINCT_CHARACTERS: Final = 1 << 12


class InvalidSchemaError(ArgumentError):
    """A schema is not well-formed, or answers cannot be kept to it.

    Attributes:
        pointer: the place of the fault, a JSON pointer (RFC 6901) such as "#/properties/a/not".
    """

    def __init__(self, pointer: str, reason: str, remedy: str, function: str = "") -> None:
        """
        Args:
            pointer: the place of the fault.
            reason: the fault.
            remedy: the thing to do, which completes a sentence.
            function: the name of the function whose arguments the schema describes, if it describes any.
        """
        self.pointer = pointer
        self._parts = (reason, remedy)
        owner = f" of the arguments of {function:.64}" if function else ""
        place = pointer if len(pointer) <= 160 else f"{pointer[:80]}...{pointer[-77:]}"
        super().__init__(f"no answer can follow the schema{owner}: {place}: {reason}; {remedy}")

    def of_function(self, function: str) -> InvalidSchemaError:
        """The same error of the schema of a function's arguments."""
        return InvalidSchemaError(self.pointer, *self._parts, function)


def normal_schema(schema: Any) -> Any:
    """The normal form of a schema.

    Args:
        schema: the schema, as json.loads reads it.

    Returns:
        A boolean, or an object.

    Raises:
        InvalidSchemaError: the schema is not well-formed, or answers cannot be kept to it.
    """
    try:
        return _NormalForm(schema).whole()
    except RecursionError:
        raise InvalidSchemaError("#", "it is nested too deep", "give a flatter schema") from None


def reference_to(name: str) -> str:
    """The `$ref` that leads to an entry of `$defs` of a normal form."""
    return f"#/$defs/{quote(pointer_step(name), safe='~$')}"


class _NormalForm:
    """The normal form of a schema, in the making."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._is_newest = True
        # The original references, and the normal forms that they lead to.
        self._definitions: dict[str, Any] = {}
        # References whose normal form is not made yet.
        self._waiting: dict[str, Any] = {}
        self._open_references: set[str] = set()
        self._one_ofs: list[tuple[list[Any], str]] = []

    def whole(self) -> Any:
        """The normal form of the root, with all definitions that it needs."""
        if isinstance(self._root, dict):
            self._is_newest = _is_newest_dialect(self._root.get("$schema", _NEWEST_DIALECT))
        part = self._part(self._root, "#")
        while self._waiting:
            self._definition(next(iter(self._waiting)))
        # Their definitions may refer to each other, so all of them have to be there.
        for choices, path in self._one_ofs:
            if not exclude_each_other(choices, self._target_of):
                raise InvalidSchemaError(
                    path,
                    "several of its schemas may be true at once",
                    "write anyOf, or give each schema its own type, or its own const of a "
                    "required property",
                )
        if self._definitions and isinstance(part, dict):
            part = {**part, "$defs": self._definitions}
        return part

    def _part(self, schema: Any, path: str) -> Any:
        """The normal form of a part of the schema. path: its JSON pointer."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise InvalidSchemaError(
                path, f"{shown(schema, 40)} is not a schema", "give an object, true or false"
            )
        self._check_base(schema, path)
        part: dict[str, Any] = {}
        if "type" in schema:
            part["type"] = _types(schema["type"], f"{path}/type")
        for keyword in ("enum", "const"):
            if keyword in schema:
                part[keyword] = _checked_value(schema[keyword], keyword, f"{path}/{keyword}")
        part |= _numbers(schema, path)
        part |= _strings(schema, path)
        part |= self._objects(schema, path)
        whole = both(part, self._arrays(schema, path))
        whole = self._with_combinations(whole, schema, path)
        whole = self._with_conditions(whole, schema, path)
        return True if whole == {} else whole

    def _with_combinations(self, part: Any, schema: Mapping[str, Any], path: str) -> Any:
        """The documents of a part that are valid under the other schemas of its place."""
        if "$ref" in schema:
            part = both(part, {"$ref": self._reference(schema["$ref"], f"{path}/$ref")})
        if "anyOf" in schema:
            part = both(part, {"anyOf": self._choices(schema, "anyOf", path)})
        if "allOf" in schema:
            part = reduce(both, self._choices(schema, "allOf", path), part)
        if "oneOf" in schema:
            part = self._with_one_of(part, self._choices(schema, "oneOf", path), f"{path}/oneOf")
        return part

    def _choices(self, schema: Mapping[str, Any], keyword: str, path: str) -> list[Any]:
        choices = schema[keyword]
        if not isinstance(choices, list) or not choices:
            raise InvalidSchemaError(
                f"{path}/{keyword}", f"{shown(choices, 40)} is no list of schemas", "give some"
            )
        return [
            self._part(choice, f"{path}/{keyword}/{place}") for place, choice in enumerate(choices)
        ]

    def _with_one_of(self, part: Any, choices: list[Any], path: str) -> Any:
        """The documents of a part that are valid under exactly one of some schemas."""
        if exclude_each_other(choices, self._target_of):
            return both(part, {"oneOf": choices})
        exclusive: list[Any] = []
        for place, choice in enumerate(choices):
            others = [*choices[:place], *choices[place + 1 :]]
            rest = without_all([both(part, choice)], others, self._target_of)
            if rest is None:
                # Maybe they exclude each other once all definitions are made.
                self._one_ofs.append((choices, path))
                return both(part, {"oneOf": choices})
            exclusive += rest
        return _any_of(exclusive, path)

    # References.

    @staticmethod
    def _check_base(schema: Mapping[str, Any], path: str) -> None:
        """Raise InvalidSchemaError if references of a part start from elsewhere than the root: at
        the time of validation, or from an `$id` of its own."""
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise InvalidSchemaError(
                    f"{path}/{keyword}", "dynamic references are not followed", "write $ref"
                )
        parts: list[Any] = [schema] if path != "#" and _is_own_document(schema) else []
        while parts:
            part = parts.pop()
            if isinstance(part, Mapping):
                if "$ref" in part:
                    raise InvalidSchemaError(
                        f"{path}/$id", "references below it start from it", "leave the $id out"
                    )
                parts += part.values()
            elif isinstance(part, list):
                parts += part

    def _reference(self, reference: Any, path: str) -> str:
        """The `$ref` of a normal form that stands for a reference."""
        if not isinstance(reference, str):
            raise InvalidSchemaError(path, f"{shown(reference, 40)} is no text", 'give "#/..."')
        own_id = self._root.get("$id") if isinstance(self._root, dict) else None
        if isinstance(own_id, str):
            reference = reference.removeprefix(own_id.rstrip("#"))
        if not reference.startswith("#"):
            raise InvalidSchemaError(
                path,
                f"{reference!r:.60} leads to another document",
                'put its schema under $defs, and write "#/$defs/NAME"',
            )
        if reference not in self._definitions and reference not in self._open_references:
            self._waiting[reference] = self._target(reference, path)
        return reference_to(reference)

    def _target(self, reference: str, path: str) -> Any:
        """The part of the schema that a reference leads to."""
        if reference != "#" and not reference.startswith("#/"):
            anchored = self._anchors.get(unquote(reference[1:]))
            values = None if anchored is None else [anchored]
        else:
            values = followed(self._root, reference)
        # References inside another document would start from there.
        is_elsewhere = values and any(
            value is not self._root and _is_own_document(value) for value in values
        )
        if values is None or is_elsewhere:
            raise InvalidSchemaError(
                path, f"{reference:.80} leads to no schema of this document", "correct it"
            )
        return values[-1]

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        """The parts of the schema that have anchors, by these."""
        anchors: dict[str, Any] = {}
        parts = [self._root]
        while parts:
            part = parts.pop()
            if isinstance(part, dict):
                for name in (part.get("$anchor"), part.get("$id")):
                    if isinstance(name, str):
                        anchors[name.removeprefix("#")] = part
                parts += part.values()
            elif isinstance(part, list):
                parts += part
        return anchors

    def _definition(self, reference: str) -> Any:
        """The normal form that a reference leads to."""
        if reference not in self._definitions:
            self._open_references.add(reference)
            target = self._waiting.pop(reference)
            self._definitions[reference] = self._part(target, reference)
            self._open_references.discard(reference)
        return self._definitions[reference]

    def _target_of(self, normal_reference: str) -> Any:
        """The normal form that a `$ref` of a normal form leads to; None for one that is still in
        the making."""
        reference = step_name(unquote(normal_reference.removeprefix("#/$defs/")))
        return None if reference in self._open_references else self._definition(reference)

    # Arrays and objects.

    def _arrays(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        part = _counts(schema, ("minItems", "maxItems"), path)
        has_list = isinstance(schema.get("items"), list)
        name_of_first, name_of_rest = (
            ("items", "additionalItems") if has_list else ("prefixItems", "items")
        )
        is_tuple = has_list or (self._is_newest and "prefixItems" in schema)
        if is_tuple and schema[name_of_first] != []:
            part["prefixItems"] = self._choices(schema, name_of_first, path)
        rest = self._others(schema, name_of_rest, "unevaluatedItems", path)
        if rest is not True:
            part["items"] = rest
        if "contains" in schema:
            part = self._with_contained(part, schema, path)
        if schema.get("uniqueItems", False) is not False:
            part = self._with_distinct_items(part, schema, path)
        return part

    def _others(self, schema: Mapping[str, Any], keyword: str, unevaluated: str, path: str) -> Any:
        """The normal form of the properties or items that no other keyword describes."""
        if schema.get(unevaluated, True) not in (True, {}):
            if any(name in schema for name in _APPLICATORS):
                raise InvalidSchemaError(
                    f"{path}/{unevaluated}",
                    "it is not kept next to anyOf, oneOf, allOf, $ref, not, if, contains and "
                    "dependencies",
                    f"write {keyword}",
                )
            if keyword not in schema:
                keyword = unevaluated
        return self._part(schema.get(keyword, True), f"{path}/{keyword}")

    def _with_contained(
        self, part: dict[str, Any], schema: Mapping[str, Any], path: str
    ) -> dict[str, Any]:
        """The arrays of a part with enough items that `contains` describes: all items are such."""
        counts = _counts(schema, ("minContains", "maxContains"), path)
        least = counts.get("minContains", 1)
        most = counts.get("maxContains", math.inf)
        if not least and most == math.inf:
            return part
        contained = self._part(schema["contains"], f"{path}/contains")
        is_like_items = canonical_text(contained) == canonical_text(part.get("items", True))
        if contained is not True and ("prefixItems" in part or not is_like_items):
            raise InvalidSchemaError(
                f"{path}/contains",
                "it is kept only if it equals items",
                "write items or prefixItems instead",
            )
        part["minItems"] = max(part.get("minItems", 0), least)
        if most < part.get("maxItems", math.inf):
            part["maxItems"] = most
        return part

    def _with_distinct_items(
        self, part: dict[str, Any], schema: Mapping[str, Any], path: str
    ) -> dict[str, Any]:
        """The arrays of a part without equal items."""
        first_items = part.get("prefixItems", [])
        most = part.get("maxItems", math.inf)
        if part.get("items") is False:
            most = min(most, len(first_items))
        if most <= 1:
            return part
        values = all_values(target_of(part.get("items"), self._target_of))
        is_small = (
            values is not None
            and len(values) <= _MAX_DISTINCT_VALUES
            and len(canonical_text(values)) <= _MAX_DISTINCT_CHARACTERS
        )
        if values is None or first_items or not is_small or schema.get("type") not in _ARRAY_TYPE:
            raise InvalidSchemaError(
                f"{path}/uniqueItems",
                f"it is kept only for arrays of at most one item, and for items of at most "
                f"{_MAX_DISTINCT_VALUES} listed values",
                "leave it out, or list the values by enum",
            )
        values = list({canonical_text(value): value for value in values}.values())
        least = part.get("minItems", 0)
        lengths = range(least, min(most, len(values)) + 1)
        arrays = [list(chosen) for length in lengths for chosen in permutations(values, length)]
        return {"enum": arrays} if arrays else {"minItems": 1, "maxItems": 0}

    def _objects(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        part: dict[str, Any] = {}
        for keyword in ("properties", "patternProperties"):
            if keyword in schema:
                part[keyword] = self._members(schema[keyword], f"{path}/{keyword}")
        if "required" in schema and not isinstance(schema["required"], bool):
            part["required"] = _names(schema["required"], f"{path}/required")
        others = self._others(schema, "additionalProperties", "unevaluatedProperties", path)
        if others is not True:
            part["additionalProperties"] = others
        if "propertyNames" in schema:
            part = self._with_names(part, schema["propertyNames"], f"{path}/propertyNames")
        return _with_counted_properties(part, schema, path)

    def _members(self, members: Any, path: str) -> dict[str, Any]:
        if not isinstance(members, Mapping):
            raise InvalidSchemaError(
                path, f"{shown(members, 40)} is no object", "give schemas by their names"
            )
        for name in members:
            _check_text(name, path)
        return {
            name: self._part(member, f"{path}/{pointer_step(name)}")
            for name, member in members.items()
        }

    def _with_names(self, part: dict[str, Any], schema: Any, path: str) -> dict[str, Any]:
        """The objects of a part whose names are valid under a schema."""
        names = target_of(self._part(schema, path), self._target_of)
        if names is True or names == {"type": ["string"]}:
            return part
        others = part.get("additionalProperties", True)
        listed = all_values(names)
        if listed is not None and "patternProperties" not in part:
            properties = part.get("properties", {})
            allowed = {name: others for name in listed if isinstance(name, str)}
            part["properties"] = {
                name: member if name in allowed else False for name, member in properties.items()
            } | {name: member for name, member in allowed.items() if name not in properties}
            part["additionalProperties"] = False
            return part
        has_pattern = isinstance(names, dict) and names.keys() - {"type"} == {"pattern"}
        if has_pattern and not part.keys() & {"properties", "patternProperties"}:
            part["patternProperties"] = {names["pattern"]: others}
            part["additionalProperties"] = False
            return part
        raise InvalidSchemaError(
            path,
            "it is kept only if it is a pattern, without properties beside it, or lists names",
            "write properties or patternProperties, and additionalProperties: false",
        )

    # Conditions.

    def _with_conditions(self, part: Any, schema: Mapping[str, Any], path: str) -> Any:
        """The documents of a part that fulfil `not`, `if` and the dependencies of a schema."""
        alternatives = [part]
        if "not" in schema:
            excluded = self._part(schema["not"], f"{path}/not")
            alternatives = self._without(alternatives, excluded, f"{path}/not")
        if "if" in schema and ("then" in schema or "else" in schema):
            condition = self._part(schema["if"], f"{path}/if")
            then = self._part(schema.get("then", True), f"{path}/then")
            otherwise = self._part(schema.get("else", True), f"{path}/else")
            fulfilled = [both(both(one, condition), then) for one in alternatives]
            rest = self._without(alternatives, condition, f"{path}/if")
            alternatives = [*fulfilled, *(both(one, otherwise) for one in rest)]
        for name, needed, place in self._dependencies(schema, path):
            absent = {"properties": {name: False}}
            present = both({"type": ["object"], "required": [name]}, needed)
            alternatives = [both(one, case) for one in alternatives for case in (absent, present)]
            if len(alternatives) > MAX_SCHEMAS:
                raise InvalidSchemaError(place, "there are too many dependencies", "give fewer")
        return _any_of(alternatives, path)

    def _dependencies(self, schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, str]]:
        """The name of a property, the schema of objects that have it, and the place of that."""
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            entries = schema.get(keyword, {})
            place = f"{path}/{keyword}"
            if not isinstance(entries, Mapping):
                raise InvalidSchemaError(place, f"{shown(entries, 40)} is no object", "give one")
            for name, needed in entries.items():
                here = f"{place}/{pointer_step(str(name))}"
                if isinstance(needed, list) or keyword == "dependentRequired":
                    yield name, {"required": _names(needed, here)}, here
                else:
                    yield name, self._part(needed, here), here

    def _without(self, alternatives: list[Any], excluded: Any, path: str) -> list[Any]:
        """The documents of some parts that are not valid under another."""
        remaining = without_all(alternatives, [excluded], self._target_of)
        if remaining is None:
            raise InvalidSchemaError(
                path,
                "the documents that are not like this cannot be described",
                "leave it out, or list the allowed values by enum beside it",
            )
        return remaining


def _any_of(alternatives: list[Any], path: str) -> Any:
    """The documents that are valid under one of some schemas, at least."""
    possible = distinct(alternatives)
    if len(possible) == 1:
        return possible[0]
    num_characters = sum(len(json.dumps(part)) for part in possible)
    if len(possible) > MAX_SCHEMAS or num_characters > _MAX_ALTERNATIVE_CHARACTERS:
        raise InvalidSchemaError(
            path, f"its conditions have {len(possible)} cases, which are too large", "give fewer"
        )
    return {"anyOf": possible} if possible else False


def _is_newest_dialect(name: Any) -> bool:
    dialect = str(name).rstrip("#").removeprefix("https:").removeprefix("http:")
    if dialect in (_NEWEST_DIALECT, "//json-schema.org/schema"):
        return True
    if dialect in _OLDER_DIALECTS:
        return False
    raise InvalidSchemaError(
        "#/$schema",
        f"{shown(name, 60)} is unknown",
        f'write "https:{_NEWEST_DIALECT}", or leave it out',
    )


def _is_own_document(schema: Any) -> bool:
    """Whether the references of a part start from it. An `$id` like "#name" is an anchor."""
    return isinstance(schema, Mapping) and not str(schema.get("$id", "#")).startswith("#")


def _types(given: Any, path: str) -> list[str]:
    names = given if isinstance(given, list) else [given]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise InvalidSchemaError(
                path, f"{shown(name, 40)} is no type", f"give {', '.join(TYPES)}, or a list of them"
            )
    if not names:
        raise InvalidSchemaError(path, "it lists no type", "give a type, or leave it out")
    return list(dict.fromkeys(names))


def _checked_value(value: Any, keyword: str, path: str) -> Any:
    """The values of `enum`, or that of `const`."""
    if keyword == "enum" and (not isinstance(value, list) or not value):
        raise InvalidSchemaError(path, f"{shown(value, 40)} is no list of values", "give some")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        raise InvalidSchemaError(
            path,
            f"{shown(value, 40)} is not JSON",
            "give numbers without NaN and infinities, texts "
            "of Unicode, booleans, null, lists or objects of these",
        ) from None
    return value


def _check_text(value: Any, path: str) -> None:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidSchemaError(path, f"{shown(value, 40)} is no text", "give one") from None


def _names(given: Any, path: str) -> list[str]:
    if not isinstance(given, list):
        raise InvalidSchemaError(path, f"{shown(given, 40)} is no list of names", "give one")
    for name in given:
        _check_text(name, path)
    return list(dict.fromkeys(given))


def _counts(schema: Mapping[str, Any], keywords: tuple[str, ...], path: str) -> dict[str, Any]:
    """Numbers of characters, items or properties."""
    counts: dict[str, Any] = {}
    for keyword in keywords:
        if keyword not in schema:
            continue
        value = schema[keyword]
        is_whole = is_integer(value) or (isinstance(value, float) and value.is_integer())
        if not is_whole or value < 0:
            raise InvalidSchemaError(
                f"{path}/{keyword}", f"{shown(value, 40)} is no number of things", "give 0 or more"
            )
        counts[keyword] = int(value)
    return counts


def _numbers(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for keyword in (*_BOUNDS, "multipleOf"):
        if keyword not in schema:
            continue
        value = schema[keyword]
        if isinstance(value, bool) and keyword in _INCLUSIVE_BOUNDS:
            inclusive = _INCLUSIVE_BOUNDS[keyword]
            if value and inclusive in part:
                part[keyword] = part[inclusive]
            continue
        is_finite = is_integer(value) or (isinstance(value, float) and math.isfinite(value))
        if not is_finite or (keyword == "multipleOf" and value <= 0):
            needed = "a positive number" if keyword == "multipleOf" else "a number"
            raise InvalidSchemaError(f"{path}/{keyword}", shown(value, 40), f"give {needed}")
        part[keyword] = value
    return part


def _strings(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    part = _counts(schema, ("minLength", "maxLength"), path)
    if "pattern" in schema:
        _check_text(schema["pattern"], f"{path}/pattern")
        part["pattern"] = schema["pattern"]
    name = schema.get("format")
    if isinstance(name, str) and (name in FORMATS or name in HOST_FORMATS):
        part["format"] = name
    return part


def _with_counted_properties(
    part: dict[str, Any], schema: Mapping[str, Any], path: str
) -> dict[str, Any]:
    """The objects of a part with as many properties as `minProperties` and `maxProperties` say."""
    counts = _counts(schema, ("minProperties", "maxProperties"), path)
    required = part.get("required", [])
    properties = part.get("properties", {})
    least = counts.get("minProperties", 0)
    most = counts.get("maxProperties", math.inf)
    is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
    if not is_closed and set(properties) - set(required):
        name = "minProperties" if least > len(required) else "maxProperties"
        if least > len(required) or most < math.inf:
            raise InvalidSchemaError(
                f"{path}/{name}",
                "it is not kept for objects of optional properties and of others",
                "write required, or additionalProperties: false",
            )
    # Masks would count a name twice that comes twice.
    if not is_closed and least > len({*required, *properties}) + 1:
        raise InvalidSchemaError(
            f"{path}/minProperties",
            "it is kept for one more property than are required",
            "write required",
        )
    if least > len(required):
        part["minProperties"] = least
    if most < (len(properties) if is_closed else math.inf):
        part["maxProperties"] = most
    return part
