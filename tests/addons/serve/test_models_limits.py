"""What a served model refuses of a request, to the last number; the packages are replaced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.serve.http import ApiError
from qsample.addons.serve.models import ServedModel
from qsample.addons.serve.requests import CompletionRequest
from qsample.contract.interface import Features
from qsample.runtime import SamplingParams


def fake(*, tokenizer: object = True, **features: Any) -> Any:
    """As a `ServedModel` of 7 tokens, with a context of 10 and 5 places; its methods take it as self."""
    model: Any = SimpleNamespace(
        name="tiny", ends=(1,), max_model_len=10, engine=SimpleNamespace(slots=2, max_waiting=3),
        interface=SimpleNamespace(vocab_size=7, features=Features(**features), image=None),
        tokenizer=SimpleNamespace(num_ids=9), defaults={"temperature": 1.0}, _max_characters_per_token=4,
        model=SimpleNamespace(images=SimpleNamespace(processor=None), tokenizer=tokenizer),
    )  # fmt: skip
    for name in ("_check_logprobs", "_check_alternatives", "_check_scores_of_answers"):
        setattr(model, name, getattr(ServedModel, name).__get__(model))
    return model


def form(shortest: int) -> Any:
    return SimpleNamespace(shortest=shortest)


def params(limit: int | None = None, ends: tuple[int, ...] | None = None) -> SamplingParams:
    return SamplingParams(max_new_tokens=limit, eos_token_id=ends)


LONG = ("prompt", "context_length_exceeded")
SHORTEST = ServedModel.check_shortest


@pytest.mark.parametrize(
    ("check", "right", "wrong", "words", "param", "code"),
    [
        (ServedModel.check_count, (5,), (6,), "6 answers .* this server takes 5", None, None),
        (ServedModel.check_room, ([5] * 9,), ([5] * 10,), "has 10 tokens .* context 10; give at most 9", *LONG),
        (ServedModel.check_room, ([5] * 8, 2), ([5] * 9, 2), "give at most 8", *LONG),
        (ServedModel.check_length, ("x" * 40,), ("x" * 41,), "41 characters, .* 10 tokens 40 at most", *LONG),
        (ServedModel.check_ids, ([0, 6],), ([0, 7, 8],), "7 is not a token .* has 0 to 6", "prompt", None),
        (ServedModel.check_images, ([], []), ([], ["x"]), "'tiny' reads text only", None, "invalid_image"),
        (SHORTEST, (form(4), [5] * 6, params(4), "f"), (form(4), [5], params(3), "f"),
         "f is 3, .* has 4 tokens, its stop token included; give at least 4", "f", None),
        (SHORTEST, (form(4), [5] * 7, params(3, ()), "f"), (form(4), [5], params(2, ()), "f"),
         "f is 2, .* has 3 tokens; give at least 3", "f", None),
        (SHORTEST, (form(0), [5] * 10, params(1), "f"), (form(4), [5] * 7, params(), "f"),
         "has 7 tokens, this model's context 10, .* the form 4; give at most 6", *LONG),
        (SHORTEST, (form(10), [], params(), "f"), (form(11), [], params(), "f"), "give a form of shorter", *LONG),
    ],
)  # fmt: skip
def test_limits(
    check: Callable[..., None], right: Any, wrong: Any, words: str, param: str | None, code: str | None
) -> None:  # fmt: skip
    check(fake(), *right)
    with pytest.raises(ApiError, match=words) as raised:
        check(fake(), *wrong)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


LISTED: dict[str, Any] = {"logprob_token_ids": [5], "logprobs": 0, "max_tokens": 1}


@pytest.mark.parametrize(
    ("features", "fields", "words", "param"),
    [
        ({}, {"logprobs": 3}, None, None),
        ({}, {"logprobs": 4}, "4 alternatives .* returns 3; .* --top-logprobs 4", "logprobs"),
        ({"tokenizer": None}, {"logprobs": 0}, "has no tokenizer; leave them out", "logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": 0}, "without logprobs; .* with --logprobs", "logprobs"),
        ({}, {"echo": True, "logprobs": 0}, "without allowed_tokens, which log-prob.* need", "echo"),
        ({}, {"prompt_logprobs": 4}, "4 alternatives", "prompt_logprobs"),
        ({"allowed_tokens": True}, {"prompt_logprobs": 3}, None, None),
        ({"prompt_logprobs": True}, {"prompt_logprobs": 3}, None, None),
        ({}, LISTED, "without prompt_logprobs", "logprob_token_ids"),
        ({"prompt_logprobs": True}, LISTED, None, None),
        ({"prompt_logprobs": True}, LISTED | {"logprobs": None}, "give logprobs, too", "logprob_token_ids"),
        ({"prompt_logprobs": True}, LISTED | {"max_tokens": 2}, "give max_tokens: 1", "logprob_token_ids"),
        ({"prompt_logprobs": True}, LISTED | {"echo": True}, "request either", "logprob_token_ids"),
        ({"prompt_logprobs": True, "logprobs_mode": "processed_logprobs"}, LISTED, "the model's own",
         "logprob_token_ids"),
        ({}, {"logit_bias": {"5": 1}}, "without logit_bias", "logit_bias"),
        ({}, {"allowed_token_ids": [5]}, "without allowed_tokens", "allowed_token_ids"),
        ({"grammars": True}, {"allowed_token_ids": [5]}, None, None),
        ({}, {"stop_token_ids": [6]}, None, None),
        ({}, {"stop_token_ids": [5, 7]}, "is 7; give ids of tokens, 0 to 6", None),
    ],
)  # fmt: skip
def test_what_a_package_lacks(
    features: dict[str, Any], fields: dict[str, Any], words: str | None, param: str | None
) -> None:
    model = fake(**{"logprobs": True, "top_logprobs": 3, **features})
    request = CompletionRequest.of({"prompt": "x", **fields})
    if words is None:
        ServedModel.sampling_params(model, request)
        return
    kind: Any = ApiError if param is not None else ValueError
    with pytest.raises(kind, match=words) as raised:
        ServedModel.sampling_params(model, request)
    if param is not None:
        assert (raised.value.status, raised.value.param) == (400, param)
