"""Log-probabilities of prompts, of packages that score whole pieces and of others; the oracle is transformers in
float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

import qsample
from qsample.addons.serve import ServeSettings, make_app
from qsample.runtime import CausalLM
from tests.helpers.fake_package import fake_package
from tests.helpers.prompt_logprobs import Scores, scores_by_transformers
from tests.helpers.servers import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "And the LORD spake unto Moses"
EOS = 1


@pytest.fixture(scope="module")
def scores() -> Scores:
    """(n token ids) → the log-probability of every token after each but the last, [n - 1, V] float64."""
    pytest.importorskip("transformers")
    return scores_by_transformers(Path(qsample.__file__).parent / "assets" / "tiny_lm")


@pytest.fixture
def ask(scoring_server: ServerProcess) -> Callable[..., Any]:
    """(path, fields of a body) → the answer."""

    def post(path: str = COMPLETIONS, **body: Any) -> Any:
        answer = scoring_server.client.post(path, json={"seed": 3, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


def test_echo_and_logprobs(
    scoring_server: ServerProcess, served_model: CausalLM, scores: Any
) -> None:
    assert served_model.tokenizer is not None
    ids = served_model.tokenizer.encode(PROMPT)
    client = openai.OpenAI(base_url=f"{scoring_server.url}/v1", api_key="none", max_retries=0)
    options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "logprobs": 2, "seed": 3}
    echoed = client.completions.create(**options, echo=True).choices[0]
    alone = client.completions.create(**options).choices[0]
    found, rest = echoed.logprobs, alone.logprobs
    assert found is not None
    assert rest is not None
    assert echoed.text == PROMPT + alone.text
    places = range(len(ids) - 1)
    expected = scores(ids)
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    np.testing.assert_allclose(
        found.token_logprobs[1 : len(ids)], expected[places, ids[1:]], atol=1e-4
    )
    assert found.top_logprobs is not None
    for place, likeliest in zip(places, found.top_logprobs[1 : len(ids)], strict=True):
        best = np.sort(expected[place])[-2:]
        assert len(likeliest) in (2, 3)  # the token itself is always there
        np.testing.assert_allclose(sorted(likeliest.values())[-2:], best, atol=1e-4)
    # The answer is what it is without echo.
    assert (found.tokens or [])[len(ids) :] == rest.tokens
    assert found.token_logprobs[len(ids) :] == rest.token_logprobs
    texts, offsets = found.tokens or [], found.text_offset or []
    assert [
        echoed.text[place:].startswith(text) for text, place in zip(texts, offsets, strict=True)
    ][1:] == ([True] * (len(ids) + 4))
    streamed = list(client.completions.create(**options, echo=True, stream=True))
    parts = [part.choices[0].logprobs for part in streamed if part.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts for entry in getattr(part, name)] == getattr(found, name)


def test_any_token_can_be_scored(ask: Any, scores: Any) -> None:
    """Stop tokens end nothing, a token may have the sign bit of a mask, and rows do not mix."""
    prompts = [[5, EOS, 31, 63, 2047], [7, 0, 300, 2], [9], [2047, 2047]]
    choices = ask(prompt=prompts, max_tokens=0, echo=True, logprobs=0, n=2)["choices"]
    for index, choice in enumerate(choices):
        ids = prompts[index // 2]
        first, *found = choice["logprobs"]["token_logprobs"]
        assert first is None
        np.testing.assert_allclose(found, scores(ids)[range(len(ids) - 1), ids[1:]], atol=1e-4)
        assert (choice["finish_reason"], choice["logprobs"]["top_logprobs"]) == ("length", None)


def test_no_tokens(ask: Any, scoring_server: ServerProcess, served_model: CausalLM) -> None:
    whole = ask(prompt=["In the", "x"], max_tokens=0)
    assert [choice["text"] for choice in whole["choices"]] == ["", ""]
    assert whole["usage"]["completion_tokens"] == 0
    assert ask(prompt="In the", max_tokens=0, echo=True)["choices"][0]["text"] == "In the"
    body = {"prompt": "In the", "max_tokens": 0, "echo": True, "stream": True}
    lines = scoring_server.client.post(COMPLETIONS, json=body).text.split("\n\n")
    assert ['"text":"In the"' in lines[0], '"finish_reason":"length"' in lines[1], lines[2]] == [
        True,
        True,
        "data: [DONE]",
    ]
    # The prompt may fill the context.
    full = [5] * served_model.capacity(4096)
    assert len(
        ask(prompt=full, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    ) == len(full)


def test_prompt_logprobs_have_vllms_form(
    ask: Any, served_model: CausalLM, scores: Any, scores_pieces: bool
) -> None:
    assert served_model.tokenizer is not None
    unlikely = f"{PROMPT} zebra Q the"
    ids = served_model.tokenizer.encode(unlikely)
    found = ask(prompt=unlikely, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    largest_rank = 0
    for token, expected, entry in zip(ids[1:], scores(ids), found[1:], strict=True):
        order = np.argsort(-expected)
        assert {*entry} == {str(other) for other in (*order[:2], token)}
        for other, values in entry.items():
            assert values["logprob"] == pytest.approx(expected[int(other)], abs=1e-4)
            rank = int(np.flatnonzero(order == int(other))[0]) + 1
            # The package returns five, and knows all ranks if it scores pieces.
            assert values["rank"] == (rank if rank <= 5 or scores_pieces else None)
            largest_rank = max(largest_rank, rank)
            assert values["decoded_token"] == served_model.tokenizer.decode([int(other)])
    assert largest_rank > 5
    chat = ask(
        CHAT, messages=[{"role": "user", "content": PROMPT}], max_tokens=1, prompt_logprobs=0
    )
    assert [len(entry) for entry in chat["prompt_logprobs"][1:]] == [1] * (
        chat["usage"]["prompt_tokens"] - 1
    )


@pytest.mark.parametrize("stream", [False, True])
def test_listed_tokens(
    scoring_server: ServerProcess, ask: Any, scores: Any, scores_pieces: bool, *, stream: bool
) -> None:
    """What classifiers read: the log-probabilities of labels, likely or not."""
    labels = [2047, 0, 300]
    prompts = [[5, 31, 63], [7, 300, 2]]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 0, "n": 2, "logprob_token_ids": labels}
    if not scores_pieces:
        refused = scoring_server.client.post(COMPLETIONS, json=body).json()["error"]
        assert refused["param"] == "logprob_token_ids"
        assert "exported without prompt_logprobs" in refused["message"]
        return
    if stream:
        lines = scoring_server.client.post(COMPLETIONS, json=body | {"stream": True}).text
        events = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"] if choice["logprobs"]]
        choices.sort(key=lambda choice: choice["index"])
    else:
        choices = ask(**body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for index, choice in enumerate(choices):
        expected = scores([*prompts[index // 2], 0])[-1][labels]
        (found,) = choice["logprobs"]["top_logprobs"]
        values = [*found.values()]
        np.testing.assert_allclose(values[:3], expected, atol=1e-4)
        assert len(values) in (3, 4)  # the sampled token may be another


def test_listed_tokens_of_a_chat(
    scoring_server: ServerProcess, scores_pieces: bool, scores: Any, ask: Any
) -> None:
    if not scores_pieces:
        pytest.skip("this package lists none")
    labels = [300, 400, 500]
    chat = {
        "messages": [{"role": "user", "content": "yes or no?"}],
        "max_tokens": 1,
        "temperature": 0,
    }
    answer = ask(CHAT, **chat, logprobs=True, logprob_token_ids=labels, return_token_ids=True)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    expected = scores([*answer["prompt_token_ids"], 0])[-1]
    found = [one["logprob"] for one in entry["top_logprobs"]]
    np.testing.assert_allclose(found, expected[labels], atol=1e-4)
    assert entry["logprob"] == pytest.approx(expected.max(), abs=1e-4)
    plain = ask(CHAT, **chat, logprobs=True, top_logprobs=2, logprob_token_ids=[])
    assert len(plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    for change, told in (
        ({"logprobs": False}, "give logprobs, too"),
        ({"max_tokens": 2}, "give max_tokens: 1"),
        ({"max_tokens": None}, "give max_tokens: 1"),
        ({"prompt_logprobs": 1}, "request either"),
        ({"logprob_token_ids": [2048]}, "the model's ids are 0 to 2047"),
        ({"logprob_token_ids": list(range(129))}, "at most 128 items"),
        ({"logprob_token_ids": [-1]}, "greater than or equal to 0"),
    ):
        body = {**chat, "logprobs": True, "logprob_token_ids": labels, **change}
        refused = scoring_server.client.post(CHAT, json=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert told in error["message"]
        assert error["param"].startswith("logprob_token_ids")


def test_scored_tokens_are_counted(ask: Any, scoring_server: ServerProcess) -> None:
    name = "prompt_tokens_scored_total"
    before = scoring_server.metric(name)
    ask(prompt=[[5, 6, 7], [8, 9]], max_tokens=2, echo=True, logprobs=0)
    assert scoring_server.metric(name) == before + 3


def test_several_clients_at_once(scoring_server: ServerProcess, scores: Any, ask: Any) -> None:
    """Scores and answers are those of a request alone."""
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 2048, length).tolist() for length in (150, 64, 65, 2, 40, 90)]
    bodies = [
        {"prompt": ids, "max_tokens": 8, "echo": True, "logprobs": 1, "temperature": 0.8}
        for ids in prompts
    ]
    alone = [
        ask(**body | {"echo": False, "logprobs": None})["choices"][0]["text"] for body in bodies
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: ask(**body), bodies))
    for ids, answer, text in zip(prompts, answers, alone, strict=True):
        (choice,) = answer["choices"]
        assert choice["text"].endswith(text)
        found = choice["logprobs"]["token_logprobs"][1 : len(ids)]
        np.testing.assert_allclose(found, scores(ids)[range(len(ids) - 1), ids[1:]], atol=1e-4)


def test_what_cannot_be_scored(scoring_server: ServerProcess, tmp_path: Path) -> None:
    def refusal(client: Any, **body: Any) -> str:
        answer = client.post(COMPLETIONS, json={"prompt": "x", **body})
        assert answer.status_code == 400, answer.text
        told: str = answer.json()["error"]["message"]
        return told

    assert "leave out stream" in refusal(scoring_server.client, prompt_logprobs=1, stream=True)
    assert "this package returns 5" in refusal(scoring_server.client, prompt_logprobs=6)
    assert "leave out either" in refusal(scoring_server.client, max_tokens=0, min_tokens=1)
    package = fake_package(tmp_path / "package", logprobs=True)
    with TestClient(
        make_app(ServeSettings(models={"tiny": str(package.path)}, slots=1, threads=1))
    ) as client:
        assert (
            "with --for-serving, which brings all that requests ask for, or with --allowed-tokens"
            in (refusal(client, echo=True, logprobs=0))
        )
