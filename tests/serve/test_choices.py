"""Answers on the wire, to the last field."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.serve.choices import ChatChoice, Choice, CompletionChoice, prompt_logprobs
from qsample.serve.parsers import REASONING_FORMATS, TOOL_FORMATS, DemandedCalls, ReasoningReader, ToolReader
from qsample.serve.scoring import PromptScores
from tests.helpers.answers import END, Texts, delta, ended, optional_outputs, served

ROLE = {"role": "assistant", "content": ""}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def chat(**options: Any) -> ChatChoice:
    return ChatChoice(3, served(), **{"top_logprobs": None, "tools": None, "return_token_ids": False} | options)


def completion(**options: Any) -> CompletionChoice:
    given = {"logprobs": None, "echo": None, "prompt_ids": None, "prompt_logprobs": None} | options
    return CompletionChoice(3, served(), **given)


def chunk(change: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": 3, "delta": change, "logprobs": None, "finish_reason": None, **more}


def told(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 3, "text": text, "logprobs": None, "finish_reason": None, **more}


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("output", "finish", "stop"),
    [
        (ended(2, END), "stop", None),
        (ended(2, 3), "stop", 3),
        (ended(3, 2, stop="x"), "stop", "x"),
        (ended(), "stop", None),
        (ended(2, 3, reason="length"), "length", None),
        (ended(2, 3, reason="time"), "length", "timeout"),
    ],
)
def test_the_end_of_an_answer(make: Any, output: Any, finish: str, stop: str | int | None) -> None:
    choice: Choice = make()
    for end in (choice.whole(output), choice.ending(output)[-1]):
        assert (end["finish_reason"], end["stop_reason"]) == (finish, stop)


def test_a_chat() -> None:
    choice = chat()
    assert choice.opening() == chunk(ROLE)
    assert choice.piece(delta(2, text="c")) == chunk({"content": "c"})
    assert choice.piece(delta(2)) is None
    end = {"finish_reason": "stop", "stop_reason": None}
    assert choice.ending(ended(2, 2, END)) == [chunk({}) | end]
    message: dict[str, Any] = {"role": "assistant", "content": "c", "refusal": None}
    assert choice.whole(ended(2, END, text="c")) == {"index": 3, "message": message, "logprobs": None, **end}
    assert choice.whole(ended(END))["message"]["content"] == ""


@pytest.mark.parametrize("top", [0, 2])
def test_tokens_of_a_chat(top: int) -> None:
    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = Texts().of(token)
        return {"token": text, "logprob": value, "bytes": list(data)}

    likeliest = [entry(7, -0.5), entry(8, -1.5)][:top]
    content = [entry(token, value) | {"top_logprobs": likeliest} for token, value in ((4, -1.0), (3, -2.0))]
    wanted = {"logprobs": {"content": content, "refusal": None}, "token_ids": [4, 3]}
    choice = chat(top_logprobs=top, return_token_ids=True)
    assert choice.piece(delta(4, 3)) == chunk({}) | wanted
    assert choice.piece(delta()) is None
    assert {name: choice.whole(ended(4, 3))[name] for name in wanted} == wanted
    assert chat(return_token_ids=True).piece(delta(4)) == chunk({}, token_ids=[4])
    assert chat(top_logprobs=0).piece(delta(4)) is not None


@pytest.mark.parametrize(
    ("tools", "text", "content", "count", "reason", "finish"),
    [
        (ToolReader(TOOL_FORMATS["hermes"], {"f": {}}), f"Well {CALL}{CALL}", "Well ", 2, "stop", "tool_calls"),
        (ToolReader(TOOL_FORMATS["hermes"], {"f": {}}), CALL, None, 1, "length", "length"),
        (ToolReader(TOOL_FORMATS["hermes"], {}), CALL, CALL, 0, "stop", "stop"),
        (DemandedCalls(None), '[{"name": "f", "parameters": {"x": 1}}]', None, 1, "stop", "tool_calls"),
        (DemandedCalls("f"), '{"x": 1}', None, 1, "stop", "stop"),
    ],
)
def test_calls(tools: Any, text: str, content: str | None, count: int, reason: str, finish: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    output = ended(2, END, text=text, reason=reason)
    streamed = chat(
        tools=type(tools)(*([tools.name] if isinstance(tools, DemandedCalls) else [tools.format, tools.tools]))
    )
    message = (answer := chat(tools=tools).whole(output))["message"]
    assert (message["content"], answer["finish_reason"]) == (content, finish)
    assert without_ids(message.get("tool_calls", [])) == [call] * count
    assert ("tool_calls" in message) == bool(count)
    first = streamed.piece(delta(2, text=text))
    *chunks, end = streamed.ending(output)
    deltas = [part["delta"] for part in ([first] if first else []) + chunks]
    assert "".join(part.get("content", "") for part in deltas) == (content or "")
    calls = [one for part in deltas for one in part.get("tool_calls", [])]
    assert without_ids(calls) == [{"index": index, **call} for index in range(count)]
    assert end == chunk({}) | {"finish_reason": finish, "stop_reason": None}


@pytest.mark.parametrize("shown", [True, False])
def test_thoughts(shown: bool) -> None:
    def thinking() -> ChatChoice:
        reader = ReasoningReader(REASONING_FORMATS["qwen3"], "")
        tools = ToolReader(TOOL_FORMATS["hermes"], {"f": {}})
        return chat(reasoning=reader, tools=tools, show_reasoning=shown)

    def thought(text: str) -> dict[str, str]:
        return {"reasoning": text, "reasoning_content": text} if shown else {}

    whole = thinking().whole(ended(2, END, text="<think>hm</think>Yes <tool"))["message"]
    assert whole == {"role": "assistant", "content": "Yes <tool", "refusal": None, **thought("hm")}
    assert thinking().whole(ended(2, END, text="<think>hm <"))["message"]["content"] is None
    choice = thinking()
    pieces = [choice.piece(delta(2, text=text)) for text in ("<think>h", "m</think>Yes <", "tool")]
    assert [piece and piece["delta"] for piece in pieces] == [
        thought("h") or None, thought("m") | {"content": "Yes "}, None,
    ]  # fmt: skip
    assert [part["delta"] for part in choice.ending(ended(2, END))] == [{"content": "<tool"}, {}]
    cut = thinking()
    cut.piece(delta(2, text="<think>hm <"))
    assert [part["delta"] for part in cut.ending(ended(2))] == [*filter(None, [thought(" <")]), {}]


def test_a_completion() -> None:
    choice = completion()
    end = {"finish_reason": "stop", "stop_reason": None}
    assert choice.opening() is None
    assert choice.piece(delta(2, text="c")) == told("c")
    assert choice.piece(delta(2)) is None
    assert choice.ending(ended(2, END)) == [told("", **end)]
    assert choice.whole(ended(2, END, text="c")) == told("c", **end)
    echoing = completion(echo="In ", prompt_ids=[5, 6])
    ids = {"prompt_token_ids": [5, 6], "token_ids": []}
    assert echoing.opening() == told("In ", **ids)
    assert completion(prompt_ids=[]).opening() == told("", prompt_token_ids=[], token_ids=[])
    assert completion(echo="In ").opening() == told("In ")
    assert echoing.piece(delta(2)) == told("", token_ids=[2])
    assert echoing.piece(delta()) is None
    assert echoing.whole(ended(2, END, text=None)) == told("In ", **ids | {"token_ids": [2, END]}, **end)


def tokens(*entries: tuple[str, float | None, dict[str, float] | None, int], top: int) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns = [list(column) for column in zip(*entries, strict=True)]
    return dict(zip(names, columns, strict=True)) | ({} if top else {"top_logprobs": None})


@pytest.mark.parametrize("top", [0, 2, 3])
def test_tokens_of_a_completion(top: int) -> None:
    def likeliest(text: str, value: float) -> dict[str, float]:
        return dict([("<7>", -0.5), ("<8>", -1.5), ("<9>", -9999.0)][:top]) | {text: value}

    rows = [("ddd", -1.0, likeliest("ddd", -1.0), 3), ("c", -2.0, likeliest("c", -2.0), 6)]
    end = ("<1>", -3.0, likeliest("<1>", -3.0), 7)
    choice = completion(logprobs=top, echo="In ")
    assert choice.whole(ended(3, 2, END, text="dddc"))["logprobs"] == tokens(*rows, end, top=top)
    assert choice.piece(delta(3, 2, text="dddc")) == told("dddc", logprobs=tokens(*rows, top=top))
    later = ("<1>", -1.0, likeliest("<1>", -1.0), 7)
    assert choice.piece(delta(END)) == told("", logprobs=tokens(later, top=top))
    assert choice.piece(delta(4, text="é")) == told("é", logprobs=tokens(("é", -1.0, likeliest("é", -1.0), 7), top=top))
    # Of a prompt "ddd", "c".
    scored = completion(logprobs=top, echo="dddc")
    assert scored.opening() == told("dddc")
    scored.scores = PromptScores([], {})
    assert scored.opening() == told("dddc")
    scored.scores = PromptScores([3, 2], optional_outputs(2))
    prompt = [("ddd", None, None, 0), ("c", -1.0, likeliest("c", -1.0), 3)]
    assert scored.opening() == told("dddc", logprobs=tokens(*prompt, top=top))
    answer = [("é", -1.0, likeliest("é", -1.0), 4)]
    assert scored.whole(ended(4, text="é"))["logprobs"] == tokens(*prompt, *answer, top=top)
    plain = completion(logprobs=top)
    plain.scores = scored.scores
    assert plain.opening() is None


def test_tokens_of_a_prompt_in_vllms_form() -> None:
    choice = completion(prompt_logprobs=1)
    assert "prompt_logprobs" not in choice.whole(ended(2))
    choice.scores = PromptScores([3, 2, 8], optional_outputs(2, 8))
    likeliest = {"logprob": -0.5, "rank": 1, "decoded_token": "<7>"}
    wanted = [
        None,
        {"7": likeliest, "2": {"logprob": -1.0, "rank": None, "decoded_token": "c"}},
        {"7": likeliest, "8": {"logprob": -1.5, "rank": 2, "decoded_token": "<8>"}},
    ]
    assert choice.whole(ended(2))["prompt_logprobs"] == wanted
    assert "prompt_logprobs" not in completion(logprobs=1).whole(ended(2))
    *_, impossible = prompt_logprobs(Texts(), PromptScores([3, 9], optional_outputs(9)), 0)  # type: ignore[arg-type]
    assert impossible == {"9": {"logprob": -9999.0, "rank": 3, "decoded_token": "<9>"}}
