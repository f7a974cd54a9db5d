"""Calls of tools in an answer: demanded by a grammar, or found in the text as it comes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from qsample.serve.guides import Grammar, from_json_schema
from qsample.serve.http.errors import ApiError
from qsample.serve.marks import open_end
from qsample.serve.protocol.chat import ChatCompletionRequest, NamedTool
from qsample.serve.tool_calls.formats import Call, ToolFormat


@dataclass(slots=True)
class ToolReader:
    """Splits an answer that comes in pieces into text for the user and calls of tools.

    What may be the beginning of a call is held back until it is certain; a call comes whole. What begins as a call and
    is none is text after all. parallel: whether there may be more than one call; those after the first are left out.
    """

    format: ToolFormat
    tools: Mapping[str, Any]  # the functions' names and parameters
    parallel: bool = True
    _text: str = ""  # not handed out
    _calling: bool = False
    _at_start: bool = True
    _calls: list[Call] = field(default_factory=list)

    def put(self, text: str) -> str:
        """The text that is certainly no call."""
        self._text += text
        if self._calling:
            return ""
        if self._at_start:
            start = self._text.lstrip()
            # Pretty-printed JSON begins with blanks between its signs.
            bare = "".join(start[:80].split())
            if any(bare.startswith(mark) for mark in self.format.at_start):
                self._calling = True
                return ""
            if not start or any(mark.startswith(bare) for mark in self.format.at_start):
                return ""
            self._at_start = False
        place = min((at for mark in self.format.marks if (at := self._text.find(mark)) >= 0), default=None)
        if place is not None:
            self._calling = True
        else:
            place = len(self._text) - max(open_end(self._text, mark) for mark in self.format.marks)
        certain, self._text = self._text[:place], self._text[place:]
        return certain

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls."""
        if not self._calling:
            return self._text, []
        try:
            calls = self.format.read(self._text, self.tools)
        except (ValueError, TypeError, RecursionError):  # TypeError: of a Python value that JSON lacks, a set say
            return self._text, []
        if not calls or any(name not in self.tools for name, _ in calls):
            return self._text, []
        return "", [as_tool_call(call) for call in (calls if self.parallel else calls[:1])]


class DemandedCalls:
    """Reads an answer that a grammar held to calls: the arguments of one function, or a list of calls."""

    def __init__(self, name: str | None) -> None:
        """name: of the one function; None = any of them, each with its name."""
        self.name = name
        self._text = ""

    def put(self, text: str) -> str:
        self._text += text
        return ""

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """As for `ToolReader`; arguments that were cut off are handed on as they are."""
        if self.name is not None:
            return "", [as_tool_call((self.name, self._text))]
        try:
            values = json.loads(self._text)
        except ValueError:  # it ended before its time
            return self._text, []
        return "", [as_tool_call((one["name"], json.dumps(one["parameters"], ensure_ascii=False))) for one in values]


def as_tool_call(call: Call) -> dict[str, Any]:
    """OpenAI's object for a call."""
    name, arguments = call
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def parameters_of(request: ChatCompletionRequest) -> dict[str, Any]:
    """The JSON schema of each function's arguments, by name."""
    return {tool.function.name: tool.function.parameters or {"type": "object"} for tool in request.tools or []}


def demanded(request: ChatCompletionRequest) -> tuple[Grammar, str | None] | None:
    """The grammar of an answer that has to be calls, and the one function's name, None for any of them; None where it
    may be text."""
    schemas = parameters_of(request)
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        return partial(from_json_schema, schemas[name]), name
    if request.tool_choice != "required":
        return None
    choices = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": _moved_schema(name, schema, f"#/items/anyOf/{index}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (name, schema) in enumerate(schemas.items())
    ]
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": choices}}
    if request.parallel_tool_calls is False:
        calls["maxItems"] = 1
    return partial(from_json_schema, calls), None


def _moved_schema(name: str, schema: Any, place: str) -> Any:
    try:
        return _moved(schema, place)
    except RecursionError:
        raise ApiError(400, f"the parameters of {name} are nested too deep; give less", param="tools") from None


def _moved(schema: Any, place: str) -> Any:
    """A schema that is to stand at `place` in another one: its references to its own parts follow it."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
