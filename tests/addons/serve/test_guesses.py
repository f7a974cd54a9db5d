"""Guessed tokens over HTTP: defaults of a server, fields of requests, OpenAI's predicted outputs, usage and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from qsample.addons.serve import ServeSettings, make_app
from qsample.addons.serve.models import ServedModel
from qsample.package.package import Package
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import SamplingParams
from tests.helpers import fake_reference
from tests.helpers.fake_graphs import GUESSING_CAPACITY as CAPACITY
from tests.helpers.servers import ServerProcess

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
FEATURES: Any = {"logprobs": True, "top_logprobs": 3, "logit_bias": True, "allowed_tokens": True}
BIAS = {"68": 12, "69": 12, "70": 12}
PROMPT = [68, 69, 70] * 4
FIELDS: Any = {
    "prompt": PROMPT,
    "max_tokens": 40,
    "seed": 3,
    "temperature": 0.5,
    "logit_bias": BIAS,
}


@pytest.fixture(scope="module")
def package(fake: Callable[..., Package]) -> Package:
    return fake(num_speculative_tokens=4, **FEATURES)


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    bias = {int(token): float(amount) for token, amount in BIAS.items()}
    params = SamplingParams(temperature=0.5, logit_bias=bias, max_new_tokens=40)
    return fake_reference.generate(PROMPT, params, 3, CAPACITY)[0]


@pytest.fixture(scope="module")
def http(package: Package) -> Iterator[TestClient]:
    # The fake's cache is float32, over which guesses change last bits.
    own = {"batch_invariant": False, "speculative_config": CONFIG}
    settings = ServeSettings(models={"tiny": str(package.path)}, ctx_len=CAPACITY, slots=3, **own)
    with TestClient(make_app(settings)) as client:
        yield client


def post(http: TestClient, path: str = "completions", **fields: Any) -> dict[str, Any]:
    answer = http.post(f"/v1/{path}", json={"return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def accepted(answer: dict[str, Any]) -> int:
    details = answer["usage"]["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] >= 0
    return int(details["accepted_prediction_tokens"])


def test_a_server_that_guesses_gives_the_same_tokens(http: TestClient, wanted: list[int]) -> None:
    answers = [
        post(http, **FIELDS, logprobs=2, prompt_lookup_num_tokens=guesses)
        for guesses in (None, 0, 2)
    ]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [wanted] * 3
    assert accepted(answers[0]) > 0 == accepted(answers[1])
    values = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in answers]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    assert len(values[0]) == len(wanted)
    refused = http.post("/v1/completions", json=FIELDS | {"prompt_lookup_num_tokens": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "prompt_lookup_num_tokens",
    )


def test_a_prediction_is_cut_before_it_is_encoded(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB took 19 s and 625 MB, though only as many tokens as the context has are used."""
    encoded: list[int] = []
    real = Tokenizer.encode

    def encode(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return real(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    chat: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    post(
        http,
        "chat/completions",
        **chat,
        prediction={"type": "content", "content": "ab" * 1_900_000},
    )
    assert max(encoded) == 32 * CAPACITY


def test_predicted_outputs(http: TestClient) -> None:
    chat: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30, "temperature": 0}
    chat |= {"prompt_lookup_num_tokens": 0, "logit_bias": {"68": 1}}
    plain = post(http, "chat/completions", **chat)
    text = plain["choices"][0]["message"]["content"]
    tokens = plain["choices"][0]["token_ids"]
    for content in (
        "abc",
        [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}],
        "",
        text,
    ):
        guessed = post(
            http, "chat/completions", **chat, prediction={"type": "content", "content": content}
        )
        assert guessed["choices"][0]["token_ids"] == tokens
    wrong = http.post(
        "/v1/chat/completions", json=chat | {"prediction": {"type": "content", "content": 5}}
    )
    assert wrong.status_code == 400
    assert "prediction" in wrong.json()["error"]["param"]


def test_a_form_is_followed_without_guesses(http: TestClient) -> None:
    forced = post(http, **FIELDS | {"logit_bias": None}, guided_regex="(abc){4,6}")
    assert forced["choices"][0]["text"] in ("abc" * count for count in (4, 5, 6))
    assert accepted(forced) == 0


def test_a_package_that_checks_too_few_guesses_is_refused_at_the_start(
    fake: Callable[..., Package], package: Package
) -> None:
    more = {**CONFIG, "num_speculative_tokens": 64}
    for path, config, message in (
        (
            fake().path,
            CONFIG,
            "asks for 4 guesses a step, and the package checks 0; leave it out, or compile",
        ),
        (
            package.path,
            more,
            r"asks for 64 guesses a step, and the package checks \d+; ask for at most \d+, or compile",
        ),
    ):
        settings = ServeSettings(models={"tiny": str(path)}, speculative_config=config)
        with pytest.raises(ValueError, match=f"speculative_config {message}"):
            ServedModel("tiny", settings.models["tiny"], settings)


@pytest.mark.ci
def test_a_real_server_and_client(package: Package, wanted: list[int]) -> None:
    config = json.dumps(CONFIG)
    arguments = (
        "--ctx-len",
        str(CAPACITY),
        "--speculative-config",
        config,
        "--served-model-name",
        "tiny",
    )
    arguments += ("--no-batch-invariant",)
    with ServerProcess(package.path, *arguments) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        more: Any = {"model": "tiny", **FIELDS, "extra_body": {"return_token_ids": True}}
        whole = client.completions.create(**more)
        assert whole.choices[0].token_ids == wanted  # type: ignore[attr-defined]
        streamed, last = list[int](), None
        events = list(
            client.completions.create(**more, stream=True, stream_options={"include_usage": True})
        )
        for event in events:
            streamed += getattr(event.choices[0], "token_ids", []) if event.choices else []
            last = event.usage
        assert streamed == wanted
        for usage in (whole.usage, last):
            assert usage is not None
            assert usage.completion_tokens_details is not None
            assert (usage.completion_tokens_details.accepted_prediction_tokens or 0) > 0
        counts = [
            server.metric(f"spec_decode_{name}_total")
            for name in ("num_drafts", "num_draft_tokens")
        ]
        right = server.metric("spec_decode_num_accepted_tokens_total")
        assert 0 < right <= counts[1]
        assert 0 < counts[0] <= counts[1]
