"""A JSON schema becomes an expression, all of whose texts are valid documents.

An expression need not match all valid documents: properties are written in their order, and only
those that the schema lists. Documents are those of json.dumps with its default separators.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from qsample.request.schemas.formats import FORMATS
from qsample.request.schemas.normal_form import normal_schema, reference_to
from qsample.request.schemas.operations import listed_values
from qsample.request.schemas.pointers import pointer_step
from qsample.request.structured.json_text import (
    BOOLEAN,
    CHARACTER,
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
# The keywords that are kept without others except, with values, the type.
_VALUES: Final = ("enum", "const")
_COMBINATIONS: Final = ("anyOf", "oneOf", "$ref")


def expression_of_schema(schema: Any) -> str:
    """The expression of a schema.

    Args:
        schema: the schema, as json.loads reads it.

    Returns:
        An expression of Rust's regex crate that whole documents match. All texts that it matches
        are valid documents.

    Raises:
        NotRegularError: the schema has a keyword that no expression keeps exactly, or is too large.
        InvalidSchemaError: the schema is not well-formed, or answers cannot be kept to it.
    """
    return checked_nesting(_Translation(normal_schema(schema)).whole())


class _Translation:
    """Translates the parts of a schema in normal form."""

    def __init__(self, root: Any) -> None:
        self._root = root
        definitions = root.get("$defs", {}) if isinstance(root, dict) else {}
        # The original references by those of the normal form.
        self._references = {reference_to(name): name for name in definitions}
        self._referenced: dict[str, str] = {}
        self._open_references: set[str] = set()

    def whole(self) -> str:
        """The expression of the root."""
        if isinstance(self._root, dict):
            root = {name: part for name, part in self._root.items() if name != "$defs"}
            return self._expression(root, "#", 0)
        return self._expression(self._root, "#", 0)

    def _expression(self, schema: Any, path: str, depth: int) -> str:
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
        keyword = _main_keyword(schema, path)
        if keyword in _VALUES:
            return _literals(schema)
        if keyword == "type":
            return self._typed(schema, path, depth)
        if keyword == "$ref":
            return self._reference(schema["$ref"], path, depth)
        choices = [
            self._expression(choice, f"{path}/{keyword}/{place}", depth + 1)
            for place, choice in enumerate(schema[keyword])
        ]
        return alternatives(choices)

    def _reference(self, reference: str, path: str, depth: int) -> str:
        name = self._references[reference]
        if name in self._open_references:
            raise NotRegularError(f"{path}: $ref {name:.80} is recursive")
        if name not in self._referenced:
            self._open_references.add(name)
            self._referenced[name] = self._expression(self._root["$defs"][name], name, depth + 1)
            self._open_references.discard(name)
        return self._referenced[name]

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
        return alternatives([translate[kind](schema, path, depth) for kind in schema["type"]])

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> str:
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        prefix = [
            self._expression(choice, f"{path}/prefixItems/{place}", depth + 1)
            for place, choice in enumerate(schema.get("prefixItems", []))
        ]
        if "items" in schema:
            item = self._expression(schema["items"], f"{path}/items", depth + 1)
        elif "prefixItems" in schema:
            item = NEVER
        elif most == 0:
            return r"\[\]" if not least else NEVER
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

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> str:
        properties = schema.get("properties", {})
        required_names = set(schema.get("required", []))
        additional = schema.get("additionalProperties", True)
        lists_properties = "properties" in schema or additional is False
        if not required_names <= properties.keys():
            if additional is False:
                return NEVER
            raise NotRegularError(f"{path}: required names a property without a schema")
        if not lists_properties:
            if additional is True:
                raise NotRegularError(f"{path}: any object")
            return self._map(additional, path, depth)
        if not isinstance(additional, bool):
            raise NotRegularError(f"{path}: additionalProperties with properties")
        members = []
        for name, part in properties.items():
            value = self._expression(part, f"{path}/properties/{pointer_step(name)}", depth + 1)
            is_required = name in required_names
            if value != NEVER:
                key = escaped(json.dumps(name, ensure_ascii=False))
                members.append(_Member(f"{key}: {value}", is_required))
            elif is_required:
                return NEVER
        return checked_length(rf"\{{{_members(members)}\}}")

    def _map(self, values: Any, path: str, depth: int) -> str:
        """An object with any keys."""
        value = self._expression(values, f"{path}/additionalProperties", depth + 1)
        if value == NEVER:
            return r"\{\}"
        member = f"{STRING}: {value}"
        return checked_length(rf"\{{(?:{member}(?:, {member})*)?\}}")


def _main_keyword(schema: dict[str, Any], path: str) -> str:
    """The keyword that describes the documents: the type, or one that is kept alone."""
    main = [keyword for keyword in (*_COMBINATIONS, *_VALUES) if keyword in schema]
    if not main and "type" not in schema:
        raise NotRegularError(f"{path}: no type")
    if not main:
        known = {"type", *sum(map(tuple, _KEYWORDS.values()), ())}
    else:
        known = {main[0], "type"} if main[0] in _VALUES else {main[0]}
    for keyword in schema:
        if keyword not in known:
            raise NotRegularError(
                f"{path}: {main[0]} with {keyword}" if main else f"{path}: {keyword}"
            )
    return main[0] if main else "type"


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
        comma = ", " if place != 0 else ""
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
    least = schema.get("minLength", 0)
    most = schema.get("maxLength")
    if most is not None and least > most:
        return NEVER
    return f'"{repeated(CHARACTER, least, most)}"'


def _content(schema: dict[str, Any], keyword: str, path: str) -> str:
    """The expression of a string's content by its pattern or format."""
    value = schema[keyword]
    if keyword == "format":
        if value not in FORMATS:
            raise NotRegularError(f"{path}: format {value!r:.40}")
        return FORMATS[value]
    try:
        return expression_of_pattern(value)
    except NotRegularError as error:
        raise NotRegularError(f"{path}: {error.reason}") from None


def _integer(schema: dict[str, Any], path: str, depth: int) -> str:
    least = -LARGEST_INTEGER
    most = LARGEST_INTEGER
    if "minimum" in schema:
        least = max(least, math.ceil(schema["minimum"]))
    if "exclusiveMinimum" in schema:
        least = max(least, math.floor(schema["exclusiveMinimum"]) + 1)
    if "maximum" in schema:
        most = min(most, math.floor(schema["maximum"]))
    if "exclusiveMaximum" in schema:
        most = min(most, math.ceil(schema["exclusiveMaximum"]) - 1)
    return integers(least, most)


def _number(schema: dict[str, Any], path: str, depth: int) -> str:
    for keyword in _KEYWORDS["number"]:
        if keyword in schema:
            raise NotRegularError(f"{path}: {keyword} of numbers that are not integers")
    return NUMBER


def _literals(schema: dict[str, Any]) -> str:
    """The expression of the values of `enum` or `const` that have the type of the schema."""
    texts = []
    for value in listed_values(schema) or []:
        is_whole = isinstance(value, float) and value.is_integer()
        if is_whole and "number" not in schema.get("type", ["number"]):
            value = int(value)  # Integers are written without a fraction.
        texts.append(escaped(json.dumps(value, ensure_ascii=False)))
    return alternatives(texts)
