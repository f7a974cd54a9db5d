"""The settings of a model's own generation_config: the features that they need, and what a package applies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from qsample.contract.interface import Features
from qsample.request.own_settings import applied_settings, with_needed
from qsample.request.refusals import UNSUPPORTED_SETTINGS
from qsample.runtime.call import CONFIG_KEYWORDS
from tests.helpers.fake_graphs import VOCAB
from tests.helpers.fake_package import fake_interface


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"suppress_tokens": [7]}, {"logit_bias": True}),
        ({"sequence_bias": [[[7], -1.5], [[8], 2]]}, {"logit_bias": True}),
        ({"no_repeat_ngram_size": 3}, {"filters": ("no_repeat_ngram_size",)}),
        ({"bad_words_ids": [[7]], "typical_p": 0.9}, {"filters": ("typical_p", "bad_words_ids")}),
        ({"xtc_probability": 0.5}, {"filters": ("xtc",)}),
        ({"mirostat": 2, "suppress_tokens": [7]}, {"filters": ("mirostat",), "logit_bias": True}),
    ],
)
def test_a_graph_gets_the_features_that_its_model_asks_for(
    settings: dict[str, Any], needed: dict[str, Any]
) -> None:
    wanted = Features(logprobs=True, **needed)
    assert with_needed(Features(logprobs=True), settings) == wanted
    assert with_needed(wanted, settings) == wanted
    own, left_out = applied_settings(settings, fake_interface(**needed))
    assert (own, left_out) == (settings, None)
    own, left_out = applied_settings(settings, fake_interface())
    assert own == {}
    assert left_out is not None
    assert f"asks for {quoted(settings)}, which the package was made without (export" in left_out


def test_features_that_were_asked_for_stay() -> None:
    features = Features(logit_bias=True, filters=("xtc",), max_loras=2, probs=True)
    assert with_needed(features, {}) == features
    assert with_needed(features, {"typical_p": 0.9}) == replace(
        features, filters=("xtc", "typical_p")
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"suppress_tokens": [], "sequence_bias": [], "bad_words_ids": [], "logit_bias": {}},
        {"suppress_tokens": None, "bad_words_ids": None, "typical_p": None},
        {"typical_p": 1, "no_repeat_ngram_size": 0, "epsilon_cutoff": 0.0, "mirostat": 0},
        {"temperature": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 2.0, "unheard_of": 3},
        {"num_beams": 1, "diversity_penalty": 0.0, "guidance_scale": 1},
    ],
)
def test_what_asks_for_nothing_needs_nothing(settings: dict[str, Any]) -> None:
    assert with_needed(Features(), settings) == Features()
    assert applied_settings(settings, fake_interface()) == (settings, None)


@pytest.mark.parametrize("name", UNSUPPORTED_SETTINGS)
def test_what_no_package_does_is_named_and_the_rest_is_kept(name: str) -> None:
    settings = {"do_sample": True, name: 7, "top_k": 5}
    assert with_needed(Features(), settings) == Features()
    own, left_out = applied_settings(settings, fake_interface())
    assert own == {"do_sample": True, "top_k": 5}
    assert left_out is not None
    assert left_out.startswith(
        f"the model's generation_config.json asks for {quoted([name])}, which qsample does not do ("
    )
    assert applied_settings(settings, fake_interface(), {name: None}) == (settings, None)


def test_a_bias_on_sequences_is_not_done() -> None:
    settings = {"sequence_bias": [[[7], 1.0], [[7, 8], 1.0]], "suppress_tokens": [5]}
    features = with_needed(Features(), settings)
    assert features == Features(logit_bias=True)
    own, left_out = applied_settings(settings, fake_interface(logit_bias=True))
    assert own == {"suppress_tokens": [5]}
    assert left_out is not None
    assert 'asks for "sequence_bias", which qsample does not do' in left_out


def test_both_kinds_are_in_one_line() -> None:
    settings = {"num_beams": 4, "suppress_tokens": [5], "typical_p": 0.5, "penalty_alpha": 0.6}
    _, left_out = applied_settings(settings, fake_interface())
    assert left_out is not None
    assert 'asks for "suppress_tokens", "typical_p", which the package was made without' in left_out
    assert 'It also asks for "num_beams", "penalty_alpha", which qsample does not do' in left_out
    assert "\n" not in left_out


def test_values_that_mean_the_same_to_a_package() -> None:
    """Tokens that the model lacks are never sampled; more guesses than the package checks change no token."""
    settings = {"suppress_tokens": [-1, 0, VOCAB - 1, VOCAB], "prompt_lookup_num_tokens": 9}
    own, left_out = applied_settings(settings, fake_interface(logit_bias=True))
    assert own == {"suppress_tokens": [0, VOCAB - 1], "prompt_lookup_num_tokens": 0}
    assert left_out is None


@pytest.mark.parametrize(
    ("settings", "meaning"),
    [
        ({"do_sample": True, "top_k": -1}, {"do_sample": True, "top_k": 0}),
        ({"do_sample": True, "top_k": 0}, {"do_sample": True, "top_k": 0}),
        ({"do_sample": True, "temperature": 0}, {"do_sample": False, "temperature": 0}),
        (
            {"do_sample": True, "temperature": 0.0, "top_k": -1, "top_p": 0.9},
            {"do_sample": False, "temperature": 0.0, "top_k": 0, "top_p": 0.9},
        ),
        ({"do_sample": True, "temperature": 1}, {"do_sample": True, "temperature": 1}),
        ({"do_sample": True, "temperature": 0.01}, {"do_sample": True, "temperature": 0.01}),
        ({"do_sample": True, "temperature": None}, {"do_sample": True, "temperature": None}),
    ],
)
def test_other_tools_words_have_their_meaning(
    settings: dict[str, Any], meaning: dict[str, Any]
) -> None:
    assert applied_settings(settings, fake_interface()) == (meaning, None)


WRONG_VALUES = [
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("min_p", -0.1),
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", False),
    ("repetition_penalty", 0.0),
    ("typical_p", 0),
    ("no_repeat_ngram_size", -1),
    ("max_new_tokens", 0),
    ("max_length", 0),
    ("min_length", -1),
    ("seed", -1),
    ("eos_token_id", -1),
    ("eos_token_id", [1, VOCAB]),
    ("bad_words_ids", [[1], []]),
    ("bad_words_ids", [[VOCAB]]),
    ("sequence_bias", [[[VOCAB], 1.0]]),
    ("logit_bias", {VOCAB: 1.0}),
    ("dry_sequence_breakers", [VOCAB]),
    ("prompt_lookup_num_tokens", -1),
    ("suppress_tokens", "all"),
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES)
def test_a_value_out_of_range_is_named_and_the_rest_is_kept(name: str, value: Any) -> None:
    filters = ("typical_p", "no_repeat_ngram_size", "bad_words_ids", "dry")
    interface = fake_interface(logit_bias=True, filters=filters)
    own, left_out = applied_settings({name: value, "do_sample": True, "num_beams": 2}, interface)
    assert own == {"do_sample": True}
    assert left_out is not None
    assert 'asks for "num_beams", which qsample does not do' in left_out
    assert f'It also asks for "{name}": {value!r}, which is outside the accepted range' in left_out
    assert "\n" not in left_out
    changed = {name: value}
    assert applied_settings(changed, interface, changed=[name]) == (changed, None), "the caller's"


def test_the_caller_s_words_are_the_caller_s() -> None:
    for settings in ({"top_k": -1}, {"do_sample": True, "temperature": 0}):
        for name in settings:
            assert applied_settings(settings, fake_interface(), changed=[name]) == (settings, None)


def test_fields_that_are_no_parameters_have_checks_of_their_own() -> None:
    settings = {"max_time": -1, "stop_strings": [""], "num_return_sequences": 0}
    own, left_out = applied_settings(settings, fake_interface(), CONFIG_KEYWORDS)
    assert own == {}
    assert left_out is not None
    for name, value in settings.items():
        assert f'"{name}": {value!r}' in left_out
    settings = {"max_time": 2, "stop_strings": ["a"], "num_return_sequences": 2}
    assert applied_settings(settings, fake_interface(), CONFIG_KEYWORDS) == (settings, None)


def test_more_new_tokens_at_least_than_at_most() -> None:
    own, left_out = applied_settings({"min_new_tokens": 9, "max_new_tokens": 3}, fake_interface())
    assert own == {"max_new_tokens": 3}
    assert left_out is not None
    assert '"min_new_tokens": 9, which is outside' in left_out
    settings = {"min_new_tokens": 3, "max_new_tokens": 3}
    assert applied_settings(settings, fake_interface()) == (settings, None)
    settings = {"min_new_tokens": 9, "max_new_tokens": 3}
    changed = ["min_new_tokens"]
    assert applied_settings(settings, fake_interface(), changed=changed) == (settings, None)
