"""Connections whose requests do not come, come slowly, or come with too much."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

import uvicorn

from qsample.addons.serve.run import RequestLimits, close_late, limited_protocol

MAX_SECONDS = 1.0
TOO_SLOW = (0, "request_too_slow")
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
LAST = HEAD + b"connection: close\r\n"
# What a client sends, in pieces; the seconds between two pieces; how the answer begins, b"" = none; the refusal.
CASES: list[tuple[list[bytes], float, bytes, tuple[int, str] | None]] = [
    ([LAST + b"content-length: 3\r\n\r\nabc"], 0.0, b"HTTP/1.1 200 OK", None),
    ([LAST + b"content-length: 3\r\n\r\n", b"abc"], 0.1, b"HTTP/1.1 200 OK", None),
    ([LAST + b"content-length: 90000\r\n\r\n" + b"a" * 90_000], 0.0, b"HTTP/1.1 200 OK", None),
    ([], 0.0, b"", TOO_SLOW),
    ([bytes([byte]) for byte in HEAD + b"a" * 600], 0.1, b"", TOO_SLOW),
    ([HEAD + b"content-length: 99\r\n\r\n", *[b"a"] * 600], 0.1, b"", TOO_SLOW),
    (
        [HEAD + b"content-length: 3\r\n\r\nabc", HEAD + b"a: ", *[b"0"] * 600],
        0.1,
        b"HTTP/1.1 2",
        TOO_SLOW,
    ),
    ([HEAD + b"a: " + b"a" * 200_000], 0.0, b"HTTP/1.1 431 ", (431, "headers_too_large")),
    (
        [HEAD + b"content-length: 3\r\n\r\nabc", HEAD + b"a: " + b"a" * 200_000],
        0.1,
        b"HTTP/1.1 2",
        (431, "headers_too_large"),
    ),
    ([HEAD + b"a: b\r\n" * 50_000], 0.0, b"HTTP/1.1 431 ", (431, "headers_too_large")),
    ([b"GET /" + b"a" * 200_000], 0.0, b"HTTP/1.1 431 ", (431, "headers_too_large")),
    (
        [HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 400_000],
        0.0,
        b"",
        (431, "headers_too_large"),
    ),
    ([b"GET / HTTP/1.1\r\n\r\n" * 10_000], 0.0, b"", (429, "too_many_pipelined")),
    ([b"no HTTP\r\n\r\n"], 0.0, b"HTTP/1.1 400 ", (400, "invalid_http")),
]


async def _size_of_the_body(scope: Any, receive: Any, send: Any) -> None:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


async def _answer(address: tuple[str, int], pieces: list[bytes], pause: float) -> bytes:
    """All that a client gets until the server closes the connection, which it does before the last of many pieces."""
    reader, writer = await asyncio.open_connection(*address)

    async def write() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    writing = asyncio.create_task(write())
    got = b""
    with suppress(ConnectionResetError):  # the rest of a refused request is not read
        while piece := await asyncio.wait_for(reader.read(2**16), 60):
            got += piece
    assert len(pieces) < 10 or not writing.done()
    writing.cancel()
    with suppress(asyncio.CancelledError, ConnectionError):
        await writing
    writer.close()
    return got


async def _all_answers() -> tuple[list[bytes], list[tuple[int, str]]]:
    refused: list[tuple[int, str]] = []
    limits = RequestLimits(
        100_000, lambda *refusal: refused.append(refusal), max_seconds=MAX_SECONDS
    )
    config = uvicorn.Config(
        _size_of_the_body,
        http=limited_protocol(limits),
        interface="asgi3",
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listening]))

    in_time = asyncio.Event()

    async def watch() -> None:
        """However busy the machine is, it is never too late for a request that is in time."""
        while not in_time.is_set():
            for connection in server.server_state.connections:
                connection.close_late((connection.request_began or 0) + 0.99 * MAX_SECONDS)
            await asyncio.sleep(0.05)
        while True:
            close_late(server.server_state.connections)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    address = listening.getsockname()
    asked = [asyncio.create_task(_answer(address, pieces, pause)) for pieces, pause, _, _ in CASES]
    await asyncio.gather(
        *(task for task, case in zip(asked, CASES, strict=True) if case[3] != TOO_SLOW)
    )
    in_time.set()
    answers = await asyncio.gather(*asked)
    watching.cancel()
    server.should_exit = True
    await serving
    return answers, refused


def test_a_request_has_a_size_and_a_time() -> None:
    answers, refused = asyncio.run(_all_answers())
    for (pieces, _, start, _), got in zip(CASES, answers, strict=True):
        assert got.startswith(start), (pieces[:1], got[:100])
        assert bool(got) == bool(start), (pieces[:1], got[:100])
    assert Counter(refused) == Counter(refusal for _, _, _, refusal in CASES if refusal is not None)
