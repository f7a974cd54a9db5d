"""uvicorn's connections with limits: on the head of a request, and on the time that a request may take to arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD: Final = 2**16  # bytes of a request's line and headers; uvicorn's number for h11
SECONDS: Final = 60.0  # in which a request has to arrive, or a new connection to send one
_SLICE: Final = 2**14  # bytes that are parsed at once; asyncio's pieces may hold thousands of pipelined requests
_PIPELINED: Final = 16  # requests of a connection that wait for the answers to those before them
_OVERHEAD: Final = 16  # bytes on the wire for a byte of a body, in chunks of a byte


def limited_protocol(
    most_body: int, refused: Callable[[int, str], object], seconds: float = SECONDS
) -> type[asyncio.Protocol]:
    """A class of connections for `uvicorn.Config(http=...)`.

    Args:
        most_body: bytes of a body, beyond which the application refuses it.
        refused: called with a status and a reason for each request that does not reach the application; status 0 = the
            connection was closed without an answer.
        seconds: in which a request has to arrive.
    """

    class Limited(HttpToolsProtocol):
        """began: monotonic seconds; None = between two requests, a time that uvicorn limits by itself."""

        began: float | None = None
        _received = 0  # bytes of the request that arrives
        _in_head = True

        def connection_made(self, transport: Any) -> None:
            self.began = time.monotonic()
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            for start in range(0, len(data), _SLICE):
                if self.began is None:
                    self.began = time.monotonic()
                piece = data[start : start + _SLICE]
                self._received += len(piece)
                super().data_received(piece)
                if self.transport.is_closing():
                    return
                if len(self.pipeline) > _PIPELINED:
                    self._refuse(b"429 Too Many Requests", "too_many_pipelined")
                elif self._received > MOST_HEAD + (0 if self._in_head else most_body * _OVERHEAD):
                    self._refuse(b"431 Request Header Fields Too Large", "headers_too_large")

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self.began, self._received, self._in_head = None, 0, True
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            refused(400, "invalid_http")
            super().send_400_response(msg)

        def _refuse(self, status: bytes, reason: str) -> None:
            refused(int(status[:3]), reason)
            if self.cycle is None or self.cycle.response_complete:  # otherwise an answer is on its way
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

        def close_late(self, now: float) -> None:
            """Close the connection if its request is overdue."""
            answers = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
            if self.began is not None and now - self.began > seconds and not answers:
                refused(0, "request_too_slow")
                self.transport.abort()

    return Limited


def close_late(connections: Iterable[Any]) -> None:
    """Close the connections whose requests are overdue."""
    now = time.monotonic()
    for connection in list(connections):
        if hasattr(connection, "close_late"):
            connection.close_late(now)
