"""A model whose tokenizer has a token that the head lacks, and another ending than the generation_config."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qsample.addons.serve import ServeSettings, make_app
from qsample.package.package import MANIFEST_NAME, read_package, write_package
from tests.conftest import made_once

END, IMAGE = 260, 261  # <|im_end|> and <image>, which the head lacks
ASKED = [{"role": "user", "content": "Hi"}]
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 4}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
    ("/v1/messages", {"messages": ASKED, "max_tokens": 4}),
]


def client_of(package: Path, **settings: Any) -> TestClient:
    app = make_app(ServeSettings(models={"tiny": str(package)}, threads=1, **settings))
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(short_head_package: Path) -> Iterator[TestClient]:
    with client_of(short_head_package) as running:
        yield running


@pytest.fixture(scope="module")
def endless(short_head_package: Path, shared_folder: Path) -> Iterator[TestClient]:
    """The same package without a stop token."""

    def write(path: Path) -> None:
        source = read_package(short_head_package)
        with write_package(path) as writer:
            for name in source.manifest.files:
                shutil.copyfile(source.file(name), writer.directory / name)
            (writer.directory / MANIFEST_NAME).unlink(missing_ok=True)
            token_ids = dataclasses.replace(source.manifest.token_ids, eos=())
            writer.finish(dataclasses.replace(source.manifest, token_ids=token_ids))

    package = made_once(shared_folder / "endless-package", write)
    with client_of(package, tool_call_parser="hermes") as running:
        yield running


def post(client: TestClient, path: str, **body: Any) -> Any:
    return client.post(path, json={"model": "tiny", **body})


@pytest.mark.parametrize(("path", "body"), SERVED)
def test_a_text_with_a_token_that_the_model_lacks(
    client: TestClient, path: str, body: dict[str, Any]
) -> None:
    text = json.dumps(body).replace('"Hi"', '"<image>"').replace('"x"', '"a <image>"')
    answer = post(client, path, **json.loads(text))
    assert answer.status_code == 400
    wanted = "'<image>', token 261 of the tokenizer, and the model has 261 tokens, 0 to 260"
    assert wanted in answer.text
    assert post(client, path, **body).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [IMAGE]},
        {"logit_bias": {str(IMAGE): 1}},
        {"prompt": [5, IMAGE]},
        {"bad_words": ["<image>"]},
    ],
)
def test_a_token_that_the_model_lacks(client: TestClient, fields: dict[str, Any]) -> None:
    answer = post(client, "/v1/completions", **{"prompt": "x", "max_tokens": 1, **fields})
    assert answer.status_code == 400
    assert "261" in answer.text


def test_tokenize_knows_every_token(client: TestClient) -> None:
    answer = post(client, "/tokenize", prompt="a<image>", return_token_strs=True).json()
    assert answer["tokens"] == [1, 68, IMAGE]
    assert answer["token_strs"][1:] == ["a", "<image>"]
    chat = post(client, "/tokenize", messages=[{"role": "user", "content": "<image>"}]).json()
    assert IMAGE in chat["tokens"]
    text = post(client, "/detokenize", tokens=[68, IMAGE]).json()["prompt"]
    assert text == "a<image>"
    assert post(client, "/detokenize", tokens=[IMAGE + 1]).status_code == 400


@pytest.mark.parametrize("end", [2, END])
@pytest.mark.parametrize(("path", "body"), SERVED[:2])
def test_every_request_ends_at_either(
    client: TestClient, path: str, body: dict[str, Any], end: int
) -> None:
    """As in vLLM, which adds the tokenizer's ending to completions, too."""
    answer = post(client, path, **body, logit_bias={str(end): 100}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    more = post(client, path, **body, logit_bias={str(end): 100}, ignore_eos=True).json()
    assert more["choices"][0]["finish_reason"] == "length"


FORMS: list[dict[str, Any]] = [
    {"guided_choice": ["yes", "no"]},
    {"guided_regex": "(yes|no)"},
    {"guided_grammar": 'start: "yes" | "no"'},
    {"structured_outputs": {"json": {"enum": ["yes", "no"]}}},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stop_token_ids", [[], [0], [END]])
def test_forms_of_a_model_without_a_stop_token(
    endless: TestClient, form: dict[str, Any], stop_token_ids: list[int]
) -> None:
    body = {"messages": ASKED, "max_tokens": 20, "stop_token_ids": stop_token_ids, "n": 2, **form}
    answer = post(endless, "/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["message"]["content"].strip('"') in ("yes", "no")
        assert choice["finish_reason"] == "stop"


def test_the_shortest_answer_without_a_stop_token(endless: TestClient) -> None:
    body = {"messages": ASKED, "guided_choice": ["yes"]}
    assert post(endless, "/v1/chat/completions", **body, max_tokens=3).status_code == 200
    refused = post(endless, "/v1/chat/completions", **body, max_tokens=2)
    assert "has 3 tokens; give at least 3" in refused.text
    stopped = post(endless, "/v1/chat/completions", **body, max_tokens=3, stop_token_ids=[0])
    assert "has 4 tokens, its stop token included; give at least 4" in stopped.text


def test_a_call_without_a_stop_token(endless: TestClient) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]}
    function = {"name": "f", "parameters": {**schema, "additionalProperties": False}}
    answer = post(
        endless,
        "/v1/chat/completions",
        messages=ASKED,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=80,
    )
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": 1}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_streams_end_with_the_form(endless: TestClient, stream: bool) -> None:
    answer = post(
        endless, "/v1/completions", prompt="x", guided_regex="ab", max_tokens=9, stream=stream
    )
    assert '"finish_reason":"stop"' in answer.text.replace(" ", "")
