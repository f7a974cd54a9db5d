"""Python functions as the JSON schemas that chat templates show to a model, made from their
annotations and docstrings.

The result equals transformers' for a function that its `get_json_schema` accepts: with a docstring
in Google's style that has a line for each argument, and an annotation on each argument.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from qsample.errors import shown

_SCALARS: Final[dict[Any, str]] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
}
_TYPE_NAMES: Final[dict[Any, str]] = _SCALARS | {list: "array", tuple: "array", dict: "object"}
_HEADING: Final = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
_CHOICES: Final = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(tool: Any) -> Mapping[str, Any]:
    """A given schema itself, or the schema of a function or method. Raises ValueError for anything
    else."""
    if isinstance(tool, Mapping):
        return tool
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise ValueError(
            f"tools has {shown(tool)}; give JSON schemas, or functions with annotations and a docstring"
        )
    return {"type": "function", "function": _function_schema(tool)}


def _function_schema(tool: Any) -> dict[str, Any]:
    """The name, description, parameters and return value of a function or method. Raises
    ValueError."""
    name = tool.__name__
    documentation = inspect.getdoc(tool)
    if documentation in (None, ""):
        raise ValueError(
            f"the tool {name} has no docstring; describe it in a docstring, or give a JSON schema"
        )
    try:
        hints = get_type_hints(tool)
    except Exception as error:
        raise ValueError(f"the annotations of the tool {name} cannot be read: {error}") from error
    sections = _sections(documentation)
    function: dict[str, Any] = {
        "name": name,
        "description": sections[""],
        "parameters": _parameters_schema(tool, hints, _arguments(sections["Args"])),
    }
    if "return" in hints:
        function |= _returned(hints["return"], sections["Returns"])
    return function


def _parameters_schema(
    tool: Any, hints: Mapping[str, Any], descriptions: Mapping[str, str]
) -> dict[str, Any]:
    """The schema of a function's arguments, from their annotations and the lines of the docstring.
    Raises ValueError for an argument without either."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(tool).parameters.values():
        argument = parameter.name
        if argument in ("self", "cls") and argument not in hints:
            continue
        what = f"the argument {argument} of the tool {tool.__name__}"
        if argument not in hints:
            raise ValueError(f"{what} has no annotation; add it, or give a schema")
        if argument not in descriptions:
            raise ValueError(
                f"{what} has no line in the docstring's Args; add it, or give a schema"
            )
        properties[argument] = _described(_schema(what, hints[argument]), descriptions[argument])
        if parameter.default is parameter.empty:
            required.append(argument)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return schema


def _returned(hint: Any, text: str) -> dict[str, Any]:
    """The schema of a function's return value; nothing if it has none, as a model never writes such
    a value."""
    try:
        schema = _schema("", hint)
    except ValueError:
        return {}
    if text:
        schema["description"] = text
    return {"return": schema}


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """The schema of an argument with its description, whose choices become an enum."""
    choices = _CHOICES.search(text)
    if choices is not None:
        try:
            values = json.loads(choices[1])
        except ValueError as error:
            raise ValueError(
                f"the choices in {text!r:.60} are not a JSON list; write (choices: [1, 2])"
            ) from error
        schema["enum"] = [value.strip() if isinstance(value, str) else value for value in values]
        text = text[: choices.start()].strip()
    return schema | {"description": text}


def _schema(what: str, hint: Any) -> dict[str, Any]:
    """The schema of a type. what: the owner of the type, for the message."""
    if hint is Any:
        return {}
    if hint in _TYPE_NAMES:
        return {"type": _TYPE_NAMES[hint]}
    origin = get_origin(hint)
    arguments = get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _values(what, [member.value for member in hint])
    if origin is Literal:
        return _values(what, list(arguments))
    if origin is list and arguments:
        return {"type": "array", "items": _schema(what, arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_schema(what, item) for item in arguments]}
    if origin is dict:
        schema: dict[str, Any] = {"type": "object"}
        if arguments:
            schema["additionalProperties"] = _schema(what, arguments[1])
        return schema
    if origin is Union or origin is types.UnionType:
        return _union(what, arguments)
    raise ValueError(
        f"{what} is annotated {shown(hint)}; JSON knows int, float, str, bool, None, Any, Enum, Literal, and list, "
        "tuple, dict and unions of them; give a JSON schema for others"
    )


def _values(what: str, values: list[Any]) -> dict[str, Any]:
    if not values or any(type(value) not in _SCALARS for value in values):
        raise ValueError(
            f"{what} has the values {shown(values)}; they must be int, float, str, bool or None"
        )
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": _one_or_all(kinds), "enum": values}


def _one_or_all(kinds: list[str]) -> str | list[str]:
    """The names of types as JSON schemas write them: a single name without its list."""
    return kinds[0] if len(kinds) == 1 else kinds


def _union(what: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    members = [_schema(what, item) for item in arguments if item is not type(None)]
    schema: dict[str, Any]
    if len(members) == 1:
        schema = members[0]
    elif all(member.keys() == {"type"} and isinstance(member["type"], str) for member in members):
        kinds = sorted({member["type"] for member in members})
        schema = {"type": _one_or_all(kinds)}
    else:
        schema = {"anyOf": members}
    if type(None) in arguments:
        schema["nullable"] = True
    return schema


def _sections(documentation: str) -> dict[str, str]:
    """The text of each section by its heading; "" for the text before the first heading."""
    start, *rest = _HEADING.split(documentation)
    headings = rest[::2]
    texts = rest[1::2]
    found = dict(zip(headings, texts, strict=True))
    return {
        "": start.strip(),
        "Args": found.get("Args", ""),
        "Returns": found.get("Returns", "").strip(),
    }


def _arguments(text: str) -> dict[str, str]:
    """Each argument's description. Lines that are indented deeper than its name continue it."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    depth = None
    for line in filter(str.strip, text.splitlines()):
        indent = len(line) - len(line.lstrip())
        if depth is None:
            depth = indent
        match = _ARGUMENT.match(line.strip()) if indent <= depth else None
        if match is None:
            current.append(line.strip())
        else:
            current = found.setdefault(match[1], [])
            current.append(match[2].strip())
    return {name: " ".join(filter(None, lines)) for name, lines in found.items()}
