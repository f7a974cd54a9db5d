"""Who may ask, and how much at once.

Plain ASGI: Starlette's @middleware("http") costs half as much again for every event of a stream.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from qsample.serve.http.errors import ApiError, as_api_error

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN: Final = ("/", "/health", "/metrics", "/docs", "/openapi.json", "/redoc", "/favicon.ico")


class ApiKeys:
    """Lets requests through that come with one of the keys, `Authorization: Bearer KEY`.

    What says nothing of the prompts needs none: the page, its description, /health and /metrics.
    """

    def __init__(self, app: App, keys: tuple[str, ...]) -> None:
        self._app = app
        # Hashes, because comparing keys of different lengths would tell the length.
        self._keys = [hashlib.sha256(key.strip().encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", "")) or "/"
        if scope["type"] == "http" and path not in _OPEN and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            hashed = hashlib.sha256(key.strip()).digest()
            # All of them are compared, so that the time does not tell which one was nearly right.
            if kind.lower() != b"bearer" or sum(hmac.compare_digest(hashed, known) for known in self._keys) == 0:
                text = "send an API key of this server, Authorization: Bearer KEY"
                error = ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class UnknownErrors:
    """Answers what nothing expected, and raises it again for the server's log.

    Starlette does so outside of every other middleware, and a page of another origin cannot read an answer without the
    headers of the one for origins.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = scope["type"] != "http"

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if not begun:
                await as_api_error(error).response()(scope, receive, send)
            raise


class BodyLimit:
    """Refuses bodies of more bytes, before they are read where their length is told, and as they come otherwise."""

    def __init__(self, app: App, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            await self._error().response()(scope, receive, send)
            return
        left = self._most

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._most} bytes, which is all that this server reads")
