"""The real `openai` client against a real server; the oracle is `generate` in this process."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from qsample.request.text.chat import ChatTemplates
from qsample.runtime import CausalLM, SamplingParams
from tests.helpers.servers import TOOL_TEMPLATE, ServerProcess

PROMPT = "And the LORD spake unto Moses"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[a-z]{3,8}$"},
                "days": {"$ref": "#/$defs/days"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
        },
    },
}


class Verse(BaseModel):
    book: Literal["Genesis", "Exodus"]
    chapter: int = Field(ge=1, le=50)


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def expected(served_model: CausalLM) -> Any:
    """What `generate` gives for a completion's fields."""

    def make(prompt: Any = PROMPT, *, seed: int, **options: Any) -> Any:
        return served_model.generate(prompt, SamplingParams(**options), seed=seed)

    return make


def test_completion_is_what_generate_gives(client: openai.OpenAI, expected: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0.7, top_p=0.9, seed=5
    )
    output = expected(seed=5, max_new_tokens=24, temperature=0.7, top_p=0.9)
    assert answer.choices[0].text == output.texts[0]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_defaults_are_openais(client: openai.OpenAI, expected: Any) -> None:
    # Temperature 1 and no filter: the model's generation_config, were it followed, would say otherwise.
    answer = client.completions.create(model="tiny", prompt=PROMPT, seed=11)
    output = expected(seed=11, max_new_tokens=16)
    assert answer.choices[0].text == output.texts[0]


def test_choices_have_the_seeds_after_the_first(client: openai.OpenAI, expected: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=[PROMPT, "In the"], max_tokens=12, n=2, seed=-3
    )
    wanted = [
        expected(prompt, seed=(2**63 - 3 + index) % 2**63, max_new_tokens=12).texts[0]
        for prompt in (PROMPT, "In the")
        for index in range(2)
    ]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_greedy_and_the_smallest_nucleus_are_the_same(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=seed, **options)
        .choices[0]
        .text
        for seed, options in [
            (1, {"temperature": 0}),
            (2, {"top_p": 0}),
            (3, {"temperature": 0, "n": 2}),
        ]
    }
    assert len(texts) == 1


def test_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "seed": 8, "n": 3}
    whole = client.completions.create(**options)
    texts, reasons, usage = {0: "", 1: "", 2: ""}, {}, None
    for event in client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usage = event.usage or usage
    assert [texts[index] for index in range(3)] == [choice.text for choice in whole.choices]
    assert set(reasons.values()) == {"length"}
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 90)


def test_async_streams_at_once(server: ServerProcess, expected: Any) -> None:
    async def text(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=20, seed=seed, stream=True
        )
        return "".join([event.choices[0].text async for event in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(text(client, seed) for seed in range(12)))

    texts = asyncio.run(run())
    assert texts == [expected(seed=seed, max_new_tokens=20).texts[0] for seed in range(12)]


def test_chat_follows_the_template(
    client: openai.OpenAI, served_model: CausalLM, expected: Any
) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 16, "seed": 2}
    answer = client.chat.completions.create(**options)
    assert served_model.tokenizer is not None
    text = ChatTemplates(TOOL_TEMPLATE).render(MESSAGES)
    prompt = served_model.tokenizer.encode(text, add_special_tokens=False)
    message, usage = answer.choices[0].message, answer.usage
    assert (message.role, message.content) == (
        "assistant",
        expected(prompt, seed=2, max_new_tokens=16).texts[0],
    )
    assert usage is not None
    assert usage.prompt_tokens == len(prompt)
    first, *events = client.chat.completions.create(**options, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == message.content
    assert events[-1].choices[0].finish_reason == "length"
    assert {event.id for event in events} == {first.id}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_package(
    client: openai.OpenAI, expected: Any, stream: bool
) -> None:
    options: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 8,
        "seed": 4,
        "logprobs": True,
    }
    output = expected(_prompt(client), seed=4, max_new_tokens=8)
    if stream:
        events = client.chat.completions.create(**options, top_logprobs=3, stream=True)
        parts = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
        entries = [entry for part in parts for entry in part.content or []]
    else:
        answer = client.chat.completions.create(**options, top_logprobs=3)
        assert answer.choices[0].logprobs is not None
        entries = list(answer.choices[0].logprobs.content or [])
    assert [entry.logprob for entry in entries] == pytest.approx(
        output.logprobs[0].tolist(), abs=1e-6
    )
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert [entry.top_logprobs[0].logprob for entry in entries] == pytest.approx(
        output.top_logprobs[0, :, 0].tolist(), abs=1e-6
    )
    assert (
        b"".join(bytes(entry.bytes or []) for entry in entries).decode().strip()
        == output.texts[0].strip()
    )
    assert all(math.isfinite(entry.logprob) for entry in entries)


def _prompt(client: openai.OpenAI) -> list[int]:
    body = client.post("../tokenize", cast_to=object, body={"messages": MESSAGES})
    tokens: list[int] = body["tokens"]  # type: ignore[index]
    return tokens


def test_stop_strings_and_biases(
    client: openai.OpenAI, served_model: CausalLM, expected: Any
) -> None:
    plain = expected(seed=3, max_new_tokens=40)
    word = plain.texts[0].split()[4]
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, seed=3, stop=[word]
    )
    assert answer.choices[0].text == plain.texts[0][: plain.texts[0].index(word)]
    assert answer.choices[0].finish_reason == "stop"
    first = plain.token_ids[0][0]
    banned = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, logit_bias={str(first): -100}
    )
    chosen = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, logit_bias={str(first): 100}
    )
    assert served_model.tokenizer is not None
    assert chosen.choices[0].text == served_model.tokenizer.decode([first])
    assert banned.choices[0].text != chosen.choices[0].text


def test_parse_gives_the_schemas_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Verse, max_tokens=900, seed=1, temperature=0.7
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Verse)


def answered(
    client: openai.OpenAI, stream: bool, **options: Any
) -> tuple[str | None, list[tuple[str, str]], str]:
    """The text of an answer, the names and arguments of its calls, and its finish reason."""
    options |= {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "seed": 9}
    if not stream:
        choice = client.chat.completions.create(**options).choices[0]
        functions: list[Any] = [call.function for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
        return (
            choice.message.content,
            [(made.name, made.arguments) for made in functions],
            choice.finish_reason,
        )
    parts: Any = [
        event.choices[0] for event in client.chat.completions.create(**options, stream=True)
    ]
    calls: list[list[str]] = []
    for one in (one for part in parts for one in part.delta.tool_calls or []):
        if one.id:
            assert (one.index, one.type) == (len(calls), "function")
            calls.append([one.function.name, ""])
        assert one.index == len(calls) - 1
        calls[-1][1] += one.function.arguments
    text = "".join(part.delta.content or "" for part in parts) or None
    if calls and parts[-1].finish_reason != "length":
        assert sum(bool(part.delta.tool_calls) for part in parts) > 3, (
            "arguments come as they are written"
        )
    return text, [(name, arguments) for name, arguments in calls], parts[-1].finish_reason


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_demanded_tools_are_called(client: openai.OpenAI, choice: Any) -> None:
    options: Any = {"tool_choice": choice, "parallel_tool_calls": False}
    whole = answered(client, False, max_tokens=200, **options)
    assert answered(client, True, max_tokens=200, **options) == whole
    text, ((name, arguments),), reason = whole
    assert (text, name) == (None, "get_weather")
    assert 3 <= len(json.loads(arguments)["city"]) <= 8
    assert 1 <= json.loads(arguments)["days"] <= 7
    assert reason == ("tool_calls" if choice == "required" else "stop")
    with pytest.raises(openai.BadRequestError, match="give at least") as wrong:
        answered(client, False, max_tokens=1, **options)
    assert wrong.value.param == "max_tokens"
    shortest = int(re.findall(r"\d+", wrong.value.message)[-1])
    for stream in (False, True):
        text, ((name, arguments),), reason = answered(
            client, stream, max_tokens=shortest, **options
        )
        assert (text, name, json.loads(arguments)["days"] in range(1, 8)) == (None, name, True)
        assert reason == ("tool_calls" if choice == "required" else "stop")
    # An answer that a stop string cuts off has what there is of a call, and never its JSON as a text.
    for stream in (False, True):
        text, calls, _ = answered(client, stream, max_tokens=200, stop=['", "days'], **options)
        assert text is None
        assert [cut for cut, _ in calls] == ["get_weather"]
        assert whole[1][0][1].startswith(calls[0][1])


def test_tools_are_found_in_the_text(client: openai.OpenAI) -> None:
    # The model knows no tools: a regular expression makes it write what one that does would write.
    arguments = r'\{"city": "[a-z]{3,8}", "days": [1-7]\}'
    call = (
        r'I see\. <tool_call>\n\{"name": "get_weather", "arguments": '
        + arguments
        + r"\}\n</tool_call>"
    )
    options: Any = {"max_tokens": 200, "extra_body": {"structured_outputs": {"regex": call}}}
    whole = answered(client, False, **options)
    assert answered(client, True, **options) == whole
    text, ((name, written),), reason = whole
    assert (text, name, reason) == ("I see. ", "get_weather", "tool_calls")
    assert re.fullmatch(arguments, written)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "qsample"
    with pytest.raises(openai.NotFoundError, match="does not exist here; there is 'tiny'"):
        client.models.retrieve("large")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="large", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="and " * 5000)
    assert long.value.code == "context_length_exceeded"
