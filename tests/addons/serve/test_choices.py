"""Answers on the wire, to the last field."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest

from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.choices import (
    ChatChoice,
    Choice,
    CompletionChoice,
    PromptScores,
    joined_events,
    listed_tokens,
)
from qsample.addons.serve.forms import ANY_TEXT, AnswerForm
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.requests import CompletionRequest
from qsample.runtime import Delta
from tests.helpers.answers import END, Texts, delta, ended, optional_outputs, served

ROLE = {"role": "assistant", "content": ""}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def chat(*, thinks: bool = False, form: AnswerForm = ANY_TEXT, **fields: Any) -> ChatChoice:
    body = ChatCompletionRequest.model_validate({"messages": [{}], **fields})
    return ChatChoice(3, served(reasoning="qwen3" if thinks else None), body, [5, 6], form)


def completion(echo: str | None = None, **fields: Any) -> CompletionChoice:
    return CompletionChoice(3, served(), CompletionRequest.model_validate(fields), [5, 6], echo)


def chunk(change: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": 3, "delta": change, "logprobs": None, "finish_reason": None, **more}


def told(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 3, "text": text, "logprobs": None, "finish_reason": None, **more}


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


def test_a_sum_of_events() -> None:
    first = {"a": "x", "b": [1], "c": {"d": "y", "e": None}, "f": None, "g": 3, "h": "z"}
    second = {
        "a": "y",
        "b": [2],
        "c": {"d": "z", "e": [5]},
        "f": {"x": 1},
        "g": 4,
        "h": None,
        "i": 0.5,
    }
    both = {
        "a": "xy",
        "b": [1, 2],
        "c": {"d": "yz", "e": [5]},
        "f": {"x": 1},
        "g": 4,
        "h": "z",
        "i": 0.5,
    }
    assert joined_events(first, second) == both
    assert reduce(joined_events, [None, first, None, second]) == both


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
    for end in (choice.whole(output), choice.end(output)[-1]):
        assert (end["finish_reason"], end["stop_reason"]) == (finish, stop)


def test_a_chat() -> None:
    choice = chat()
    assert choice.start() == [chunk(ROLE)]
    assert choice.piece(delta(2, text="c")) == [chunk({"content": "c"})]
    assert choice.piece(delta(2)) == []
    end = {"finish_reason": "stop", "stop_reason": None}
    assert choice.end(ended(2, 2, END)) == [chunk({}) | end]
    message: dict[str, Any] = {"role": "assistant", "content": "c", "refusal": None}
    assert choice.whole(ended(2, END, text="c")) == {
        "index": 3,
        "message": message,
        "logprobs": None,
        **end,
    }
    assert choice.whole(ended(END))["message"]["content"] == ""
    assert chat().outer() == {}
    assert chat(return_token_ids=True).outer() == {"prompt_token_ids": [5, 6]}


@pytest.mark.parametrize("top", [0, 2])
def test_tokens_of_a_chat(top: int) -> None:
    def entry(token: int, value: float) -> dict[str, Any]:
        text, data = Texts().of(token)
        return {"token": text, "logprob": value, "bytes": list(data)}

    likeliest = [entry(7, -0.5), entry(8, -1.5)][:top]
    content = [
        entry(token, value) | {"top_logprobs": likeliest} for token, value in ((4, -1.0), (3, -2.0))
    ]
    wanted = {"logprobs": {"content": content, "refusal": None}, "token_ids": [4, 3]}
    choice = chat(logprobs=True, top_logprobs=top, return_token_ids=True)
    assert choice.piece(delta(4, 3)) == [chunk({}) | wanted]
    assert choice.piece(delta()) == []
    whole, empty = choice.whole(ended(4, 3)), choice.whole(ended())
    assert {name: whole[name] for name in wanted} == wanted
    assert (empty["logprobs"], empty["token_ids"]) == ({"content": [], "refusal": None}, [])
    assert chat(return_token_ids=True).piece(delta(4)) == [chunk({}, token_ids=[4])]
    assert chat(logprobs=True).piece(delta(4))


@pytest.mark.parametrize(
    ("fields", "text", "content", "count", "reason", "finish"),
    [
        ({}, f"Well {CALL}{CALL}", "Well ", 2, "stop", "tool_calls"),
        ({"parallel_tool_calls": False}, f"{CALL}{CALL}", None, 1, "stop", "tool_calls"),
        ({}, CALL, None, 1, "length", "length"),
        ({}, f"Well {CALL[:-12]}", "Well ", 1, "length", "length"),
        ({"tool_choice": "none"}, CALL, CALL, 0, "stop", "stop"),
        ({"tool_choice": "required"}, '[{"name": "f", "par', None, 0, "length", "length"),
        (
            {"tool_choice": "required"},
            '[{"name": "f", "parameters": {"x": 1}}]',
            None,
            1,
            "stop",
            "tool_calls",
        ),
        ({"tool_choice": TOOLS[0]}, '{"x": 1}', None, 1, "stop", "stop"),
    ],
)
def test_calls(
    fields: dict[str, Any], text: str, content: str | None, count: int, reason: str, finish: str
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    output = ended(2, END, text=text, reason=reason)
    message = (answer := chat(tools=TOOLS, **fields).whole(output))["message"]
    assert (message["content"], answer["finish_reason"]) == (content, finish)
    assert without_ids(message.get("tool_calls", [])) == [call] * count
    assert ("tool_calls" in message) == bool(count)
    streamed = chat(tools=TOOLS, **fields)
    first = streamed.piece(delta(2, text=text))
    *chunks, end = streamed.end(output)
    deltas = [part["delta"] for part in first + chunks]
    assert "".join(part.get("content", "") for part in deltas) == (content or "")
    calls = [one for part in deltas for one in part.get("tool_calls", [])]
    assert without_ids(calls) == [{"index": index, **call} for index in range(count)]
    assert end == chunk({}) | {"finish_reason": finish, "stop_reason": None}


@pytest.mark.parametrize("shown", [True, False])
def test_thoughts(shown: bool) -> None:
    def thinking(**fields: Any) -> ChatChoice:
        return chat(thinks=True, tools=TOOLS, include_reasoning=shown, **fields)

    def thought(text: str) -> dict[str, str]:
        return {"reasoning": text, "reasoning_content": text} if shown else {}

    whole = thinking().whole(ended(2, END, text="<think>hm</think>Yes <tool"))["message"]
    assert whole == {"role": "assistant", "content": "Yes <tool", "refusal": None, **thought("hm")}
    assert thinking().whole(ended(2, END, text="<think>hm <"))["message"]["content"] is None
    choice = thinking()
    pieces = [choice.piece(delta(2, text=text)) for text in ("<think>h", "m</think>Yes <", "tool")]
    changes = [[part["delta"] for part in piece] for piece in pieces]
    assert changes == [[thought("h")] * shown, [thought("m") | {"content": "Yes "}], []]
    assert [part["delta"] for part in choice.end(ended(2, END))] == [{"content": "<tool"}, {}]
    cut = thinking()
    cut.piece(delta(2, text="<think>hm <"))
    assert [part["delta"] for part in cut.end(ended(2))] == [*filter(None, [thought(" <")]), {}]
    # The text of a form by masks and the rest of a message contain none.
    without = thinking(form=AnswerForm(may_have_thoughts=False))
    assert without.whole(ended(2, text="<think>"))["message"]["content"] == "<think>"


def test_impossible_tokens_have_the_least_number_of_openai() -> None:
    """JSON has no infinity."""
    outputs = {
        "logprobs": np.array([[-np.inf]], np.float32),
        "top_logprob_ids": np.array([[2, 3]]),
        "top_logprobs": np.array([[-0.5, -np.inf]], np.float32),
    }
    impossible = Delta([4], "é", 0.0, outputs)
    (part,) = chat(logprobs=True, top_logprobs=2).piece(impossible)
    (entry,) = part["logprobs"]["content"]
    assert (entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]]) == (
        -9999,
        [-0.5, -9999],
    )
    (part,) = completion(logprobs=2).piece(impossible)
    assert part["logprobs"]["token_logprobs"] == [-9999]
    assert part["logprobs"]["top_logprobs"] == [{"c": -0.5, "ddd": -9999, "é": -9999}]


def test_a_completion() -> None:
    choice = completion()
    end = {"finish_reason": "stop", "stop_reason": None}
    assert choice.start() == []
    assert choice.piece(delta(2, text="c")) == [told("c")]
    assert choice.piece(delta(2)) == []
    assert choice.end(ended(2, END)) == [told("", **end)]
    assert choice.whole(ended(2, END, text="c")) == told("c", **end)
    echoing = completion("In ", return_token_ids=True)
    ids = {"prompt_token_ids": [5, 6], "token_ids": []}
    assert echoing.start() == [told("In ", **ids)]
    assert completion(return_token_ids=True).start() == [told("", **ids)]
    assert completion("In ").start() == [told("In ")]
    assert echoing.piece(delta(2)) == [told("", token_ids=[2])]
    assert echoing.piece(delta()) == []
    assert echoing.whole(ended(2, END, text=None)) == told(
        "In ", **ids | {"token_ids": [2, END]}, **end
    )


def tokens(
    *entries: tuple[str, float | None, dict[str, float] | None, int], top: int
) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns = [list(column) for column in zip(*entries, strict=True)]
    return dict(zip(names, columns, strict=True)) | ({} if top else {"top_logprobs": None})


@pytest.mark.parametrize("top", [0, 2, 3])
def test_tokens_of_a_completion(top: int) -> None:
    def likeliest(text: str, value: float) -> dict[str, float]:
        return dict([("<7>", -0.5), ("<8>", -1.5), ("<9>", -9999.0)][:top]) | {text: value}

    rows = [("ddd", -1.0, likeliest("ddd", -1.0), 3), ("c", -2.0, likeliest("c", -2.0), 6)]
    end = ("<1>", -3.0, likeliest("<1>", -3.0), 7)
    whole = completion("In ", logprobs=top).whole(ended(3, 2, END, text="dddc"))
    assert whole["logprobs"] == tokens(*rows, end, top=top)
    choice = completion("In ", logprobs=top)
    assert choice.piece(delta(3, 2, text="dddc")) == [told("dddc", logprobs=tokens(*rows, top=top))]
    later = ("<1>", -1.0, likeliest("<1>", -1.0), 7)
    assert choice.piece(delta(END)) == [told("", logprobs=tokens(later, top=top))]
    last = tokens(("é", -1.0, likeliest("é", -1.0), 7), top=top)
    assert choice.piece(delta(4, text="é")) == [told("é", logprobs=last)]
    # Of a prompt "ddd", "c".
    scored = completion("dddc", logprobs=top)
    assert scored.start() == [told("dddc")]
    scored.scores = PromptScores([], {})
    assert scored.start() == [told("dddc")]
    scored.scores = PromptScores([3, 2], optional_outputs(2))
    prompt = [("ddd", None, None, 0), ("c", -1.0, likeliest("c", -1.0), 3)]
    assert scored.start() == [told("dddc", logprobs=tokens(*prompt, top=top))]
    answer = [("é", -1.0, likeliest("é", -1.0), 4)]
    assert scored.whole(ended(4, text="é"))["logprobs"] == tokens(*prompt, *answer, top=top)
    plain = completion(logprobs=top)
    plain.scores = scored.scores
    assert plain.start() == []
    assert completion(logprobs=top).whole(ended())["logprobs"]["tokens"] == []


def test_offsets_of_tokens_whose_text_is_held() -> None:
    choice = completion("In ", logprobs=0)
    pieces = [
        choice.piece(delta(*ids, text=text))
        for ids, text in (((3, 2), ""), ((4,), "dddcé"), ((2,), "c"))
    ]
    assert [event["text"] for (event,) in pieces] == ["", "dddcé", "c"]
    assert [event["logprobs"]["text_offset"] for (event,) in pieces] == [[3, 6], [7], [8]]


def test_tokens_of_a_prompt_in_vllms_form() -> None:
    likeliest = {"logprob": -0.5, "rank": 1, "decoded_token": "<7>"}
    wanted = [
        None,
        {"7": likeliest, "2": {"logprob": -1.0, "rank": None, "decoded_token": "c"}},
        {"7": likeliest, "8": {"logprob": -1.5, "rank": 2, "decoded_token": "<8>"}},
    ]
    scores = PromptScores([3, 2, 8], optional_outputs(2, 8))
    of_text, of_chat = completion(prompt_logprobs=1), chat(prompt_logprobs=1)
    assert "prompt_logprobs" not in of_text.whole(ended(2))
    assert of_chat.outer() == {}
    of_text.scores = of_chat.scores = scores
    assert (
        of_text.whole(ended(2))["prompt_logprobs"] == of_chat.outer()["prompt_logprobs"] == wanted
    )
    assert "prompt_logprobs" not in completion(logprobs=1).whole(ended(2))
    *_, impossible = PromptScores([3, 9], optional_outputs(9)).entries(Texts(), 0)  # type: ignore[arg-type]
    assert impossible == {"9": {"logprob": -9999.0, "rank": 3, "decoded_token": "<9>"}}


def test_tokens_that_a_request_lists_stand_in_the_place_of_the_answers_only_token() -> None:
    scores = {"prompt_logprobs": np.array([[-0.25], [-np.inf], [-2.0]], np.float32)}
    listed = listed_tokens([4, 3, 2], replace(ended(), prompt_outputs=scores))
    assert listed == [(4, -0.25), (3, -np.inf), (2, -2.0)]
    choices: list[Choice] = [completion(logprobs=0), chat(logprobs=True, top_logprobs=0)]
    parts = []
    for choice in choices:
        choice.listed = listed
        parts += choice.piece(delta(3, text="ddd"))
    assert parts[0]["logprobs"]["top_logprobs"] == [{"é": -0.25, "ddd": -1.0, "c": -2.0}]
    tops = parts[1]["logprobs"]["content"][0]["top_logprobs"]
    assert [(top["token"], top["logprob"]) for top in tops] == [
        ("é", -0.25),
        ("ddd", -9999),
        ("c", -2),
    ]
    assert chat().failed(ApiError(400, "m"))[0]["error"]["message"] == "m"
