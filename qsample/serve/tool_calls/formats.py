"""How models write calls of tools, by family, and how they are read back."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

Call = tuple[str, str]  # a function's name, and its arguments as JSON text


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    marks: texts with which a call begins, wherever it stands in an answer. at_start: texts with which an answer begins
    that is nothing but calls; the special tokens in front of those are not in the text. read: the calls of a text that
    begins with a mark; ValueError or TypeError where there is none that is complete and that JSON can hold.
    in_template: what a chat template says that teaches the format.
    """

    marks: tuple[str, ...]
    at_start: tuple[str, ...]
    read: Callable[[str, Mapping[str, Any]], list[Call]]
    in_template: tuple[str, ...]


def _hermes(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, of NousResearch's Hermes and Qwen's models."""
    return [_call(json.loads(body)) for body in _bodies(text, "<tool_call>", "</tool_call>")]


def _json(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """{"name": ..., "parameters": {...}}, of Llama 3; or a list of {"name": ..., "arguments": ...}, of Mistral.

    Several objects follow one another, or stand with semicolons between them. [TOOL_CALLS]name{...} too.
    """
    text = text.strip().removeprefix("<|python_tag|>").removeprefix("[TOOL_CALLS]").strip()
    calls: list[Call] = []
    decoder = json.JSONDecoder()
    while text:
        if match := re.match(r"([\w.-]+)(?:\[ARGS\])?\s*(?=\{)", text):
            arguments, end = decoder.raw_decode(text, match.end())
            calls.append(_call({"name": match[1], "arguments": arguments}))
        else:
            value, end = decoder.raw_decode(text)
            calls += [_call(one) for one in (value if isinstance(value, list) else [value])]
        text = text[end:].lstrip("; \n\t").removeprefix("[TOOL_CALLS]").lstrip()
    return calls


def _xml_function(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>, of Qwen3-Coder and Qwen3.5."""
    calls = []
    for body in _bodies(text, "<tool_call>", "</tool_call>"):
        match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if match is None:
            raise ValueError("no function in a call")
        values = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL)
        calls.append(_typed(match[1].strip(), values, tools))
    return calls


def _xml_pairs(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>, of GLM-4.5."""
    calls = []
    for body in _bodies(text, "<tool_call>", "</tool_call>"):
        name = body.split("<arg_key>", 1)[0].strip()
        values = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
        calls.append(_typed(name, [(key.strip(), value) for key, value in values], tools))
    return calls


def _deepseek_mark(name: str) -> str:
    """DeepSeek's tokens have a full-width bar and a block character where others have | and _."""
    return f"<\uff5ctool_{name}\uff5c>".replace("_", "\u2581")


def _deepseek(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """Of DeepSeek: "function", a separator, the name, then the arguments in a block of JSON; from V3.1 on the name, the
    separator, and the arguments."""
    calls = []
    for body in _bodies(text, _deepseek_mark("call_begin"), _deepseek_mark("call_end")):
        kind, _, rest = body.partition(_deepseek_mark("sep"))
        name, _, arguments = rest.partition("\n") if kind.strip() == "function" else (kind, "", rest)
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        calls.append(_call({"name": name.strip(), "arguments": json.loads(arguments)}))
    return calls


def _pythonic(text: str, tools: Mapping[str, Any]) -> list[Call]:
    """[name(key=value), ...], of Llama 4 and others."""
    try:
        tree = ast.parse(text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>"), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("no list of calls") from error
    calls = []
    for node in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(node, ast.Call) or node.args:
            raise ValueError("not a call with named arguments")
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
        calls.append(_call({"name": ast.unparse(node.func), "arguments": arguments}))
    return calls


FORMATS: Final[Mapping[str, ToolFormat]] = {
    "qwen3_coder": ToolFormat(("<tool_call>",), (), _xml_function, ("<function=",)),
    "glm45": ToolFormat(("<tool_call>",), (), _xml_pairs, ("<arg_key>",)),
    "deepseek_v3": ToolFormat((_deepseek_mark("calls_begin"),), (), _deepseek, (_deepseek_mark("calls_begin"),)),
    "hermes": ToolFormat(("<tool_call>",), (), _hermes, ("<tool_call>",)),
    "mistral": ToolFormat(("[TOOL_CALLS]",), ('[{"name"', '[{"arguments"'), _json, ("[TOOL_CALLS]",)),
    "llama4_pythonic": ToolFormat(("<|python_start|>",), ("[",), _pythonic, ("<|python_start|>",)),
    "llama3_json": ToolFormat(("<|python_tag|>",), ('{"name"', '{"type"', '{"function"'), _json, ('"parameters"',)),
}


def find_format(name: str | None, template: str) -> ToolFormat:
    """The format of that name; None = the one that a chat template teaches, Hermes' where it teaches none."""
    if name is None:
        known = (key for key, one in FORMATS.items() if any(text in template for text in one.in_template))
        name = next(known, "hermes")
    return FORMATS[name]


def _bodies(text: str, start: str, end: str) -> Iterator[str]:
    """What stands between each `start` and `end`. Raises ValueError for a start without its end."""
    for part in text.split(start)[1:]:
        body, found, _ = part.partition(end)
        if not found:
            raise ValueError(f"{start} without {end}")
        yield body


def _call(value: Any) -> Call:
    """A call of a JSON object, whatever its family calls the parts. Raises ValueError where it is none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("a call is no object")
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has no name, or arguments that are no object")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _typed(name: str, values: list[tuple[str, str]], tools: Mapping[str, Any]) -> Call:
    """A call whose arguments were written as bare texts, JSON but for what the function's schema calls strings."""
    schema = tools.get(name) or {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    arguments: dict[str, Any] = {}
    for key, text in values:
        one = properties.get(key) if isinstance(properties, dict) else None
        kind = one.get("type") if isinstance(one, dict) else None
        arguments[key] = text
        if kind != "string":
            try:
                arguments[key] = json.loads(text)
            except ValueError:
                arguments[key] = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return _call({"name": name, "arguments": arguments})
