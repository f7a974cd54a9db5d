"""A server as a process: uvicorn, which on SIGTERM and SIGINT takes no more requests and lets those that run end."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from qsample.errors import QsampleError
from qsample.serve.app import make_app
from qsample.serve.served_model import ServedModels
from qsample.serve.settings import DEFAULT_PORT, ServeSettings

_BACKLOG: Final = 2048  # connections that wait to be taken; uvicorn's number
_LAST_WORDS: Final = 5  # seconds to tell clients that their answers have ended; those that read slowly are cut then


def run(
    settings: ServeSettings,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    ready: Callable[[str], object] = lambda url: None,
    **options: Any,
) -> None:
    """Serve until a signal comes; a second one does not wait for those that run.

    host, port: where to listen; port 0 takes a free one. ready: called with the address, once it is answered. options:
    of `uvicorn.Config`, log_level say.
    Raises QsampleError where nothing can listen there, and where a model cannot be loaded.
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
        taken = listening.getsockname()[1]
        ready(f"http://{f'[{host}]' if ':' in host else host}:{taken}")
        _Server(config, models, settings.drain_timeout).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends the answers that still run when their time is up, and tells their clients, where uvicorn would cut them."""

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
        # create_server puts the address behind the reason; getaddrinfo's numbers are its own.
        reason = str(error.strerror).partition(" (while")[0]
        raise QsampleError(f"cannot listen on {host}, port {port} ({reason}); give another host or port") from None
