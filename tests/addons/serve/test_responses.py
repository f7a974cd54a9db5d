"""`/v1/responses` with the real `openai` client; the oracle is the chat completion of the same conversation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, response_create_params
from pydantic import BaseModel, Field, ValidationError
from starlette.testclient import TestClient

from qsample.addons.serve import responses
from qsample.addons.serve.forms import ANY_TEXT
from qsample.addons.serve.responses import ResponseAnswers, ResponseChoice, ResponsesRequest
from qsample.request.grammar import Form
from qsample.request.text.chat import ChatOptions
from qsample.runtime import SamplingParams
from qsample.runtime.request import Usage
from tests.helpers.answers import Scripted, delta, ended, served
from tests.helpers.flags import undescribed
from tests.helpers.servers import ServerProcess

RESPONSES = "/v1/responses"
PROMPT = "And the LORD spake unto Moses"
LOGPROBS: Any = ["message.output_text.logprobs"]
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[a-z]{3,8}$"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Verse(BaseModel):
    book: Literal["Genesis", "Exodus"]
    chapter: int = Field(ge=1, le=50)


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def messages(given: Any, **more: Any) -> list[dict[str, Any]]:
    return ResponsesRequest.model_validate({"input": given, **more}).chat.messages


def test_a_response_is_the_chat_completion(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": PROMPT}],
        max_completion_tokens=12,
        temperature=0.8,
        top_p=0.9,
        seed=4,
    )
    options: Any = {
        "model": "tiny",
        "instructions": "Be brief",
        "max_output_tokens": 12,
        "extra_body": {"seed": 4},
    }
    for given in (PROMPT, [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]):
        answer = client.responses.create(input=given, temperature=0.8, top_p=0.9, **options)
        assert answer.output_text == chat.choices[0].message.content
        assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.8, 0.9, 12)
        assert (answer.status, answer.instructions) == ("incomplete", "Be brief")
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.usage is not None
        assert chat.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
            chat.usage.prompt_tokens,
            12,
        )


def test_a_stream_has_openais_events(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "input": PROMPT,
        "max_output_tokens": 12,
        "extra_body": {"seed": 4},
    }
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=12,
        seed=4,
        logprobs=True,
        top_logprobs=2,
    )
    events = list(client.responses.create(**options, include=LOGPROBS, top_logprobs=2, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    deltas: Any = [event for event in events if event.type == "response.output_text.delta"]
    last: Any = events[-1]
    assert (
        "".join(event.delta for event in deltas)
        == last.response.output_text
        == chat.choices[0].message.content
    )
    (item,) = last.response.output
    assert {event.item_id for event in deltas} == {item.id}
    assert chat.choices[0].logprobs is not None
    wanted = [entry.model_dump() for entry in chat.choices[0].logprobs.content or []]
    assert [entry.model_dump() for entry in item.content[0].logprobs] == wanted
    assert [entry.token for event in deltas for entry in event.logprobs] == [
        entry["token"] for entry in wanted
    ]


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    extra: Any = {"seed": 1, "temperature": 0.7}
    answer = client.responses.parse(
        model="tiny", input=PROMPT, text_format=Verse, max_output_tokens=900, extra_body=extra
    )
    assert isinstance(answer.output_parsed, Verse)
    assert answer.status == "completed"
    with client.responses.stream(
        model="tiny", input=PROMPT, text_format=Verse, max_output_tokens=900, extra_body=extra
    ) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    form: Any = {"format": {"type": "json_object"}}
    free = client.responses.create(
        model="tiny", input=PROMPT, text=form, max_output_tokens=8, extra_body=extra
    )
    assert free.output_text.startswith("{")


def test_functions(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "tools": [WEATHER],
        "max_output_tokens": 200,
        "extra_body": {"seed": 2},
    }
    chosen: Any = {"type": "function", "name": "get_weather"}
    events = list(client.responses.create(input=PROMPT, tool_choice=chosen, stream=True, **options))
    whole = client.responses.create(
        input=PROMPT, tool_choice="required", parallel_tool_calls=False, **options
    )
    last: Any = events[-1]
    parts: Any = [
        event for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert len(parts) > 3, "as they are written"
    assert "".join(part.delta for part in parts) == last.response.output[0].arguments
    assert [*dict.fromkeys(event.type.removeprefix("response.") for event in events[2:])] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    for answer in (last.response, whole):
        (call,) = answer.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, call.status, {*json.loads(call.arguments)}) == (
            "get_weather",
            "completed",
            {"city"},
        )
    # What came back is sent again, with the result.
    sent = [{"role": "user", "content": PROMPT}, *(item.model_dump() for item in whole.output)]
    result = {
        "type": "function_call_output",
        "call_id": whole.output[0].call_id,
        "output": "12 degrees",
    }  # type: ignore[union-attr]
    assert client.responses.create(
        input=[*sent, result], **{**options, "max_output_tokens": 4}
    ).output_text


def test_items_become_messages() -> None:
    calls = [
        {
            "type": "function_call",
            "call_id": name,
            "name": name,
            "arguments": "{}",
            "id": "fc",
            "status": "completed",
        }
        for name in ("a", "b")
    ]
    items = [
        {"role": "developer", "content": "Be brief"},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look"}],
        },
        *calls,
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "1"}],
        },
        calls[1],
    ]
    tool_calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("a", "b")
    ]
    assert messages(items, instructions="First") == [
        {"role": "system", "content": "First"},
        {"role": "developer", "content": "Be brief"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": tool_calls,
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "content": None, "tool_calls": tool_calls[1:]},
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 200])
def test_thoughts_text_and_calls_are_items(size: int) -> None:
    text = '<think>why not</think>Hello <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    body = ResponsesRequest.model_validate(
        {"input": "x", "tools": [{"type": "function", "name": "f"}]}
    )
    choice = ResponseChoice(served(reasoning="qwen3"), body, [5], ANY_TEXT, {})
    pieces = [
        choice.piece(delta(2, text=text[start : start + size]))
        for start in range(0, len(text), size)
    ]
    *events, last = [*chain(*pieces), *choice.end(ended(2))]
    items = last["response"]["output"]
    thoughts, message, call = items
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert [thoughts["content"][0]["text"], message["content"][0]["text"]] == ["why not", "Hello "]
    assert json.loads(call["arguments"]) == {"x": 1}
    assert {item["status"] for item in items} == {"completed"}
    for place, kind in enumerate(("reasoning_text", "output_text")):
        deltas = [event for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(event["delta"] for event in deltas) == items[place]["content"][0]["text"]
        assert {(event["item_id"], event["output_index"]) for event in deltas} == {
            (items[place]["id"], place)
        }
    done = [
        event["item"]["type"] for event in events if event["type"] == "response.output_item.done"
    ]
    assert done == ["reasoning", "message", "function_call"]


def test_a_request_is_a_chat() -> None:
    bare = ResponsesRequest.model_validate({"input": "x"})
    chat = bare.chat
    assert (chat.messages, chat.tools, chat.tool_choice, chat.logprobs, chat.form) == (
        messages("x"),
        None,
        None,
        False,
        None,
    )
    assert (
        chat.token_limit,
        chat.top_logprobs,
        chat.parallel_tool_calls,
        chat.template_options(),
    ) == (
        None,
        None,
        None,
        ChatOptions(),
    )
    params = SamplingParams(temperature=0.5, top_p=0.25)
    described = {
        "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None}, "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": 0.25, "user": None, "background": False, "max_tool_calls": None,
        "previous_response_id": None, "service_tier": "default", "store": False, "truncation": "disabled",
    }  # fmt: skip
    assert bare.repeated_fields(params) == described
    schema: dict[str, Any] = {"type": "object"}
    chosen = {"type": "function", "name": "get_weather"}
    given: dict[str, Any] = {
        "instructions": "I", "max_output_tokens": 7, "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "tool_choice": chosen, "tools": [WEATHER], "top_logprobs": 3, "user": "u",
    }  # fmt: skip
    options = {
        "chat_template": "t",
        "chat_template_kwargs": {"a": 1},
        "temperature": 0.5,
        "seed": 4,
    }
    whole = ResponsesRequest.model_validate({"input": "x", "include": LOGPROBS, **given, **options})
    changes = {
        "reasoning": {"effort": "low", "summary": None}, "tools": [{**WEATHER, "description": None}],
    }  # fmt: skip
    assert whole.repeated_fields(params) == described | given | changes
    chat = whole.chat
    assert (chat.token_limit, chat.logprobs, chat.top_logprobs, chat.parallel_tool_calls) == (
        7,
        True,
        3,
        False,
    )
    assert (chat.temperature, chat.seed, chat.user, chat.demanded_function) == (
        0.5,
        4,
        "u",
        "get_weather",
    )
    assert chat.response_format is not None
    assert chat.response_format.type == "json_object"
    function = {name: value for name, value in WEATHER.items() if name != "type"}
    assert chat.template_options() == ChatOptions(
        tools=[{"type": "function", "function": function}],
        chat_template="t",
        chat_template_kwargs={"a": 1, "reasoning_effort": "low"},
    )
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    followed = ResponsesRequest.model_validate({"input": "x", "text": {"format": form}})
    assert followed.chat.form == Form("json_schema", schema)
    assert followed.repeated_fields(params)["text"]["format"] == form
    of_llama_cpp = ResponsesRequest.model_validate(
        {"input": "x", "text": {"format": {"type": "json_object", "schema": schema}}}
    )
    assert of_llama_cpp.chat.form == Form("json_schema", schema)
    for kind in ({}, {"type": "text"}):
        with pytest.raises(ValidationError, match="it is of type text and has schema"):
            ResponsesRequest.model_validate(
                {"input": "x", "text": {"format": {**kind, "schema": schema}}}
            )
    nameless = ResponsesRequest.model_validate(
        {"input": "x", "text": {"format": {**form, "name": None}}}
    )
    assert nameless.repeated_fields(params)["text"]["format"]["name"] == "response"


def test_parts_and_calls_of_messages() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
    ]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    thought = {
        "type": "reasoning",
        "content": [{"type": "reasoning_text", "text": text} for text in ("h", "m")],
    }
    assert messages([{"role": "user", "content": parts}, thought, call]) == [
        {"role": "user", "content": "a\nb\nc"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
            "reasoning_content": "hm",
        },
    ]
    assert messages([thought, {"role": "user", "content": ""}, {"role": "assistant", "content": ""}]) == [
        {"role": "user", "content": ""}, {"role": "assistant", "content": ""},
    ]  # fmt: skip


def played(reason: str, text: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole response and the events of a stream, of an answer in two pieces."""

    async def run(stream: bool) -> Any:
        output = ended(2, 3, text=text, reason=reason, usage=Usage(10, 2, 4))
        script = Scripted(delta(2, text=text[:3]), delta(3, text=text[3:]), output=output)
        body = ResponsesRequest.model_validate(
            {"input": "x", "request_id": "r", "stream": stream, **fields}
        )
        body.chat.include_reasoning = body.user is None
        metrics: Any = SimpleNamespace(follow=lambda *given: None, count_form=lambda *given: None)
        model = served(script, reasoning=None if body.tools else "qwen3")
        answers = ResponseAnswers(model, body, metrics, SamplingParams(), [5] * 10, ANY_TEXT)
        await answers.start([[5] * 10], SamplingParams(), None)
        if not stream:
            return await answers.whole()
        return [json.loads(event.split(b"data: ")[1]) async for event in answers.events() if event]

    return asyncio.run(run(False)), asyncio.run(run(True))


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: without_ids(inner)
            for name, inner in value.items()
            if name not in ("id", "item_id", "call_id")
        }
    return [*map(without_ids, value)] if isinstance(value, list) else value


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
@pytest.mark.parametrize("shown", [True, False])
def test_a_whole_response(reason: str, status: str, shown: bool) -> None:
    before = int(time.time())
    document, events = played(reason, "<think>hm</think>Yes", **({} if shown else {"user": "u"}))
    thought = {"type": "reasoning_text", "text": "hm"}
    part = {"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}
    message = {"type": "message", "status": status, "role": "assistant", "content": [part]}
    items = [
        {"type": "reasoning", "status": "completed", "summary": [], "content": [thought]}
    ] * shown + [message]
    assert without_ids(document["output"]) == items
    assert [item["id"].partition("_")[0] for item in document["output"]] == ["rs"] * shown + ["msg"]
    completed_at = document["completed_at"]
    assert (completed_at is not None and before <= completed_at <= time.time()) == (
        reason == "stop"
    )
    head = {
        "id": "resp_r", "object": "response", "model": "tiny", "status": status, "error": None,
        "incomplete_details": None if reason == "stop" else {"reason": "max_output_tokens"},
    }  # fmt: skip
    assert {name: document[name] for name in head} == head
    assert document["usage"] == {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip
    first, second, *middle, last = events
    assert [first["type"], second["type"], last["type"]] == [
        "response.created", "response.in_progress", f"response.{status}",
    ]  # fmt: skip
    assert without_ids(last["response"]["output"]) == items
    begun = {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
    assert [first["response"][name] for name in begun] == [*begun.values()]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    places = {
        event["output_index"]
        for event in middle
        if event.get("part", part)["type"] == "output_text"
    }
    assert places >= {int(shown)}
    done = [event["item"] for event in middle if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    added = [event["item"] for event in middle if event["type"] == "response.output_item.added"]
    assert [(item["status"], item["content"]) for item in added] == [("in_progress", [])] * len(
        items
    )
    parts = [event["part"] for event in middle if event["type"] == "response.content_part.added"]
    assert [(part["type"], part["text"]) for part in parts] == [("reasoning_text", "")] * shown + [
        ("output_text", "")
    ]
    texts = [event for event in middle if event["type"] == "response.output_text.done"]
    assert [(event["text"], event["output_index"], event["content_index"]) for event in texts] == [
        ("Yes", shown, 0)
    ]


def test_an_empty_message_and_a_call_that_is_cut() -> None:
    document, _ = played("length", "<think>hm")
    assert [(item["type"], item["status"]) for item in document["output"]] == [
        ("reasoning", "completed"), ("message", "incomplete"),
    ]  # fmt: skip
    options: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}
    for reason, status in (("stop", "completed"), ("length", "incomplete")):
        document, events = played(reason, '{"city": "a"}', **options)
        call = {
            "type": "function_call",
            "status": status,
            "name": "get_weather",
            "arguments": '{"city": "a"}',
        }
        assert without_ids(document["output"]) == [call]
        (item,) = document["output"]
        assert [item["id"][:3], item["call_id"][:5]] == ["fc_", "call_"]
        place = {"output_index": 0}
        begun = {**call, "status": "in_progress", "arguments": ""}
        told = [
            {"type": "response.output_item.added", **place, "item": begun},
            {"type": "response.function_call_arguments.delta", **place, "delta": call["arguments"][:3]},
            {"type": "response.function_call_arguments.delta", **place, "delta": call["arguments"][3:]},
            {
                "type": "response.function_call_arguments.done", **place, "name": "get_weather",
                "arguments": call["arguments"],
            },
            {"type": "response.output_item.done", **place, "item": call},
        ]  # fmt: skip
        numbered = [
            {**event, "sequence_number": number} for number, event in enumerate(told, start=2)
        ]
        assert without_ids(events[2:-1]) == numbered


def test_tokens_of_a_message() -> None:
    document, events = played("stop", "Yes, a", include=LOGPROBS, top_logprobs=1)
    (item,) = document["output"]
    entries = item["content"][0]["logprobs"]
    assert [(entry["token"], entry["logprob"], len(entry["top_logprobs"])) for entry in entries] == [
        ("c", -1.0, 1), ("ddd", -2.0, 1),
    ]  # fmt: skip
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in event["logprobs"]] for event in deltas] == [["c"], ["ddd"]]
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert [entry["token"] for entry in done["logprobs"]] == ["c", "ddd"]


def test_every_field_of_openais_is_known() -> None:
    fields = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    assert len(fields) > 25
    assert fields - ResponsesRequest.model_fields.keys() - ResponsesRequest.refusals.keys() == set()
    ResponsesRequest.model_validate(
        {**dict.fromkeys(fields), "input": "x", "store": False, "background": False}
    )


def test_what_other_models_do_is_refused_by_name(client: openai.OpenAI) -> None:
    asked: list[Callable[[], object]] = [
        lambda: client.embeddings.create(model="tiny", input="x"),
        lambda: client.moderations.create(input="x"),
        lambda: client.images.generate(prompt="x"),
        lambda: client.audio.speech.create(model="tiny", voice="x", input="x"),
        lambda: client.responses.retrieve("resp_1"),
        lambda: client.files.list(),
    ]
    for ask in asked:
        with pytest.raises(
            openai.NotFoundError, match=r"is not done here: .* /v1/responses"
        ) as refused:
            ask()
        assert refused.value.code == "unsupported_endpoint"


def test_a_failure_within_a_stream(
    local_app: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_app() as client:
        monkeypatch.setattr(ResponseChoice, "piece", lambda *given: 1 / 0)
        answer = client.post(RESPONSES, json={"input": "x", "max_output_tokens": 3, "stream": True})
        events = [json.loads(part.split("data: ")[1]) for part in answer.text.strip().split("\n\n")]
        assert [event["type"] for event in events] == [
            "response.created", "response.in_progress", "error", "response.failed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
        assert events[2]["code"] == "internal_error"
        assert events[3]["response"]["status"] == "failed"


def test_every_field_has_words_for_clients() -> None:
    assert [name for name in undescribed(responses) if name[0] != "_"] == []
