"""A server as a process: uvicorn with limits for connections. On a signal, running requests may
end."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from qsample.addons.serve.app import ACCESS_LOG, make_app
from qsample.addons.serve.hosts import is_loopback
from qsample.addons.serve.models import ServedModels
from qsample.addons.serve.settings import DEFAULT_PORT, ServeSettings
from qsample.errors import QsampleError, shown

# The limit of a request's line and headers. It is uvicorn's number for h11.
MAX_HEAD_BYTES: Final = 2**16
# A new connection has the same time to send its first request.
MAX_SECONDS_OF_A_REQUEST: Final = 60.0
# A piece that asyncio reads may hold thousands of pipelined requests, so it is parsed in parts.
_PARSED_BYTES: Final = 2**14
# These requests of a connection wait for earlier answers.
_MAX_PIPELINED_REQUESTS: Final = 16
# A body that is sent in chunks of a byte has this size on the wire for each byte.
_MAX_BYTES_SENT_FOR_A_BYTE: Final = 16
# The connections that wait to be accepted. It is uvicorn's number.
_BACKLOG: Final = 2048
# Each connection is an open file, and many systems begin with a limit of 1,024.
_MAX_CONNECTIONS: Final = 65_536
_LOG_CONFIG: Final = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": "INFO", "propagate": False}
        for name in ("uvicorn", ACCESS_LOG)
    },
}
_TICKS_A_SECOND: Final = 10
# The time for the last events of answers. Slow readers are cut off after it.
_LAST_EVENTS_SECONDS: Final = 5


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
    """Serve until a signal comes. A second signal does not wait for running requests.

    Args:
        settings: the models and the limits.
        host, port: the address to listen on; port 0 takes a free port.
        ssl_keyfile, ssl_certfile: the PEM files of a key without a password and of its certificate,
            for https. The second file may hold both.
        ready: a function that is called with the address as soon as the server answers there.
        options: further arguments of `uvicorn.Config`, such as log_level.

    Raises:
        QsampleError: the address or the certificate cannot be used, or a model cannot be loaded.
    """
    _check_certificate(ssl_keyfile, ssl_certfile)
    # Loading the models may take long, so the address is tried first.
    with _listen(host, port) as listening:
        if not settings.allowed_hosts and is_loopback(listening.getsockname()[0]):
            settings = replace(settings, allowed_hosts=(host,))
        models = ServedModels(settings)
        app = make_app(settings, models)
        limits = RequestLimits(
            app.state.server.max_body_bytes(),
            report_refusal=partial(app.state.server.count_exchange, "other"),
        )
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits),
            ws="none",
            log_config=_LOG_CONFIG,
            access_log=False,  # `Exchanges` writes the log.
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout) + _LAST_EVENTS_SECONDS,
            server_header=False,
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
            **options,
        )
        logging.getLogger(ACCESS_LOG).setLevel(logging.getLogger("uvicorn.error").level)
        _raise_open_files()
        port = listening.getsockname()[1]
        scheme = "http" if ssl_certfile is None else "https"
        address = f"[{host}]" if ":" in host else host
        ready(f"{scheme}://{address}:{port}")
        _Server(config, models, settings.drain_timeout).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends the answers that still run after the drain timeout with an error event. uvicorn would
    cut them off."""

    def __init__(self, config: uvicorn.Config, models: ServedModels, drain_timeout: float) -> None:
        super().__init__(config)
        self._models = models
        self._drain_timeout = drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. The process exits with 0 after a first signal; a second signal forces the
        end and is raised again then."""
        if self.should_exit:
            super().handle_exit(sig, frame)
            self.force_exit = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        is_new_second = counter % _TICKS_A_SECOND == 0
        if is_new_second:
            close_late(self.server_state.connections)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_models_late())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_models_late(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await asyncio.to_thread(self._models.close)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of requests on their way to the application.

    Attributes:
        max_body_bytes: the largest size of a body that the application reads.
        report_refusal: a function of a status and a reason. It is called for each request that does
            not reach the application. The status is 0 if the connection is closed without an
            answer.
        max_seconds: the time in which a request has to arrive.
    """

    max_body_bytes: int
    report_refusal: Callable[[int, str], object]
    max_seconds: float = MAX_SECONDS_OF_A_REQUEST


class LimitedProtocol(HttpToolsProtocol):
    """A connection that refuses requests beyond its limits.

    Attributes:
        limits: the limits of the connection's requests.
        request_began: the monotonic time, in seconds, at which the request that arrives began. It
            is None between two requests, a time that uvicorn limits.
    """

    limits: ClassVar[RequestLimits]
    request_began: float | None = None
    _received_bytes = 0
    _is_in_head = True

    def connection_made(self, transport: Any) -> None:
        self.request_began = time.monotonic()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PARSED_BYTES):
            if self.request_began is None:
                self.request_began = time.monotonic()
            piece = data[start : start + _PARSED_BYTES]
            self._received_bytes += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if len(self.pipeline) > _MAX_PIPELINED_REQUESTS:
                self._refuse(b"429 Too Many Requests", "too_many_pipelined")
            elif self._received_bytes > self._max_received_bytes():
                self._refuse(b"431 Request Header Fields Too Large", "headers_too_large")

    def _max_received_bytes(self) -> int:
        if self._is_in_head:
            return MAX_HEAD_BYTES
        return MAX_HEAD_BYTES + self.limits.max_body_bytes * _MAX_BYTES_SENT_FOR_A_BYTE

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.request_began = None
        self._received_bytes = 0
        self._is_in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.limits.report_refusal(400, "invalid_http")
        super().send_400_response(msg)

    def _refuse(self, status: bytes, reason: str) -> None:
        self.limits.report_refusal(int(status[:3]), reason)
        # Otherwise, the answer to an earlier request is on its way.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(
                b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
        self.transport.close()

    def close_late(self, now: float) -> None:
        """Close the connection if its request is overdue.

        Args:
            now: the monotonic time, in seconds.
        """
        if self.request_began is None or now - self.request_began <= self.limits.max_seconds:
            return
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.more_body and not cycle.response_complete
        if not is_answering:
            self.limits.report_refusal(0, "request_too_slow")
            self.transport.abort()


def limited_protocol(request_limits: RequestLimits) -> type[LimitedProtocol]:
    """A class of connections for `uvicorn.Config(http=...)`."""

    class Connection(LimitedProtocol):
        limits = request_limits

    return Connection


def close_late(connections: Iterable[Any]) -> None:
    """Close the connections whose requests are overdue."""
    now = time.monotonic()
    for connection in list(connections):
        if hasattr(connection, "close_late"):
            connection.close_late(now)


def _raise_open_files() -> None:
    """Raise the process's limit of open files to the system's limit."""
    if sys.platform == "win32":  # Windows has no such limit.
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_certificate(keyfile: str | None, certfile: str | None) -> None:
    if keyfile is None and certfile is None:
        return
    reason = "there is no certificate"
    if certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
            return
        except OSError as error:  # The errors of ssl are OSErrors also.
            reason = str(error)
    given = f"ssl_certfile {shown(certfile)}, ssl_keyfile {shown(keyfile)}"
    raise QsampleError(
        f"cannot serve https with {given} ({reason}); "
        "give PEM files of a certificate and its plain key"
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
