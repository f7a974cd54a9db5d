"""A server as a process: uvicorn with limits for connections; on a signal, running requests may end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from qsample.addons.serve.app import ACCESS_LOG, make_app
from qsample.addons.serve.hosts import is_loopback
from qsample.addons.serve.models import ServedModels
from qsample.addons.serve.settings import DEFAULT_PORT, ServeSettings
from qsample.errors import QsampleError, shown

MOST_HEAD: Final = 2**16  # bytes of a request's line and headers; uvicorn's number for h11
SECONDS: Final = 60.0  # in which a request has to arrive, or a new connection to send one
_SLICE: Final = (
    2**14
)  # bytes that are parsed at once; asyncio's pieces may hold thousands of pipelined requests
_PIPELINED: Final = 16  # requests of a connection that wait for earlier answers
_OVERHEAD: Final = 16  # bytes on the wire for a byte of a body, in chunks of a byte
_BACKLOG: Final = 2048  # connections that wait to be accepted; uvicorn's number
_MOST_CONNECTIONS: Final = 65_536  # each is an open file, and many systems begin with 1,024
_LOGGING: Final = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": "INFO", "propagate": False}
        for name in ("uvicorn", ACCESS_LOG)
    },
}
_LAST_WORDS: Final = 5  # seconds for the last events of answers; slow readers are cut off then


def run(
    settings: ServeSettings,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    ready: Callable[[str], object] = lambda url: None,
    **options: Any,
) -> None:
    """Serve until a signal comes; a second signal does not wait for running requests.

    Args:
        host, port: the address to listen on; port 0 takes a free port.
        ssl_keyfile, ssl_certfile: PEM files of a key without a password and its certificate, for https. The second may
            hold both.
        ready: called with the address as soon as the server answers there.
        options: of `uvicorn.Config`, such as log_level.

    Raises QsampleError if the address or the certificate cannot be used, or if a model cannot be loaded.
    """
    _check_certificate(ssl_keyfile, ssl_certfile)
    with _listen(host, port) as listening:  # first: loading may take long
        if not settings.allowed_hosts and is_loopback(host):
            settings = replace(settings, allowed_hosts=("localhost",))
        models = ServedModels(settings)
        app = make_app(settings, models)
        refused = partial(app.state.server.count_exchange, "other")
        config = uvicorn.Config(
            app,
            http=limited_protocol(app.state.server.most_body(), refused),
            ws="none",
            log_config=_LOGGING,
            access_log=False,  # `Exchanges` writes it
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout) + _LAST_WORDS,
            server_header=False,
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
            **options,
        )
        logging.getLogger(ACCESS_LOG).setLevel(logging.getLogger("uvicorn.error").level)
        _raise_open_files()
        port = listening.getsockname()[1]
        ready(
            f"http{'' if ssl_certfile is None else 's'}://{f'[{host}]' if ':' in host else host}:{port}"
        )
        _Server(config, models, settings.drain_timeout).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends the answers that still run after the drain timeout with an error event; uvicorn would cut them off."""

    def __init__(self, config: uvicorn.Config, models: ServedModels, drain_timeout: float) -> None:
        super().__init__(config)
        self._models = models
        self._drain_timeout = drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The process exits with 0 after a first signal. A second signal forces the end, and is raised again then."""
        if self.should_exit:
            super().handle_exit(sig, frame)
            self.force_exit = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # every second
            close_late(self.server_state.connections)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_late())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_late(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await asyncio.to_thread(self._models.close)


def limited_protocol(
    most_body: int, refused: Callable[[int, str], object], seconds: float = SECONDS
) -> type[asyncio.Protocol]:
    """A class of connections for `uvicorn.Config(http=...)`. A request has to arrive in `seconds`; the application
    refuses bodies of more than `most_body` bytes. `refused` is called with a status and a reason for each request that
    does not reach the application; the status is 0 if the connection was closed without an answer."""

    class Limited(HttpToolsProtocol):
        """began: monotonic seconds; None between two requests: uvicorn limits that time."""

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
            if (
                self.cycle is None or self.cycle.response_complete
            ):  # otherwise an answer is on its way
                self.transport.write(
                    b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                )
            self.transport.close()

        def close_late(self, now: float) -> None:
            """Close the connection if its request is overdue."""
            answers = (
                self.cycle is not None
                and not self.cycle.more_body
                and not self.cycle.response_complete
            )
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


def _raise_open_files() -> None:
    """Raise the process's limit of open files to the system's."""
    if sys.platform == "win32":  # has none
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _MOST_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _check_certificate(keyfile: str | None, certfile: str | None) -> None:
    if keyfile is None and certfile is None:
        return
    reason = "there is no certificate"
    if certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
            return
        except OSError as error:  # ssl's, too
            reason = str(error)
    given = f"ssl_certfile {shown(certfile)}, ssl_keyfile {shown(keyfile)}"
    raise QsampleError(
        f"cannot serve https with {given} ({reason}); give PEM files of a certificate and its plain key"
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server appends the address to the reason; getaddrinfo has other numbers and texts.
        reason = str(error.strerror).partition(" (while")[0]
        raise QsampleError(
            f"cannot listen on {host}, port {port} ({reason}); give another host or port"
        ) from None
