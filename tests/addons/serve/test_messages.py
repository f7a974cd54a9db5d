"""`/v1/messages` with the real `anthropic` client, where it is installed; the oracle is the chat completion of the same
conversation. What only a scripted answer shows is compared to the last field, with and without the client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from qsample.addons.serve import messages
from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.forms import ANY_TEXT
from qsample.addons.serve.messages import (
    CountTokensRequest,
    MessageAnswers,
    MessageChoice,
    MessagesRequest,
)
from qsample.request.text.chat import ChatOptions
from qsample.runtime import SamplingParams
from qsample.runtime.request import Usage
from tests.helpers.answers import Scripted, delta, ended, served
from tests.helpers.flags import undescribed
from tests.helpers.servers import ServerProcess

MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
PROMPT = "And the LORD spake unto Moses"
SAID: Any = [{"role": "user", "content": PROMPT}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[a-z]{3,8}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "get_weather", "description": "of a place", "input_schema": SCHEMA}
FUNCTION = {"name": "get_weather", "description": "of a place", "parameters": SCHEMA}


@pytest.fixture
def client(server: ServerProcess) -> Any:
    anthropic = pytest.importorskip(
        "anthropic", reason="pip install anthropic; it is the client of /v1/messages"
    )
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def request(messages: Any = SAID, **fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"messages": messages, "max_tokens": 9, **fields})


def test_a_message_is_the_chat_completion(client: Any, server: ServerProcess) -> None:
    options: Any = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 4}
    body = {
        "messages": [{"role": "system", "content": "Be brief"}, *SAID],
        "max_tokens": 12,
        **options,
    }
    chat = server.client.post(CHAT, json=body).json()
    blocks = [{"type": "text", "text": PROMPT}]
    for said, system in (
        (SAID, "Be brief"),
        ([{"role": "user", "content": blocks}], [{"type": "text", "text": "Be brief"}]),
    ):
        given = {
            "model": "tiny",
            "messages": said,
            "system": system,
            "max_tokens": 12,
            "extra_body": options,
        }
        answer = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            events = [event.type for event in stream]
        assert [*dict.fromkeys(events)] == [
            "message_start", "content_block_start", "content_block_delta", "text", "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        assert events.count("content_block_delta") > 6
        for message in (answer, stream.get_final_message()):
            (block,) = message.content
            assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
            assert (message.role, message.model, message.stop_reason) == (
                "assistant",
                "tiny",
                "max_tokens",
            )
            usage = message.usage
            assert (
                usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
            )
            assert usage.output_tokens == 12


def test_stop_sequences_and_a_beginning(client: Any, server: ServerProcess) -> None:
    options: Any = {"model": "tiny", "messages": SAID, "max_tokens": 60, "extra_body": {"seed": 4}}
    whole = client.messages.create(**options).content[0].text
    word = whole.split()[4]
    cut = client.messages.create(**options, stop_sequences=["#", word])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == (
        "stop_sequence",
        word,
        whole[: whole.index(word)],
    )
    # The client's last message may be the beginning of the answer.
    begun = [*SAID, {"role": "assistant", "content": "Thus"}]
    body = {"messages": begun, "max_tokens": 8, "seed": 4, "continue_final_message": True}
    chat = server.client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    answer = client.messages.create(
        model="tiny", messages=begun, max_tokens=8, extra_body={"seed": 4}
    )
    assert answer.content[0].text == chat


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools(client: Any, choice: Any) -> None:
    options: Any = {
        "model": "tiny",
        "tools": [WEATHER],
        "max_tokens": 200,
        "extra_body": {"seed": 2},
    }
    choice = {**choice, "disable_parallel_tool_use": True}
    whole = client.messages.create(messages=SAID, tool_choice=choice, **options)
    with client.messages.stream(messages=SAID, tool_choice=choice, **options) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
    assert len(parts) > 3, "as they are written"
    for message in (whole, stream.get_final_message()):
        (block,) = message.content
        assert (block.type, block.name, message.stop_reason) == (
            "tool_use",
            "get_weather",
            "tool_use",
        )
        assert block.input == whole.content[0].input == json.loads("".join(parts))
        assert 3 <= len(block.input["city"]) <= 8
    # What came back is sent again, with the result.
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "12 degrees"}
    sent = [
        *SAID,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(messages=sent, **{**options, "max_tokens": 4}).content
    # The limit may be as small as the shortest call.
    with pytest.raises(
        pytest.importorskip("anthropic").BadRequestError, match="give at least"
    ) as wrong:
        client.messages.create(messages=SAID, tool_choice=choice, **{**options, "max_tokens": 8})
    shortest = int(re.findall(r"at least (\d+)", str(wrong.value))[0])
    options = {**options, "max_tokens": shortest}
    short = client.messages.create(messages=SAID, tool_choice=choice, **options)
    assert short.stop_reason == "tool_use"
    assert [block.type for block in short.content] == ["tool_use"]
    assert 3 <= len(short.content[0].input["city"]) <= 8


def test_tokens_are_counted_and_forms_followed(client: Any, server: ServerProcess) -> None:
    chat = {
        "messages": [{"role": "system", "content": "Be brief"}, *SAID],
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    count = server.client.post("/tokenize", json=chat).json()["count"]
    counted = client.messages.count_tokens(
        model="tiny", messages=SAID, system="Be brief", tools=[WEATHER]
    )
    assert counted.input_tokens == count
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(
        model="tiny", messages=SAID, max_tokens=200, output_config=form, extra_body={"seed": 1}
    )
    assert {*json.loads(answer.content[0].text)} == {"city"}


def test_errors_are_the_clients_own(client: Any) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    image = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    bash = {"type": "bash_20250124", "name": "bash"}
    for fields, kind, text in (
        ({"model": "large"}, "NotFoundError", "the model 'large' does not exist here"),
        (
            {"messages": [{"role": "user", "content": [image]}]},
            "BadRequestError",
            "the model 'tiny' reads text only",
        ),
        ({"tools": [bash]}, "BadRequestError", "models here know no tools of Anthropic's"),
        (
            {"messages": [{"role": "user", "content": "and " * 5000}]},
            "BadRequestError",
            "this model's context",
        ),
        (
            {"extra_body": {"stop": ["x"]}},
            "BadRequestError",
            "stop is not done here; give stop_sequences",
        ),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
    ):
        with pytest.raises(getattr(anthropic, kind)) as refused:
            client.messages.create(**{"model": "tiny", "max_tokens": 4, "messages": SAID, **fields})
        assert refused.value.type == (
            "not_found_error" if kind == "NotFoundError" else "invalid_request_error"
        )
        assert text in refused.value.api_message


@pytest.mark.ci
def test_keys(start_server: Callable[..., ServerProcess]) -> None:
    anthropic: Any = pytest.importorskip("anthropic", reason="pip install anthropic")
    with start_server("--api-key", "secret") as guarded:
        options: Any = {"base_url": guarded.url, "max_retries": 0}
        for given in ({"api_key": "secret"}, {"auth_token": "secret"}):
            answer = anthropic.Anthropic(**options, **given).messages.create(
                model="tiny", max_tokens=4, messages=SAID
            )
            assert answer.usage.output_tokens == 4
        with pytest.raises(anthropic.AuthenticationError) as refused:
            anthropic.Anthropic(**options, api_key="wrong").messages.create(
                model="tiny", max_tokens=4, messages=SAID
            )
        assert refused.value.type == "authentication_error"


def test_errors_have_anthropics_form(
    local_app: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_app(api_keys=("secret",), max_body_bytes=400) as client:
        body = {"messages": SAID, "max_tokens": 3}

        def error(path: str, body: Any, **headers: str) -> tuple[int, str, bool]:
            answer = client.post(path, json=body, headers=headers)
            assert answer.json().keys() == {"type", "error"}
            assert answer.json()["error"].keys() == {"type", "message"}
            return (
                answer.status_code,
                answer.json()["error"]["type"],
                answer.json()["type"] == "error",
            )

        key = {"x-api-key": "secret"}
        assert error(MESSAGES, body) == (401, "authentication_error", True)
        assert error(COUNT, body, **{"x-api-key": "wrong"}) == (401, "authentication_error", True)
        assert (
            error(COUNT, {}, **key)
            == error(MESSAGES, {"messages": SAID}, **key)
            == (400, "invalid_request_error", True)
        )
        assert error(MESSAGES, {"user": "x" * 400}, **key) == (413, "request_too_large", True)
        assert error(MESSAGES + "/batches", body, **key) == (404, "not_found_error", True)
        assert client.post(COUNT, json={"messages": SAID}, headers=key).json().keys() == {
            "input_tokens"
        }
        assert client.post(CHAT, json=body).json()["error"]["code"] == "invalid_api_key"
        monkeypatch.setattr(MessageChoice, "piece", lambda *given: 1 / 0)
        assert error(MESSAGES, body, **key) == (500, "api_error", True)
        text = client.post(MESSAGES, json={**body, "stream": True}, headers=key).text
        named = [part.split("\n") for part in text.strip().split("\n\n")]
        assert [name for name, _ in named] == [
            "event: message_start",
            "event: ping",
            "event: error",
        ]
        assert json.loads(named[-1][1].removeprefix("data: "))["error"]["type"] == "api_error"


def test_blocks_become_messages() -> None:
    def chat(messages: Any, **fields: Any) -> ChatCompletionRequest:
        return request(messages, **fields).chat

    use = {
        "type": "tool_use",
        "id": "a",
        "name": "f",
        "input": {"x": [1]},
        "cache_control": {"type": "ephemeral"},
    }
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look"}, use,
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "And?"},
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}], "is_error": False},
            {"type": "tool_result", "tool_use_id": "b"},
        ]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "2"}]},
    ]  # fmt: skip
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}]
    assert chat(
        said, system=[{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]
    ).messages == [
        {"role": "system", "content": "S\nT"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    assert [chat(said[:count]).continue_final_message for count in (1, 2, 4)] == [
        False,
        False,
        False,
    ]
    assert chat([*SAID, {"role": "assistant", "content": "Yes"}]).continue_final_message
    for wrong, text in (
        ([], "give a list of messages"), ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "user"}], "message 0 has no content"), ([{"role": "user", "content": [use]}], "type 'tool_use'"),
        ([{"role": "assistant", "content": [{**use, "input": "x"}]}], "without input; give an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without text; give a text"),
        ([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 3}]}], "has no content"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            request(wrong)


def test_a_request_is_a_chat() -> None:
    bare = request().chat
    assert (bare.token_limit, bare.stop, bare.tools, bare.tool_choice, bare.form, bare.include_reasoning) == (
        9, None, None, None, None, True,
    )  # fmt: skip
    assert bare.template_options() == ChatOptions()
    for choice, wanted in (
        (None, "auto"), ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
    ):  # fmt: skip
        assert request(tools=[WEATHER], tool_choice=choice).chat.tool_choice == wanted
    named = request(
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    )
    assert (named.chat.demanded_function, named.chat.parallel_tool_calls) == ("get_weather", False)
    tools = [{"type": "function", "function": FUNCTION}]
    assert named.chat.template_options() == ChatOptions(tools=tools)
    given: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "stop_sequences": ["x"], "seed": 4, "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "service_tier": "auto",
        "chat_template_kwargs": {"a": 1}, "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    chat = request(**given).chat
    assert (chat.temperature, chat.top_k, chat.stop, chat.seed, chat.include_reasoning) == (
        0.5,
        3,
        ["x"],
        4,
        False,
    )
    assert chat.template_options() == ChatOptions(
        chat_template_kwargs={"a": 1, "enable_thinking": False, "reasoning_effort": "low"}
    )
    shown = [
        {"type": "enabled", "budget_tokens": 2000},
        {"type": "adaptive"},
        {"type": "adaptive", "display": "omitted"},
    ]
    assert [request(thinking=thinking).chat.include_reasoning for thinking in shown] == [
        True,
        True,
        False,
    ]
    for wrong, text in (
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [WEATHER]}, "is not among tools"),
        ({"tool_choice": {"type": "any"}}, "the request has no tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "give a name"),
        ({"stop_sequences": ["x"] * 65}, "it has 65 strings"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "this server cuts no messages"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            request(**wrong)


def played(
    text: str, size: int, reason: str = "stop", stop: str | None = None, **fields: Any
) -> tuple[Any, list[Any]]:
    """A whole message and the events of a stream, of an answer in pieces."""

    async def run(stream: bool) -> Any:
        output = ended(2, 3, text=text, reason=reason, stop=stop, usage=Usage(10, 5, 4))
        pieces = [delta(2, text=text[start : start + size]) for start in range(0, len(text), size)]
        body = request(request_id="r", stream=stream, **fields)
        metrics: Any = SimpleNamespace(follow=lambda *given: None, count_form=lambda *given: None)
        model = served(Scripted(*pieces, output=output), reasoning="qwen3")
        answers = MessageAnswers(model, body, metrics, [5] * 10, ANY_TEXT)
        await answers.start([[5] * 10], SamplingParams(), None)
        if not stream:
            return await answers.whole()
        events = [event.decode().split("\n") async for event in answers.events() if event]
        assert all(line == f"event: {json.loads(data[6:])['type']}" for line, data, *_ in events)
        return [json.loads(data[6:]) for _, data, *_ in events]

    return asyncio.run(run(False)), asyncio.run(run(True))


@pytest.mark.parametrize("size", [1, 3, 200])
def test_thoughts_text_and_calls_are_blocks(size: int) -> None:
    arguments = '{"city":"Paris", "n": [1.5]}'
    call = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    message, events = played(f"<think>why not</think>Hello {call}\n{call}", size, tools=[WEATHER])
    ids = [block.pop("id") for block in message["content"][2:]]
    assert len({*ids}) == 2
    used = {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris", "n": [1.5]}}
    thought = {"type": "thinking", "thinking": "why not", "signature": ""}
    assert message == {
        "id": "msg_r", "type": "message", "role": "assistant", "model": "tiny",
        "content": [thought, {"type": "text", "text": "Hello "}, used, used],
        "stop_reason": "tool_use", "stop_sequence": None,
        "usage": {
            "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 5,
        },
    }  # fmt: skip
    start, ping, *between, ending, stop = events
    assert (start["type"], start["message"]["content"], start["message"]["stop_reason"]) == (
        "message_start",
        [],
        None,
    )
    assert start["message"]["usage"]["input_tokens"] == 10
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    assert ending == {
        "type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": message["usage"],
    }  # fmt: skip
    blocks: list[Any] = []  # as a client makes them of the events
    for event in between:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append([event["content_block"], ""])
        elif event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            ((field, part),) = event["delta"].items()
            blocks[event["index"]][1] += part
            names = {
                "thinking": "thinking_delta",
                "text": "text_delta",
                "partial_json": "input_json_delta",
            }
            assert (event["index"], kind) == (len(blocks) - 1, names[field])
    stops = [event["index"] for event in between if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    assert [text for _, text in blocks] == ["why not", "Hello ", arguments, arguments]
    assert [block["type"] for block, _ in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert all(block["input"] == {} and block["id"] for block, _ in blocks[2:])
    assert len(between) > (60 if size == 1 else 8)


@pytest.mark.parametrize(
    ("reason", "stop", "limit", "told"),
    [
        ("stop", None, 9, ("end_turn", None)), ("stop", "x", 9, ("stop_sequence", "x")),
        ("length", None, 5, ("max_tokens", None)), ("length", None, 9, ("model_context_window_exceeded", None)),
        ("time", None, 9, ("max_tokens", None)),
    ],
)  # fmt: skip
def test_why_an_answer_ends(
    reason: str, stop: str | None, limit: int, told: tuple[str, str | None]
) -> None:
    message, (*_, ending, _) = played("Yes", 2, reason, stop, max_tokens=limit)
    assert message["content"] == [{"type": "text", "text": "Yes"}]
    for document in (message, ending["delta"]):
        assert (document["stop_reason"], document["stop_sequence"]) == told


def test_what_is_cut_off_or_empty() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "n": [1, 2'
    for behind, given in (
        ("", {"city": "Paris", "n": [1, 2]}),
        (" , NaN]}", {"city": "Paris", "n": [1, 2, "NaN"]}),
    ):
        message, _ = played(call + behind, 3, "length", tools=[WEATHER], max_tokens=5)
        assert [(block["input"], message["stop_reason"]) for block in message["content"]] == [
            (given, "max_tokens")
        ]
    message, events = played("", 1)
    assert (message["content"], message["stop_reason"], len(events)) == ([], "end_turn", 4)
    hidden, _ = played(
        "<think>hm</think>Yes", 3, thinking={"type": "adaptive", "display": "omitted"}
    )
    assert hidden["content"] == [{"type": "text", "text": "Yes"}]


def test_every_field_of_anthropics_is_known() -> None:
    params: Any = pytest.importorskip(
        "anthropic.types.message_create_params", reason="pip install anthropic"
    )
    fields = {
        *params.MessageCreateParamsBase.__annotations__,
        "stream",
        "temperature",
        "top_k",
        "top_p",
    }
    assert len(fields) > 15
    assert fields - MessagesRequest.model_fields.keys() - MessagesRequest.refusals.keys() == set()
    CountTokensRequest.model_validate({**dict.fromkeys(fields), "messages": SAID})


def test_every_field_has_words_for_clients() -> None:
    assert undescribed(messages) == []
