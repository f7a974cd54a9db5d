"""A server as a process: uvicorn, which on SIGTERM and SIGINT takes no more requests and finishes those that run."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from qsample.errors import QsampleError
from qsample.serve.app import make_app
from qsample.serve.models import ServedModels
from qsample.serve.settings import DEFAULT_PORT, ServeSettings

_BACKLOG: Final = 2048  # connections that wait to be accepted; uvicorn's number
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
        config = uvicorn.Config(
            app,
            timeout_graceful_shutdown=math.ceil(settings.drain_timeout) + _LAST_WORDS,
            server_header=False,
            **options,
        )
        port = listening.getsockname()[1]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        _Server(config, models, settings.drain_timeout).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends the answers that still run after the drain timeout with an error event; uvicorn would cut them off."""

    def __init__(self, config: uvicorn.Config, models: ServedModels, drain_timeout: float) -> None:
        super().__init__(config)
        self._models = models
        self._drain_timeout = drain_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_late())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_late(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        await asyncio.to_thread(self._models.close)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server appends the address to the reason; getaddrinfo has its own numbers, with texts of their own.
        reason = str(error.strerror).partition(" (while")[0]
        raise QsampleError(f"cannot listen on {host}, port {port} ({reason}); give another host or port") from None
