"""A JSON schema becomes an expression, all of whose texts are valid documents.

An expression need not match all valid documents: properties are written in their order, and only
those that the schema lists. Documents are those of json.dumps with its default separators. A schema
means what JSON Schema 2020-12 and draft 7 say (https://json-schema.org/specification).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from qsample.checks import is_integer
from qsample.errors import shown
from qsample.request.structured.json_text import (
    BOOLEAN,
    CHARACTER,
    FORMATS,
    LARGEST_INTEGER,
    NULL,
    NUMBER,
    STRING,
    integers,
)
from qsample.request.structured.not_regular import (
    MAX_NESTING,
    NEVER,
    NotRegularError,
    alternatives,
    checked_length,
    checked_nesting,
    escaped,
    repeated,
)
from qsample.request.structured.pattern import expression_of_pattern

# The keywords that are kept, by the type of documents that they restrict.
_KEYWORDS: Final[Mapping[str, Sequence[str]]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
    "boolean": (),
    "null": (),
}
# The keywords that are kept without others, except for annotations and, with values, for the type.
_VALUES: Final = ("enum", "const")
_COMBINATIONS: Final = ("anyOf", "oneOf", "allOf", "$ref")
# The keywords that allow all documents.
_ANNOTATIONS: Final = (
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$defs",
    "definitions",
)
# Keywords of the whole schema, which say how to read it.
_ROOT_KEYWORDS: Final = ("$schema", "$id")
_KNOWN_KEYWORDS: Final = frozenset(
    ["type", *_VALUES, *_COMBINATIONS, *_ANNOTATIONS, *sum(map(tuple, _KEYWORDS.values()), ())]
)
_NEWEST_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_DIALECTS: Final = (
    _NEWEST_DIALECT,
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
)
# JSON pointers write / and ~ in this way.
_POINTER_ESCAPES: Final = (("~1", "/"), ("~0", "~"))


def expression_of_schema(schema: Any) -> str:
    """The expression of a schema.

    Args:
        schema: the schema, as json.loads reads it.

    Returns:
        An expression of Rust's regex crate that whole documents match. All texts that it matches
        are valid documents.

    Raises:
        NotRegularError: the schema has a keyword that is not kept exactly, or is too large.
    """
    try:
        return checked_nesting(_Translation(schema).expression(schema, "#", 0))
    except RecursionError:  # The values of an enum may be nested deeper than the schema.
        raise NotRegularError("#: nested too deep") from None


class _Extent(NamedTuple):
    """A bound of the documents that are valid under a schema.

    Attributes:
        types: the types that they may have; integers are numbers.
        values: the documents, as text; None if they are not listed.
    """

    types: frozenset[str]
    values: frozenset[str] | None


class _Translation:
    """Translates the parts of a schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._referenced: dict[str, str] = {}
        self._open_references: set[str] = set()
        # The extents of the schema's parts by their ids; the root keeps the parts alive.
        self._extents: dict[int, _Extent] = {}

    def expression(self, schema: Any, path: str, depth: int) -> str:
        """The expression of a part.

        Args:
            schema: the part.
            path: its path, for messages.
            depth: the number of parts around it.
        """
        if depth > MAX_NESTING:
            raise NotRegularError(f"{path:.80}...: nested more than {MAX_NESTING} deep")
        if schema is False:
            return NEVER
        if schema is True:
            raise NotRegularError(f"{path}: any JSON")
        if not isinstance(schema, dict):
            raise NotRegularError(f"{path}: {shown(schema, 40)} is not a schema")
        keyword = self._main_keyword(schema, path)
        if keyword in _VALUES:
            return _literals(schema, keyword, path)
        if keyword == "type":
            return self._typed(schema, path, depth)
        translate: Mapping[str, Callable[[dict[str, Any], str, int], str]] = {
            "$ref": self._reference,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "allOf": self._all_of,
        }
        return translate[keyword](schema, path, depth)

    def _main_keyword(self, schema: dict[str, Any], path: str) -> str:
        """The keyword that describes the documents: the type, or one that is kept alone."""
        for keyword in schema:
            if path == "#" and keyword in _ROOT_KEYWORDS:
                continue
            if keyword not in _KNOWN_KEYWORDS:
                raise NotRegularError(f"{path}: {keyword:.40}")
        if path == "#" and str(schema.get("$schema", _NEWEST_DIALECT)).rstrip("#") not in _DIALECTS:
            raise NotRegularError(f"{path}: $schema {shown(schema['$schema'], 60)}")
        main = [keyword for keyword in (*_COMBINATIONS, *_VALUES) if keyword in schema]
        if not main:
            if "type" not in schema:
                raise NotRegularError(f"{path}: no type")
            return "type"
        neutral = {main[0], *_ANNOTATIONS, *_ROOT_KEYWORDS}
        if main[0] in _VALUES:
            neutral.add("type")
        for keyword in schema:
            if keyword not in neutral:
                raise NotRegularError(f"{path}: {main[0]} with {keyword}")
        return main[0]

    def _reference(self, schema: dict[str, Any], path: str, depth: int) -> str:
        reference = schema["$ref"]
        target = self._target(reference, path)
        if reference in self._open_references:
            raise NotRegularError(f"{path}: $ref {reference:.80} is recursive")
        if reference not in self._referenced:
            self._open_references.add(reference)
            self._referenced[reference] = self.expression(target, reference, depth + 1)
            self._open_references.discard(reference)
        return self._referenced[reference]

    def _target(self, reference: Any, path: str) -> Any:
        """The part of the schema that a reference names."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise NotRegularError(f"{path}: $ref {shown(reference, 60)} to another document")
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            raise NotRegularError(f"{path}: $ref {reference:.80} to an anchor")
        target = self._root
        for step in pointer.split("/")[1:]:
            for written, character in _POINTER_ESCAPES:
                step = step.replace(written, character)
            if isinstance(target, list) and step.isascii() and step.isdigit():
                target = target[int(step)] if int(step) < len(target) else None
            elif isinstance(target, dict):
                target = target.get(step)
            else:
                target = None
            # References inside another document would start from there.
            if target is None or (isinstance(target, dict) and "$id" in target):
                raise NotRegularError(f"{path}: $ref {reference:.80} leads to no schema")
        return target

    def _choices(self, schema: dict[str, Any], keyword: str, path: str) -> list[Any]:
        choices = schema[keyword]
        if not isinstance(choices, list) or not choices:
            raise NotRegularError(f"{path}: {keyword} is not a list of schemas")
        return choices

    def _any_of(self, schema: dict[str, Any], path: str, depth: int) -> str:
        return self._alternatives(schema, "anyOf", path, depth)

    def _alternatives(self, schema: dict[str, Any], keyword: str, path: str, depth: int) -> str:
        parts = []
        for place, choice in enumerate(self._choices(schema, keyword, path)):
            parts.append(self.expression(choice, f"{path}/{keyword}/{place}", depth + 1))
        return alternatives(parts)

    def _one_of(self, schema: dict[str, Any], path: str, depth: int) -> str:
        expression = self._alternatives(schema, "oneOf", path, depth)
        types: set[str] = set()
        types_of_values: set[str] = set()
        values: set[str] = set()
        for choice in schema["oneOf"]:
            extent = self._extent(choice, path)
            if extent.values is None:
                overlaps = bool(extent.types & (types | types_of_values))
                types |= extent.types
            else:
                overlaps = bool(extent.types & types or extent.values & values)
                types_of_values |= extent.types
                values |= extent.values
            if overlaps:
                raise NotRegularError(f"{path}: oneOf of schemas that may overlap")
        return expression

    def _all_of(self, schema: dict[str, Any], path: str, depth: int) -> str:
        choices = self._choices(schema, "allOf", path)
        if len(choices) > 1:
            raise NotRegularError(f"{path}: allOf of several schemas")
        return self.expression(choices[0], f"{path}/allOf/0", depth + 1)

    def _extent(self, schema: Any, path: str) -> _Extent:
        """A bound of the valid documents of a part whose expression is known."""
        if id(schema) not in self._extents:
            self._extents[id(schema)] = self._new_extent(schema, path)
        return self._extents[id(schema)]

    def _new_extent(self, schema: Any, path: str) -> _Extent:
        if schema is False:
            return _Extent(frozenset(), frozenset())
        for keyword in _VALUES:
            if keyword in schema:
                values = _values(schema, keyword)
                texts = frozenset(_canonical_text(value) for value in values)
                return _Extent(frozenset(_type_of(value) for value in values), texts)
        if "$ref" in schema:
            return self._extent(self._target(schema["$ref"], path), path)
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                parts = [self._extent(part, path) for part in schema[keyword]]
                return _united(parts)
        types = _types(schema, path)
        return _Extent(frozenset(_DISJOINT_TYPES.get(kind, kind) for kind in types), None)

    def _typed(self, schema: dict[str, Any], path: str, depth: int) -> str:
        translate: Mapping[str, Callable[[dict[str, Any], str, int], str]] = {
            "string": _string,
            "integer": _integer,
            "number": _number,
            "boolean": lambda schema, path, depth: BOOLEAN,
            "null": lambda schema, path, depth: NULL,
            "array": self._array,
            "object": self._object,
        }
        types = _types(schema, path)
        return alternatives([translate[kind](schema, path, depth) for kind in types])

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> str:
        least = _count(schema, "minItems", path) or 0
        most = _count(schema, "maxItems", path)
        prefix = self._prefix_items(schema, path, depth)
        if "items" in schema:
            item = self.expression(schema["items"], f"{path}/items", depth + 1)
        elif "prefixItems" in schema:
            item = NEVER
        else:
            raise NotRegularError(f"{path}: an array without items")
        if most is not None:
            prefix = prefix[:most]
        if NEVER in prefix:
            prefix = prefix[: prefix.index(NEVER)]
            item = NEVER
        if item == NEVER:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and least > most:
            return NEVER
        if most == 0:
            return r"\[\]"
        return checked_length(rf"\[{_items(prefix, item, least, most)}\]")

    def _prefix_items(self, schema: dict[str, Any], path: str, depth: int) -> list[str]:
        """The expressions of the first items."""
        if "prefixItems" not in schema:
            return []
        root = self._root if isinstance(self._root, dict) else {}
        if str(root.get("$schema", _NEWEST_DIALECT)).rstrip("#") != _NEWEST_DIALECT:
            raise NotRegularError(f"{path}: prefixItems in an old dialect")
        parts = []
        for place, choice in enumerate(self._choices(schema, "prefixItems", path)):
            parts.append(self.expression(choice, f"{path}/prefixItems/{place}", depth + 1))
        return parts

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise NotRegularError(f"{path}: properties is not an object")
        if not isinstance(required, list) or not all(map(_is_text, required)):
            raise NotRegularError(f"{path}: required is not a list of names")
        required_names = set(required)
        if not required_names <= properties.keys():
            raise NotRegularError(f"{path}: required names a property without a schema")
        lists_properties = "properties" in schema or additional is False
        if not lists_properties:
            if additional is True:
                raise NotRegularError(f"{path}: any object")
            return self._map(additional, path, depth)
        if not isinstance(additional, bool) and additional != {}:
            raise NotRegularError(f"{path}: additionalProperties with properties")
        members = []
        for name, part in properties.items():
            value = self.expression(part, f"{path}/properties/{_pointer_step(name)}", depth + 1)
            is_required = name in required_names
            if value != NEVER:
                key = escaped(json.dumps(name, ensure_ascii=False))
                members.append(_Member(f"{key}: {value}", is_required))
            elif is_required:
                return NEVER
        return checked_length(rf"\{{{_members(members)}\}}")

    def _map(self, values: Any, path: str, depth: int) -> str:
        """An object with any keys."""
        value = self.expression(values, f"{path}/additionalProperties", depth + 1)
        if value == NEVER:
            return r"\{\}"
        member = f"{STRING}: {value}"
        return checked_length(rf"\{{(?:{member}(?:, {member})*)?\}}")


class _Member(NamedTuple):
    """A member of an object: the expression of its name and value, and whether it is required."""

    expression: str
    is_required: bool


def _members(members: list[_Member]) -> str:
    """The expression of the content of an object."""
    if not members:
        return ""
    is_required = [member.is_required for member in members]
    if True not in is_required:
        return f"(?:{_some([member.expression for member in members])})?"
    # The first required member has no comma before it, and every other member has it on that side.
    first = is_required.index(True)
    parts = [f"(?:{member.expression}, )?" for member in members[:first]]
    parts.append(members[first].expression)
    for member in members[first + 1 :]:
        suffix = "" if member.is_required else "?"
        parts.append(f"(?:, {member.expression}){suffix}")
    return "".join(parts)


def _some(members: list[str]) -> str:
    """One optional member or more, in their order. A member comes log2(n) times."""
    if len(members) == 1:
        return members[0]
    half = len(members) // 2
    later = "".join(f"(?:, {member})?" for member in members[half:])
    return checked_length(f"(?:{_some(members[:half])}{later}|{_some(members[half:])})")


def _items(prefix: list[str], item: str, least: int, most: int | None) -> str:
    """The expression of the content of an array that may have items.

    Args:
        prefix: the expressions of the first items, at most `most`.
        item: the expression of the items after them.
        least: the fewest items.
        most: the most items, at least 1; None for any number.
    """
    places = prefix or [item]
    num_more = max(least - len(places), 0)
    most_more = None if most is None else most - len(places)
    content = ""
    if item != NEVER:
        content = repeated(f", {item}", num_more, most_more)
    for place in reversed(range(len(places))):
        comma = ", " if place else ""
        content = f"{comma}{places[place]}{content}"
        if place >= least:
            content = checked_length(f"(?:{content})?")
    return content


def _string(schema: dict[str, Any], path: str, depth: int) -> str:
    keywords = [keyword for keyword in _KEYWORDS["string"] if keyword in schema]
    if "pattern" in keywords or "format" in keywords:
        if len(keywords) > 1:
            raise NotRegularError(f"{path}: {keywords[-1]} with {keywords[0]}")
        return f'"{_content(schema, keywords[0], path)}"'
    least = _count(schema, "minLength", path) or 0
    most = _count(schema, "maxLength", path)
    if most is not None and least > most:
        return NEVER
    return f'"{repeated(CHARACTER, least, most)}"'


def _content(schema: dict[str, Any], keyword: str, path: str) -> str:
    """The expression of a string's content by its pattern or format."""
    value = schema[keyword]
    if not isinstance(value, str):
        raise NotRegularError(f"{path}: {keyword} is not a text")
    if keyword == "format":
        if value not in FORMATS:
            raise NotRegularError(f"{path}: format {value!r:.40}")
        return FORMATS[value]
    try:
        return expression_of_pattern(value)
    except NotRegularError as error:
        raise NotRegularError(f"{path}: {error.reason}") from None


def _integer(schema: dict[str, Any], path: str, depth: int) -> str:
    bounds: dict[str, Any] = {}
    for keyword in _KEYWORDS["integer"]:
        bounds[keyword] = schema.get(keyword, 0)
        if not _is_finite(bounds[keyword]):
            raise NotRegularError(f"{path}: {keyword} is not a number")
    least = -LARGEST_INTEGER
    most = LARGEST_INTEGER
    if "minimum" in schema:
        least = max(least, math.ceil(bounds["minimum"]))
    if "exclusiveMinimum" in schema:
        least = max(least, math.floor(bounds["exclusiveMinimum"]) + 1)
    if "maximum" in schema:
        most = min(most, math.floor(bounds["maximum"]))
    if "exclusiveMaximum" in schema:
        most = min(most, math.ceil(bounds["exclusiveMaximum"]) - 1)
    return integers(least, most)


def _number(schema: dict[str, Any], path: str, depth: int) -> str:
    for keyword in _KEYWORDS["number"]:
        if keyword in schema:
            raise NotRegularError(f"{path}: {keyword} of numbers that are not integers")
    return NUMBER


def _count(schema: dict[str, Any], keyword: str, path: str) -> int | None:
    """A number of characters or items; None if the schema does not give it."""
    if keyword not in schema:
        return None
    value = schema[keyword]
    if not _is_whole(value) or value < 0:
        raise NotRegularError(f"{path}: {keyword} is not a natural number")
    return int(value)


def _types(schema: dict[str, Any], path: str) -> list[str]:
    types = schema["type"]
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list) or not types:
        raise NotRegularError(f"{path}: type is not a type")
    for kind in types:
        if not isinstance(kind, str) or kind not in _KEYWORDS:
            raise NotRegularError(f"{path}: type {shown(kind, 40)}")
    return types


def _values(schema: dict[str, Any], keyword: str) -> list[Any]:
    """The values of `enum` or `const`."""
    if keyword == "const":
        return [schema["const"]]
    values = schema["enum"]
    return values if isinstance(values, list) else []


def _literals(schema: dict[str, Any], keyword: str, path: str) -> str:
    """The expression of the values of `enum` or `const` that have the type of the schema."""
    values = _values(schema, keyword)
    if not values:
        raise NotRegularError(f"{path}: {keyword} is not a list of values")
    types = _types(schema, path) if "type" in schema else list(_KEYWORDS)
    texts = []
    for value in values:
        if _type_of(value) not in types:
            if not _is_whole(value) or "integer" not in types:
                continue
            # Integers are written without a fraction.
            value = int(value)
        try:
            texts.append(escaped(json.dumps(value, ensure_ascii=False, allow_nan=False)))
        except (ValueError, RecursionError):
            raise NotRegularError(f"{path}: {keyword} has a value that is not JSON") from None
    return alternatives(texts)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_finite(value: Any) -> bool:
    """Whether a value is a number, and not infinite or NaN."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_whole(value: Any) -> bool:
    """Whether a value is an integer, or a float without a fraction."""
    return is_integer(value) or (isinstance(value, float) and value.is_integer())


def _type_of(value: Any) -> str:
    """The type of a document; "number" for integers, too."""
    for kind, python in _PYTHON_TYPES.items():
        if isinstance(value, python):
            return kind
    return "null"


# In this order, because a bool of Python is an int.
_PYTHON_TYPES: Final[Mapping[str, Any]] = {
    "boolean": bool,
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
}
_DISJOINT_TYPES: Final = {"integer": "number"}


def _canonical_text(value: Any) -> str:
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


def _united(extents: list[_Extent]) -> _Extent:
    types = frozenset().union(*(extent.types for extent in extents))
    values: set[str] = set()
    for extent in extents:
        if extent.values is None:
            return _Extent(types, None)
        values |= extent.values
    return _Extent(types, frozenset(values))


def _pointer_step(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
