"""Sampling parameters from a model's generation_config, with a caller's options on top."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qsample.sampling_params import DEFAULT_NEW_TOKENS, SamplingParams, layered

from_config = SamplingParams.from_generation_config


def test_an_empty_config_is_greedy_as_in_transformers() -> None:
    assert from_config({}).temperature == 0
    assert from_config(None).temperature == 0


def test_every_field_of_a_generation_config_is_read() -> None:
    config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_length": 3,
        "min_new_tokens": 4,
        "max_length": 50,
        "max_new_tokens": 40,
        "eos_token_id": [2, 7],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "transformers_version": "5.23.0",
        "use_cache": True,
        "cache_implementation": "hybrid",
        "output_scores": False,
        "return_dict_in_generate": False,
        "_from_model_config": True,
        "num_beams": 1,
        "typical_p": 1.0,
        "suppress_tokens": [],
        "a_key_of_the_model_itself": 5,
    }
    assert from_config(config) == SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        min_length=3,
        min_new_tokens=4,
        max_length=50,
        max_new_tokens=40,
        eos_token_id=(2, 7),
    )


def test_top_k_is_50_where_a_sampling_config_leaves_it_open() -> None:
    assert from_config({"do_sample": True}).top_k == 50
    assert from_config({"do_sample": True, "top_k": None}).top_k == 50
    assert from_config({"do_sample": True, "top_k": 0}).top_k == 0
    assert from_config({"do_sample": True}, top_k=None).top_k == 0
    assert from_config({}, temperature=0.5).top_k == 50


def test_a_greedy_config_ignores_its_sampling_fields() -> None:
    assert from_config({"do_sample": False, "temperature": 0.6, "top_k": 5, "top_p": 0.5}) == SamplingParams(
        temperature=0
    )
    assert from_config({"temperature": 0.6}).temperature == 0
    assert from_config({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, do_sample=False) == SamplingParams(
        temperature=0
    )


@pytest.mark.parametrize("override", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_sampling_override_implies_do_sample(override: dict[str, Any]) -> None:
    params = from_config({"do_sample": False, "top_k": 3}, **override)
    assert params == SamplingParams(**({"top_k": 3} | override))


def test_temperature_0_is_greedy() -> None:
    assert from_config({"do_sample": True, "top_k": 5}, temperature=0) == SamplingParams(temperature=0)
    assert from_config({}, do_sample=False, temperature=0.0).temperature == 0


def test_values_that_ask_for_nothing_are_no_contradiction() -> None:
    neutral = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    assert from_config({"do_sample": True}, do_sample=False, **neutral) == SamplingParams(temperature=0)
    assert from_config({}, do_sample=False, top_k=0) == SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ({}, {"do_sample": False, "top_p": 0.5}, r"do_sample=False chooses greedily, yet top_p=0.5 is given"),
        ({}, {"do_sample": True, "temperature": 0}, "contradict"),
        ({"do_sample": True, "temperature": 0.0}, {}, "temperature is 0"),
        ({}, {"do_sample": 1}, "do_sample is 1; give True or False"),
        ({}, {"top_q": 0.5}, "unknown sampling option 'top_q'; did you mean 'top_"),
        ({}, {"temprature": 0.5}, "did you mean 'temperature'"),
        ({}, {"xyz": 0.5}, "choose from bad_words, bad_words_ids, do_sample"),
        ({}, {"top_p": math.nan}, "top_p is nan"),
        ({}, {"temperature": math.nan}, "temperature is nan"),
        ({"do_sample": True, "top_p": 0}, {}, "top_p is 0"),
        (5, {}, "generation_config is a int"),
    ],
)
def test_bad_configs_and_overrides(config: Any, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config, **overrides)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("top_h", 0.4),
        ("suppress_tokens", [5]),
        ("begin_suppress_tokens", [5]),
        ("guidance_scale", 1.5),
        ("penalty_alpha", 0.6),
        ("sequence_bias", [[[5], 1.0]]),
        ("forced_eos_token_id", 0),
        ("stop_strings", ["\n"]),
        ("watermarking_config", {"greenlist_ratio": 0.5}),
        ("token_healing", True),
        ("encoder_repetition_penalty", 1.2),
        ("diversity_penalty", 0.5),
        ("exponential_decay_length_penalty", [5, 1.1]),
    ],
)
def test_what_qsample_does_not_do_is_refused_with_a_way_on(field: str, value: Any) -> None:
    config = {"do_sample": True, field: value}
    with pytest.raises(ValueError, match=rf"{field} is .*not supported: .*give {field}=None to go without"):
        from_config(config)
    assert from_config(config, **{field: None}) == from_config({"do_sample": True})
    with pytest.raises(ValueError, match=field):
        from_config({"do_sample": True}, **{field: value})


def test_several_unsupported_fields_are_listed_together() -> None:
    with pytest.raises(
        ValueError, match=r"num_beams is 4, .*num_beams=None .*; guidance_scale is 3, .*guidance_scale=None"
    ):
        from_config({"num_beams": 4, "guidance_scale": 3})


def test_filters_of_transformers() -> None:
    cutoffs = {"typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 6e-4}
    bans = {"no_repeat_ngram_size": 3, "bad_words_ids": [[5], [6, 7]]}
    tuples = {**bans, "bad_words_ids": ((5,), (6, 7))}
    assert from_config({"do_sample": True, **cutoffs, **bans}) == SamplingParams(top_k=50, **cutoffs, **tuples)
    # Greedy search ignores what chooses among several tokens, and not what forbids some.
    assert from_config({"do_sample": False, **cutoffs, **bans}) == SamplingParams(temperature=0, **tuples)
    assert from_config({}, typical_p=0.9) == SamplingParams(top_k=50, typical_p=0.9)
    assert from_config({}, no_repeat_ngram_size=3).temperature == 0
    with pytest.raises(ValueError, match=r"do_sample=False chooses greedily, yet xtc_probability=0\.5 is given"):
        from_config({}, do_sample=False, xtc_probability=0.5)


def test_an_override_of_the_total_length_beats_the_configs_new_tokens() -> None:
    params = from_config({"max_new_tokens": 500, "min_new_tokens": 5}, max_length=20, min_length=3)
    assert params.lengths(10, 100) == (3, 20)
    assert from_config({"max_length": 20}, max_new_tokens=5).lengths(10, 100) == (0, 15)
    assert from_config({"max_new_tokens": 500}, max_new_tokens=None).total_length(10) == 10 + DEFAULT_NEW_TOKENS


def test_a_total_length_beats_the_new_tokens_of_an_earlier_layer() -> None:
    own = {"max_new_tokens": 500, "min_new_tokens": 2, "top_k": 5}
    assert layered(own, {"max_length": 20, "min_length": 3}) == {"max_length": 20, "min_length": 3, "top_k": 5}
    assert layered(own, {"max_length": 20, "max_new_tokens": 7})["max_new_tokens"] == 7
    assert layered(own, {}, {"max_length": None}) == {**own, "max_length": None}


def test_eos_override() -> None:
    assert from_config({"eos_token_id": 2}).eos_token_id == (2,)
    assert from_config({}).eos_token_id is None
    assert from_config({"eos_token_id": 2}, eos_token_id=None).eos_token_id == ()
    assert from_config({"eos_token_id": 2}, eos_token_id=[5, 6]).eos_token_id == (5, 6)


def test_transformers_own_objects_and_defaults() -> None:
    transformers = pytest.importorskip("transformers")
    assert from_config(transformers.GenerationConfig()) == SamplingParams(temperature=0)
    config = transformers.GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=5)
    assert from_config(config) == SamplingParams(temperature=0.7, top_k=50, eos_token_id=(5,))
    # Everything that transformers itself fills in is a value that qsample can do.
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert from_config(defaults | {"do_sample": True}) == SamplingParams(top_k=50, max_length=20)


def test_every_field_of_transformers_is_known_or_harmless() -> None:
    """A new sampling field of transformers must not be ignored: this list is all that is, and why."""
    transformers = pytest.importorskip("transformers")
    from qsample import sampling_params as module

    harmless_without_beams = {"early_stopping", "length_penalty"}
    same_distribution = {"renormalize_logits", "use_mtp"}
    needs_an_assistant_model = {
        "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
        "speculation_type", "max_matching_ngram_size",
    }  # fmt: skip
    bookkeeping = {
        "prefill_chunk_size", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "output_attentions",
        "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "pad_token_id",
        "bos_token_id", "decoder_start_token_id", "compile_config", "disable_compile", "continuous_batching_config",
        "transformers_version", "do_sample", "low_memory", "return_legacy_cache",
    }  # fmt: skip
    known = {*module.UNSUPPORTED, *SamplingParams.__slots__}
    fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert fields - known - harmless_without_beams - same_distribution - needs_an_assistant_model - bookkeeping == set()


def test_who_made_a_mistake_is_told() -> None:
    with pytest.raises(ValueError, match=r"^generation_config: repetition_penalty is 0; give"):
        SamplingParams.from_generation_config({"repetition_penalty": 0}, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"^max_new_tokens is 0; give"):
        SamplingParams.from_generation_config({"repetition_penalty": 0}, max_new_tokens=0)
    with pytest.raises(ValueError, match=r"^generation_config: min_new_tokens is 9, more than max_new_tokens \(3\)"):
        SamplingParams.from_generation_config({"min_new_tokens": 9}, max_new_tokens=3)
