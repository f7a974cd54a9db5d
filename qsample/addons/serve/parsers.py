"""The parts of an answer's text: thoughts, text for the user, and calls of tools, in the format of
a model's family."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from qsample.request.structured.automaton import Thoughts
from qsample.request.text.tool_arguments import argument_value

# Calls of OpenAI's API, or parts of them: the parts with the same index are one call, and the texts
# of their arguments follow each other.
ToolCalls = list[dict[str, Any]]


class FunctionCall(NamedTuple):
    """A call of a function.

    Attributes:
        name: the name of the function.
        arguments: the arguments as a JSON object's text.
    """

    name: str
    arguments: str


class ThoughtsAndText(NamedTuple):
    """A part of an answer: thoughts, and the text after them."""

    thoughts: str
    text: str


class TextAndCalls(NamedTuple):
    """A part of an answer: text for the user, and calls or parts of them."""

    text: str
    calls: ToolCalls


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its thoughts.

    Attributes:
        start, end: the marks around the thoughts.
        from_start: whether an answer begins with thoughts, even without the mark `start`, unless
            the prompt ends them.
    """

    start: str
    end: str
    from_start: bool = False

    def thoughts_after(self, prompt: str) -> Thoughts | None:
        """The thoughts that an answer to a prompt begins with, or may begin with; None if the prompt
        has ended them.

        Args:
            prompt: the end of the prompt, special tokens included. Many templates write the mark
                that begins the thoughts or, for clients that want no thoughts, both marks.
        """
        prompt = prompt.rstrip()
        if prompt.endswith(self.end):
            return None
        is_open = self.from_start or prompt.endswith(self.start)
        return Thoughts(self.start, self.end, is_open)


# The names are vLLM's.
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", from_start=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", from_start=True),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}


def find_reasoning_format(name: str | None) -> ReasoningFormat | None:
    """The format `name` of REASONING_FORMATS. Without a name it is None, and thoughts stay in the
    answer."""
    return None if name is None else REASONING_FORMATS[name]


# The blanks between thoughts and the text after them: of any text, and of a form, see
# `automaton.with_thoughts`.
ANY_BLANKS: Final = re.compile(r"\s*")
TWO_LINE_FEEDS: Final = re.compile(r"\n{0,2}")


class ReasoningReader:
    """Splits an answer that comes in pieces into thoughts and the text after them.

    Text that may be a part of a mark is held back until that is certain, and so are blanks that may
    precede a mark. Blanks next to the marks belong to neither side. Thoughts come first or not at
    all: a mark in the middle of an answer is text.
    """

    def __init__(
        self,
        reasoning_format: ReasoningFormat,
        prompt: str,
        separator: re.Pattern[str] = ANY_BLANKS,
    ) -> None:
        """
        Args:
            reasoning_format: the format of the model.
            prompt: the end of the prompt, see `ReasoningFormat.thoughts_after`.
            separator: the blanks after thoughts that are no part of the text.
        """
        thoughts = reasoning_format.thoughts_after(prompt)
        self._format = reasoning_format
        self._is_past_thoughts = thoughts is None
        self._prompt_begins_thoughts = thoughts is not None and thoughts.is_open
        self._text_before_answer = ""
        self._num_returned_characters = 0
        self._separator = separator
        # The blanks after the thoughts so far, while more may come.
        self._open_separator: str | None = None

    def put(self, text: str, is_last: bool = False) -> ThoughtsAndText:
        """The thoughts and the text of the answer that a piece makes certain.

        Args:
            text: the next piece of the answer.
            is_last: whether no text follows.
        """
        if self._is_past_thoughts:
            return ThoughtsAndText("", self._without_separator(text))
        self._text_before_answer += text
        start = self._format.start
        end = self._format.end
        stripped = self._text_before_answer.lstrip()
        if not stripped.startswith(start):
            if start.startswith(stripped) and not is_last:
                return ThoughtsAndText("", "")
            if not self._prompt_begins_thoughts:
                self._is_past_thoughts = True
                return ThoughtsAndText("", self._text_before_answer)
        thoughts, mark, answer = stripped.removeprefix(start).lstrip().partition(end)
        if not mark and not is_last:
            thoughts = thoughts[: len(thoughts) - _length_of_open_end(thoughts, end)]
        thoughts = thoughts.rstrip()
        new_thoughts = thoughts[self._num_returned_characters :]
        self._num_returned_characters = len(thoughts)
        if mark:
            self._is_past_thoughts = True
            self._open_separator = ""
            answer = self.put(answer).text
        return ThoughtsAndText(new_thoughts, answer)

    def _without_separator(self, text: str) -> str:
        """The next text after the thoughts, without the blanks at its beginning."""
        if self._open_separator is None:
            return text
        both = self._open_separator + text
        match = self._separator.match(both)
        assert match is not None
        self._open_separator = both if match.end() == len(both) else None
        return both[match.end() :]

    def end(self) -> ThoughtsAndText:
        """The rest of the thoughts and of the text."""
        return self.put("", is_last=True)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A notation of calls.

    Attributes:
        marks: texts that begin a call, anywhere in an answer.
        start_marks: texts that begin an answer of calls only. Special tokens in front of them are
            not in the text.
        read: returns the calls of a text that begins with a mark. It raises ValueError or TypeError
            unless the calls are complete and JSON can hold them.
        marks_in_template: texts of chat templates that teach the format.
        head: a call in its usual form up to its arguments, a JSON object; a group has the name.
            Such a call is certain from there on, and its arguments are passed on as they come.
    """

    marks: tuple[str, ...]
    start_marks: tuple[str, ...]
    read: Callable[[str, Mapping[str, Any]], list[FunctionCall]]
    marks_in_template: tuple[str, ...]
    head: re.Pattern[str] | None = None


def _read_hermes(text: str, tools: Mapping[str, Any]) -> list[FunctionCall]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, of NousResearch's Hermes and Qwen's
    models."""
    bodies = _texts_between(text, "<tool_call>", "</tool_call>")
    return [_call_of_json(_parsed(body)) for body in bodies]


def _read_json(text: str, tools: Mapping[str, Any]) -> list[FunctionCall]:
    """{"name": ..., "parameters": {...}}, of Llama 3, or a list of {"name": ..., "arguments": ...},
    of Mistral. Several objects follow each other, perhaps with semicolons between them. Mistral's
    [TOOL_CALLS]name{...} is read also."""
    text = text.strip().removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]").strip()
    calls: list[FunctionCall] = []
    decoder = json.JSONDecoder(parse_constant=str)
    while text:
        match = re.match(r"([\w.-]+)(?:\[ARGS\])?\s*(?=\{)", text)
        if match is not None:
            arguments, end = decoder.raw_decode(text, match.end())
            calls.append(_call_of_json({"name": match[1], "arguments": arguments}))
        else:
            value, end = decoder.raw_decode(text)
            items = value if isinstance(value, list) else [value]
            calls += [_call_of_json(item) for item in items]
        text = text[end:].lstrip("; \n\t").removeprefix("[TOOL_CALLS]").lstrip()
    return calls


def _read_xml_function(text: str, tools: Mapping[str, Any]) -> list[FunctionCall]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, of
    Qwen3-Coder and Qwen3.5."""
    calls = []
    for body in _texts_between(text, "<tool_call>", "</tool_call>"):
        match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if match is None:
            raise ValueError("a call without a function")
        values = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL)
        calls.append(_call_of_texts(match[1].strip(), values, tools))
    return calls


def _read_xml_pairs(text: str, tools: Mapping[str, Any]) -> list[FunctionCall]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, of GLM-4.5."""
    calls = []
    for body in _texts_between(text, "<tool_call>", "</tool_call>"):
        name = body.partition("<arg_key>")[0].strip()
        pairs = re.findall(
            r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL
        )
        values = [(key.strip(), value) for key, value in pairs]
        calls.append(_call_of_texts(name, values, tools))
    return calls


def _deepseek_mark(name: str) -> str:
    """DeepSeek's tokens have a full-width bar instead of |, and a block character instead of _."""
    return f"<\uff5ctool_{name}\uff5c>".replace("_", "\u2581")


def _read_deepseek(text: str, tools: Mapping[str, Any]) -> list[FunctionCall]:
    """DeepSeek's calls: "function", a separator, the name, and the arguments in a block of JSON.
    From V3.1 on, a call is the name, the separator, and the arguments."""
    calls = []
    for body in _texts_between(text, _deepseek_mark("call_begin"), _deepseek_mark("call_end")):
        name, _, arguments = body.partition(_deepseek_mark("sep"))
        if name.strip() == "function":
            name, _, arguments = arguments.partition("\n")
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        calls.append(_call_of_json({"name": name.strip(), "arguments": _parsed(arguments)}))
    return calls


def _read_pythonic(text: str, tools: Mapping[str, Any]) -> list[FunctionCall]:
    """[name(key=value), ...], of Llama 4 and other models."""
    source = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not a list of calls") from error
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("not a call with named arguments")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        calls.append(_call_of_json({"name": ast.unparse(node.func), "arguments": arguments}))
    return calls


_BEFORE_AN_OBJECT: Final = r"(?=\{\s*[\"}])"
_CALL: Final = (
    r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*' + _BEFORE_AN_OBJECT
)
_HERMES_HEAD: Final = re.compile(rf"\s*<tool_call>\s*{_CALL}")
_JSON_HEAD: Final = re.compile(
    r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?[\s\[,;]*"
    rf"(?:{_CALL}|([\w.-]+)(?:\[ARGS\])?\s*{_BEFORE_AN_OBJECT})"
)
_DEEPSEEK_HEAD: Final = re.compile(
    rf"\s*(?:{_deepseek_mark('calls_begin')})?\s*{_deepseek_mark('call_begin')}\s*"
    rf"(?:(?:function\s*{_deepseek_mark('sep')})?([\w.-]+)"
    rf"(?:{_deepseek_mark('sep')}|\s*```json)\s*){_BEFORE_AN_OBJECT}"
)
# After the arguments, these marks close a call, next to brackets and a fence of Markdown.
_CLOSING_MARKS: Final = ("</tool_call>", _deepseek_mark("call_end"), _deepseek_mark("calls_end"))
_END_OF_A_CALL: Final = re.compile(
    rf'(?:[\s}}\]`]|{"|".join(_CLOSING_MARKS)}|,\s*"id"\s*:\s*"[^"]*")*'
)
_MAX_HEAD_CHARACTERS: Final = 512
# An answer of calls in JSON may be pretty-printed: this number of characters has its first signs.
_MAX_START_CHARACTERS: Final = 80

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "qwen3_coder": ToolFormat(("<tool_call>",), (), _read_xml_function, ("<function=",)),
    "glm45": ToolFormat(("<tool_call>",), (), _read_xml_pairs, ("<arg_key>",)),
    "deepseek_v3": ToolFormat(
        (_deepseek_mark("calls_begin"),),
        (),
        _read_deepseek,
        (_deepseek_mark("calls_begin"),),
        _DEEPSEEK_HEAD,
    ),
    "hermes": ToolFormat(("<tool_call>",), (), _read_hermes, ("<tool_call>",), _HERMES_HEAD),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        ('[{"name"', '[{"arguments"'),
        _read_json,
        ("[TOOL_CALLS]",),
        _JSON_HEAD,
    ),
    "llama4_pythonic": ToolFormat(
        ("<|python_start|>",), ("[",), _read_pythonic, ("<|python_start|>",)
    ),
    "llama3_json": ToolFormat(
        ("<|python_tag|>",),
        ('{"name"', '{"type"', '{"function"'),
        _read_json,
        ('"parameters"',),
        _JSON_HEAD,
    ),
}
# A grammar constrains answers with demanded calls to a list of calls.
_LIST_OF_CALLS: Final = ToolFormat((), ("[",), _read_json, (), _JSON_HEAD)


def find_tool_format(name: str | None, template: str) -> ToolFormat:
    """The format `name`. Without a name, it is the format that a chat template teaches, or else
    Hermes' format."""
    if name is not None:
        return TOOL_FORMATS[name]
    for tool_format in TOOL_FORMATS.values():
        if any(mark in template for mark in tool_format.marks_in_template):
            return tool_format
    return TOOL_FORMATS["hermes"]


@dataclass(slots=True)
class ToolReader:
    """Splits an answer that comes in pieces into text for the user and calls of tools.

    Text that may begin a call is held back until that is certain. Then, a call in its format's
    usual form comes in parts, its arguments as the model writes them, cut off or not. Another call
    comes whole, at the end. A beginning that turns out to be no call is text.

    Attributes:
        format: the format of the model.
        tools: the schemas of the functions' parameters, by the functions' names.
        parallel: whether an answer may have several calls. Otherwise, all calls except the first
            are dropped.
    """

    format: ToolFormat
    tools: Mapping[str, Any]
    parallel: bool = True
    _held_text: str = field(default="", init=False)
    _has_reached_calls: bool = field(default=False, init=False)
    _is_at_start: bool = field(default=True, init=False)
    _num_calls: int = field(default=0, init=False)
    _open_arguments: _JsonObject | None = field(default=None, init=False)

    def put(self, text: str) -> TextAndCalls:
        """The text that is certainly not a call, and the parts of calls that have become
        certain."""
        self._held_text += text
        certain = "" if self._has_reached_calls else self._take_text_before_calls()
        return TextAndCalls(certain, self._take_parts() if self._has_reached_calls else [])

    def _take_text_before_calls(self) -> str:
        if self._is_at_start:
            without_blanks = "".join(self._held_text.lstrip()[:_MAX_START_CHARACTERS].split())
            if any(without_blanks.startswith(mark) for mark in self.format.start_marks):
                self._has_reached_calls = True
                return ""
            if any(mark.startswith(without_blanks) for mark in self.format.start_marks):
                return ""
            self._is_at_start = False
        places = [self._held_text.find(mark) for mark in self.format.marks]
        found = [place for place in places if place >= 0]
        if found:
            self._has_reached_calls = True
            end = min(found)
        else:
            open_ends = [_length_of_open_end(self._held_text, mark) for mark in self.format.marks]
            end = len(self._held_text) - max(open_ends, default=0)
        certain = self._held_text[:end]
        self._held_text = self._held_text[end:]
        return certain

    def _take_parts(self) -> ToolCalls:
        parts: ToolCalls = []
        while self._held_text and self.format.head is not None:
            if self._open_arguments is not None:
                arguments = self._take_arguments(self._open_arguments)
                parts.append({"index": self._num_calls - 1, "function": {"arguments": arguments}})
                continue
            name = self._take_head(self.format.head)
            if name is None:
                break
            self._open_arguments = _JsonObject()
            call = FunctionCall(name, self._take_arguments(self._open_arguments))
            parts.append(self._begin_call(call))
        return parts

    def _take_head(self, pattern: re.Pattern[str]) -> str | None:
        """The name of the call that begins the held text; None if it does not begin a call in its
        usual form."""
        if self._num_calls > 0:
            end_of_last_call = _END_OF_A_CALL.match(self._held_text)
            assert end_of_last_call is not None  # It matches the empty text.
            self._held_text = self._held_text[end_of_last_call.end() :]
            if not self.parallel:
                return None
        head = pattern.match(self._held_text, 0, _MAX_HEAD_CHARACTERS)
        if head is None:
            return None
        name = str(head[head.lastindex or 0])
        if name not in self.tools:
            return None
        self._held_text = self._held_text[head.end() :]
        return name

    def _take_arguments(self, arguments: _JsonObject) -> str:
        """The held text up to the end of the arguments."""
        part = arguments.put(self._held_text)
        if arguments.rest is not None:
            self._open_arguments = None
        self._held_text = arguments.rest or ""
        return part

    def _begin_call(self, call: FunctionCall) -> dict[str, Any]:
        self._num_calls += 1
        return {"index": self._num_calls - 1, **_as_tool_call(call)}

    def end(self) -> TextAndCalls:
        """The rest of the text and of the calls."""
        if not self._has_reached_calls:
            return TextAndCalls(self._held_text, [])
        if self._num_calls > 0 and (self._open_arguments is not None or not self.parallel):
            return TextAndCalls("", [])
        rest = self._held_text.strip(" \n\t,;")
        calls: list[FunctionCall] = []
        # TypeError: the calls have a Python value that JSON lacks, such as a set.
        with suppress(ValueError, TypeError, RecursionError):
            calls = self.format.read(rest.rstrip("]") if self._num_calls > 0 else rest, self.tools)
        if calls and all(call.name in self.tools for call in calls):
            if not self.parallel:
                del calls[1:]
            return TextAndCalls("", [self._begin_call(call) for call in calls])
        is_cut_off = self._num_calls > 0 and not calls and self._may_begin_a_call(rest)
        return TextAndCalls("" if is_cut_off else self._held_text, [])

    def _may_begin_a_call(self, text: str) -> bool:
        marks = (*self.format.marks, *_CLOSING_MARKS, "{", "[", '"id"')
        return any(text.startswith(mark) or mark.startswith(text) for mark in marks)


# Constants that Python and JavaScript write for numbers that JSON lacks.
_CONSTANTS: Final = ("NaN", "Infinity", "-Infinity")


@dataclass(slots=True)
class _JsonObject:
    """Passes on a JSON object that comes in pieces, as it is written, except what models write and
    JSON lacks: NaN and infinities become texts, line feeds and other control characters in texts
    are escaped, and a comma in front of a closing bracket is left out.

    Attributes:
        rest: the text after the object; None while the object goes on.
    """

    rest: str | None = None
    _depth: int = 0
    _is_quoted: bool = False
    _is_escaped: bool = False
    # The beginning of a constant, or of a negative number.
    _held_text: str = ""
    # A comma and the blanks after it.
    _held_comma: str = ""

    def put(self, text: str) -> str:
        """The part of the object that the next piece makes certain."""
        certain: list[str] = []
        for place, character in enumerate(text, start=1):
            if self._is_quoted:
                certain.append(self._put_quoted(character))
                continue
            if self._holds_comma(character):
                continue
            if self._holds(character):
                if self._held_text in _CONSTANTS:
                    certain.append(self._with_held(f'"{self._held_text}"', is_constant=True))
                continue
            self._is_quoted = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            certain.append(self._with_held(character))
            if self._depth == 0:
                self.rest = text[place:]
                break
        return "".join(certain)

    def _put_quoted(self, character: str) -> str:
        """A character of a text, escaped if JSON demands it."""
        if self._is_escaped:
            self._is_escaped = False
        else:
            self._is_escaped = character == "\\"
            self._is_quoted = character != '"'
        return json.dumps(character)[1:-1] if character < " " else character

    def _with_held(self, text: str, *, is_constant: bool = False) -> str:
        """A text behind what was held back."""
        comma = "" if text in ("]", "}") else self._held_comma
        before = "" if is_constant else self._held_text
        self._held_comma = ""
        self._held_text = ""
        return comma + before + text

    def _holds_comma(self, character: str) -> bool:
        """Whether a character is a comma, or a blank behind one, and is held back."""
        if character != "," and not (self._held_comma and character.isspace()):
            return False
        self._held_comma += character
        return True

    def _holds(self, character: str) -> bool:
        """Whether a character may be a part of a constant, and is held back."""
        longer = self._held_text + character
        if not any(constant.startswith(longer) for constant in _CONSTANTS):
            return False
        self._held_text = longer
        return True


class DemandedCalls:
    """Reads an answer like `ToolReader`, but one that a grammar constrained to calls of tools.

    With a name, the answer is the arguments of that function; otherwise, it is a list of calls,
    each with its function's name. An answer that was cut off has only the calls so far.
    """

    def __init__(self, name: str | None, tools: Mapping[str, Any]) -> None:
        """
        Args:
            name: the name of the function that is called, if the request names one.
            tools: the schemas of the functions' parameters, by the functions' names.
        """
        self.name = name
        self._list_reader = ToolReader(_LIST_OF_CALLS, tools)
        self._has_begun = False
        self._arguments = _JsonObject()

    def put(self, text: str) -> TextAndCalls:
        """The parts of calls that have become certain."""
        if self.name is None:
            return self._list_reader.put(text)
        text = self._arguments.put(text)
        if not self._has_begun:
            self._has_begun = True
            call = _as_tool_call(FunctionCall(self.name, text))
            return TextAndCalls("", [{"index": 0, **call}])
        if not text:
            return TextAndCalls("", [])
        return TextAndCalls("", [{"index": 0, "function": {"arguments": text}}])

    def end(self) -> TextAndCalls:
        """Nothing: the parts so far are all of the answer."""
        return TextAndCalls("", [])


def joined_calls(parts: Iterable[Mapping[str, Any]]) -> ToolCalls:
    """The calls that parts of calls add up to."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        index = part["index"]
        if index not in calls:
            calls[index] = {name: value for name, value in part.items() if name != "index"}
            continue
        function = calls[index]["function"]
        arguments = function["arguments"] + part["function"]["arguments"]
        calls[index]["function"] = {**function, "arguments": arguments}
    return list(calls.values())


def _as_tool_call(call: FunctionCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _length_of_open_end(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may begin `mark`."""
    for count in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0


def _texts_between(text: str, start: str, end: str) -> Iterator[str]:
    """The texts between each `start` and `end`.

    Raises:
        ValueError: a start has no end.
    """
    for part in text.split(start)[1:]:
        body, mark, _ = part.partition(end)
        if not mark:
            raise ValueError(f"{start} without {end}")
        yield body


def _parsed(text: str) -> Any:
    """The value of a text in JSON. NaN and infinities, which JSON lacks and Python reads, are texts;
    texts may have line feeds."""
    return json.loads(text, parse_constant=str, strict=False)


def _call_of_json(value: Any) -> FunctionCall:
    """The call in a JSON object of any family.

    Raises:
        ValueError: the value is not a call.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("a call is not an object")
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has no name, or its arguments are not an object")
    return FunctionCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _call_of_texts(
    name: str, values: list[tuple[str, str]], tools: Mapping[str, Any]
) -> FunctionCall:
    """A call whose arguments are bare texts. The function's schema says what they mean."""
    parameters = tools.get(name)
    arguments = {key: argument_value(text, key, parameters) for key, text in values}
    return _call_of_json({"name": name, "arguments": arguments})
