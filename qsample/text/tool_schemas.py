"""Python functions as the JSON schemas that chat templates show to a model, by their annotations and docstrings.

The result is transformers' for a function that its `get_json_schema` accepts: with a docstring in Google's style that
has a line for each argument, and an annotation on each argument.
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
_NAMES: Final[dict[Any, str]] = _SCALARS | {list: "array", tuple: "array", dict: "object"}
_HEADING: Final = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
_CHOICES: Final = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(tool: Any) -> Mapping[str, Any]:
    """A schema as it is, or the schema of a function or method. Raises ValueError for anything else."""
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
    if not documentation:
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
    try:
        schema = _schema("", hint)
    except ValueError:  # a model never writes it
        return {}
    return {"return": schema | ({"description": text} if text else {})}


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    if choices := _CHOICES.search(text):
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
    """The schema of a type. what: its owner, for the message."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _values(what, [member.value for member in hint])
    if origin is Literal:
        return _values(what, list(arguments))
    if origin is list and arguments:
        return {"type": "array", "items": _schema(what, arguments[0])}
    if origin is tuple and len(arguments) > 1 and ... not in arguments:
        return {"type": "array", "prefixItems": [_schema(what, item) for item in arguments]}
    if origin is dict:
        return {"type": "object"} | (
            {"additionalProperties": _schema(what, arguments[1])} if arguments else {}
        )
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
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(what: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    members = [_schema(what, item) for item in arguments if item is not type(None)]
    schema: dict[str, Any]
    if len(members) == 1:
        schema = members[0]
    elif all(member.keys() == {"type"} and isinstance(member["type"], str) for member in members):
        kinds = sorted({member["type"] for member in members})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": members}
    return schema | ({"nullable": True} if type(None) in arguments else {})


def _sections(documentation: str) -> dict[str, str]:
    """The text before the first section under "", and the text of each section under its heading."""
    start, *rest = _HEADING.split(documentation)
    found = dict(zip(rest[::2], rest[1::2], strict=True))
    return {
        "": start.strip(),
        "Args": found.get("Args", ""),
        "Returns": found.get("Returns", "").strip(),
    }


def _arguments(text: str) -> dict[str, str]:
    """Each argument's description; lines that are indented deeper than its name go on with it."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    depth = None
    for line in filter(str.strip, text.splitlines()):
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        if indent <= depth and (match := _ARGUMENT.match(line.strip())):
            current = found.setdefault(match[1], [])
            line = match[2]
        current.append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in found.items()}
