"""HTTP around the endpoints: JSON, errors in OpenAI's form, ids and a log of requests, API keys,
and limits of bodies.

The middleware is plain ASGI: Starlette's @middleware("http") makes each event of a stream take half
as long again.
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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, PrivateAttr, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qsample.addons.serve.hosts import is_allowed
from qsample.errors import ArgumentError, PackageError, QsampleError
from qsample.request.grammar import InvalidGrammarError
from qsample.request.schemas.normal_form import InvalidSchemaError
from qsample.runtime import EngineClosedError, QueueFullError, RequestFailedError

T = TypeVar("T")

_OPENAI_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
MESSAGES_PATH: Final = "/v1/messages"
_ANTHROPIC_ERROR_TYPES: Final = {
    **_OPENAI_ERROR_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
# Arguments of the Python API whose fields of requests have another name.
_FIELDS_OF_ARGUMENTS: Final = {
    "adapter": "model",
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
PATHS_WITHOUT_A_KEY: Final = frozenset(
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
# The errors of `requests.Body`, whose context has the name of the field.
_FIELD_ERRORS: Final = ("unsupported_parameter", "unknown_parameter", "duplicate_parameter")
# pydantic's paths of errors have the names of a union's types.
_UNION_TYPES: Final = {"str", "int", "float", "bool", "dict", "list"}
_SERVER_LOG: Final = logging.getLogger("uvicorn.error")
# A slot is free again after some tokens.
_RETRY_AFTER_A_SECOND: Final = {"Retry-After": "1"}
# JSON leaves these characters as they are, and clients that read a stream with a function such as
# Python's splitlines end a line at them.
_ESCAPED_LINE_ENDS: Final = str.maketrans(
    {character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
)
# Parsing a longer body takes milliseconds.
_MIN_LONG_BODY_BYTES: Final = 2**16
# Longer bodies have images.
_MAX_TEXT_BODY_BYTES: Final = 2**22
# The number of the largest bodies that may be in memory together; a body is held until its answer
# ends. The first number is for bodies of up to `_MAX_TEXT_BODY_BYTES`.
_MAX_TEXT_BODIES_IN_MEMORY: Final = 32
_MAX_BODIES_IN_MEMORY: Final = 4
# These characters make a body slow to parse. Base64 has none of them.
_STRUCTURAL_CHARACTERS: Final = (b",", b"[", b"{", b"\\")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_MAX_LOGGED_CHARACTERS: Final = 200
# The seconds without an event after which a stream shows that it is alive.
KEEP_ALIVE_S = 15.0
# The key of a request's scope under which the reason of its refusal stands.
_REFUSAL_REASON: Final = "qsample.reason"
# The header of an answer that names what its request has and what was ignored.
IGNORED_HEADER: Final = "X-Qsample-Ignored"
# The names of JSON may have any characters, and headers may not.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def json_bytes(value: Any) -> bytes:
    """`value` as compact JSON in UTF-8, on a line. Lone surrogates become escapes, because UTF-8
    cannot hold them.

    Raises:
        ValueError: the value has NaN or an infinity, which JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        text = text.translate(_ESCAPED_LINE_ENDS)
    return text.encode("utf-8", "backslashreplace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer with `value` as its body."""
    return Response(json_bytes(value), status, headers, "application/json")


class ApiError(QsampleError):
    """A request that is answered with an error. It is an ASGI application that sends the answer.

    Attributes:
        status: the status of HTTP.
        param: the field of the request that is wrong.
        code: OpenAI's or vLLM's word for the problem.
        headers: further headers of the answer.
        kind: OpenAI's type of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """message: the problem and its remedy."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.kind = _OPENAI_ERROR_TYPES.get(status, "server_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """The error in OpenAI's form, or in Anthropic's for a path of its API."""
        if path.startswith(MESSAGES_PATH):
            kind = _ANTHROPIC_ERROR_TYPES.get(self.status, "api_error")
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
        """Answer with the error. `Exchanges` counts it by its code, or by its type."""
        scope[_REFUSAL_REASON] = self.kind if self.code is None else self.code
        answer = json_response(self.body(_path_of(scope)), self.status, self.headers)
        await answer(scope, receive, send)


def _path_of(scope: Scope) -> str:
    """The path of a request after the server's prefix."""
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", "")) or "/"


def as_api_error(error: BaseException) -> ApiError:
    """An exception of the engine, a tokenizer or a template as an answer."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, text, code="rate_limit_exceeded", headers=_RETRY_AFTER_A_SECOND)
        case RequestFailedError(__cause__=InvalidGrammarError() | InvalidSchemaError() as cause):
            return as_api_error(cause)
        case RequestFailedError():
            return ApiError(500, text, code="request_failed")
        case EngineClosedError():
            return ApiError(500, text, code="engine_closed")
        case InvalidGrammarError() | InvalidSchemaError():
            return ApiError(400, text, code="invalid_grammar")
        case ArgumentError():
            argument = error.argument or ""
            return ApiError(400, text, param=_FIELDS_OF_ARGUMENTS.get(argument, error.argument))
        case ValueError():
            return ApiError(400, text)
        case QsampleError() if not isinstance(error, PackageError):
            return ApiError(500, text)
    # A PackageError is among them: clients need not know where the package is.
    text = f"the server failed: {type(error).__name__}; its log has the details"
    return ApiError(500, text, code="internal_error")


def logged_api_error(error: Exception) -> ApiError:
    """The error as an answer. A fault of the server itself is logged with its traceback."""
    answer = as_api_error(error)
    if answer.status == 500:
        _SERVER_LOG.error("a request failed: %s", answer, exc_info=error)
    return answer


def add_error_handlers(app: FastAPI) -> None:
    """Let `app` answer expected errors in OpenAI's form. `Exchanges` answers the unexpected."""

    async def answer_known(request: Request, error: Exception) -> Any:
        return logged_api_error(error)

    async def answer_http(request: Request, error: Exception) -> Any:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # It was raised while the body was read.
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

    async def answer_invalid(request: Request, error: Exception) -> Any:
        # `JsonRoute` finds all errors except those of a body that is not JSON.
        assert isinstance(error, RequestValidationError)
        return _of_validation(error.errors()[0], ("body",))

    app.add_exception_handler(QsampleError, answer_known)
    app.add_exception_handler(ValueError, answer_known)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_invalid)


def _of_validation(problem: Mapping[str, Any], prefix: Sequence[str] = ()) -> ApiError:
    """A problem that pydantic found in a body as an answer.

    Args:
        problem: an item of pydantic's list of errors.
        prefix: the beginning of the problem's place that is not a part of the body.
    """
    kind = problem["type"]
    context = problem.get("ctx", {})
    place = problem["loc"][len(prefix) :]
    path = [str(part) for part in place if not _is_a_type(part)]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind in _FIELD_ERRORS:
        name = ".".join([*path, context["name"]])
        return ApiError(400, f"{name} is {message}", param=name, code=kind)
    name = ".".join(path)
    if not name:
        if kind == "value_error":
            return ApiError(400, message)
        state = "empty" if kind == "missing" else "not a JSON object"
        return ApiError(
            400, f"the body is {state}; send a JSON object with Content-Type: application/json"
        )
    if kind == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    value = problem.get("input")
    given = "" if isinstance(value, Mapping | list) else f" ({value!a:.60} was given)"
    return ApiError(400, f"{name}: {message[:1].lower()}{message[1:]}{given}", param=name)


def _is_a_type(part: Any) -> bool:
    """Whether a part of pydantic's path is the type of a union, not a field or an index."""
    return isinstance(part, str) and (not part.replace("_", "").isalnum() or part in _UNION_TYPES)


class JsonBody(BaseModel):
    """The body of a request.

    Attributes:
        ignored: the names of what the body has and the answer does not depend on: unknown fields,
            at any depth, and others that an endpoint adds. The answer has them in a header.
    """

    _ignored: set[str] = PrivateAttr(default_factory=set)

    @property
    def ignored(self) -> set[str]:
        return self._ignored

    @classmethod
    def of(cls, value: Any) -> Self:
        """A checked body. Its validators find the set `ignored` as the context of validation.

        Raises:
            pydantic.ValidationError: the body is wrong.
        """
        ignored: set[str] = set()
        body = cls.model_validate(value, context=ignored)
        body.ignored.update(ignored)
        return body

    def share_ignored_of(self, other: JsonBody) -> None:
        """Have the same set of names as another body: this body is made of the other."""
        self._ignored = other.ignored


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names what was ignored in a request; none if nothing was."""
    plain_names = sorted({name if _PLAIN_NAME.fullmatch(name) else "other" for name in names})
    return {IGNORED_HEADER: ", ".join(plain_names)} if plain_names else {}


class JsonRoute(APIRoute):
    """A route that parses long bodies on a thread, so that the event loop goes on, and reports only
    the first error. FastAPI lists all errors, for half a minute if a body of 4 MB has two million.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handler
        model: type[JsonBody] = field.field_info.annotation  # type: ignore[assignment]

        class JsonRequest(Request):
            async def json(self) -> JsonBody:
                """The checked body, a model that FastAPI passes on unchanged.

                Raises:
                    ApiError: the body is wrong.
                """
                body = await self.body()
                if len(body) < _MIN_LONG_BODY_BYTES:
                    return _parsed(body, model)
                # The parser holds Python's lock. With a single thread, the event loop gets the lock
                # after each body.
                return await asyncio.get_running_loop().run_in_executor(
                    _PARSER, _parsed, body, model
                )

        async def handle(plain_request: Request) -> Response:
            request = JsonRequest(plain_request.scope, plain_request.receive)
            await request.body()
            response = await while_connected(request.receive, handler(request))
            if response is None:
                raise ApiError(499, "the client closed the connection", code="client_disconnected")
            return response

        return handle


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client leaves first.

    Then the work is cancelled, such as a long text that waits to be encoded, the compilation of a
    grammar, or an answer.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.create_task(work)
    disconnect_task = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        return await work_task if work_task.done() else None
    finally:
        work_task.cancel()
        disconnect_task.cancel()


class EventStream(StreamingResponse):
    """Server-sent events that end as soon as the client leaves. Starlette would notice that only
    when it sends."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_end: Callable[[], object],
        headers: Mapping[str, str],
        keep_alive: bytes,
    ) -> None:
        """
        Args:
            events: the encoded events.
            on_end: a function that is called at the end, also after an error or a cancellation.
            headers: further headers.
            keep_alive: an event, or a comment, that is sent after `KEEP_ALIVE_S` seconds without an
                event: reading a long prompt takes minutes, and clients and proxies give up on
                silent connections.
        """
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._on_end = on_end
        self._keep_alive = keep_alive
        # None before the first event, while one is sent, and after the last.
        self._last_event_time: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_note(message: Message) -> None:
            self._last_event_time = None
            await send(message)
            if message.get("more_body"):
                self._last_event_time = time.monotonic()

        keeper = asyncio.create_task(self._keep_alive_with(send))
        try:
            with suppress(OSError):  # The client has left.
                await while_connected(receive, self.stream_response(send_and_note))
        finally:
            keeper.cancel()
            self._on_end()

    async def _keep_alive_with(self, send: Send) -> None:
        """Send a sign of life whenever no event has been sent for a while. Each event is a message
        of its own, so it comes between two events."""
        filler = {"type": "http.response.body", "body": self._keep_alive, "more_body": True}
        with suppress(OSError):
            while True:
                await asyncio.sleep(KEEP_ALIVE_S)
                last_time = self._last_event_time
                if last_time is not None and time.monotonic() - last_time >= KEEP_ALIVE_S:
                    await send(filler)


# The thread starts with the first body.
_PARSER: Final = ThreadPoolExecutor(1, thread_name_prefix="qsample-json")


def _parsed(body: bytes, model: type[JsonBody]) -> JsonBody:
    """A body as a checked model."""
    if len(body) > _MAX_TEXT_BODY_BYTES:
        structural = sum(map(body.count, _STRUCTURAL_CHARACTERS))
        if structural > _MAX_TEXT_BODY_BYTES // 2:
            raise ApiError(
                413,
                f"the body has more than {_MAX_TEXT_BODY_BYTES} bytes besides its images, this "
                "server's limit",
                code="request_too_large",
            )
    # A million lists would start the collector again and again, and it takes ten times as long as
    # parsing them.
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        content = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error!s:.200}") from None
    finally:
        if collects_garbage:
            gc.enable()
    try:
        return model.of(content)
    except ValidationError as error:
        raise _of_validation(error.errors(include_url=False)[0]) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


class ApiKeys:
    """Demands a valid key: `Authorization: Bearer KEY` or, as Anthropic's clients send it,
    `X-Api-Key: KEY`.

    The page, its description, /health, /ping, /version and /metrics need no key, because they
    reveal nothing of the prompts.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        # Comparing keys of different lengths would reveal the length. Hashes have the same length.
        self._key_hashes = [hashlib.sha256(key.strip().encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _path_of(scope)
        needs_no_key = path in PATHS_WITHOUT_A_KEY or path.startswith(("/docs/", "/markdown/"))
        if scope["type"] != "http" or needs_no_key or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        if self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "send an API key of this server, Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        key_hash = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so that the time does not reveal a key that was nearly right.
        matches = [hmac.compare_digest(key_hash, known) for known in self._key_hashes]
        return any(matches)


class Hosts:
    """Refuses requests to names that the server does not have; see hosts.py."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if is_allowed(host, self._allowed):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            f"this server is not called {host!r:.100}; call it localhost, or start it with "
            "--allowed-host NAME",
            code="host_not_allowed",
        )
        await error(scope, receive, send)


class Exchanges:
    """Gives each request an id, counts and logs its end, and answers unexpected exceptions. It
    raises them again for the server's log.

    The id is the client's X-Request-Id, if it is short and plain; the answer has it also.
    Starlette's handler of exceptions is outside of every other middleware: its answers lack the
    headers of the CORS middleware, so a page of another origin could not read them.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: frozenset[str],
        count: Callable[[str, int, str], object],
        log: logging.Logger | None,
    ) -> None:
        """
        Args:
            app: the application.
            paths: the paths that are counted by their names; each other path is "other".
            count: a function of a path, a status and a reason, which is empty without an error.
            log: the logger that gets a line for each request, if there is one.
        """
        self._app = app
        self._paths = paths
        self._count = count
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        start_time = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status == 0:
                await as_api_error(error)(scope, receive, send_with_id)
            raise
        finally:
            path = _path_of(scope)
            self._count(
                path if path in self._paths else "other", status, scope.get(_REFUSAL_REASON, "")
            )
            if self._log is not None and self._log.isEnabledFor(logging.INFO):
                client = _shown(":".join(map(str, scope.get("client") or ("-",))))
                # The query is left out, because it may hold a secret.
                request = f'"{scope["method"]} {_shown(scope["path"])}"'
                self._log.info(
                    "%s %s %d %.3fs %s",
                    client,
                    request,
                    status,
                    time.monotonic() - start_time,
                    request_id,
                )


def _shown(text: str) -> str:
    """A client's text on a line of a log: without control characters."""
    return ascii(text[:_MAX_LOGGED_CHARACTERS])[1:-1]


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
            min(max_bytes, _MAX_TEXT_BODY_BYTES) * _MAX_TEXT_BODIES_IN_MEMORY,
            max_bytes * _MAX_BODIES_IN_MEMORY,
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
                    headers=_RETRY_AFTER_A_SECOND,
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
