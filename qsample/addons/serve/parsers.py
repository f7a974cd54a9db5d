"""The parts of an answer's text: thoughts, text for the user, and calls of tools, by the format of a model's family."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

Call = tuple[str, str]  # a function's name, and its arguments as JSON text


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its thoughts: between `start` and `end`. `from_start`: an answer begins with
    thoughts, even without `start`, unless its prompt ends them."""

    start: str
    end: str
    from_start: bool = False


# By vLLM's names.
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", from_start=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", from_start=True),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}


def find_reasoning_format(
    name: str | None, is_shown: Callable[[str], bool]
) -> ReasoningFormat | None:
    """The format `name` of REASONING_FORMATS; None without a name: then thoughts stay in the answer. Raises ValueError
    unless the model's texts can contain both marks (`is_shown`)."""
    if name is None:
        return None
    form = REASONING_FORMATS[name]
    for mark in (form.start, form.end):
        if not is_shown(mark):
            raise ValueError(
                f"the reasoning parser {name} looks for {mark}, which is a special token of this model, and texts do "
                "not contain those; choose another parser, or none"
            )
    return form


class ReasoningReader:
    """Splits an answer that comes in pieces into thoughts and the text after them.

    Text that may be a part of a mark is held back until that is certain, and so are blanks that may precede a mark.
    Blanks next to the marks belong to neither side. Thoughts come first or not at all: a mark in the middle of an
    answer is text.
    """

    def __init__(self, form: ReasoningFormat, prompt: str) -> None:
        """`prompt`: its end, special tokens included. Many templates write the mark that begins the thoughts, or, for
        clients that want none, both marks."""
        prompt = prompt.rstrip()
        self._form = form
        self._answering = prompt.endswith(form.end)
        self._opened = prompt.endswith(form.start) or (form.from_start and not self._answering)
        self._text = ""  # before the answer
        self._told = 0  # characters of thoughts that were returned
        self._after_mark = False  # blanks that come now are dropped

    def put(self, text: str, last: bool = False) -> tuple[str, str]:
        """The thoughts, and the text of the answer, that have become certain. `last`: no text follows."""
        if self._answering:
            if self._after_mark:
                text = text.lstrip()
                self._after_mark = not text
            return "", text
        self._text += text
        start, end = self._form.start, self._form.end
        rest = self._text.lstrip()
        if not rest.startswith(start):
            if start.startswith(rest) and not last:
                return "", ""
            if not self._opened:
                self._answering = True
                return "", self._text
        thoughts, mark, answer = rest.removeprefix(start).lstrip().partition(end)
        if not mark and not last:
            thoughts = thoughts[: len(thoughts) - _open_end(thoughts, end)]
        thoughts = thoughts.rstrip()
        new, self._told = thoughts[self._told :], len(thoughts)
        if mark:
            self._answering = self._after_mark = True
            _, answer = self.put(answer)
        return new, answer

    def end(self) -> tuple[str, str]:
        """The rest of both."""
        return self.put("", last=True)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A notation of calls. `marks` begin a call, anywhere in an answer. `at_start`: texts that begin an answer of calls
    alone; special tokens in front of them are not in the text. `read`: the calls of a text that begins with a mark;
    raises ValueError or TypeError unless they are complete and JSON can hold them. `in_template`: texts of chat
    templates that teach the format. `head`: a call in its usual form up to its arguments, an object of JSON; a group
    has the name. Such a call is certain from there on, and its arguments are passed on as they come."""

    marks: tuple[str, ...]
    at_start: tuple[str, ...]
    read: Callable[[str, Mapping[str, Any]], list[Call]]
    in_template: tuple[str, ...]
    head: re.Pattern[str] | None = None


def _hermes(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, of NousResearch's Hermes and Qwen's models."""
    return [_call(json.loads(body)) for body in _bodies(text, "<tool_call>", "</tool_call>")]


def _json(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """{"name": ..., "parameters": {...}}, of Llama 3; or a list of {"name": ..., "arguments": ...}, of Mistral. Several
    objects follow each other, perhaps with semicolons between them. [TOOL_CALLS]name{...} too."""
    text = text.strip().removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]").strip()
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    while text:
        if match := re.match(r"([\w.-]+)(?:\[ARGS\])?\s*(?=\{)", text):
            arguments, end = decoder.raw_decode(text, match.end())
            calls.append(_call({"name": match[1], "arguments": arguments}))
        else:
            value, end = decoder.raw_decode(text)
            calls += [_call(item) for item in (value if isinstance(value, list) else [value])]
        text = text[end:].lstrip("; \n\t").removeprefix("[TOOL_CALLS]").lstrip()
    return calls


def _xml_function(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, of Qwen3-Coder and Qwen3.5."""
    calls = []
    for body in _bodies(text, "<tool_call>", "</tool_call>"):
        match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if match is None:
            raise ValueError("a call without a function")
        values = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL)
        calls.append(_typed(match[1].strip(), values, tools))
    return calls


def _xml_pairs(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, of GLM-4.5."""
    calls = []
    for body in _bodies(text, "<tool_call>", "</tool_call>"):
        name = body.partition("<arg_key>")[0].strip()
        values = re.findall(
            r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL
        )
        calls.append(_typed(name, [(key.strip(), value) for key, value in values], tools))
    return calls


def _deepseek_mark(name: str) -> str:
    """DeepSeek's tokens have a full-width bar instead of |, and a block character instead of _."""
    return f"<\uff5ctool_{name}\uff5c>".replace("_", "\u2581")


def _deepseek(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """Of DeepSeek: "function", a separator, the name, then the arguments in a block of JSON; from V3.1 on the name, the
    separator, and the arguments."""
    calls = []
    for body in _bodies(text, _deepseek_mark("call_begin"), _deepseek_mark("call_end")):
        kind, _, rest = body.partition(_deepseek_mark("sep"))
        name, _, arguments = (
            rest.partition("\n") if kind.strip() == "function" else (kind, "", rest)
        )
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        calls.append(_call({"name": name.strip(), "arguments": json.loads(arguments)}))
    return calls


def _pythonic(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """[name(key=value), ...], of Llama 4 and other models."""
    try:
        tree = ast.parse(
            text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>"),
            mode="eval",
        ).body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not a list of calls") from error
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("not a call with named arguments")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        calls.append(_call({"name": ast.unparse(node.func), "arguments": arguments}))
    return calls


_OBJECT: Final = r"(?=\{\s*[\"}])"  # follows: arguments
_CALL: Final = r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*' + _OBJECT
_HERMES_HEAD: Final = re.compile(rf"\s*<tool_call>\s*{_CALL}")
_JSON_HEAD: Final = re.compile(
    rf"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?[\s\[,;]*(?:{_CALL}|([\w.-]+)(?:\[ARGS\])?\s*{_OBJECT})"
)
_DEEPSEEK_HEAD: Final = re.compile(
    r"\s*(?:{calls_begin})?\s*{call_begin}\s*(?:(?:function\s*{sep})?([\w.-]+)(?:{sep}|\s*```json)\s*)".format_map(
        {name: _deepseek_mark(name) for name in ("calls_begin", "call_begin", "sep")}
    )
    + _OBJECT
)
# What closes a call behind its arguments, next to brackets and a fence of Markdown.
_CLOSING: Final = ("</tool_call>", _deepseek_mark("call_end"), _deepseek_mark("calls_end"))
_CLOSED: Final = re.compile(rf'(?:[\s}}\]`]|{"|".join(_CLOSING)}|,\s*"id"\s*:\s*"[^"]*")*')
_LONGEST_HEAD: Final = 512  # characters

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "qwen3_coder": ToolFormat(("<tool_call>",), (), _xml_function, ("<function=",)),
    "glm45": ToolFormat(("<tool_call>",), (), _xml_pairs, ("<arg_key>",)),
    "deepseek_v3": ToolFormat(
        (_deepseek_mark("calls_begin"),),
        (),
        _deepseek,
        (_deepseek_mark("calls_begin"),),
        _DEEPSEEK_HEAD,
    ),
    "hermes": ToolFormat(("<tool_call>",), (), _hermes, ("<tool_call>",), _HERMES_HEAD),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",), ('[{"name"', '[{"arguments"'), _json, ("[TOOL_CALLS]",), _JSON_HEAD
    ),
    "llama4_pythonic": ToolFormat(("<|python_start|>",), ("[",), _pythonic, ("<|python_start|>",)),
    "llama3_json": ToolFormat(
        ("<|python_tag|>",),
        ('{"name"', '{"type"', '{"function"'),
        _json,
        ('"parameters"',),
        _JSON_HEAD,
    ),
}
# Of answers that a grammar constrained to a list of calls.
_DEMANDED: Final = ToolFormat((), ("[",), _json, (), _JSON_HEAD)


def find_tool_format(name: str | None, template: str) -> ToolFormat:
    """The format `name`; by default the format that a chat template teaches, or else Hermes'."""
    if name is None:
        known = (
            key
            for key, form in TOOL_FORMATS.items()
            if any(text in template for text in form.in_template)
        )
        name = next(known, "hermes")
    return TOOL_FORMATS[name]


ToolCalls = list[
    dict[str, Any]
]  # OpenAI's, or parts of them: of an index, the texts of arguments follow each other


@dataclass(slots=True)
class ToolReader:
    """Splits an answer that comes in pieces into text for the user and calls of `tools`, the functions' parameters by
    name. Text that may begin a call is held back until that is certain. Then, a call in its format's usual form comes
    in parts, its arguments as the model writes them, cut off or not; another comes whole, at the end. A beginning that
    turns out not to be a call is text. Without `parallel`, all calls but the first are dropped."""

    format: ToolFormat
    tools: Mapping[str, Any]
    parallel: bool = True
    _text: str = field(default="", init=False)  # not returned yet
    _calling: bool = field(default=False, init=False)
    _at_start: bool = field(default=True, init=False)
    _begun: int = field(default=0, init=False)  # calls
    _open: _Object | None = field(default=None, init=False)  # the arguments that come

    def put(self, text: str) -> tuple[str, ToolCalls]:
        """The text that is certainly not a call, and the parts of calls that have become certain."""
        self._text += text
        certain = "" if self._calling else self._before()
        return certain, self._parts() if self._calling else []

    def _before(self) -> str:
        """The text in front of calls."""
        if self._at_start:
            start = self._text.lstrip()
            # Pretty-printed JSON begins with blanks between its signs.
            bare = "".join(start[:80].split())
            if any(bare.startswith(mark) for mark in self.format.at_start):
                self._calling = True
                return ""
            if any(mark.startswith(bare) for mark in self.format.at_start):
                return ""
            self._at_start = False
        place = min(
            (at for mark in self.format.marks if (at := self._text.find(mark)) >= 0), default=None
        )
        if place is not None:
            self._calling = True
        else:
            place = len(self._text) - max(
                (_open_end(self._text, mark) for mark in self.format.marks), default=0
            )
        certain, self._text = self._text[:place], self._text[place:]
        return certain

    def _parts(self) -> ToolCalls:
        parts: ToolCalls = []
        while self._text and self.format.head is not None:
            begins = self._open is None
            if self._open is None:
                if self._begun:
                    self._text = self._text[_CLOSED.match(self._text).end() :]  # type: ignore[union-attr]
                head = self.format.head.match(self._text, 0, _LONGEST_HEAD)
                name = head[head.lastindex or 0] if head is not None else ""
                if head is None or name not in self.tools or (self._begun and not self.parallel):
                    break
                self._text, self._open = self._text[head.end() :], _Object()
            end = self._open.end(self._text)
            part, self._text = (
                self._text[:end],
                self._text[len(self._text) if end is None else end :],
            )
            if end is not None:
                self._open = None
            if begins:
                parts.append(self._begin((name, part)))
            else:
                parts.append({"index": self._begun - 1, "function": {"arguments": part}})
        return parts

    def _begin(self, call: Call) -> dict[str, Any]:
        self._begun += 1
        return {"index": self._begun - 1, **_as_tool_call(call)}

    def end(self) -> tuple[str, ToolCalls]:
        """The rest of the text, and of the calls."""
        if not self._calling:
            return self._text, []
        if self._begun and (self._open is not None or not self.parallel):
            return "", []
        rest, calls = self._text.strip(" \n\t,;"), list[Call]()
        with suppress(
            ValueError, TypeError, RecursionError
        ):  # TypeError: a Python value that JSON lacks, such as a set
            calls = self.format.read(rest.rstrip("]") if self._begun else rest, self.tools)
        if calls and all(name in self.tools for name, _ in calls):
            return "", [self._begin(call) for call in (calls if self.parallel else calls[:1])]
        marks = (*self.format.marks, *_CLOSING, "{", "[", '"id"')
        is_cut = (
            self._begun
            and not calls
            and any(rest.startswith(mark) or mark.startswith(rest) for mark in marks)
        )
        return "" if is_cut else self._text, []


@dataclass(slots=True)
class _Object:
    """Finds the end of an object of JSON that comes in pieces."""

    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False

    def end(self, text: str) -> int | None:
        """The place behind the object's end; None if it goes on behind `text`."""
        for place, sign in enumerate(text, start=1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = sign == "\\", sign != '"'
            elif sign == '"':
                self._quoted = True
            else:
                self._depth += (sign in "{[") - (sign in "}]")
                if not self._depth:
                    return place
        return None


class DemandedCalls:
    """As `ToolReader`, of an answer that a grammar constrained to calls of `tools`: the arguments of the function
    `name`, or without a name, a list of calls, each with its function's name. An answer that was cut off has no more
    than the calls so far."""

    def __init__(self, name: str | None, tools: Mapping[str, Any]) -> None:
        self.name = name
        self._list = ToolReader(_DEMANDED, tools)
        self._begun = False

    def put(self, text: str) -> tuple[str, ToolCalls]:
        if self.name is None:
            return self._list.put(text)
        if self._begun:
            return "", [{"index": 0, "function": {"arguments": text}}] if text else []
        self._begun = True
        return "", [{"index": 0, **_as_tool_call((self.name, text))}]

    def end(self) -> tuple[str, ToolCalls]:
        return "", []


def joined_calls(parts: Iterable[Mapping[str, Any]]) -> ToolCalls:
    """The calls that parts of them add up to."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = {name: value for name, value in part.items() if name != "index"}
        if (before := calls.setdefault(part["index"], call)) is not call:
            arguments = before["function"]["arguments"] + part["function"]["arguments"]
            before["function"] = {**before["function"], "arguments": arguments}
    return [*calls.values()]


def _as_tool_call(call: Call) -> dict[str, Any]:
    name, arguments = call
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _open_end(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may begin `mark`."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0


def _bodies(text: str, start: str, end: str) -> Iterator[str]:
    """The texts between each `start` and `end`. Raises ValueError for a start without its end."""
    for part in text.split(start)[1:]:
        body, found, _ = part.partition(end)
        if not found:
            raise ValueError(f"{start} without {end}")
        yield body


def _call(value: Any) -> Call:
    """The call in a JSON object of any family. Raises ValueError if it is not a call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("a call is not an object")
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has no name, or its arguments are not an object")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _typed(name: str, values: list[tuple[str, str]], tools: Mapping[str, Any]) -> Call:
    """A call with arguments as bare texts: JSON, except for strings by the function's schema."""
    schema = tools.get(name) or {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    arguments: dict[str, Any] = {}
    for key, text in values:
        entry = properties.get(key) if isinstance(properties, dict) else None
        kind = entry.get("type") if isinstance(entry, dict) else None
        arguments[key] = text
        if kind != "string":
            try:
                arguments[key] = json.loads(text)
            except ValueError:
                arguments[key] = {"True": True, "False": False, "None": None}.get(
                    text.strip(), text
                )
    return _call({"name": name, "arguments": arguments})


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A chat message whose calls have objects as arguments, as templates take them; in OpenAI's API they are texts.
    Texts that are not JSON objects stay."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
            try:
                value = json.loads(text or "{}")
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                call = {**call, "function": {**function, "arguments": value}}
        changed.append(call)
    return {**message, "tool_calls": changed}
