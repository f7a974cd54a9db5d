"""Log-probabilities of the distribution that is sampled from; the oracle is transformers' processors in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import qsample
from qsample.addons.serve import ServeSettings, make_app
from qsample.contract.interface import Features
from qsample.package.package import read_package
from tests.conftest import made_once

PROMPT = [71, 264, 300, 511, 290]
Scores = Callable[[list[int], list[int]], np.ndarray]


@pytest.fixture(scope="module")
def package(bundled_package: Path, shared_folder: Path) -> Path:
    from tests.helpers.tiny_models import with_features

    features = Features(logprobs_mode="processed_logprobs").for_serving()
    return made_once(
        shared_folder / "tiny_lm-processed-package",
        lambda path: with_features(read_package(bundled_package), path, features),
    )


@pytest.fixture(scope="module")
def client(package: Path) -> Iterator[TestClient]:
    with TestClient(
        make_app(ServeSettings(models={"tiny": str(package)}, trust_request_chat_template=True))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def logits() -> Scores:
    """(prompt, answer) → the logits before each token of the answer, [n, V] float64."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    bundled = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float64).eval()

    def of(prompt: list[int], answer: list[int]) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = model(torch.tensor([prompt + answer])).logits[0].numpy()
        return found[len(prompt) - 1 : -1]

    return of


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def test_after_temperature_and_filters(client: TestClient, logits: Scores) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 2, "temperature": 0.7, "top_k": 3}
    answer = client.post(
        "/v1/completions", json={**body, "logprobs": 5, "return_token_ids": True}
    ).json()["choices"][0]
    tokens = answer["token_ids"]
    assert len(tokens) > 1
    filtered = logits(PROMPT, tokens) / 0.7
    filtered[filtered < np.sort(filtered)[:, -3:-2]] = -np.inf
    expected = log_softmax(filtered)
    own = expected[range(len(tokens)), tokens]
    np.testing.assert_allclose(answer["logprobs"]["token_logprobs"], own, atol=1e-3)
    for likeliest, row in zip(answer["logprobs"]["top_logprobs"], expected, strict=True):
        np.testing.assert_allclose(sorted(likeliest.values()), np.sort(row)[-3:], atol=1e-3)


def test_greedy_answers_have_those_after_biases(client: TestClient, logits: Scores) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logit_bias": {"300": 2.5}}
    answer = client.post(
        "/v1/completions", json={**body, "logprobs": 1, "return_token_ids": True}
    ).json()["choices"][0]
    tokens = answer["token_ids"]
    biased = logits(PROMPT, tokens)
    biased[:, 300] += 2.5
    own = log_softmax(biased)[range(len(tokens)), tokens]
    np.testing.assert_allclose(answer["logprobs"]["token_logprobs"], own, atol=1e-3)


@pytest.mark.parametrize("temperature", [0, 1])
def test_shares_of_the_allowed_tokens(client: TestClient, temperature: float) -> None:
    """What a classifier reads: the shares of two labels."""
    answer = client.post(
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "yes or no?"}],
            "chat_template": "{{ messages[0].content }}",
            "allowed_token_ids": [300, 400],
            "temperature": temperature,
            "logprobs": True,
            "top_logprobs": 5,
            "max_tokens": 1,
        },
    ).json()
    entry = answer["choices"][0]["logprobs"]["content"][0]
    shares = np.exp([one["logprob"] for one in entry["top_logprobs"]])
    assert len(shares) == 2
    assert shares.sum() == pytest.approx(1, abs=1e-5)


def test_prompts_have_the_model_s_own(client: TestClient, logits: Scores) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0.5, "top_k": 2, "prompt_logprobs": 1}
    answer = client.post("/v1/completions", json=body).json()["choices"][0]
    entries = answer["prompt_logprobs"]
    found = [
        entry[str(token)]["logprob"] for entry, token in zip(entries[1:], PROMPT[1:], strict=True)
    ]
    expected = log_softmax(logits(PROMPT[:1], PROMPT[1:]))
    np.testing.assert_allclose(found, expected[range(len(found)), PROMPT[1:]], atol=1e-3)
