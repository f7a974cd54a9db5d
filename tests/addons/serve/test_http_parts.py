"""The layers around the endpoints, each alone: which error is which answer, and what passes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import Field
from starlette.testclient import TestClient

from qsample.addons.serve import http
from qsample.addons.serve.http import (
    ApiError,
    ApiKeys,
    BodyLimit,
    Exchanges,
    JsonBody,
    JsonRoute,
    add_error_handlers,
    as_api_error,
    json_bytes,
    json_response,
    logged_api_error,
)
from qsample.addons.serve.requests import CompletionRequest
from qsample.errors import ArgumentError, QsampleError
from qsample.request.grammar import InvalidGrammarError
from qsample.runtime import EngineClosedError, QueueFullError, RequestFailedError


def caused(error: BaseException) -> RequestFailedError:
    failed = RequestFailedError("it failed")
    failed.__cause__ = error
    return failed


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code", "message"),
    [
        (QueueFullError("full"), 429, "rate_limit_error", None, "rate_limit_exceeded", "full"),
        (InvalidGrammarError("g"), 400, "invalid_request_error", None, "invalid_grammar", "g"),
        (caused(InvalidGrammarError("g")), 400, "invalid_request_error", None, "invalid_grammar", "g"),
        (caused(OSError("x")), 500, "server_error", None, "request_failed", "it failed"),
        (EngineClosedError("closed"), 500, "server_error", None, "engine_closed", "closed"),
        (ArgumentError("a", argument="min_new_tokens"), 400, "invalid_request_error", "min_tokens", None, "a"),
        (ArgumentError("a", argument="max_new_tokens"), 400, "invalid_request_error", "max_tokens", None, "a"),
        (ArgumentError("a", argument="stop_strings"), 400, "invalid_request_error", "stop", None, "a"),
        (ArgumentError("a", argument="top_k"), 400, "invalid_request_error", "top_k", None, "a"),
        (ValueError("v"), 400, "invalid_request_error", None, None, "v"),
        (QsampleError("q"), 500, "server_error", None, None, "q"),
        (KeyError("k"), 500, "server_error", None, "internal_error",
         "the server failed: KeyError; its log has the details"),
        (ApiError(401, "m"), 401, "authentication_error", None, None, "m"),
        (ApiError(403, "m"), 403, "permission_error", None, None, "m"),
        (ApiError(404, "m"), 404, "not_found_error", None, None, "m"),
        (ApiError(405, "m"), 405, "invalid_request_error", None, None, "m"),
        (ApiError(413, "m"), 413, "invalid_request_error", None, None, "m"),
        (ApiError(501, "m"), 501, "server_error", None, None, "m"),
    ],
)  # fmt: skip
def test_errors_are_answers(
    error: Exception, status: int, kind: str, param: str | None, code: str | None, message: str,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    answer = logged_api_error(error)
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    assert (answer.status, answer.body()) == (status, body)
    assert answer.headers == ({"Retry-After": "1"} if status == 429 else {})
    assert [
        (entry.levelname, entry.exc_info is not None and entry.exc_info[1])
        for entry in caplog.records
    ] == ([("ERROR", error)] if status == 500 else [])


def test_bytes() -> None:
    assert json_bytes({"a": [1, "é\ud800\x85"]}) == b'{"a":[1,"\xc3\xa9\\ud800\\u0085"]}'
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            json_bytes(value)
    plain, other = json_response({}), json_response([], 201, {"a": "b"})
    assert (plain.status_code, plain.body, plain.headers["content-type"]) == (
        200,
        b"{}",
        "application/json",
    )
    assert (other.status_code, other.body, other.headers["a"]) == (201, b"[]", "b")


class Pair(JsonBody):
    str_field: int
    given: dict[str, list[bool]] = Field(default_factory=dict)


@pytest.fixture(scope="module")
def client() -> TestClient:
    async def complete(body: CompletionRequest) -> dict[str, Any]:
        return {"thread": body.user, "collects": gc.isenabled()}

    app = FastAPI()
    app.router.route_class = JsonRoute

    async def pair(body: Pair) -> None:
        raise ValueError("wrong")

    async def get() -> None:
        raise QsampleError("odd")

    app.add_api_route("/c", complete, methods=["POST"])
    app.add_api_route("/p", pair, methods=["POST"])
    app.add_api_route("/g", get, methods=["GET"])
    add_error_handlers(app)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("path", "content", "param", "code", "message"),
    [
        ("/c", "[" * 70_000, None, None, "the body is not valid JSON: "),
        ("/p", "{}", "str_field", "missing_required_parameter", "str_field is missing"),
        ("/p", '{"str_field": 1, "given": {"a b": [3]}}', "given.0", None, "given.0: input should be a valid boolean"),
        ("/p", '{"str_field": 1}', None, None, "wrong"),
    ],
)  # fmt: skip
def test_bodies_that_are_wrong(
    client: TestClient, path: str, content: str, param: str | None, code: str | None, message: str
) -> None:
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"], error["code"]) == (
        400,
        "invalid_request_error",
        param,
        code,
    )
    assert error["message"].startswith(message)
    assert len(error["message"]) < 300
    assert gc.isenabled()


def test_bodies_that_are_right(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 2**17):
        answer = client.post("/c", json={"user": "x" * size})
        assert answer.json() == {"thread": "x" * size, "collects": True}
    missing, method, odd = client.get("/none"), client.get("/c"), client.get("/g")
    assert (
        missing.json()["error"]["message"] == "/none does not exist here; /docs lists the endpoints"
    )
    assert method.json()["error"]["message"] == "/c does not take GET; /docs lists the methods"
    assert method.headers["allow"] == "POST"
    assert [answer.status_code for answer in (missing, method, odd)] == [404, 405, 500]
    assert odd.json()["error"]["message"] == "odd"


class Sent(list[Any]):
    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def status(self) -> int:
        return int(self[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self[0]["headers"]}


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def scope_of(
    path: str = "/v1/models", method: str = "GET", kind: str = "http", **headers: str
) -> dict[str, Any]:
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": kind,
        "method": method,
        "path": path,
        "headers": listed,
        "client": ("10.0.0.1", 5),
    }


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (scope_of(authorization="Bearer one"), 200),
        (scope_of(authorization="bearer  two "), 200),
        (scope_of(authorization="Basic one"), 401),
        (scope_of(authorization="one"), 401),
        (scope_of(authorization="Bearer"), 401),
        (scope_of(authorization="Bearer onetwo"), 401),
        (scope_of(authorization="Bearer on"), 401),
        (scope_of(authorization="Bearer "), 401),
        (scope_of(), 401),
        (scope_of(method="OPTIONS"), 200),
        (scope_of(kind="lifespan"), 200),
        *(
            (scope_of(path), 200)
            for path in ("/", "/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json")
        ),
        *((scope_of(path), 200) for path in ("/redoc", "/favicon.ico")),
        *((scope_of(path), 200) for path in ("/docs/x", "/markdown/x")),
        *((scope_of(path), 401) for path in ("/docsx", "/markdown")),
        (scope_of("/health/x"), 401),
        # Behind a prefix.
        *(
            (scope_of(path) | {"root_path": "/llm"}, 200)
            for path in ("/llm/health", "/llm", "/llm/")
        ),
        *(
            (scope_of(path) | {"root_path": "/llm"}, 401)
            for path in ("/llm/v1/models", "/llmhealth")
        ),
        (scope_of("/llm/health"), 401),
    ],
)
def test_keys(given: dict[str, Any], status: int) -> None:
    sent = Sent()
    asyncio.run(ApiKeys(fine, ("one", " two\n"))(given, None, sent))  # type: ignore[arg-type]
    assert sent.status == status
    if status == 401:
        assert sent.headers["www-authenticate"] == "Bearer"
        assert json.loads(sent[1]["body"])["error"]["code"] == "invalid_api_key"
        assert given["qsample.reason"] == "invalid_api_key"


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(second)
        return first == second

    monkeypatch.setattr(http.hmac, "compare_digest", compare)
    asyncio.run(ApiKeys(fine, ("one", "two"))(scope_of(authorization="Bearer one"), None, Sent()))  # type: ignore[arg-type]
    assert compared == [hashlib.sha256(key).digest() for key in (b"one", b"two")]


@pytest.mark.parametrize(
    ("given", "own"),
    [("a" * 128, False), ("a" * 129, True), ("Az0._:/+=-", False), ("a b", True), ("", True)],
)
def test_ids_counts_and_lines(given: str, own: bool, caplog: pytest.LogCaptureFixture) -> None:
    counted: list[Any] = []
    log = logging.getLogger("tests.exchanges")
    exchanges = Exchanges(fine, frozenset({"/known"}), lambda *told: counted.append(told), log)
    sent, scope = Sent(), scope_of("/llm/known", x_request_id=given) | {"root_path": "/llm"}
    with caplog.at_level(logging.INFO, "tests.exchanges"):
        asyncio.run(exchanges(scope, None, sent))  # type: ignore[arg-type]
    shown = sent.headers["x-request-id"]
    assert (shown != given, len(shown) == 32) == (own, own)
    assert counted == [("/known", 200, "")]
    (entry,) = caplog.records
    client, line, status, seconds, request = entry.args  # type: ignore[misc]
    assert (client, line, status, request) == ("10.0.0.1:5", '"GET /llm/known"', 200, shown)
    assert 0 <= float(str(seconds)) < 5


def test_exchanges_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        await ApiError(404, "x", code="model_not_found")(scope, receive, send)

    async def untold(scope: Any, receive: Any, send: Any) -> None:
        await ApiError(413, "x")(scope, receive, send)

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("x")

    async def fails_late(scope: Any, receive: Any, send: Any) -> None:
        await fine(scope, receive, send)
        raise KeyError("x")

    for app, path, messages, told in (
        (refuses, "/known", 2, ("/known", 404, "model_not_found")),
        (untold, "/x\n" + "y" * 300, 2, ("other", 413, "invalid_request_error")),
        (fails, "/", 2, ("/", 500, "internal_error")),
        (fails_late, "/", 1, ("/", 200, "")),
    ):
        counted: list[Any] = []
        sent = Sent()
        log = logging.getLogger("tests.exchanges")
        exchanges = Exchanges(
            app, frozenset({"/known", "/"}), lambda *told, to=counted: to.append(told), log
        )
        with caplog.at_level(logging.INFO, "tests.exchanges"):
            running = exchanges(scope_of(path) | {"client": None}, None, sent)  # type: ignore[arg-type]
            if app in (fails, fails_late):
                with pytest.raises(KeyError):
                    asyncio.run(running)
            else:
                asyncio.run(running)
        assert (counted, len(sent)) == ([told], messages)
        assert "x-request-id" in sent.headers
        client, line, *_ = caplog.records[-1].args  # type: ignore[misc]
        assert client == "-"
        assert line == ('"GET ' + ("/x\\n" + "y" * 197 if path.startswith("/x") else path) + '"')
    number = len(caplog.records)
    for quiet in (None, logging.getLogger("tests.quiet")):
        logging.getLogger("tests.quiet").setLevel(logging.WARNING)
        asyncio.run(
            Exchanges(fine, frozenset(), lambda *told: None, quiet)(scope_of(), None, Sent())
        )  # type: ignore[arg-type]
    asyncio.run(
        Exchanges(fine, frozenset(), failed, None)(scope_of(kind="lifespan"), None, sent := Sent())
    )  # type: ignore[arg-type]
    assert (len(caplog.records), sent.headers) == (number, {})


def failed(*told: Any) -> None:
    raise AssertionError("what is no request is not counted")


def test_sizes_of_bodies() -> None:
    """10 bytes are the most of a body, and 320 of all that are held at once."""
    held: list[int] = []

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        held.append(limit._bytes_in_memory)
        await fine(scope, receive, send)

    limit = BodyLimit(reads, lambda: 10)

    def answer(sizes: list[int], length: str | None = None, kind: str = "http") -> int | str:
        async def receive() -> Any:
            size = sizes.pop(0)
            return (
                {"type": "http.request", "body": b"x" * size, "more_body": bool(sizes)}
                if size
                else {"type": "x"}
            )

        sent, scope = (
            Sent(),
            scope_of(kind=kind, **({} if length is None else {"content_length": length})),
        )
        try:
            asyncio.run(limit(scope, receive, sent))
        except ApiError as error:
            return f"{error.status} {error.code}"
        return sent.status

    assert answer([10]) == 200
    assert held == [10]
    assert answer([5, 5], "10") == 200
    assert answer([5, 6]) == "413 request_too_large"
    assert answer([0], "11") == 413
    assert answer([0], "+11") == 200
    assert answer([100], "100", "lifespan") == 200
    assert limit._bytes_in_memory == 0
    limit._bytes_in_memory = 310
    assert answer([10]) == 200
    limit._bytes_in_memory = 311
    assert answer([10]) == "429 rate_limit_exceeded"
    assert limit._bytes_in_memory == 311


def test_as_it_is() -> None:
    error = ApiError(400, "x", headers={"a": "b"})
    assert as_api_error(error) is error
    assert error.headers == {"a": "b"}


@pytest.mark.parametrize(
    ("status", "openai", "kind"),
    [
        (400, "invalid_request_error", "invalid_request_error"), (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"), (404, "not_found_error", "not_found_error"),
        (405, "invalid_request_error", "invalid_request_error"), (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"), (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"), (504, "server_error", "timeout_error"),
    ],
)  # fmt: skip
def test_errors_have_the_form_of_their_api(status: int, openai: str, kind: str) -> None:
    error = ApiError(status, "m", param="p", code="c", headers={"A": "b"})
    for path, root, anthropic in (
        ("/v1/messages", "", True), ("/v1/messages/count_tokens", "", True), ("/llm/v1/messages", "/llm", True),
        ("/v1/chat/completions", "", False), ("/llm/v1/messages", "", False),
    ):  # fmt: skip
        sent, scope = Sent(), scope_of(path) | {"root_path": root}
        asyncio.run(error(scope, None, sent))  # type: ignore[arg-type]
        body = json.loads(sent[1]["body"])
        if anthropic:
            assert body == {"type": "error", "error": {"type": kind, "message": "m"}}
        else:
            wanted = {"message": "m", "type": openai, "param": "p", "code": "c"}
            assert body == {"error": wanted}
        assert (sent.status, sent.headers["a"], scope["qsample.reason"]) == (status, "b", "c")
        assert sent.headers["content-type"] == "application/json"
