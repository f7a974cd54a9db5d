"""Calls as the families write them, one example each from their model cards, read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qsample.serve.tool_calls.calls import ToolReader
from qsample.serve.tool_calls.formats import FORMATS, find_format

TOOLS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "stop": {"type": "object"},
}
PARIS = ("get_weather", {"city": "Paris", "days": 2})
OSLO = ("get_weather", {"city": "Oslo", "days": 3})
BAR, BLOCK = "\uff5c", "\u2581"


def deepseek(name: str) -> str:
    return f"<{BAR}tool{BLOCK}{name}{BAR}>".replace("_", BLOCK)


def as_json(call: tuple[str, dict[str, Any]], arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]})


EXAMPLES = {
    "hermes": f"<tool_call>\n{as_json(PARIS)}\n</tool_call>\n<tool_call>\n{as_json(OSLO)}\n</tool_call>",
    "qwen3_coder": "".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>\n"
        for name, arguments in (PARIS, OSLO)
    ),
    "glm45": "".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
        + "</tool_call>\n"
        for name, arguments in (PARIS, OSLO)
    ),
    "deepseek_v3": deepseek("calls_begin")
    + "".join(
        f"{deepseek('call_begin')}function{deepseek('sep')}{name}\n```json\n{json.dumps(arguments)}\n```"
        + deepseek("call_end")
        for name, arguments in (PARIS, OSLO)
    )
    + deepseek("calls_end"),
    "mistral": f"[TOOL_CALLS][{as_json(PARIS)}, {as_json(OSLO)}]",
    "llama3_json": f"<|python_tag|>{as_json(PARIS, 'parameters')}; {as_json(OSLO, 'parameters')}",
    "llama4_pythonic": (
        '<|python_start|>[get_weather(city="Paris", days=2), get_weather(city="Oslo", days=3)]<|python_end|>'
    ),
}
# Where the marks are special tokens, the text does not have them.
WITHOUT_MARKS = {
    "mistral": f"[{as_json(PARIS)}, {as_json(OSLO)}]",
    "llama3_json": f"{as_json(PARIS, 'parameters')}; {as_json(OSLO, 'parameters')}",
    "llama4_pythonic": '[get_weather(city="Paris", days=2), get_weather(city="Oslo", days=3)]',
}


def read(name: str, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    reader = ToolReader(FORMATS[name], TOOLS)
    shown = "".join(reader.put(text[start : start + size]) for start in range(0, len(text), size))
    rest, calls = reader.end()
    return shown + rest, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_every_format_has_an_example() -> None:
    assert set(EXAMPLES) == set(FORMATS)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_read_however_they_come(name: str, size: int) -> None:
    assert read(name, EXAMPLES[name], size) == ("", [PARIS, OSLO])
    before = "I look it up: <"
    if name not in WITHOUT_MARKS or name == "mistral":
        assert read(name, before + EXAMPLES[name], size) == (before, [PARIS, OSLO])


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_call_where_several_are_not_wanted(name: str) -> None:
    reader = ToolReader(FORMATS[name], TOOLS, parallel=False)
    assert reader.put(EXAMPLES[name]) == ""
    rest, (call,) = reader.end()
    assert (rest, call["function"]["name"], json.loads(call["function"]["arguments"])) == ("", *PARIS)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", WITHOUT_MARKS)
def test_calls_without_their_marks(name: str, size: int) -> None:
    assert read(name, WITHOUT_MARKS[name], size) == ("", [PARIS, OSLO])


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "", "plain text", "a < b and [x] {y}", "<tool_call>", "<tool_call>{not json}</tool_call>", "[", '{"name": "x"',
        "<tool_call>\n" + as_json(("unknown", {})) + "\n</tool_call>", '[{"name": "unknown", "arguments": {}}]',
        EXAMPLES["hermes"][:-5], "<tool", "[TOOL_CALLS]", '{"name": "get_weather", "parameters": 3}', "[" * 3000,
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(name: str, text: str, size: int) -> None:
    assert read(name, text, size) == (text, [])


@pytest.mark.parametrize(
    "value", ["{1, 2}", "{[1]: 2}", "{(1, 2): 3}", "1j", "b'x'", "...", "1e999", "{'a': {1}}", "f", "1 + 'a'"]
)
def test_python_values_that_json_lacks_are_text(value: str) -> None:
    text = f"[get_weather(city={value})]"
    assert read("llama4_pythonic", text, 1000) == (text, [])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_lacks_are_text(number: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {{"days": {number}}}}}</tool_call>'
    assert read("hermes", text, 1000) == (text, [])


def test_typed_values_follow_the_schema() -> None:
    values = "<parameter=city>2</parameter><parameter=days>2</parameter>"
    text = f"<tool_call><function=get_weather>{values}</function></tool_call>"
    assert read("qwen3_coder", text, 1000)[1] == [("get_weather", {"city": "2", "days": 2})]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("", "hermes"), ("<tool_call>{{ x }}</tool_call>", "hermes"), ("<tool_call>\n<function=x>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm45"), ("[TOOL_CALLS]", "mistral"), (deepseek("calls_begin"), "deepseek_v3"),
        ('{"name": ..., "parameters": ...}', "llama3_json"), ("<|python_start|>", "llama4_pythonic"),
    ],
)  # fmt: skip
def test_the_format_is_the_templates(template: str, name: str) -> None:
    assert find_format(None, template) is FORMATS[name]
    assert find_format("hermes", template) is FORMATS["hermes"]
