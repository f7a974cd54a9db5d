"""A hostile client against a real server, which stays alive, answers /health within a second, and keeps its memory."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.helpers.grammars import SLOW, chained
from tests.helpers.servers import ServerProcess, watched

pytestmark = pytest.mark.slow
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def post(server: ServerProcess, path: str, body: Any, timeout: float = 120) -> httpx.Response:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=timeout)


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"null"}' + "}" * depth


def million(item: str, size: int = 4_000_000) -> str:
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(count)) + f'r{count}: "b"'


LARGE: list[tuple[str, str, int]] = [
    (COMPLETIONS, f'{{"prompt": "x", "guided_json": {json.dumps(chained(1000))}}}', 400),
    (COMPLETIONS, f'{{"prompt": "x", "guided_json": {nested(940)}}}', 400),
    (COMPLETIONS, f'{{"prompt": "x", "guided_json": {nested(100_000)}}}', 400),
    (COMPLETIONS, json.dumps({"prompt": "x", "guided_grammar": rules(2709)}), 400),
    (
        COMPLETIONS,
        json.dumps(
            {
                "prompt": "x",
                "guided_grammar": rules(2709).replace("start", "root").replace(":", " ::="),
            }
        ),
        400,
    ),
    (
        COMPLETIONS,
        json.dumps(
            {"prompt": "x", "guided_choice": [f"choice number {n}" for n in range(100_000)]}
        ),
        400,
    ),
    (COMPLETIONS, json.dumps({"prompt": "x", "guided_regex": SLOW}), 400),
    (COMPLETIONS, f'{{"stop": {million("0")}}}', 400),
    (COMPLETIONS, f'{{"guided_choice": {million("0")}}}', 400),
    (COMPLETIONS, f'{{"bad_words": {million("0")}}}', 400),
    (COMPLETIONS, f'{{"prompt": {million("[]")}}}', 400),
    (COMPLETIONS, f'{{"prompt": {million("5")}}}', 400),
    (COMPLETIONS, f'{{"prompt": {million(json.dumps("x"))}}}', 400),
    (COMPLETIONS, '{"logit_bias": {' + ",".join(f'"{n}":""' for n in range(350_000)) + "}}", 400),
    (COMPLETIONS, "{" + ",".join(f'"k{n}":0' for n in range(250_000)) + "}", 400),
    (COMPLETIONS, json.dumps({"prompt": "and the LORD " * 300_000}), 400),
    (COMPLETIONS, '{"prompt": "' + "\\ud83d\\ude00" * 300_000 + '"}', 400),
    (COMPLETIONS, '{"seed": ' + "9" * 4_000_000 + "}", 400),
    (
        COMPLETIONS,
        '{"temperature": 0.' + "1" * 4_000_000 + ', "prompt": "x", "max_tokens": 1}',
        200,
    ),
    (COMPLETIONS, "[" * 4_000_000, 400),
    (COMPLETIONS, '{"a":' * 600_000, 400),
    (CHAT, f'{{"messages": {million("0")}}}', 400),
    (CHAT, f'{{"messages": {million("{}")}}}', 400),
    (CHAT, f'{{"messages": [{{"role": "user", "content": {million("{}")}}}]}}', 400),
    (
        CHAT,
        f'{{"messages": [{{"role": "user", "content": "x"}}], "documents": {million("0")}}}',
        400,
    ),
    (CHAT, f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": {million("0")}}}', 400),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": "and the LORD " * 300_000}]}), 400),
    (CHAT, f'{{"messages": {million(json.dumps({"role": "user", "content": "x"}))}}}', 400),
    ("/tokenize", json.dumps({"prompt": "and the LORD " * 300_000}), 200),
    ("/detokenize", f'{{"tokens": {million("5")}}}', 200),
    ("/detokenize", f'{{"tokens": {million(json.dumps(""))}}}', 400),
]


@pytest.fixture(scope="module")
def hostile_server(start_server: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    with start_server("--slots", "4", "--max-waiting", "16", "--no-access-log") as running:
        yield running


@pytest.mark.parametrize(("path", "body", "status"), LARGE, ids=[f"{n}" for n in range(len(LARGE))])
def test_large_bodies(hostile_server: ServerProcess, path: str, body: str, status: int) -> None:
    with watched(hostile_server):
        answer = post(hostile_server, path, body)
    assert answer.status_code == status, answer.text[:300]


def test_eight_large_bodies_at_once(hostile_server: ServerProcess) -> None:
    bodies = [LARGE[index] for index in range(7, len(LARGE))]
    random.Random(3).shuffle(bodies)
    with watched(hostile_server), ThreadPoolExecutor(8) as pool:
        statuses = list(
            pool.map(lambda case: post(hostile_server, *case[:2], timeout=400).status_code, bodies)
        )
    assert statuses == [status for _, _, status in bodies]


def test_grammars_whose_clients_leave(hostile_server: ServerProcess) -> None:
    def leave(number: int) -> None:
        with suppress(httpx.TimeoutException):
            post(
                hostile_server,
                COMPLETIONS,
                {"prompt": "x", "guided_regex": f"{SLOW}{number}"},
                timeout=1.0,
            )

    with watched(hostile_server):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(8)))
        began = time.monotonic()
        answer = post(
            hostile_server,
            COMPLETIONS,
            {"prompt": "x", "max_tokens": 4, "guided_regex": "[a-z]{4}"},
        )
        assert answer.status_code == 200
        assert time.monotonic() - began < 8  # a grammar may take 10 s


def test_264_requests_with_long_stop_strings(hostile_server: ServerProcess) -> None:
    bodies = [
        {
            "prompt": "x",
            "max_tokens": 400,
            "stop": ["".join(random.Random(n).choices("abcdef", k=2048))],
        }
        for n in range(264)
    ]
    with watched(hostile_server), ThreadPoolExecutor(64) as pool:
        statuses = Counter(
            pool.map(lambda body: post(hostile_server, COMPLETIONS, body).status_code, bodies)
        )
    assert set(statuses) <= {200, 429}


def raw(
    server: ServerProcess, pieces: Sequence[bytes], pause: float = 0.0, close_writing: bool = False
) -> bytes:
    """What the server sends back until it closes, or for three seconds."""
    host, port = server.url.removeprefix("http://").split(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=3) as connection, suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
        if close_writing:
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            got += piece
    return got


def request(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size = b"Content-Length: %d\r\n" % (len(body) if length is None else length)
    return head + size + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


GOOD = b'{"prompt": "x", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([b"\x00" * 1000], b"400"),
        ([b"GET /health HTTP/9.9\r\n\r\n"], b"400"),
        ([b"GET " + b"/" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"], b"404"),
        ([b"GET /%00%1b[31m%0a HTTP/1.1\r\nHost: localhost\r\n\r\n"], b"404"),
        ([b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\x1b[31mb\r\n\r\n"], b"400"),
        ([b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200_000], b"431"),
        ([b"GET /health HTTP/1.1\r\na: " + b"b" * 100_000_000], b"431"),
        ([b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000], b"429"),
        ([request(GOOD)], b"200"),
        ([request(GOOD, length=3)], b"400"),
        ([request(GOOD, length=5 * 2**20)], b"413"),
        ([request(GOOD, b"Content-Length: 4")], b"400"),
        ([request(GOOD, b"Transfer-Encoding: chunked")], b"400"),
        ([request(GOOD, b"Expect: 100-continue")], b"100"),
        ([request(GOOD, b"Upgrade: websocket", b"Connection: Upgrade")], b"400"),
        ([request(b'{"prompt": NaN}')], b"400"),
        ([request(b'{"temperature": 1e999}')], b"400"),
        ([request(b'{"temperature": -Infinity}')], b"400"),
        ([request(b'{"prompt": "x", "prompt": 5}')], b"400"),
        ([request(b'{"prompt": "\xff\xfe"}')], b"400"),
        ([request(b'{"prompt": "\\ud800"}')], b"400"),
        ([request(b'{"prompt": "x", "__proto__": {}}')], b"400"),
        ([request("\u202e{".encode() * 10_000)], b"400"),
        ([request(b"\x1f\x8b" + b"\x00" * 1000, b"Content-Encoding: gzip")], b"400"),
    ],
    ids=range(24),
)
def test_raw_bytes(hostile_server: ServerProcess, pieces: list[bytes], status: bytes) -> None:
    with watched(hostile_server):
        got = raw(hostile_server, pieces)
    # A client that sends more than the server reads may find the connection reset before it sees the answer.
    assert got.startswith(b"HTTP/1.1 " + status) or (status in (b"429", b"431") and not got), got[
        :300
    ]


def test_half_closed_and_cut_connections(hostile_server: ServerProcess) -> None:
    whole = request(b'{"prompt": "x", "max_tokens": 200, "stream": true, "ignore_eos": true}')
    with watched(hostile_server), ThreadPoolExecutor(16) as pool:
        cuts = [whole[:size] for size in range(0, len(whole), 2)] + [whole] * 50
        list(pool.map(lambda piece: raw(hostile_server, [piece], close_writing=True), cuts))
        deadline = time.monotonic() + 60
        while hostile_server.metric("num_requests_running") + hostile_server.metric(
            "num_requests_waiting"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_fifteen_hundred_open_connections(hostile_server: ServerProcess) -> None:
    """More than the 1,024 files that many systems allow a process at first; each sends a byte now and then."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("the system allows fewer open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    host, port = hostile_server.url.removeprefix("http://").split(":")
    connections = []
    try:
        with watched(hostile_server):
            for _ in range(1500):
                connections.append(socket.create_connection((host, int(port)), timeout=10))
                connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: ")
            for connection in connections:
                connection.sendall(b"x")
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_1200_clients_are_counted(start_server: Callable[..., ServerProcess]) -> None:
    """Every answer that a client saw is in /metrics, by its status and reason."""
    seen: Counter[tuple[int, str]] = Counter()
    bodies = [
        {"prompt": "In the beginning", "max_tokens": 16, "seed": number, "stream": number % 3 == 0}
        if number % 4
        else {"prompt": "x", "unknown": number}
        for number in range(1200)
    ]
    with (
        start_server("--slots", "4", "--max-waiting", "32", "--api-key", "one") as server,
        watched(server),
    ):
        limits = httpx.Limits(
            max_connections=300, max_keepalive_connections=0
        )  # the server closes idle ones
        with httpx.Client(timeout=300, limits=limits) as client, ThreadPoolExecutor(300) as pool:

            def send(number: int) -> tuple[int, str]:
                headers = {"Authorization": "Bearer " + ("two" if number % 10 == 3 else "one")}
                answer = client.post(server.url + COMPLETIONS, json=bodies[number], headers=headers)
                if answer.status_code == 200:
                    return 200, ""
                return answer.status_code, answer.json()["error"]["code"]

            seen.update(pool.map(send, range(1200)))
        text = server.client.get("/metrics").text
    counted = {
        (int(status), reason): int(float(count))
        for reason, status, count in re.findall(
            rf'^qsample:http_requests_total{{handler="{COMPLETIONS}",reason="(\w*)",status="(\d+)"}} (\S+)$',
            text,
            re.M,
        )
    }
    print(counted)
    assert counted == dict(seen)
    assert sum(counted.values()) == 1200
    assert counted[429, "rate_limit_exceeded"] > 100
    assert counted[401, "invalid_api_key"] == 120
