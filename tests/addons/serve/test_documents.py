"""The description of the endpoints, walked to its last field, and the answers that it describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from qsample.addons.serve import ServeSettings, documents, make_app
from qsample.addons.serve.documents import (
    Completion,
    Error,
    Health,
    Message,
    MessageError,
    Model,
    Models,
    Response,
    Text,
    TokenCount,
    Tokens,
    Version,
)
from qsample.request.sampling_params import HELP
from tests.helpers.flags import undescribed
from tests.helpers.servers import ServerProcess

SAID = [{"role": "user", "content": "And the LORD spake"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
OPEN = {"/health", "/version", "/metrics"}


def described(**settings: Any) -> dict[str, Any]:
    return make_app(ServeSettings(models={"a": "nowhere"}, **settings)).openapi()


def schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema with fields, however deep."""
    if isinstance(value, dict):
        if isinstance(value.get("properties"), dict):
            yield value
        for inner in value.values():
            yield from schemas(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from schemas(inner)


def test_every_field_and_answer_is_described() -> None:
    document = described(api_keys=("secret",))
    fields = [
        (schema["title"], name, entry)
        for schema in schemas(document)
        for name, entry in schema["properties"].items()
    ]
    assert len(fields) > 400
    assert [
        (title, name) for title, name, entry in fields if len(entry.get("description", "")) < 7
    ] == []
    for title, name, entry in fields:  # a text is of its field alone
        assert not any(
            f" {other}: " in entry["description"] for other in ("model", "messages", "stop")
        ), (title, name)
        assert entry["description"][0] == entry["description"][0].upper()
    operations = [
        (path, one) for path, methods in document["paths"].items() for one in methods.values()
    ]
    assert {path for path, _ in operations} >= {
        "/v1/messages",
        "/v1/chat/completions",
        "/tokenize",
        *OPEN,
    }
    for path, one in operations:
        assert one["description"]
        assert all(parameter["description"] for parameter in one.get("parameters", []))
        (content,) = one["responses"]["200"]["content"].values()
        assert content["schema"], path
        assert {*one["responses"]} == {"200", "4XX"}, "a wrong body has status 400"
        error = one["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"]
        assert error.endswith("/MessageError" if path.startswith("/v1/messages") else "/Error")
        assert ("security" in one) == (path not in OPEN), path
    assert [scheme["scheme"] for scheme in document["components"]["securitySchemes"].values()] == [
        "bearer"
    ]
    assert "ValidationError" not in json.dumps(document)
    assert "security" not in json.dumps(described())


def test_sampling_parameters_have_the_words_of_the_command_line() -> None:
    bodies = described()["components"]["schemas"]
    chat, completion = (bodies[f"{name}CompletionRequest"]["properties"] for name in ("Chat", ""))
    for name in ("temperature", "top_k", "min_p", "typical_p", "dry_base", "mirostat_tau"):
        assert chat[name]["description"] == HELP[name]
    # A text of a body stands in front of a general one, and that of a subclass in front of its base's.
    assert "repeat_penalty" in chat["repetition_penalty"]["description"]
    assert completion["max_tokens"]["description"] != chat["max_tokens"]["description"]


def test_examples_are_answered(server: ServerProcess) -> None:
    document, tried = server.client.get("/openapi.json").json(), 0
    for path, methods in document["paths"].items():
        content = (
            methods.get("post", {})
            .get("requestBody", {})
            .get("content", {"application/json": {"schema": {}}})
        )
        name = content["application/json"]["schema"].get("$ref", "").rpartition("/")[2]
        for example in document["components"]["schemas"].get(name, {}).get("examples", []):
            assert server.client.post(path, json=example).status_code == 200, path
            tried += 1
    assert tried == 5


def test_answers_have_the_described_fields(server: ServerProcess) -> None:
    client = server.client
    chat = {
        "messages": SAID,
        "max_tokens": 4,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    tools = {"messages": SAID, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}
    message = {"messages": SAID, "max_tokens": 4}
    for kind, path, body in (
        (
            Completion,
            "/v1/completions",
            {"prompt": "In the", "max_tokens": 4, "logprobs": 2, "echo": True},
        ),
        (Completion, "/v1/chat/completions", chat),
        (Completion, "/v1/chat/completions", {**message, "prompt_logprobs": 1}),
        (Completion, "/v1/chat/completions", tools),
        (Response, "/v1/responses", {"input": "In the", "max_output_tokens": 4}),
        (Message, "/v1/messages", message),
        (TokenCount, "/v1/messages/count_tokens", {"messages": SAID}),
        (Tokens, "/tokenize", {"prompt": "In the", "return_token_strs": True}),
        (Tokens, "/tokenize", {"messages": SAID}),
        (Text, "/detokenize", {"tokens": [5, 6]}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        kind.model_validate(answer.json(), strict=True)  # which takes no other field
    for kind, path in (
        (Health, "/health"), (Version, "/version"), (Models, "/v1/models"), (Model, "/v1/models/tiny"),
        (Error, "/v1/models/none"), (MessageError, "/v1/messages/none"),
    ):  # fmt: skip
        kind.model_validate(client.get(path).json(), strict=True)
    with pytest.raises(ValueError, match="Extra inputs"):
        Version.model_validate({"version": "1", "other": 2})


def test_what_an_answer_may_leave_out() -> None:
    assert undescribed(documents) == []
    for kind, names in (
        (Completion, "id object model created choices usage"), (Text, "prompt"), (Health, "status"),
        (Response, "id object model status created_at output"), (Message, "id type role model content usage"),
        (Model, "id object owned_by created max_model_len capabilities"), (Tokens, "count max_model_len tokens"),
    ):  # fmt: skip
        fields = kind.model_fields.items()
        assert [name for name, field in fields if field.is_required()] == names.split()
        assert {field.default for _, field in fields if not field.is_required()} <= {None}
