"""Connections whose requests do not come, come slowly, or come with too much."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn

from qsample.serve.connections import close_late, limited_protocol


class Counted:
    """A server in this process whose requests may take half a second to arrive. It answers with the size of a body."""

    def __init__(self) -> None:
        self.refused: list[tuple[int, str]] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        text = str(size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
        await send({"type": "http.response.body", "body": text})

    async def answers(self, *pieces: bytes, pause: float = 0.0) -> bytes:
        """Everything that a client gets that sends these pieces, and then waits for the server to close."""
        protocol = limited_protocol(100_000, lambda *refusal: self.refused.append(refusal), seconds=0.5)
        config = uvicorn.Config(
            self._app, http=protocol, interface="asgi3", lifespan="off", log_config=None, timeout_keep_alive=1
        )
        server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())

        async def watch() -> None:
            while True:
                close_late(server.server_state.connections)
                await asyncio.sleep(0.05)

        async def write() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)

        watching, writing = asyncio.create_task(watch()), asyncio.create_task(write())
        got = b""
        try:
            while piece := await asyncio.wait_for(reader.read(2**16), 10):
                got += piece
        except ConnectionResetError:
            pass
        watching.cancel()
        writing.cancel()
        writer.close()
        server.should_exit = True
        await serving
        return got


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: "


@pytest.mark.parametrize(
    ("pieces", "pause", "status", "refused"),
    [
        ([HEAD + b"3\r\n\r\nabc"], 0.0, b"HTTP/1.1 200 OK", []),
        ([HEAD + b"3\r\n\r\n", b"abc"], 0.2, b"HTTP/1.1 200 OK", []),
        ([], 0.0, b"", [(0, "request_too_slow")]),
        ([b"P", b"O", b"S", b"T", b" ", b"/", b" "] * 9, 0.1, b"", [(0, "request_too_slow")]),
        ([HEAD + b"99\r\n\r\n", *[b"a"] * 60], 0.05, b"", [(0, "request_too_slow")]),
        ([HEAD + b"3\r\n\r\nabc", HEAD, *[b"0"] * 60], 0.05, b"HTTP/1.1 200 OK", [(0, "request_too_slow")]),
        ([b"GET / HTTP/1.1\r\na: " + b"a" * 200_000], 0.0, b"HTTP/1.1 431 ", [(431, "headers_too_large")]),
        ([b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 50_000], 0.0, b"HTTP/1.1 431 ", [(431, "headers_too_large")]),
        ([b"GET /" + b"a" * 200_000], 0.0, b"HTTP/1.1 431 ", [(431, "headers_too_large")]),
        ([HEAD + b"90000\r\n\r\n" + b"a" * 90_000], 0.0, b"HTTP/1.1 200 OK", []),
        ([b"GET / HTTP/1.1\r\n\r\n" * 10_000], 0.0, b"", [(429, "too_many_pipelined")]),
        ([b"no HTTP\r\n\r\n"], 0.0, b"HTTP/1.1 400 ", [(400, "invalid_http")]),
    ],
)
def test_a_request_has_a_size_and_a_time(
    pieces: list[bytes], pause: float, status: bytes, refused: list[tuple[int, str]]
) -> None:
    server = Counted()
    got = asyncio.run(server.answers(*pieces, pause=pause))
    assert got.startswith(status)
    assert bool(got) == bool(status)
    assert server.refused == refused
