"""What a client is told when a request cannot be answered: OpenAI's error body with the fitting HTTP status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from qsample.errors import QsampleError
from qsample.runtime import EngineClosedError, QueueFullError, RequestFailedError
from qsample.serve.http.json_bytes import json_bytes

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_CHOICES: Final = {"str", "int", "float", "bool", "dict", "list"}  # of a union, in pydantic's paths
_LOG: Final = logging.getLogger("uvicorn.error")  # the server's own
_RETRY_AFTER: Final = {"Retry-After": "1"}  # seconds; a slot is free again after some tokens


class ApiError(QsampleError):
    """A request that is answered with an error.

    status: HTTP's. param: the field of the request that is wrong. code: OpenAI's or vLLM's word for it.
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
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(json_bytes(self.body()), self.status, self.headers, "application/json")


def as_api_error(error: BaseException) -> ApiError:
    """What the engine, a tokenizer or a template raised, as an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="rate_limit_exceeded", headers=_RETRY_AFTER)
    if isinstance(error, RequestFailedError):
        if isinstance(error.__cause__, ApiError):  # of a function that came with the request
            return error.__cause__
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, EngineClosedError):
        return ApiError(500, str(error), code="engine_closed")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    if isinstance(error, QsampleError):
        return ApiError(500, str(error))
    return ApiError(500, f"the server failed: {type(error).__name__}; its log says where", code="internal_error")


def answer_to(error: Exception) -> ApiError:
    """`as_api_error`. What is the server's own fault is written to its log, with where it came from."""
    answer = as_api_error(error)
    if answer.status == 500:
        _LOG.error("a request failed: %s", answer, exc_info=error)
    return answer


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of `app` in OpenAI's form."""

    async def known(request: Request, error: Exception) -> Response:
        return answer_to(error).response()

    async def unknown(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()  # Starlette raises it again, and uvicorn logs it

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):  # while the body was read
            return error.__cause__.response()
        texts = {
            404: f"there is no {request.url.path} here; /docs lists what there is",
            405: f"{request.url.path} does not take {request.method}; /docs lists what it takes",
        }
        text = texts.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, text, headers=error.headers).response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error).response()

    app.add_exception_handler(QsampleError, known)
    app.add_exception_handler(ValueError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unknown)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:] if not _is_a_type(part)]
    name = ".".join(where)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "unsupported_parameter":  # of `protocol.unsupported`
        name = ".".join([*where, first["ctx"]["name"]])
        return ApiError(400, f"{name} is {first['msg']}", param=name, code=first["type"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not known here; leave it out", param=name, code="unknown_parameter")
    if first["type"] == "value_error" and not name:
        return ApiError(400, str(first["msg"]).removeprefix("Value error, "))
    if first["type"] == "missing" and not name:
        return ApiError(400, "the body is empty; send a JSON object with Content-Type: application/json")
    if not name:
        return ApiError(400, "the body is no JSON object; send one with Content-Type: application/json")
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    given = "" if isinstance(first.get("input"), Mapping | list) else f" ({str(first.get('input'))!a:.60} was given)"
    return ApiError(400, f"{name}: {message[:1].lower()}{message[1:]}{given}", param=name)


def _is_a_type(part: Any) -> bool:
    """Whether a part of pydantic's path is one choice of a union, not a field or an index."""
    return isinstance(part, str) and (not part.replace("_", "").isalnum() or part in _CHOICES)
