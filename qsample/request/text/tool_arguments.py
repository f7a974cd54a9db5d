"""The arguments of calls that a model writes as bare texts, as values of the tool's schema.

Some families of models write strings without quotes, and other values as JSON or Python do: 5 may be
a number or a text, and only the schema knows. A value is the first of its readings that the schema allows:
a number, a constant, a list or an object before a text. So 5 is a number where the schema has
"string" and "integer", as in vLLM's parsers, and null is None where it has "null".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from qsample.request.schemas.operations import canonical_text, type_of
from qsample.request.schemas.pointers import followed

_PYTHON_CONSTANTS: Final = {"True": True, "False": False, "None": None}
_MAX_DEPTH: Final = 16


def argument_value(text: str, name: str, parameters: Any) -> Any:
    """The value of an argument.

    Args:
        text: the argument as the model wrote it.
        name: the name of the argument.
        parameters: the JSON schema of the function's arguments; None without one.

    Returns:
        A value that JSON has; NaN and infinities are texts.
    """
    value = _value_of_text(text)
    schemas = _schemas_of_argument(parameters, name, parameters, 0)
    if not schemas:
        return value
    readings = [text, value] if isinstance(value, str) else [value, text]
    for has_values in (True, False):
        for reading in readings:
            if any(_allows(schema, reading, parameters, has_values, 0) for schema in schemas):
                return reading
    return value


def _value_of_text(text: str) -> Any:
    """The value of a text in JSON, or of a constant of Python; otherwise the text."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _PYTHON_CONSTANTS.get(text.strip(), text)
    return value


def _schemas_of_argument(schema: Any, name: str, root: Any, depth: int) -> list[Any]:
    """The schemas of an argument in a schema and in the schemas that it combines."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return []
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return [properties[name]]
    found: list[Any] = []
    for part in _combined(schema, root):
        found += _schemas_of_argument(part, name, root, depth + 1)
    others = schema.get("additionalProperties")
    return found or ([others] if isinstance(others, Mapping) else [])


def _combined(schema: Mapping[str, Any], root: Any) -> list[Any]:
    """The schemas that a schema combines or refers to."""
    parts: list[Any] = []
    for keyword in ("allOf", "anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            parts += schema[keyword]
    return [*_targets(schema, root), *parts]


def _targets(schema: Mapping[str, Any], root: Any) -> list[Any]:
    """The schema that a schema refers to, if it does."""
    reference = schema.get("$ref")
    values = followed(root, reference) if isinstance(reference, str) else None
    return values[-1:] if values else []


def _allows(schema: Any, value: Any, root: Any, has_values: bool, depth: int) -> bool:
    """Whether a schema allows a value by its types and values.

    Args:
        schema: the schema.
        value: the value.
        root: the document of the schema's references.
        has_values: whether the value has to be one of `enum` and `const`, or else of their types only.
        depth: the number of schemas around it.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema is not False
    if value is None and schema.get("nullable") is True:
        return True
    if not _allows_type(schema, value) or not _allows_values(schema, value, has_values):
        return False

    def allows(part: Any) -> bool:
        return _allows(part, value, root, has_values, depth + 1)

    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword)
        if isinstance(choices, list) and choices and not any(map(allows, choices)):
            return False
    all_of = schema.get("allOf")
    parts = [*_targets(schema, root), *(all_of if isinstance(all_of, list) else [])]
    return all(map(allows, parts))


def _allows_type(schema: Mapping[str, Any], value: Any) -> bool:
    given = schema.get("type", [])
    names = given if isinstance(given, list) else [given]
    kind = type_of(value)
    return not names or kind in names or (kind == "integer" and "number" in names)


def _allows_values(schema: Mapping[str, Any], value: Any, has_values: bool) -> bool:
    """Whether the `enum` and the `const` of a schema have a value, or one of its type."""
    describe = canonical_text if has_values else type_of
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return not isinstance(listed, list) or describe(value) in map(describe, listed)
