"""Status codes, limits, disconnects and the end of a real server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.testclient import TestClient

import qsample
from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.http import JsonBody, JsonRoute, add_error_handlers, json_bytes
from qsample.addons.serve.requests import CompletionRequest
from qsample.runtime import CausalLM, SamplingParams
from tests.helpers.requests import wait_until
from tests.helpers.servers import ServerProcess, post_all

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "In the beginning", "max_tokens": 400, "ignore_eos": True}


def test_tokens_and_back(server: ServerProcess, served_model: CausalLM) -> None:
    assert served_model.tokenizer is not None
    text = "In the beginning God created"
    body = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert body["tokens"] == served_model.tokenizer.encode(text)
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 512)
    assert "".join(body["token_strs"]) == "<s>" + text
    back = server.client.post("/detokenize", json={"tokens": body["tokens"]}).json()
    assert back["prompt"] == "<s>" + text


def test_prompts_of_token_ids_and_echo(server: ServerProcess, served_model: CausalLM) -> None:
    assert served_model.tokenizer is not None
    ids = served_model.tokenizer.encode("In the")
    body = {
        "prompt": [ids, ids],
        "max_tokens": 5,
        "seed": 1,
        "echo": True,
        "return_token_ids": True,
    }
    choices = server.client.post(COMPLETIONS, json=body).json()["choices"]
    output = served_model.generate([ids], SamplingParams(max_new_tokens=5), seed=1)
    assert [choice["token_ids"] for choice in choices] == output.token_ids * 2
    assert output.texts is not None
    assert choices[0]["text"] == served_model.tokenizer.decode(ids) + output.texts[0]


def test_large_bodies_hold_up_nobody(server: ServerProcess) -> None:
    """Python's lock is let go while a long text is encoded, and a million ids are looked at once."""
    body = json.dumps({"prompt": "and the LORD said unto him, " * 60_000}).encode()
    sent, encoded = threading.Event(), threading.Event()
    answers = 0

    def parts() -> Iterator[bytes]:
        yield body
        sent.set()

    def ask() -> None:
        nonlocal answers
        sent.wait(120)
        with httpx.Client(timeout=120) as client:
            while not encoded.is_set():
                assert client.get(server.url + "/health").status_code == 200
                answers += not encoded.is_set()

    asking = threading.Thread(target=ask)
    asking.start()
    with server.client.stream(
        "POST", "/tokenize", content=parts(), headers={"Content-Type": "application/json"}
    ) as answer:
        encoded.set()
        answer.read()
    asking.join()
    assert answer.status_code == 200
    assert answer.json()["count"] > 100_000
    print(f"{answers} answers of /health meanwhile")
    # Hundreds, however busy the machine is, because both take longer there; ten where the event loop waits.
    assert answers >= 40
    many = server.client.post(COMPLETIONS, json={"prompt": [5] * 1_000_000})
    assert many.json()["error"]["code"] == "context_length_exceeded"


def test_a_token_list_in_pieces(server: ServerProcess, served_model: CausalLM) -> None:
    """A long list is written by a thread, piece by piece; the body is that of a short list."""
    assert served_model.tokenizer is not None
    text = "and the LORD said unto him, " * 10_000
    body = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert body["tokens"] == served_model.tokenizer.encode(text)
    assert len(body["tokens"]) > 2**16
    assert "".join(body["token_strs"]) == "<s>" + text
    assert [*body] == ["count", "max_model_len", "tokens", "token_strs"]


def test_an_id_that_each_event_has_is_short(server: ServerProcess) -> None:
    longest = {"prompt": "x", "max_tokens": 2, "request_id": "r" * 256}
    assert server.client.post(COMPLETIONS, json=longest).json()["id"] == "cmpl-" + "r" * 256
    for path, field in (
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = server.client.post(path, json={**field, "request_id": "r" * 257})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
        assert len(answer.content) < 500


def test_bodies_of_a_million_errors_hold_up_nobody(server: ServerProcess) -> None:
    """Each is half a body of 4 MB; noting all errors took half a minute, in which nobody was answered."""
    million = "[" + ",".join("0" for _ in range(1_000_000)) + "]"
    for path, body, param in (
        (
            COMPLETIONS,
            f'{{"prompt": {million}}}',
            "prompt",
        ),  # a million good ids, in which nothing is wrong but the number
        (COMPLETIONS, f'{{"stop": {million}}}', "stop"),
        (COMPLETIONS, f'{{"guided_choice": {million}}}', "guided_choice.0"),
        (CHAT, f'{{"messages": {million}}}', "messages.0"),
        (CHAT, f'{{"messages": [{{}}], "documents": {million}, "tools": {million}}}', "tools.0"),
    ):
        answer = server.client.post(
            path, content=body, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        kind = CompletionRequest if path == COMPLETIONS else ChatCompletionRequest
        if param != "prompt":
            with pytest.raises(ValidationError) as noted:
                kind.of(json.loads(body.replace(million, str([0] * 1000))))
            assert noted.value.error_count() < 10


def test_probes(server: ServerProcess) -> None:
    assert server.client.get("/version").json() == {"version": qsample.__version__}
    for answer in (server.client.get("/ping"), server.client.post("/ping")):
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_heads_and_ids(server: ServerProcess) -> None:
    for path in ("/", "/health", "/v1/models"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (
        server.client.get("/health", headers={"X-Request-Id": "a-1"}).headers["x-request-id"]
        == "a-1"
    )
    for given in ("x" * 129, "a b", "a;b", ""):
        own = server.client.get("/v1/nothing", headers={"X-Request-Id": given}).headers[
            "x-request-id"
        ]
        assert own != given
        assert len(own) == 32
    assert any(
        re.search(r'^\d{4}-\S+ \S+ INFO 127\S+ "GET /health" 200 0\.\d+s a-1$', line)
        for line in server.log
    )


def test_docs_without_the_internet(local_app: Callable[..., TestClient]) -> None:
    pytest.importorskip(
        "fastapi_offline", reason="it brings the files of /docs: pip install fastapi-offline"
    )
    with local_app() as client:
        page = client.get("/docs").text
        links = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert len(links) == 3
        for link in [*links, "openapi.json"]:
            assert client.get("/" + link).status_code == 200
        assert "http" not in page.replace("http-equiv", "")
        assert client.get("/docs/core.py").status_code == 404


def test_a_stream_has_no_line_ends_within_an_event() -> None:
    """Python's splitlines, and clients that use it, end a line at these characters."""
    text = "a\x85b\u2028c\u2029d\x1ce\x0bf"
    assert len(json_bytes({"text": text}).decode().splitlines()) == 1
    assert json.loads(json_bytes({"text": text})) == {"text": text}


def test_the_page_and_the_description(server: ServerProcess) -> None:
    page = server.client.get("/")
    assert "<textarea" in page.text
    assert "unsafe" not in page.headers["content-security-policy"].replace(
        "style-src 'unsafe-inline'", ""
    )
    for name in ("markdown.js", "markdown-it.esm.min.mjs"):
        script = server.client.get(f"/markdown/{name}")
        assert script.status_code == 200
        assert script.headers["content-type"].startswith("text/javascript")
        assert script.headers["cache-control"] == "no-cache"
    for name in ("", "LICENSE", "../page.py", "..%2fpage.py", "%00"):
        assert server.client.get(f"/markdown/{name}").status_code == 404
    assert CHAT in server.client.get("/openapi.json").json()["paths"]


def test_a_client_that_goes_frees_its_slot(server: ServerProcess) -> None:
    for stream in (True, False):
        leaves = httpx.Timeout(60, read=0.5)
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(COMPLETIONS, json={**LONG, "n": 64, "stream": False}, timeout=leaves)
        if stream:
            with server.client.stream(
                "POST", COMPLETIONS, json={**LONG, "stream": True, "n": 8}
            ) as answer:
                next(answer.iter_lines())
        wait_until(
            lambda: (
                server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0
            )
        )
    assert server.metric("request_success_total") > 0


class Empty(JsonBody):
    """A body; of the module, where FastAPI looks the annotation up."""


def test_what_a_client_asked_for_ends_when_it_leaves() -> None:
    """Before its answer begins, too: a grammar that is compiled for minutes, or a text that waits to be encoded."""

    ended: list[str] = []

    begun = asyncio.Event()

    async def endpoint(body: Empty) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    app = FastAPI()
    app.router.route_class = JsonRoute
    app.add_api_route("/", endpoint, methods=["POST"])
    add_error_handlers(app)
    arriving = [
        {"type": "http.request", "body": b"{}", "more_body": False},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        if len(arriving) == 1:
            await begun.wait()
        return arriving.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    assert ended == ["cancelled"]
    assert sent[0]["status"] == 499


def test_a_slow_reader_holds_no_slot(server: ServerProcess) -> None:
    address = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {**LONG, "stream": True, "return_token_ids": True, "logprobs": 5, "n": 4}
    ).encode()
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert connection.recv(100)
        wait_until(
            lambda: server.metric("num_requests_running") == 0
        )  # it has read a few bytes only
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        received = b""
        while b"[DONE]" not in received[-200:]:
            received += connection.recv(65536)
    assert received.count(b"data: ") > 1500


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
def test_prefixes_that_turn_hostile(
    start_server: Callable[..., ServerProcess], served_model: CausalLM, tmp_path: Path
) -> None:
    """A file that is written to gave NaN, cut off it ended the process, and a pipe held the engine up for ever."""
    rules, kept = "And the LORD spake unto Moses, saying, " * 20, tmp_path / "kept"
    length = served_model.save_prefix(rules, tmp_path / "rules")

    def ask(server: ServerProcess, prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 6, "seed": 1, "return_token_ids": True}
        answer = server.client.post(COMPLETIONS, json=body).json()
        wanted = served_model.generate(prompt, SamplingParams(max_new_tokens=6), seed=1).token_ids[
            0
        ]
        assert answer["choices"][0]["token_ids"] == wanted
        return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    with start_server(
        "--slots", "1", "--prefix", str(tmp_path / "rules"), "--prefix-cache-dir", str(kept)
    ) as server:
        for number, size in enumerate((200_000, 4096)):
            (tmp_path / "rules").write_bytes(b"\xff" * size)
            ask(
                server, f"{number} In the beginning God created the heaven and the earth. " * 8
            )  # the slot forgets
            assert ask(server, f"{rules}{number}") == length
        wait_until(lambda: len(list(kept.glob("*.safetensors"))) > 0)
        name = next(kept.glob("*.safetensors")).name
        os.mkfifo(kept / f"{name[:17]}{'0' * 32}.safetensors")
        header = b'{"__metadata__":' + b"[" * 100_000
        (kept / f"{name[:17]}{'1' * 32}.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header
        )
        assert ask(server, rules + "2") == length
        assert server.client.get("/health").status_code == 200


@pytest.mark.ci
def test_forty_at_once_on_eight_places(start_server: Callable[..., ServerProcess]) -> None:
    with start_server("--slots", "4", "--max-waiting", "4") as server:
        answers = post_all(
            server.url + COMPLETIONS,
            [{**LONG, "max_tokens": 480, "seed": seed} for seed in range(40)],
        )
        assert Counter(answer.status_code for answer in answers) == {200: 8, 429: 32}
        full = next(answer for answer in answers if answer.status_code == 429)
        assert int(full.headers["Retry-After"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
        labels = f'handler="{COMPLETIONS}",reason="rate_limit_exceeded",status="429"'
        assert (
            f"qsample:http_requests_total{{{labels}}} 32.0\n" in server.client.get("/metrics").text
        )


def test_what_takes_too_long_ends_with_what_it_has(local_app: Callable[..., TestClient]) -> None:
    with local_app(request_timeout=0.05, slots=1) as client:
        answer = client.post(COMPLETIONS, json={**LONG, "max_tokens": 500}).json()
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == (
            "length",
            "timeout",
        )
        assert answer["usage"]["completion_tokens"] < 500


@pytest.mark.ci
def test_two_thousand_malformed_bodies(server: ServerProcess) -> None:
    """Random changes of good bodies: whatever comes of them, it is no fault of the server's."""
    generator = random.Random(7)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    good: list[tuple[str, dict[str, Any]]] = [
        (
            COMPLETIONS,
            {
                "prompt": "x",
                "max_tokens": 1,
                "temperature": 1,
                "seed": 1,
                "stop": ["y"],
                "logprobs": 1,
            },
        ),
        (
            COMPLETIONS,
            {
                "prompt": [1, 2],
                "max_tokens": 1,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 1,
                "logit_bias": {"5": 1},
            },
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [tool]}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 1,
                "response_format": {"type": "text"},
            },
        ),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ]
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        1e308,
        2**70,
        "",
        "\ud83d",
        "x" * 50,
        "\x00",
        {},
        {"a": []},
    ]
    odd += [[], [[]], [None], [2**40], [-1]]
    keys = [
        "model",
        "n",
        "top_k",
        "min_p",
        "guided_json",
        "guided_grammar",
        "tool_choice",
        "request_id",
        "documents",
    ]
    statuses: Counter[int] = Counter()
    with httpx.Client(timeout=60) as client:
        for _ in range(2000):
            path, body = generator.choice(good)
            body = json.loads(json.dumps(body))
            for _ in range(generator.randint(1, 3)):
                key = generator.choice([*body, *keys])
                body[key] = generator.choice(odd)
            text = json.dumps(body)
            if generator.random() < 0.1:
                place = generator.randrange(len(text))
                text = (
                    text[:place]
                    + generator.choice(["", "}", '"', "\\", "\x01"])
                    + text[place + 1 :]
                )
            answer = client.post(
                server.url + path, content=text, headers={"Content-Type": "application/json"}
            )
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (text, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
    assert statuses[200] > 20
    assert statuses[400] > 500


@pytest.mark.ci
@pytest.mark.parametrize("streams", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_many_streams_of_which_a_third_leaves(
    server: ServerProcess, served_model: CausalLM, streams: int
) -> None:
    texts: dict[int, str] = {}
    errors: list[BaseException] = []

    def read(seed: int) -> None:
        body = {
            "prompt": "In the beginning",
            "max_tokens": 40,
            "seed": seed,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            while True:
                with server.client.stream("POST", COMPLETIONS, json=body) as answer:
                    if answer.status_code == 429:
                        answer.read()
                        time.sleep(0.1)
                        continue
                    assert answer.status_code == 200
                    text, count = "", 0
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                            count += 1
                            if seed % 3 == 0 and count == 5:
                                return
                    texts[seed] = text
                    return
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(streams)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not errors
    assert sorted(texts) == [seed for seed in range(streams) if seed % 3]
    params = SamplingParams(max_new_tokens=40, eos_token_id=())
    for seed, text in texts.items():
        expected = served_model.generate("In the beginning", params, seed=seed).texts
        assert expected is not None
        assert text == expected[0]
    wait_until(
        lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0
    )
