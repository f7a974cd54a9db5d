"""Parts of answers: thoughts and calls as the families of models write them, with an example from each model card."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qsample.addons.serve.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    DemandedCalls,
    ReasoningReader,
    ToolReader,
    find_reasoning_format,
    find_tool_format,
    joined_calls,
)

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
        },
    },
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
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in arguments.items()
        )
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
    text, calls = put(ToolReader(TOOL_FORMATS[name], TOOLS), text, size)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def put(
    reader: ToolReader | DemandedCalls, text: str, size: int
) -> tuple[str, list[tuple[str, str]]]:
    """The text for the user, and the names and arguments of the calls, of a text that comes in pieces."""
    pieces = [
        *(reader.put(text[start : start + size]) for start in range(0, len(text), size)),
        reader.end(),
    ]
    calls = joined_calls(part for _, parts in pieces for part in parts)
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [call["function"] for call in calls]
    return "".join(shown for shown, _ in pieces), [
        (made["name"], made["arguments"]) for made in functions
    ]


def test_every_format_has_an_example() -> None:
    assert set(EXAMPLES) == set(TOOL_FORMATS)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_read_however_they_come(name: str, size: int) -> None:
    assert read(name, EXAMPLES[name], size) == ("", [PARIS, OSLO])
    before = "I look it up: <"
    if name not in WITHOUT_MARKS or name == "mistral":
        assert read(name, before + EXAMPLES[name], size) == (before, [PARIS, OSLO])


@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "deepseek_v3"])
def test_arguments_come_as_they_are_written(name: str, size: int) -> None:
    arguments = r'{"city":"a} \"]{\\", "days": [{"x": 1e5}, "\u00e9"]}'
    text = EXAMPLES[name].replace(json.dumps(PARIS[1]), arguments)
    whole = put(ToolReader(TOOL_FORMATS[name], TOOLS), text, 1000)
    assert whole == ("", [("get_weather", arguments), ("get_weather", json.dumps(OSLO[1]))])
    assert put(ToolReader(TOOL_FORMATS[name], TOOLS), text, size) == whole
    # From the second on, each sign of them comes with the piece of the answer that has it.
    start = text.index(arguments)
    for end in range(start + 2, start + len(arguments), size):
        reader = ToolReader(TOOL_FORMATS[name], TOOLS)
        pieces = [reader.put(text[place : min(end, place + size)]) for place in range(0, end, size)]
        (call,) = joined_calls(part for shown, parts in pieces for part in parts)
        written = arguments[: end - start]
        if written.endswith((",", ", ")):  # It may be one too many, so it comes with what follows.
            written = written.rstrip(", ")
        assert call["function"] == {"name": "get_weather", "arguments": written}
        assert reader.end() == ("", [])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_unknown_function_is_never_called(name: str) -> None:
    """Next to a known one, too. A call whose arguments came as they were written stays; any other text is text."""
    for size in (1, 1000):
        known, unknown = EXAMPLES[name], EXAMPLES[name].replace("get_weather", "get_money")
        assert put(ToolReader(TOOL_FORMATS[name], TOOLS), unknown, size) == (unknown, [])
        place = known.rindex("get_weather")
        text, calls = read(
            name, known[:place] + "get_money" + known[place + len("get_weather") :], size
        )
        assert "get_money" in text
        assert calls == ([PARIS] if TOOL_FORMATS[name].head is not None else [])


@pytest.mark.parametrize("size", [1, 1000])
def test_what_stands_behind_a_call(size: int) -> None:
    call = f"<tool_call>{as_json(PARIS)}</tool_call>"
    for behind, text in (
        ("\n", ""),
        (" I wait.", "I wait."),
        ("<tool_ca", ""),
        ('\n<tool_call>{"name": "get_', ""),
    ):
        assert read("hermes", call + behind, size) == (text, [PARIS])
    assert read("hermes", call[:-5], size) == ("", [PARIS])
    # Of a call in another form, the reader waits for the end.
    other = json.dumps({"arguments": OSLO[1], "name": OSLO[0]})
    assert read("hermes", f"{call} and <tool_call>{other}</tool_call>", size) == ("", [PARIS, OSLO])
    assert (
        read("mistral", f'[TOOL_CALLS][{as_json(PARIS)[:-1]}, "id": "a1b2"}}, {other}]', size)[1][0]
        == PARIS
    )
    assert read("mistral", 'get_weather[ARGS]{"city": "Paris"}', size) == (
        'get_weather[ARGS]{"city": "Paris"}',
        [],
    )
    named = '[TOOL_CALLS]get_weather[ARGS]{"days": 2}[TOOL_CALLS]stop{}'
    assert read("mistral", named, size) == ("", [("get_weather", {"days": 2}), ("stop", {})])


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_call_where_several_are_not_wanted(name: str) -> None:
    for size in (1, 1000):
        text, (call,) = put(
            ToolReader(TOOL_FORMATS[name], TOOLS, parallel=False), EXAMPLES[name], size
        )
        assert (text, call[0], json.loads(call[1])) == ("", *PARIS)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", WITHOUT_MARKS)
def test_calls_without_their_marks(name: str, size: int) -> None:
    assert read(name, WITHOUT_MARKS[name], size) == ("", [PARIS, OSLO])


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "", "plain text", "a < b and [x] {y}", "<tool_call>", "<tool_call>{not json}</tool_call>", "[", '{"name": "x"',
        "<tool_call>\n" + as_json(("unknown", {})) + "\n</tool_call>", '[{"name": "unknown", "arguments": {}}]',
        EXAMPLES["glm45"][:-5], "<tool", "[TOOL_CALLS]", '{"name": "get_weather", "parameters": 3}', "[" * 3000,
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(name: str, text: str, size: int) -> None:
    assert read(name, text, size) == (text, [])


@pytest.mark.parametrize(
    "value",
    [
        "{1, 2}",
        "{[1]: 2}",
        "{(1, 2): 3}",
        "1j",
        "b'x'",
        "...",
        "1e999",
        "{'a': {1}}",
        "f",
        "1 + 'a'",
    ],
)
def test_python_values_that_json_lacks_are_text(value: str) -> None:
    text = f"[get_weather(city={value})]"
    assert read("llama4_pythonic", text, 1000) == (text, [])


CONSTANTS = ("NaN", "Infinity", "-Infinity")


def no_constant(name: str) -> None:
    pytest.fail(f"{name} is not JSON")


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("number", [*CONSTANTS, "-5", "1e999"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_numbers_that_json_lacks_are_texts(name: str, number: str, size: int) -> None:
    """In each format, alone and inside of lists and objects, and however the call comes."""
    values = [number, f"[{number}, -1, {number}]", f'{{"a": {number}, "NaN": "-Infinity{number}"}}']
    for value in values:
        text = EXAMPLES[name]
        for shown in ('"days": 2', "days=2", "days>\n2", "days</arg_key>\n<arg_value>2"):
            text = text.replace(shown, shown[:-1] + value)
        shown_text, calls = put(ToolReader(TOOL_FORMATS[name], TOOLS), text, size)
        if not calls:  # Python has no such names, and its infinity is not JSON.
            assert (name, shown_text) == ("llama4_pythonic", text)
            continue
        for _, arguments in calls:
            json.loads(arguments, parse_constant=no_constant)
        if number in CONSTANTS:
            days = json.loads(calls[0][1])["days"]
            whole = name in ("qwen3_coder", "glm45")  # there, texts are texts as they are
            expected = [number, [number, -1, number], {"a": number, "NaN": f"-Infinity{number}"}]
            assert days == (value if whole else expected[values.index(value)])


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("name", ["get_weather", None])
def test_demanded_calls_are_json(name: str | None, size: int) -> None:
    arguments = '{"a": NaN, "b": [-Infinity, -5, Infinity], "c": "NaN"}'
    text = arguments if name else f'[{{"name": "get_weather", "parameters": {arguments}}}]'
    _, (call,) = put(DemandedCalls(name, TOOLS), text, size)
    assert json.loads(call[1], parse_constant=no_constant) == {
        "a": "NaN",
        "b": ["-Infinity", -5, "Infinity"],
        "c": "NaN",
    }


@pytest.mark.parametrize("number", CONSTANTS)
def test_a_call_in_another_order_is_json(number: str) -> None:
    text = f'<tool_call>{{"arguments": {{"days": {number}}}, "name": "get_weather"}}</tool_call>'
    assert read("hermes", text, 1000) == ("", [("get_weather", {"days": number})])
    text = text.replace(number, "1e999")
    assert read("hermes", text, 1000) == (text, [])


@pytest.mark.parametrize("value", ["{1e999: 1}", "float('nan')", "NaN", "nan", "[1e999]", "-1e999"])
def test_python_numbers_that_json_lacks_are_text(value: str) -> None:
    text = f"[get_weather(city={value})]"
    assert read("llama4_pythonic", text, 1000) == (text, [])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_bare_texts_have_the_types_of_the_schema(name: str) -> None:
    entry = {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/none"}]}
    tools = {
        "f": {
            "type": "object",
            "properties": {
                "a": entry,
                "b": {"type": "string"},
                "c": {"enum": ["1", 2]},
                "d": entry,
            },
            "$defs": {"none": {"type": "null"}},
        }
    }
    pairs = {"a": "5", "b": "5", "c": "1", "d": "null"}
    if name == "glm45":
        body = "f\n" + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in pairs.items()
        )
    else:
        body = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs.items()
        )
        body = f"<function=f>\n{body}</function>\n"
    _, (call,) = put(ToolReader(TOOL_FORMATS[name], tools), f"<tool_call>{body}</tool_call>", 7)
    assert call == ("f", '{"a": 5, "b": "5", "c": "1", "d": null}')


def test_typed_values_follow_the_schema() -> None:
    given = {
        "city": "2",
        "days": "2",
        "a": "True",
        "b": " False",
        "c": "None",
        "d": "none",
        "e": '"é"',
        "city ": "false",
        "share": "5.5",
        "g": "-1e3",
    }
    values = "".join(f"<parameter={name}>{value}</parameter>" for name, value in given.items())
    text = f"<tool_call><function=get_weather>{values}</function></tool_call>"
    typed = {
        "city": "2",
        "days": 2,
        "a": True,
        "b": False,
        "c": None,
        "d": "none",
        "e": "é",
        "city ": False,
    }
    typed |= {"share": 5.5, "g": -1000.0}
    assert read("qwen3_coder", text, 1000)[1] == [("get_weather", typed)]


def test_arguments_are_not_escaped() -> None:
    reader = ToolReader(TOOL_FORMATS["hermes"], TOOLS)
    call = '{"arguments": {"city": "Orl\\u00e9ans"}, "name": "get_weather"}'  # read as a whole, at the end
    assert reader.put(f"<tool_call>{call}</tool_call>") == ("", [])
    text, (call,) = reader.end()
    assert (text, call["index"], call["type"], call["function"]["name"]) == (
        "",
        0,
        "function",
        "get_weather",
    )
    assert call["function"]["arguments"] == '{"city": "Orléans"}'
    assert len(call["id"]) == len("call_") + 24


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("stop", '{"a": "é"', [("stop", '{"a": "é"')]),  # as it is, though it was cut off
        (None, '[{"name": "stop", "parameters": {"a": "é"}}, {"name": "get_weather", "parameters": {}}]',
         [("stop", '{"a": "é"}'), ("get_weather", "{}")]),
        (None, '[{"name": "stop", "parameters": {"a": "é', [("stop", '{"a": "é')]),
        (None, '[{"name": "stop", "parameters": {}}, {"name": "get', [("stop", "{}")]),
        (None, '[{"name": "stop"', []),
        (None, "[", []),
    ],
)  # fmt: skip
def test_calls_that_were_demanded(
    name: str | None, text: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 5, 1000):
        assert put(DemandedCalls(name, TOOLS), text, size) == ("", calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("", "hermes"), ("<tool_call>{{ x }}</tool_call>", "hermes"), ("<tool_call>\n<function=x>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm45"), ("[TOOL_CALLS]", "mistral"), (deepseek("calls_begin"), "deepseek_v3"),
        ('{"name": ..., "parameters": ...}', "llama3_json"), ("<|python_start|>", "llama4_pythonic"),
    ],
)  # fmt: skip
def test_the_format_is_the_templates(template: str, name: str) -> None:
    assert find_tool_format(None, template) is TOOL_FORMATS[name]
    assert find_tool_format("hermes", template) is TOOL_FORMATS["hermes"]


def split(name: str, text: str, size: int, prompt: str = "<|assistant|>\n") -> tuple[str, str]:
    reader = ReasoningReader(REASONING_FORMATS[name], prompt)
    parts = [reader.put(text[start : start + size]) for start in range(0, len(text), size)]
    parts.append(reader.end())
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("opened", [False, True])
def test_thoughts_and_answer(name: str, size: int, opened: bool) -> None:
    form = REASONING_FORMATS[name]
    thoughts, answer = "Let me see:\n\n  2 < 3 </thin", "It is\n 3. "
    text = f"\n{thoughts}\n {form.end}\n\n{answer}"
    if opened:  # by the chat template
        assert split(name, text, size, f"<|assistant|>{form.start}\n") == (thoughts, answer)
    else:
        assert split(name, f"\n{form.start}{text}", size) == (thoughts, answer)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thoughts_that_were_cut_off(size: int) -> None:
    for name in REASONING_FORMATS:
        assert split(name, REASONING_FORMATS[name].start + "\nhm, ", size) == ("hm,", "")
        assert split(
            name, REASONING_FORMATS[name].start + "\nhm " + REASONING_FORMATS[name].end[:-1], size
        ) == (
            "hm " + REASONING_FORMATS[name].end[:-1],
            "",
        )
        assert split(
            name, REASONING_FORMATS[name].start + "a" + REASONING_FORMATS[name].end, size
        ) == ("a", "")
        assert split(name, REASONING_FORMATS[name].start + REASONING_FORMATS[name].end, size) == (
            "",
            "",
        )


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text", ["", " ", "plain", "  a < b", "<thin", "a <think>b</think> c", "x</think>y", "<think"]
)
def test_an_answer_without_thoughts_is_as_it_is(text: str, size: int) -> None:
    assert split("qwen3", text, size) == ("", text)
    # Where a client wants no thoughts, templates write both marks.
    for name in REASONING_FORMATS:
        prompt = (
            f"<|assistant|>{REASONING_FORMATS[name].start}\n\n{REASONING_FORMATS[name].end}\n\n"
        )
        assert split(name, text, size, prompt) == ("", text)


@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_may_begin_inside(size: int) -> None:
    assert split("deepseek_r1", "hm</think>yes <think>", size) == ("hm", "yes <think>")
    assert split("deepseek_r1", "hm", size) == ("hm", "")
    assert split("deepseek_r1", " <thi", size) == ("<thi", "")
    # A model may repeat what the template wrote.
    assert split("qwen3", "<think>hm</think>yes", size, "<think>\n") == ("hm", "yes")
    assert split("qwen3", "< hm</think>yes", size, "<think>\n") == ("< hm", "yes")


def test_a_reasoning_format_by_name() -> None:
    assert find_reasoning_format(None) is None
    assert find_reasoning_format("qwen3") is REASONING_FORMATS["qwen3"]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"city": "Paris", }', '{"city": "Paris"}'),
        ('{"city": "a,]", "n": [1, 2 , ] }', '{"city": "a,]", "n": [1, 2 ] }'),
        ('{"city": "one\ntwo\tthree"}', '{"city": "one\\ntwo\\tthree"}'),
        ('{"city": "\\n\n\\\\"}', '{"city": "\\n\\n\\\\"}'),
        ('{"n": [NaN, -1, NaN , ]}', '{"n": ["NaN", -1, "NaN" ]}'),
        ('{"city": "x",\n "n": [\n1,\n-2\n]\n}', '{"city": "x",\n "n": [\n1,\n-2\n]\n}'),
    ],
)
def test_what_models_write_and_json_lacks(written: str, arguments: str, size: int) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {written}}}\n</tool_call>'
    json.loads(arguments)
    assert put(ToolReader(TOOL_FORMATS["hermes"], TOOLS), text, size) == (
        "",
        [("get_weather", arguments)],
    )
    assert put(DemandedCalls("get_weather", TOOLS), written, size)[1] == [
        ("get_weather", arguments)
    ]


@pytest.mark.parametrize("name", ["arguments", "parameters"])
def test_a_call_without_arguments(name: str) -> None:
    for call in ({"name": "get_weather", name: None}, {"name": "get_weather"}):
        text = f"<tool_call>{json.dumps(call)}</tool_call>"
        assert put(ToolReader(TOOL_FORMATS["hermes"], TOOLS), text, 3) == (
            "",
            [("get_weather", "{}")],
        )
