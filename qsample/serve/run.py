"""A server as a process: uvicorn, which on SIGTERM and SIGINT takes no more requests and finishes those that run."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

import uvicorn

from qsample.errors import QsampleError
from qsample.serve.app import ACCESS_LOG, make_app
from qsample.serve.connections import close_late, limited_protocol
from qsample.serve.models import ServedModels
from qsample.serve.settings import DEFAULT_PORT, ServeSettings

_BACKLOG: Final = 2048  # connections that wait to be accepted; uvicorn's number
_MOST_CONNECTIONS: Final = 65_536  # each is an open file, and many systems begin with 1,024
_LOGGING: Final = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        name: {"handlers": ["stderr"], "level": "INFO", "propagate": False} for name in ("uvicorn", ACCESS_LOG)
    },
}
_LAST_WORDS: Final = 5  # seconds for the last events of answers; slow readers are cut off then


def run(
    settings: ServeSettings,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    ready: Callable[[str], object] = lambda url: None,
    **options: Any,
) -> None:
    """Serve until a signal comes; a second signal does not wait for running requests.

    Args:
        settings: the models and limits.
        host, port: the address to listen on; port 0 takes a free port.
        ready: called with the address as soon as the server answers there.
        options: of `uvicorn.Config`, such as log_level.

    Raises QsampleError if the address cannot be used, or if a model cannot be loaded.
    """
    with _listen(host, port) as listening:  # first: loading may take long
        models = ServedModels(settings)
        app = make_app(settings, models)
        refused = partial(app.state.server.count_exchange, "other")
        config = uvicorn.Config(
            app,
            http=limited_protocol(settings.max_body_bytes, refused),
            ws="none",
            log_config=_LOGGING,
            access_log=False,  # `Exchanges` writes it
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout) + _LAST_WORDS,
            server_header=False,
            **options,
        )
        logging.getLogger(ACCESS_LOG).setLevel(logging.getLogger("uvicorn.error").level)
        _raise_open_files()
        port = listening.getsockname()[1]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        _Server(config, models, settings.drain_timeout).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends the answers that still run after the drain timeout with an error event; uvicorn would cut them off."""

    def __init__(self, config: uvicorn.Config, models: ServedModels, drain_timeout: float) -> None:
        super().__init__(config)
        self._models = models
        self._drain_timeout = drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for the end that comes now, and the process exits with 0. A second one forces it, and
        is raised again at the end."""
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


def _raise_open_files() -> None:
    """Let the process open as many files as the system allows it."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _MOST_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server appends the address to the reason; getaddrinfo has its own numbers, with texts of their own.
        reason = str(error.strerror).partition(" (while")[0]
        raise QsampleError(f"cannot listen on {host}, port {port} ({reason}); give another host or port") from None
