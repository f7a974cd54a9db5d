"""The application in this process: what is missing, what breaks, and what a client's own texts bring."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from qsample.addons.serve.choices import ChatChoice
from qsample.addons.serve.http import EventStream
from qsample.addons.serve.parsers import REASONING_FORMATS, ReasoningFormat
from qsample.ort.buffers import OutputRing
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, Engine, Request, SamplingParams, Step
from qsample.runtime.call import Call
from qsample.runtime.decode.loop import DecodeLoop

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "And the LORD spake unto Moses"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LocalApp = Callable[..., TestClient]


@pytest.fixture(scope="module")
def client(local_app: LocalApp) -> Iterator[TestClient]:
    with local_app(slots=4) as running:
        yield running


def events(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(line.removeprefix("data: "))
        for line in text.splitlines()
        if line.startswith("data: {")
    ]


def on_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"guided_json": {"type": "object"}}),
        (COMPLETIONS, {"structured_outputs": {"choice": ["a", "b"]}}),
        (COMPLETIONS, {"guided_grammar": 'root ::= "a"'}),
        (COMPLETIONS, {"guided_regex": "a+", "stream": True}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_without_llguidance_a_form_is_not_followed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = client.post(path, json={**prompt, "max_tokens": 4, **body})
    assert answer.status_code == 501
    assert "lacks llguidance" in answer.json()["error"]["message"]
    assert client.post(path, json={**prompt, "max_tokens": 4}).status_code == 200


def test_without_jinja2_no_messages_are_taken(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_chat(self: Tokenizer, *arguments: object) -> str:
        raise ImportError("chat templates need jinja2: install it")

    monkeypatch.setattr(Tokenizer, "render_chat", render_chat)
    for path in (CHAT, "/tokenize"):
        answer = client.post(path, json={"messages": MESSAGES})
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "missing_module")
        assert "jinja2" in answer.json()["error"]["message"]


def failing_after(calls: int) -> Callable[[DecodeLoop], None]:
    """A step of the loop that fails from its call number `calls` + 1 on."""
    step, numbers = DecodeLoop.step, count(1)

    def failing(self: DecodeLoop) -> None:
        if next(numbers) > calls:
            raise OSError("the device has gone")
        step(self)

    return failing


def test_an_engine_that_fails(local_app: LocalApp, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "In the beginning", "max_tokens": 50, "ignore_eos": True}
    with local_app() as client:
        assert client.get("/health").json() == {"status": "ok"}
        monkeypatch.setattr(DecodeLoop, "step", failing_after(5))
        first = client.post(COMPLETIONS, json=body)
        assert first.status_code == 500
        assert "the device has gone" in first.json()["error"]["message"]
        health = client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "error", "ended": ["tiny"]})
        second = client.post(COMPLETIONS, json=body)
        assert (second.status_code, second.json()["error"]["type"]) == (500, "server_error")
        assert client.get("/metrics").status_code == 200


def test_an_engine_that_fails_in_a_stream(
    local_app: LocalApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_app() as client:
        monkeypatch.setattr(DecodeLoop, "step", failing_after(5))
        body = {"messages": MESSAGES, "max_tokens": 50, "ignore_eos": True, "stream": True}
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 200  # it had begun
    assert events(answer.text)[-1]["error"]["type"] == "server_error"
    assert answer.text.endswith("data: [DONE]\n\n")


def failed(self: object, *arguments: object) -> None:
    raise KeyError("a mistake of the server's")


def test_keys_sizes_and_what_a_page_of_another_origin_reads(
    local_app: LocalApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, body = "https://a.example", {"messages": MESSAGES, "max_tokens": 4}
    with local_app(
        cors_origins=(origin,), api_keys=("one", " two\n"), max_body_bytes=500
    ) as client:

        def ask(
            key: str, body: dict[str, Any] | None = None, content: Any = None
        ) -> tuple[int, str]:
            headers = {
                "Origin": origin,
                "Authorization": f"Bearer {key}",
                "Content-Type": "application/json",
            }
            answer = client.post(CHAT, json=body, content=content, headers=headers)
            assert answer.headers["access-control-allow-origin"] == origin
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"Retry-After", "X-Request-Id", "X-Qsample-Ignored"} == {*exposed}
            return answer.status_code, answer.json()["error"][
                "code"
            ] if answer.status_code != 200 else ""

        assert ask("one", body) == ask("two", body) == (200, "")
        assert ask("three", body) == ask("on", body) == (401, "invalid_api_key")
        assert ask("one", {}) == (400, "missing_required_parameter")
        assert ask("one", body | {"user": "x" * 500}) == (413, "request_too_large")
        assert ask("one", content=(b" " * 100 for _ in range(6))) == (
            413,
            "request_too_large",
        )  # of no announced size
        assert client.get("/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200
        foreign = client.get("/health", headers={"Origin": "https://b.example"})
        assert (foreign.status_code, "access-control-allow-origin" in foreign.headers) == (
            200,
            False,
        )
        text = client.get("/metrics").text
        assert 'qsample:num_slots{model_name="tiny"}' in text
        for status, reason, count in (
            *((200, "", 2), (401, "invalid_api_key", 2), (413, "request_too_large", 2)),
            (400, "missing_required_parameter", 1),
        ):
            labels = f'handler="{CHAT}",reason="{reason}",status="{status}"'
            assert f"qsample:http_requests_total{{{labels}}} {count:.1f}\n" in text
        monkeypatch.setattr(ChatChoice, "whole", failed)
        assert ask("one", body) == (500, "internal_error")  # nothing expected it
        # An answer that has begun is what it is: no second one behind it.
        monkeypatch.setattr(EventStream, "__call__", begun_and_failed)
        answer = client.post(
            CHAT, json=body | {"stream": True}, headers={"Authorization": "Bearer one"}
        )
        assert (answer.status_code, answer.content) == (200, b"")


async def begun_and_failed(self: object, scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise KeyError("a mistake of the server's")


def test_a_package_that_is_replaced_while_it_is_served(
    local_app: LocalApp, served_package: Path, tmp_path: Path
) -> None:
    """What was opened is served, to the last file."""
    own = tmp_path / "package"
    shutil.copytree(served_package, own)
    form = {"prompt": "x", "max_tokens": 20, "guided_choice": ["yes"]}
    with local_app(models={"tiny": str(own)}) as client:
        # Another tokenizer's texts, token for token.
        described = json.loads((own / "tokenizer.json").read_text())
        vocabulary = described["model"]["vocab"]
        described["model"]["vocab"] = dict(
            zip(vocabulary, reversed(vocabulary.values()), strict=True)
        )
        (own / "tokenizer.json").write_text(json.dumps(described))
        client.app.state.server.models.find("tiny").__dict__.pop("token_texts")  # type: ignore[attr-defined]
        assert client.post(COMPLETIONS, json=form).json()["choices"][0]["text"] == "yes"
        texts = client.post(
            "/tokenize", json={"prompt": "In the", "return_token_strs": True}
        ).json()["token_strs"]
        assert "".join(texts).endswith("In the")


@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_stands_in_the_log(
    local_app: LocalApp,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    monkeypatch.setattr(
        logging.getLogger("uvicorn"), "propagate", True
    )  # a server in this process turns it off
    body = {"messages": MESSAGES, "max_tokens": 20, "ignore_eos": True, "stream": stream}
    with local_app() as client:
        with monkeypatch.context() as patched:
            patched.setattr(ChatChoice, "piece", failed)
            answer = client.post(CHAT, json=body)
            if stream:  # of an answer that is whole, uvicorn does it
                assert events(answer.text)[-1]["error"]["code"] == "internal_error"
                assert 'KeyError: "a mistake of the server\'s"' in caplog.text
        caplog.clear()
        assert client.post(CHAT, json={**body, "max_tokens": 0}).status_code == 400
        assert not caplog.text
        monkeypatch.setattr(DecodeLoop, "step", failing_after(5))
        assert "the device has gone" in client.post(CHAT, json=body).text
        assert "OSError: the device has gone" in caplog.text
        assert ", in failing" in caplog.text  # where


@pytest.mark.parametrize("shown", [True, False])
def test_thoughts_have_a_field(
    client: TestClient,
    local_app: LocalApp,
    masked_package: Path,
    served_model: CausalLM,
    monkeypatch: pytest.MonkeyPatch,
    shown: bool,
) -> None:
    # The model writes no marks; a word that it writes stands for one.
    params = SamplingParams(max_new_tokens=60, eos_token_id=())
    body = {"messages": MESSAGES, "max_tokens": 60, "seed": 5, "ignore_eos": True, "logprobs": True}
    tokens = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    whole = served_model.generate([tokens], params, seed=5).texts
    assert whole is not None
    word = whole[0].split()[8]
    thoughts, _, answer = whole[0].partition(word)
    monkeypatch.setitem(
        REASONING_FORMATS, "deepseek_r1", ReasoningFormat("<think>", word, from_start=True)
    )  # type: ignore[index]
    with local_app(reasoning_parser="deepseek_r1") as thinking:
        choice = thinking.post(CHAT, json={**body, "include_reasoning": shown}).json()["choices"][0]
        streamed = events(
            thinking.post(CHAT, json={**body, "include_reasoning": shown, "stream": True}).text
        )
    masks = {"tiny": str(masked_package)}
    with local_app(reasoning_parser="deepseek_r1", models=masks) as thinking:
        held = thinking.post(
            CHAT, json={**body, "ignore_eos": False, "guided_choice": ["yes"]}
        ).json()
    message = choice["message"]
    assert message["content"] == answer.lstrip()
    assert (
        message.get("reasoning")
        == message.get("reasoning_content")
        == (thoughts.strip() if shown else None)
    )
    assert len(choice["logprobs"]["content"]) == 60
    deltas = [event["choices"][0]["delta"] for event in streamed]
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    # What follows a form by masks is the form from its first token on; test_thoughts.py has tables.
    assert held["choices"][0]["message"]["content"] == "yes"
    assert "reasoning" not in held["choices"][0]["message"]


def test_arguments_of_calls_are_objects_to_a_template(
    local_app: LocalApp, served_model: CausalLM
) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )

    def prompt(arguments: object) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
        answer = client.post("/tokenize", json={"messages": messages})
        assert answer.status_code == 200, answer.text
        assert served_model.tokenizer is not None
        return served_model.tokenizer.decode(answer.json()["tokens"])

    with local_app(chat_template=template) as client:
        assert '{"a": 1}' in prompt('{"a": 1}')
        assert prompt('{"a": 1}') == prompt({"a": 1})
        assert prompt("") == prompt({})
        assert "not json" in prompt("not json")  # a model may have written that


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_tokens_in_the_text(client: TestClient, stream: bool) -> None:
    """Also of tokens whose text is held, because it may be the beginning of a stop string."""
    body = {"prompt": "In the", "max_tokens": 24, "seed": 1, "logprobs": 1}
    text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    stop = [text[start : start + 20] + "#" for start in (0, 4, 22, 30)]
    answer = client.post(COMPLETIONS, json={**body, "stop": stop, "stream": stream})
    parts = [
        event["choices"][0]["logprobs"]
        for event in (events(answer.text) if stream else [answer.json()])
    ]
    pairs = [
        pair
        for part in filter(None, parts)
        for pair in zip(part["text_offset"], part["tokens"], strict=True)
    ]
    assert len(pairs) == 24
    assert all(text[offset:].startswith(token) for offset, token in pairs)


def test_answers_of_late_reads(
    client: TestClient, local_app: LocalApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read every four steps, as on a GPU, answers and log-probabilities stay, and what none asks for is not read."""
    ranked = {"logprobs", "top_logprob_ids", "top_logprobs"}
    asked: list[tuple[dict[str, Any], set[str]]] = [
        ({}, set()),
        ({"guided_regex": "[a-z]{9}"}, set()),
        ({"logprobs": 0}, {"logprobs"}),
        ({"logprobs": 2, "n": 3, "stop": ["e", "th"]}, ranked),
        ({"logprobs": 2, "guided_regex": "[a-z]{9}"}, ranked),
        ({"logprobs": 1, "echo": True}, ranked),
    ]

    def choices(running: TestClient, body: dict[str, Any]) -> Any:
        body = {"prompt": "In the beginning", "max_tokens": 15, "seed": 1, **body}
        whole, streamed = (
            running.post(COMPLETIONS, json={**body, "stream": stream}) for stream in (False, True)
        )
        parts = [event["choices"][0] for event in events(streamed.text)]
        pairs = [
            (one["index"], *pair)
            for one in parts
            if one["logprobs"]
            for pair in zip(
                one["logprobs"]["tokens"], one["logprobs"]["token_logprobs"], strict=True
            )
        ]
        texts = [
            "".join(one["text"] for one in parts if one["index"] == index)
            for index in range(body.get("n", 1))
        ]
        return whole.json()["choices"], sorted(pairs, key=lambda pair: pair[0]), texts

    wanted = [choices(client, body) for body, _ in asked]
    read: set[str] = set()
    steps: set[int] = set()
    plain = OutputRing.read

    def noted(self: OutputRing, given: range, name: str, rows: range) -> Any:
        read.add(name)
        steps.add(len(given))
        return plain(self, given, name, rows)

    monkeypatch.setattr(OutputRing, "read", noted)
    monkeypatch.setattr("qsample.runtime.engine.choose_flush_every", lambda *_: 4)
    with local_app(slots=4) as late:
        for (body, names), answers in zip(asked, wanted, strict=True):
            read.clear()
            assert choices(late, body) == answers
            assert read == names
    assert max(steps) == 4


def test_every_answer_follows_a_form_of_its_own(client: TestClient) -> None:
    body = {
        "prompt": "In the",
        "n": 4,
        "max_tokens": 60,
        "seed": 1,
        "temperature": 2,
        "guided_regex": "[a-z]{1,9}[0-9]",
    }
    choices = client.post(COMPLETIONS, json=body).json()["choices"]
    texts = [choice["text"] for choice in choices]
    assert all(re.fullmatch("[a-z]{1,9}[0-9]", text) for text in texts), texts
    assert len({*texts}) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_prompts_and_answers(client: TestClient, stream: bool) -> None:
    """As vLLM: of a completion beside each choice, of a chat beside all of them, streamed once at the start."""
    options = {
        "n": 2,
        "max_tokens": 5,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    prompts = [
        client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        for text in ("In the", "And")
    ]
    answer = client.post(COMPLETIONS, json={"prompt": ["In the", "And"], **options})
    choices = [
        one
        for event in (events(answer.text) if stream else [answer.json()])
        for one in event["choices"]
    ]
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        given = [choice["prompt_token_ids"] for choice in own if "prompt_token_ids" in choice]
        assert given == [prompts[index // 2]]
        assert "prompt_token_ids" in own[0]
        assert sum(len(choice.get("token_ids", [])) for choice in own) == 5
    prompt = client.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    answer = client.post(CHAT, json={"messages": MESSAGES, **options})
    whole = events(answer.text) if stream else [answer.json()]
    assert whole[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in event for event in whole[1:])
    tokens = [choice.get("token_ids", []) for event in whole for choice in event["choices"]]
    assert sum(map(len, tokens)) == 10


def test_texts_of_tokens_are_made_at_the_start(local_app: LocalApp) -> None:
    with local_app() as client:
        assert "token_texts" in vars(client.app.state.server.models.find("tiny"))  # type: ignore[attr-defined]


def test_without_a_tokenizer_there_are_no_texts(local_app: LocalApp) -> None:
    with local_app() as client:
        client.app.state.server.models.find("tiny").model.tokenizer = None  # type: ignore[attr-defined]
        body = {"prompt": [5, 6], "max_tokens": 4, "return_token_ids": True}
        answer = client.post(COMPLETIONS, json={**body, "ignore_eos": True})
        assert len(answer.json()["choices"][0]["token_ids"]) == 4
        for more, what in (
            ({"logprobs": 0}, "has no tokenizer; leave them out"),
            ({"prompt": "x"}, "has no tokenizer"),
            ({"stop": "x"}, "the package has no tokenizer"),
            ({"echo": True}, "has no tokenizer"),
        ):
            answer = client.post(COMPLETIONS, json={**body, **more})
            assert (answer.status_code, what in answer.json()["error"]["message"]) == (400, True), (
                answer.text
            )


def test_models_with_and_without_a_slash(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert client.get("/v1/models/").json() == listed
    assert client.get("/v1/models/tiny").json() == listed["data"][0]
    assert listed["data"][0]["capabilities"] == {"completion_chat": True, "vision": False}


def test_a_model_without_a_chat_template_takes_no_chats(local_app: LocalApp) -> None:
    with local_app(chat_template=None) as client:
        assert client.get("/v1/models/tiny").json()["capabilities"] == {
            "completion_chat": False,
            "vision": False,
        }


def test_n_answers_read_their_prompt_once(client: TestClient) -> None:
    engine = client.app.state.server.models.find("tiny").engine  # type: ignore[attr-defined]
    before = engine.stats().prefixes
    prompt = "And the LORD spake unto Aaron, saying, " * 20
    answer = client.post(COMPLETIONS, json={"prompt": prompt, "n": 4, "max_tokens": 8}).json()
    after, tokens = engine.stats().prefixes, answer["usage"]["prompt_tokens"]
    assert tokens > 150
    assert after.prompt_tokens - before.prompt_tokens == 4 * tokens
    assert after.cached_tokens - before.cached_tokens == 3 * (
        tokens - 2
    )  # of the same prompt, all but the last two


def test_without_a_seed_no_two_answers_are_the_same(client: TestClient) -> None:
    body = {"prompt": ["In the beginning"] * 3, "n": 2, "max_tokens": 24, "ignore_eos": True}
    choices = client.post(COMPLETIONS, json=body).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 6
    same = client.post(COMPLETIONS, json={**body, "seed": 7}).json()["choices"]
    assert [choice["text"] for choice in same[:2]] * 3 == [choice["text"] for choice in same]


def test_every_token_of_a_prompt_is_read(client: TestClient, served_model: CausalLM) -> None:
    pad = served_model.generation_config.pad_token_id
    assert pad not in (None, served_model.generation_config.eos_token_id)
    params = SamplingParams(max_new_tokens=12)
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"prompt": [5, pad, 6, pad]}, [5, pad, 6, pad]),
        ({"prompt": "<pad>", "add_special_tokens": False}, [pad]),
    ]
    for body, ids in cases:
        answer = client.post(
            COMPLETIONS, json={**body, "max_tokens": 12, "seed": 3, "return_token_ids": True}
        ).json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        whole = served_model.generate([ids], params, seed=3, attention_mask=[[1] * len(ids)])
        assert answer["choices"][0]["token_ids"] == whole.token_ids[0]


@pytest.mark.parametrize("prompt", ["", [[]]])
def test_an_empty_prompt_begins_a_text(
    client: TestClient, served_model: CausalLM, prompt: Any
) -> None:
    body = {
        "prompt": prompt,
        "add_special_tokens": False,
        "max_tokens": 12,
        "seed": 3,
        "return_token_ids": True,
    }
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    expected = served_model.generate([[0]], SamplingParams(max_new_tokens=12), seed=3)  # <s>
    assert answer.json()["choices"][0]["token_ids"] == expected.token_ids[0]


def test_many_prompts_hold_up_nobody(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many are not encoded at all, and long ones not on the event loop, however short each is."""
    on_the_loop: list[bool] = []
    plain = Tokenizer.encode

    def encode(self: Tokenizer, text: str, **options: bool) -> list[int]:
        on_the_loop.append(on_an_event_loop())
        return plain(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    many = client.post(COMPLETIONS, json={"prompt": ["x"] * 5000, "max_tokens": 1})
    assert "5000 answers were requested at once" in many.json()["error"]["message"]
    assert not on_the_loop
    assert client.post(COMPLETIONS, json={"prompt": ["x", "y"], "max_tokens": 1}).status_code == 200
    assert on_the_loop == [True, True]
    long = client.post(COMPLETIONS, json={"prompt": ["and " * 1750] * 3, "max_tokens": 1})
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert on_the_loop[2:] == [False] * 3


def test_all_answers_to_a_request_get_places_or_none(
    local_app: LocalApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, asked, plain = threading.Event(), count(), Engine.add

    def hold(step: Step | None, mask: np.ndarray) -> None:
        if step is not None:
            going.wait(60)

    def add(self: Engine, *arguments: Any, **options: Any) -> list[Request]:
        next(asked)
        return plain(self, *arguments, **options)

    with local_app(slots=1, max_waiting=3) as client:
        engine = client.app.state.server.models.find("tiny").engine  # type: ignore[attr-defined]
        options: Any = {"max_new_tokens": 2, "eos_token_id": (), "allowed_tokens": hold}
        held = [engine.add_request([5, 6], **options) for _ in range(2)]
        monkeypatch.setattr(Engine, "add", add)
        full = client.post(COMPLETIONS, json={"prompt": "x", "n": 3, "max_tokens": 1})
        assert (full.status_code, full.headers["retry-after"]) == (429, "1"), full.text
        assert next(asked) == 0
        going.set()
        assert [len(request.result(60).token_ids) for request in held] == [2, 2]
        assert (
            client.post(COMPLETIONS, json={"prompt": "x", "n": 3, "max_tokens": 1}).status_code
            == 200
        )


def test_what_a_server_tells_its_engine(
    local_app: LocalApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Call] = []
    priorities: list[int] = []
    plain = Engine.add

    def add(self: Engine, call: Call, *, priority: int, **options: Any) -> list[Request]:
        given.append(call)
        priorities.append(priority)
        return plain(self, call, priority=priority, **options)

    monkeypatch.setattr(Engine, "add", add)
    spinning = ("session.intra_op.allow_spinning", "session.inter_op.allow_spinning")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"request_timeout": 30.0}, "0"),
        ({"spinning": True}, ""),
    ]
    for settings, entry in cases:
        with local_app(**settings) as client:
            body = {
                "prompt": "x",
                "max_tokens": 1,
                "priority": -3,
                "seed": 7,
                "stop": ["y", "z"],
                "n": 2,
            }
            assert client.post(COMPLETIONS, json=body).status_code == 200
            model = client.app.state.server.models.find("tiny").model  # type: ignore[attr-defined]
            options = model.sessions.decoder.get_session_options()
            assert [_entry(options, name) for name in spinning] == [entry, entry]
    assert [call.seed for call in given] == [7, 8, 7, 8]
    # The time counts from the beginning of the request.
    times = [call.max_time for call in given]
    assert times[2:] == [None, None]
    assert all(time is not None and 0 < time <= 30 for time in times[:2])
    assert all(call.stop_strings == ["y", "z"] for call in given)
    assert priorities == [-3] * 4


def _entry(options: Any, name: str) -> str:
    try:
        return str(options.get_session_config_entry(name))
    except RuntimeError:  # it was not set
        return ""


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "model 'tiny' reads text only",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "model 'tiny' reads text only",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 99_999}]}, "characters"),
        (CHAT, {"messages": [{"role": "user", "content": "1 2 3 " * 200}]}, "give at most 511"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "takes no chat templates"),
        (
            CHAT,
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 9},
            "this package returns 5",
        ),
        (COMPLETIONS, {"prompt": "x" * 99_999}, "characters"),
        (COMPLETIONS, {"prompt": [5] * 512}, "give at most 511"),
        (COMPLETIONS, {"prompt": [99_999]}, "99999 is not a token"),
        (COMPLETIONS, {"prompt": ["x"] * 131, "n": 2}, "262 answers were requested at once"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "give a prompt, or messages"),
        ("/tokenize", {}, "give a prompt, or messages"),
        ("/detokenize", {"tokens": [99_999]}, "99999 is not a token"),
    ],
)
def test_every_limit_is_checked(
    client: TestClient, path: str, body: dict[str, Any], words: str
) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), (
        answer.text
    )


SAID = {"messages": MESSAGES, "max_tokens": 2, "seed": 1}


@pytest.mark.parametrize(
    ("call", "body", "status", "found"),
    [
        ("GET /health", None, 200, '{"status":"ok"}'), ("GET /version", None, 200, '{"version":'),
        ("GET /metrics", None, 200, 'num_slots{model_name="tiny"} 4.0'), ("GET /v1/models/none", None, 404, "'none'"),
        ("POST /v1/responses", {"input": "x", "max_output_tokens": 2}, 200, '"object":"response"'),
        ("POST /v1/messages", SAID, 200, '"type":"message"'), ("POST /v1/messages/count_tokens", SAID, 200, "input_"),
        ("POST /tokenize", {"prompt": "In"}, 200, '{"count":2,"max_model_len":512,"tokens":[0,'),
        ("POST /detokenize", {"tokens": [0]}, 200, '{"prompt":"<s>"}'), ("GET /ping", None, 200, "ok"),
        ("POST /ping", None, 200, "ok"), ("HEAD /", None, 200, ""), ("HEAD /health", None, 200, ""),
        ("HEAD /v1/models", None, 200, ""), ("GET /", None, 200, "<textarea"), ("GET /nothing", None, 404, "/docs"),
        ("POST /v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, 404, "--lora-dir"),
        ("POST /v1/unload_lora_adapter", {"lora_name": "a"}, 404, "--lora-dir"),
    ],
)  # fmt: skip
def test_endpoints(client: TestClient, call: str, body: Any, status: int, found: str) -> None:
    method, path = call.split()
    answer = client.request(method, path, json=body)
    assert (answer.status_code, found in answer.text) == (status, True), answer.text


def test_endpoints_of_openai_that_are_not_done_here(client: TestClient) -> None:
    whole = "embeddings moderations images/edits audio/speech fine_tuning/jobs responses/r/cancel"
    either = "videos realtime conversations files batches assistants threads vector_stores"
    for name in (*whole.split(), *either.split(), *(f"{name}/x" for name in either.split())):
        for method in ("GET", "POST", "DELETE"):
            answer = client.request(method, f"/v1/{name}")
            code = answer.json()["error"]["code"]
            assert (answer.status_code, code) == (404, "unsupported_endpoint")
