"""A server of a real model with the real clients; the oracle is transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.helpers.servers import ServerProcess
from tests.real.conftest import Reference

pytestmark = pytest.mark.real

MODEL = "smollm2"
CHAT: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 24
GREEDY: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": TOKENS, "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@pytest.fixture(scope="module")
def server(float_package: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        float_package, "--served-model-name", MODEL, "--slots", "4", "--ctx-len", "1024"
    ) as running:
        yield running


@pytest.fixture
def openai_client(server: ServerProcess) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def anthropic_client(server: ServerProcess) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_chat_with_openais_client(openai_client: Any, reference: Reference) -> None:
    expected = reference.answer(CHAT, TOKENS)
    count = len(reference.greedy(reference.chat(CHAT), TOKENS))
    answer = openai_client.chat.completions.create(**GREEDY)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        expected,
        "stop",
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(reference.chat(CHAT)),
        count,
    )
    events = [
        *openai_client.chat.completions.create(
            **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == expected
    assert len(events) > 5
    assert events[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": events[-1].usage.prompt_tokens_details}
    )
    cut = openai_client.chat.completions.create(**GREEDY, stop=[" is"]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (expected.partition(" is")[0], "stop")
    short = openai_client.chat.completions.create(**{**GREEDY, "max_tokens": 3}).choices[0]
    assert expected.startswith(short.message.content)
    assert short.finish_reason == "length"


def test_chat_with_anthropics_client(anthropic_client: Any, reference: Reference) -> None:
    expected = reference.answer(CHAT, TOKENS)
    given: Any = {
        "model": MODEL,
        "messages": CHAT,
        "max_tokens": TOKENS,
        "extra_body": {"temperature": 0},
    }
    answer = anthropic_client.messages.create(**given)
    assert (answer.content[0].text, answer.stop_reason) == (expected, "end_turn")
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(reference.chat(CHAT))
    assert usage.output_tokens == len(reference.greedy(reference.chat(CHAT), TOKENS))
    with anthropic_client.messages.stream(**given) as stream:
        parts = [*stream.text_stream]
    assert "".join(parts) == expected
    assert len(parts) > 3
    cut = anthropic_client.messages.create(**given, stop_sequences=[" is"])
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == (
        expected.partition(" is")[0],
        "stop_sequence",
        " is",
    )


def test_an_answer_follows_its_schema(server: ServerProcess) -> None:
    text = "Anna is 31 years old. Who is it? Answer in JSON with the keys name and age."
    form = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": Person.model_json_schema()},
    }
    body = {
        **GREEDY,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 200,
        "response_format": form,
    }
    answer = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert Person.model_validate_json(answer["message"]["content"]) == Person(name="Anna", age=31)


def test_a_tool_is_called_and_its_result_read(server: ServerProcess, reference: Reference) -> None:
    asked: Any = {
        "role": "user",
        "content": "What is the weather in Paris? Call get_weather with the city.",
    }
    options = {"model": MODEL, "tools": [WEATHER], "max_tokens": 100, "temperature": 0}

    def answer(messages: list[Any], **more: Any) -> Any:
        response = server.client.post(
            "/v1/chat/completions", json={**options, "messages": messages, **more}
        )
        assert response.status_code == 200, response.text
        return response.json()

    first = answer([asked], tool_choice="required", parallel_tool_calls=False)["choices"][0]
    (call,) = first["message"]["tool_calls"]
    assert (first["finish_reason"], call["function"]["name"]) == ("tool_calls", "get_weather")
    arguments = json.loads(call["function"]["arguments"])
    assert "Paris" in arguments["city"]
    # The template of this model has no place for calls, so that the call counts as an empty answer.
    result = {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": "It is sunny, with 21 degrees.",
    }
    second = answer([asked, {"role": "assistant", "content": "", "tool_calls": [call]}, result])
    read = [
        asked,
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": result["content"]},
    ]
    assert second["usage"]["prompt_tokens"] == len(reference.chat(read))
    assert second["choices"][0]["message"]["content"] == reference.answer(read, 100)


def test_a_conversation_with_a_tool_goes_on(server: ServerProcess) -> None:
    """The template joins contents to texts, and prints neither tools nor calls: the answer says so."""

    def ask(path: str, **body: Any) -> Any:
        answer = server.client.post(path, json={"model": MODEL, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer

    asked = {"role": "user", "content": "How is the weather in Bern?"}
    demanded = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 80}
    answer = ask("/v1/chat/completions", messages=[asked], **demanded)
    assert answer.headers["X-Qsample-Ignored"] == "tools"
    said = answer.json()["choices"][0]["message"]
    (call,) = said["tool_calls"][:1]
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny, 22 degrees."}
    prompts = set()
    for content in (None, "", [], "absent"):
        calling = {**said, "content": content, "tool_calls": [call]}
        if content == "absent":
            del calling["content"]
        messages = [asked, calling, result]
        answer = ask("/v1/chat/completions", messages=messages, max_tokens=8, return_token_ids=True)
        assert answer.headers["X-Qsample-Ignored"] == "tool_calls"
        assert answer.json()["choices"][0]["message"]["content"].strip()
        prompts.add(tuple(answer.json()["prompt_token_ids"]))
    assert len(prompts) == 1
    items = [
        asked,
        {"type": "function_call", "call_id": "c", **call["function"]},
        {"type": "function_call_output", "call_id": "c", "output": result["content"]},
    ]
    response = ask("/v1/responses", input=items, max_output_tokens=8).json()
    blocks = [
        asked,
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "get_weather", "input": {"city": "Bern"}}
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": result["content"]}
        ]},
    ]  # fmt: skip
    message = ask("/v1/messages", messages=blocks, max_tokens=8).json()
    (length,) = {len(prompt) for prompt in prompts}
    assert response["usage"]["input_tokens"] == length
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == length
