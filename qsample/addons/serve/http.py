"""HTTP around the endpoints: JSON, errors in OpenAI's form, ids and a log of requests, API keys, limits of bodies.

The middleware is plain ASGI: Starlette's @middleware("http") adds half as much time to each event of a stream.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qsample.addons.serve.hosts import is_allowed
from qsample.errors import ArgumentError, QsampleError
from qsample.request.grammar import InvalidGrammarError
from qsample.runtime import EngineClosedError, QueueFullError, RequestFailedError

T = TypeVar("T")

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
MESSAGES_PATH: Final = "/v1/messages"
_ANTHROPICS: Final = {
    **_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
# Arguments of the Python API → fields of requests with another name.
_FIELDS: Final = {
    "adapter": "model",
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
WITHOUT_A_KEY: Final = frozenset(
    (
        "/",
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/redoc",
        "/favicon.ico",
    )
)
_UNION_TYPES: Final = {"str", "int", "float", "bool", "dict", "list"}  # parts of pydantic's paths
_LOG: Final = logging.getLogger("uvicorn.error")  # the server's
_RETRY_AFTER: Final = {"Retry-After": "1"}  # seconds; a slot is free again after some tokens
# JSON leaves these as they are, and clients that read a stream with a function such as Python's splitlines end a line
# at them.
_LINE_ENDS: Final = str.maketrans(
    {character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
)
_LONG_BODY: Final = 2**16  # bytes; parsing more takes milliseconds
_TEXT_BODY: Final = 2**22  # bytes; longer bodies have images
_BODIES_AT_ONCE: Final = 32  # of the largest size, up to that size
_LONG_AT_ONCE: Final = 16  # of a larger size; a body is held until its answer ends
_STRUCTURE: Final = (
    b",",
    b"[",
    b"{",
    b"\\",
)  # what makes a body slow to parse; base64 has none of it
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_SHOWN_PATH: Final = 200  # characters
_REASON: Final = "qsample.reason"  # why a request is refused; in its scope


def json_bytes(value: Any) -> bytes:
    """`value` as compact JSON in UTF-8, on a line; lone surrogates become escapes, because UTF-8 cannot hold them.
    Raises ValueError for NaN and infinities: JSON has none."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return text.encode("utf-8", "backslashreplace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer with `value` as its body."""
    return Response(json_bytes(value), status, headers, "application/json")


class ApiError(QsampleError):
    """A request that is answered with an error: HTTP's `status`, and a `message` with the problem and its remedy.
    `param`: the field of the request that is wrong. `code`: OpenAI's or vLLM's word for the problem."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

        self.kind = _TYPES.get(status, "server_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """The error in OpenAI's form, or in Anthropic's for a path of its API."""
        if path.startswith(MESSAGES_PATH):
            kind = _ANTHROPICS.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; `Exchanges` counts the error by its code, or its type."""
        scope[_REASON] = self.code or self.kind
        await json_response(self.body(_path_of(scope)), self.status, self.headers)(
            scope, receive, send
        )


def _path_of(scope: Scope) -> str:
    """The path of a request behind the server's prefix."""
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", "")) or "/"


def as_api_error(error: BaseException) -> ApiError:
    """An exception of the engine, a tokenizer or a template as an answer."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, text, code="rate_limit_exceeded", headers=_RETRY_AFTER)
        case RequestFailedError(__cause__=InvalidGrammarError() as cause):
            return as_api_error(cause)
        case RequestFailedError():
            return ApiError(500, text, code="request_failed")
        case EngineClosedError():
            return ApiError(500, text, code="engine_closed")
        case InvalidGrammarError():
            return ApiError(400, text, code="invalid_grammar")
        case ArgumentError():
            return ApiError(400, text, param=_FIELDS.get(error.argument or "", error.argument))
        case ValueError():
            return ApiError(400, text)
        case QsampleError():
            return ApiError(500, text)
    text = f"the server failed: {type(error).__name__}; its log has the details"
    return ApiError(500, text, code="internal_error")


def logged_api_error(error: Exception) -> ApiError:
    """`as_api_error`; the log gets a fault of the server itself, with the traceback."""
    answer = as_api_error(error)
    if answer.status == 500:
        _LOG.error("a request failed: %s", answer, exc_info=error)
    return answer


def add_error_handlers(app: FastAPI) -> None:
    """Answer the expected errors of `app` in OpenAI's form; `Exchanges` answers the unexpected."""

    async def known(request: Request, error: Exception) -> Any:
        return logged_api_error(error)

    async def http(request: Request, error: Exception) -> Any:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # raised while the body was read
            return error.__cause__
        texts = {
            404: f"{request.url.path} does not exist here; /docs lists the endpoints",
            405: f"{request.url.path} does not take {request.method}; /docs lists the methods",
        }
        return ApiError(
            error.status_code,
            texts.get(error.status_code, str(error.detail)),
            headers=error.headers,
        )

    async def invalid(request: Request, error: Exception) -> Any:
        assert isinstance(
            error, RequestValidationError
        )  # `JsonRoute` finds all but a body that is not JSON
        return _of_validation(error.errors()[0], ("body",))

    for kind, handler in (
        (QsampleError, known), (ValueError, known), (HTTPException, http), (RequestValidationError, invalid),
    ):  # fmt: skip
        app.add_exception_handler(kind, handler)


def _of_validation(first: Mapping[str, Any], prefix: Sequence[str] = ()) -> ApiError:
    """The first problem that pydantic found in a body. prefix: of its place."""
    kind, context = first["type"], first.get("ctx", {})
    path = [str(part) for part in first["loc"][len(prefix) :] if not _is_a_type(part)]
    message = str(first["msg"]).removeprefix("Value error, ")
    if kind == "unsupported_parameter":  # of `requests.Body`
        name = ".".join([*path, context["name"]])
        return ApiError(400, f"{name} is {message}", param=name, code=kind)
    name = ".".join(path)
    if kind == "extra_forbidden":
        return ApiError(
            400, f"{name} is not known here; leave it out", param=name, code="unknown_parameter"
        )
    if not name:
        if kind == "value_error":
            return ApiError(400, message)
        state = "empty" if kind == "missing" else "not a JSON object"
        return ApiError(
            400, f"the body is {state}; send a JSON object with Content-Type: application/json"
        )
    if kind == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    value = first.get("input")
    given = "" if isinstance(value, Mapping | list) else f" ({value!a:.60} was given)"
    return ApiError(400, f"{name}: {message[:1].lower()}{message[1:]}{given}", param=name)


def _is_a_type(part: Any) -> bool:
    """Whether a part of pydantic's path is a union's type, not a field or an index."""
    return isinstance(part, str) and (not part.replace("_", "").isalnum() or part in _UNION_TYPES)


class JsonRoute(APIRoute):
    """A route that parses long bodies on a thread, so that the event loop goes on, and reports only the first error.
    FastAPI lists all errors, for half a minute if a body of 4 MB has two million."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handler
        model: type[BaseModel] = field.field_info.annotation  # type: ignore[assignment]

        class JsonRequest(Request):
            async def json(self) -> BaseModel:
                """The checked body, a model that FastAPI passes on unchanged. Raises ApiError."""
                body = await self.body()
                if len(body) < _LONG_BODY:
                    return _parsed(body, model)
                # On a single thread: the parser holds Python's lock, and the event loop gets it after each body.
                return await asyncio.get_running_loop().run_in_executor(
                    _PARSER, _parsed, body, model
                )

        async def handle(given: Request) -> Response:
            request = JsonRequest(given.scope, given.receive)
            await request.body()
            response = await while_connected(request.receive, handler(request))
            if response is None:
                raise ApiError(499, "the client closed the connection", code="client_disconnected")
            return response

        return handle


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client leaves first. Then the work is cancelled: a long text that waits to be
    encoded, a grammar that is compiled, or an answer."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


class EventStream(StreamingResponse):
    """Server-sent events that end as soon as the client goes; Starlette would notice that only when it sends."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], object]) -> None:
        """`end` is called at the end, also after an error or a cancellation."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(OSError):  # the client has gone
                await while_connected(receive, self.stream_response(send))
        finally:
            self._end()


_PARSER: Final = ThreadPoolExecutor(
    1, thread_name_prefix="qsample-json"
)  # its thread begins with the first body


def _parsed(body: bytes, model: type[BaseModel]) -> BaseModel:
    if len(body) > _TEXT_BODY and sum(map(body.count, _STRUCTURE)) > _TEXT_BODY // 2:
        text = f"the body has more than {_TEXT_BODY} bytes besides its images, this server's limit"
        raise ApiError(413, text, code="request_too_large")
    collects = gc.isenabled()
    gc.disable()  # a million lists start it again and again, and it takes ten times as long as parsing them
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error!s:.200}") from None
    finally:
        if collects:
            gc.enable()
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _of_validation(error.errors(include_url=False)[0]) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


class ApiKeys:
    """Demands a valid key, `Authorization: Bearer KEY` or, as Anthropic's clients send it, `X-Api-Key: KEY`, except for
    the page, its description, /health, /ping, /version and /metrics: they reveal nothing of the prompts."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        # Hashes, because comparing keys of different lengths would reveal the length.
        self._keys = [hashlib.sha256(key.strip().encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _path_of(scope)
        free = path in WITHOUT_A_KEY or path.startswith(("/docs/", "/markdown/"))
        if scope["type"] == "http" and not free and scope["method"] != "OPTIONS":
            headers = dict(scope["headers"])
            kind, _, key = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer":
                key = headers.get(b"x-api-key", b"")
            hashed = hashlib.sha256(key.strip()).digest()
            # Every key is compared, so that the time does not reveal a key that was nearly right.
            if sum(hmac.compare_digest(hashed, known) for known in self._keys) == 0:
                text = "send an API key of this server, Authorization: Bearer KEY"
                error = ApiError(
                    401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await error(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Hosts:
    """Refuses requests to names that the server does not have; see `hosts`."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if is_allowed(host, self._allowed):
            await self._app(scope, receive, send)
            return
        text = f"this server is not called {host!r:.100}; call it localhost, or start it with --allowed-host NAME"
        await ApiError(403, text, code="host_not_allowed")(scope, receive, send)


class Exchanges:
    """Gives each request an id, counts and logs its end, and answers unexpected exceptions; it raises them again for
    the server's log.

    The id is the client's X-Request-Id, if it is short and plain; the answer has it, too. Starlette's handler of
    exceptions is outside of every other middleware: its answers lack the headers of the CORS middleware, so a page of
    another origin could not read them.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: frozenset[str],
        count: Callable[[str, int, str], object],
        log: logging.Logger | None,
    ) -> None:
        """`paths`: counted by their names; every other path is "other". `count`: called with a path, a status and a
        reason, empty without an error. `log`: gets a line for each request."""
        self._app, self._paths, self._count, self._log = app, paths, count, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        began, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if not status:
                await as_api_error(error)(scope, receive, noted)
            raise
        finally:
            path = _path_of(scope)
            self._count(path if path in self._paths else "other", status, scope.get(_REASON, ""))
            if self._log is not None and self._log.isEnabledFor(logging.INFO):
                client = _shown(":".join(map(str, scope.get("client") or ("-",))))
                request = f'"{scope["method"]} {_shown(scope["path"])}"'  # without the query: it may hold a secret
                self._log.info(
                    "%s %s %d %.3fs %s",
                    client,
                    request,
                    status,
                    time.monotonic() - began,
                    request_id,
                )


def _shown(text: str) -> str:
    """A client's text on a line of a log: without control characters."""
    return ascii(text[:_SHOWN_PATH])[1:-1]


class BodyLimit:
    """Refuses bodies that are too large: before they are read if their length is announced,
    otherwise while they come. It refuses any body while the bodies in memory are too large
    together."""

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int]) -> None:
        """max_bytes: a function that returns the largest size of a body."""
        self._app = app
        self._max_bytes = max_bytes
        self._bytes_in_memory = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._max_bytes()
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > max_bytes:
            await _body_too_large(max_bytes)(scope, receive, send)
            return
        max_bytes_in_memory = max(
            min(max_bytes, _TEXT_BODY) * _BODIES_AT_ONCE, max_bytes * _LONG_AT_ONCE
        )
        received_bytes = 0

        async def receive_within_limits() -> Message:
            nonlocal received_bytes
            message = await receive()
            size = len(message.get("body", b""))
            received_bytes += size
            self._bytes_in_memory += size
            if received_bytes > max_bytes:
                raise _body_too_large(max_bytes)
            if self._bytes_in_memory > max_bytes_in_memory:
                raise ApiError(
                    429,
                    "the server holds as many long requests as it can; try again later",
                    code="rate_limit_exceeded",
                    headers=_RETRY_AFTER,
                )
            return message

        try:
            await self._app(scope, receive_within_limits, send)
        finally:
            self._bytes_in_memory -= received_bytes


def _body_too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {max_bytes} bytes, this server's limit",
        code="request_too_large",
    )
