"""vLLM's names: the same meaning as the arguments here, or a message with the argument."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qsample.package.manifest import TokenIds
from qsample.request.sampling_params import SamplingParams
from qsample.request.vllm import take_stop_tokens, unknown_field
from qsample.runtime.call import Call, read_call

MODEL = TokenIds(pad=0, eos=(5, 6), bos=1)


def call(own: dict[str, Any] | None = None, **keywords: Any) -> Call:
    return read_call([[3]], None, keywords, own or {}, MODEL, 100)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_tokens": 7}, {"max_new_tokens": 7}),
        ({"min_tokens": 2, "max_tokens": 7}, {"min_new_tokens": 2, "max_new_tokens": 7}),
        ({"stop": "x"}, {"stop_strings": "x"}),
        ({"stop": ["x", "y"]}, {"stop_strings": ["x", "y"]}),
        ({"n": 3, "temperature": 1.0}, {"num_return_sequences": 3, "temperature": 1.0}),
        ({"ignore_eos": True}, {"eos_token_id": ()}),
        ({"stop_token_ids": [9]}, {"eos_token_id": [5, 6, 9]}),
        ({"stop_token_ids": np.array([9, 5])}, {"eos_token_id": [5, 6, 9]}),
        ({"stop_token_ids": (9,), "ignore_eos": True}, {"eos_token_id": [9]}),
        ({"ignore_eos": False, "stop_token_ids": []}, {}),
        (dict.fromkeys(("max_tokens", "min_tokens", "stop", "n", "ignore_eos", "stop_token_ids")), {}),
    ],
)  # fmt: skip
def test_names(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert call(**theirs) == call(**ours)


def test_stop_tokens_of_a_generation_config() -> None:
    assert call({"eos_token_id": 8}, stop_token_ids=[9]).params.eos_token_id == (8, 9)  # type: ignore[union-attr]
    assert call({"eos_token_id": [8, 7]}, stop_token_ids=[9]).params.eos_token_id == (8, 7, 9)  # type: ignore[union-attr]
    assert call({"eos_token_id": 8}, ignore_eos=True).params.eos_token_id == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_tokens": 7, "max_new_tokens": 7}, "max_tokens and max_new_tokens were given"),
        ({"stop": "x", "stop_strings": None}, "stop and stop_strings were given"),
        ({"n": 1, "num_return_sequences": 1}, "n and num_return_sequences were given"),
        ({"ignore_eos": True, "eos_token_id": 5}, "ignore_eos and eos_token_id were given"),
        ({"stop_token_ids": [5], "eos_token_id": 5}, "stop_token_ids and eos_token_id were given"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes'; give True or False"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; give a list of token ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids is"),
        ({"max_tokens": 0}, "max_new_tokens is 0"),
        (
            {"logprobs": 5},
            "logprobs is 5, which is not supported: a package that was exported with",
        ),
        ({"logprobs": 0}, "logprobs is 0, which is not supported"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is 1; give True, for the alternatives"),
        ({"structured_outputs": {}}, "give grammar, a result of model.grammar"),
        ({"use_beam_search": True}, "beam search"),
        (
            {"allowed_token_ids": []},
            "allowed_token_ids is .*; give a list of at least one token id",
        ),
        ({"allowed_token_ids": "5"}, "allowed_token_ids is '5'"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids is"),
        ({"skip_special_tokens": 1}, "skip_special_tokens is 1; give True, False or None"),
        ({"repetition_detection": 3}, "repetition_detection is 3; give a mapping"),
    ],
)
def test_messages(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**keywords)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_tokens", "no field 'max_tokens'; it is called max_new_tokens here"),
        ("stop_token_ids", "it is called eos_token_id here"),
        ("ignore_eos", "it is called eos_token_id here"),
        ("stop", "give stop_strings to generate or add_request"),
        ("n", "give num_return_sequences to generate"),
        ("skip_special_tokens", "give skip_special_tokens to generate"),
        ("structured_outputs", "give grammar to generate"),
        ("top_q", "sampling option 'top_q'; did you mean 'top_"),
    ],
)
def test_fields_of_sampling_params(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(**{"temperature": 1.0, name: None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_generation_config({}, **{name: None})


def test_sampling_params_are_made_and_copied_as_before() -> None:
    params = SamplingParams(0.5, top_k=3)
    for again in (copy.copy(params), pickle.loads(pickle.dumps(params)), replace(params)):
        assert again == params


OTHER_NAMES = (
    "repetition_detection include_stop_str_in_output allowed_token_ids thinking_token_budget"
)


@pytest.mark.parametrize("name", ["min_tokens", *OTHER_NAMES.split()])
def test_each_name_leads_to_its_argument(name: str) -> None:
    own = name.replace("tokens", "new_tokens")
    given = f"SamplingParams has no field {name!r}; give {own} to generate or add_request"
    assert unknown_field(name, ["temperature"]).startswith(given)
    assert unknown_field(name, [own]).endswith(f"it is called {own} here")


def test_stop_tokens_come_on_top_of_the_models() -> None:
    for ends, given, expected in ((None, [0], [0]), ((None,), [9], [9]), (0, {9}, [0, 9])):
        keywords: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": given}
        take_stop_tokens(keywords, ends)
        assert keywords == {"eos_token_id": expected}
    for value in ("5", b"5", {5: 6}, [-1], [True], [1.0], 0):
        with pytest.raises(ValueError, match=r"stop_token_ids is .*; give a list of token ids"):
            take_stop_tokens({"stop_token_ids": value}, 5)
