"""Sampling parameters: defaults, ranges, lengths, messages; from a generation_config with a caller's options on top."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.errors import ArgumentError
from qsample.request.refusals import UNSUPPORTED_SETTINGS
from qsample.request.sampling_params import DEFAULT_NEW_TOKENS, SamplingParams, layered


def test_defaults_sample_from_the_models_own_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1.0,
        0.0,
        0.0,
    )
    assert params.eos_token_id is None


ACCEPTED: dict[str, list[Any]] = {
    "temperature": [0, 1e-30, np.float32(0.5)], "top_k": [2**31 - 1, np.int64(5)], "top_p": [1, 1e-6], "min_p": [1.0],
    "repetition_penalty": [0.5], "presence_penalty": [-2], "frequency_penalty": [-2.5], "min_length": [0],
    "min_new_tokens": [0], "max_length": [1], "max_new_tokens": [1], "seed": [2**63 - 1], "dry_penalty_last_n": [-1],
    "no_repeat_ngram_size": [65], "mirostat": [2], "penalty_last_n": [-1, 0, 2**31 - 1],
    "adaptive_target": [-1, 0, 1.0],
}  # fmt: skip
REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, 1e39, "0.7", True, None],  # 1e39 is infinite in float32
    "top_k": [-1, 2.0, True, 2**31],
    "top_p": [0, 1.5, -0.1, math.nan, 1e-50],  # the last is zero in float32
    "min_p": [-0.01, 1.01, math.nan],
    "repetition_penalty": [0, -1, math.inf, math.nan, 1.2e-38, 1e39],  # logits overflow with 1.2e-38
    "presence_penalty": [math.nan, -math.inf],
    "frequency_penalty": [math.nan, "1", -3e38],
    "min_length": [-1, None],
    "min_new_tokens": [-1, 1.5],
    "max_length": [0],
    "max_new_tokens": [0, 2**31],
    "eos_token_id": [-1, "2", [2, True], [2, 1.0]],
    "seed": [-1, 2**63, 1.0],
    "logit_bias": [[1], {-1: 1.0}, {1: math.nan}, {1: math.inf}, {1: -1e39}],
    "typical_p": [0], "epsilon_cutoff": [1.1], "eta_cutoff": [-0.1], "top_n_sigma": [-1],
    "xtc_probability": [2], "xtc_threshold": [math.nan],
    "dry_multiplier": [-1], "dry_base": [0.5], "dry_allowed_length": [0], "dry_penalty_last_n": [-2],
    "dry_sequence_breakers": ["\n", [""], [-1]],
    "penalty_last_n": [-2, 1.0], "no_repeat_ngram_size": [66],
    "bad_words_ids": [[5], [[]], [list(range(65))], [[True]]],
    "bad_words": ["word", [5]],
    "dynatemp_range": [math.inf], "dynatemp_exponent": [-1],
    "mirostat": [1, 2.0], "mirostat_tau": [0], "mirostat_eta": [-0.1],
    "adaptive_target": [1.01, -2], "adaptive_decay": [1, -0.1],
    "adapter": ["", 5],
}  # fmt: skip


@pytest.mark.parametrize("field", ACCEPTED)
def test_accepted_values(field: str) -> None:
    for value in ACCEPTED[field]:
        stored = getattr(SamplingParams(**{field: value}), field)
        assert stored == value
        assert type(stored) in (int, float)


@pytest.mark.parametrize("field", REFUSED)
def test_refused_values_name_the_field_and_what_is_accepted(field: str) -> None:
    for value in REFUSED[field]:
        with pytest.raises(ValueError, match=rf"^{field}.* is .+; give "):
            SamplingParams(**{field: value})


def test_lists_of_filters_become_tuples_and_empty_lists_none() -> None:
    words = np.array([[5, 6]])
    params = SamplingParams(
        bad_words_ids=words, dry_sequence_breakers=["a", 5, "a"], bad_words=("x",)
    )  # type: ignore[arg-type]
    assert (params.bad_words_ids, params.dry_sequence_breakers, params.bad_words) == (
        ((5, 6),),
        ("a", 5),
        ("x",),
    )
    none = SamplingParams(bad_words_ids=[], dry_sequence_breakers=[], bad_words=[])  # type: ignore[arg-type]
    assert none == SamplingParams()
    assert hash(params) != hash(none)


def test_defaults_are_the_contracts_and_switch_every_filter_off() -> None:
    params = SamplingParams()
    for specs in EXTRA_PARAMETERS.values():
        for spec in specs:
            assert (params.value_of(spec.name) or spec.off) == spec.off, spec.name
    assert params.filters == {}
    on = {
        "xtc_probability": 0.5,
        "mirostat": 2,
        "mirostat_tau": 3.0,
        "bad_words": ["x"],
        "dry_base": 2.0,
    }
    asked = SamplingParams(**on)  # type: ignore[arg-type]
    assert asked.filters == {
        "xtc": "xtc_probability",
        "mirostat": "mirostat",
        "bad_words_ids": "bad_words",
    }
    assert asked.value_of("mirostat_tau") == 3.0


def test_the_message_shows_what_was_given() -> None:
    with pytest.raises(
        ValueError, match=r"^top_p is 1\.5; give a number > 0 and <= 1 \(1 = off\)$"
    ):
        SamplingParams(top_p=1.5)


def test_contradicting_lengths() -> None:
    with pytest.raises(
        ArgumentError, match=r"min_new_tokens is 5, more than max_new_tokens \(4\)"
    ) as raised:
        SamplingParams(min_new_tokens=5, max_new_tokens=4)
    assert raised.value.argument == "min_new_tokens"


def test_eos_ids_are_a_tuple_without_repeats() -> None:
    assert SamplingParams(eos_token_id=2).eos_token_id == (2,)  # type: ignore[arg-type]
    assert SamplingParams(eos_token_id=[2, 3, 2]).eos_token_id == (2, 3)  # type: ignore[arg-type]
    assert SamplingParams(eos_token_id=()).eos_token_id == ()


def test_logit_bias_is_copied() -> None:
    given = {3: 1, 4: -math.inf}
    params = SamplingParams(logit_bias=given)
    given[5] = 2
    assert params.logit_bias == {3: 1.0, 4: -math.inf}
    assert hash(params) == hash(SamplingParams())


@pytest.mark.parametrize(
    ("params", "prompt", "capacity", "expected"),
    [
        (SamplingParams(max_new_tokens=5), 10, 100, (0, 15)),
        (SamplingParams(max_new_tokens=5, max_length=50), 10, 100, (0, 15)),  # as in transformers
        (SamplingParams(max_length=50), 10, 100, (0, 50)),
        (SamplingParams(), 10, 1000, (0, 10 + DEFAULT_NEW_TOKENS)),
        (SamplingParams(), 10, 100, (0, 100)),
        (SamplingParams(max_new_tokens=500), 99, 100, (0, 100)),
        (SamplingParams(min_length=12, max_length=50), 10, 100, (12, 50)),
        (SamplingParams(min_length=12, min_new_tokens=4, max_length=50), 10, 100, (14, 50)),
        (SamplingParams(min_new_tokens=2**31 - 1), 10, 100, (2**31 - 1, 100)),
    ],
)
def test_lengths(
    params: SamplingParams, prompt: int, capacity: int, expected: tuple[int, int]
) -> None:
    assert params.lengths(prompt, capacity) == expected


def test_no_room_for_a_token() -> None:
    with pytest.raises(
        ValueError, match="prompt has 100 tokens and the context length is 100; give at most 99"
    ):
        SamplingParams().lengths(100, 100)
    with pytest.raises(ValueError, match="max_length is 10 and the prompt already has 10 tokens"):
        SamplingParams(max_length=10).lengths(10, 100)
    with pytest.raises(ValueError, match="already has 11 tokens; raise"):
        SamplingParams(max_length=10).lengths(11, 100)


def test_it_needs_the_standard_library_only() -> None:
    program = (
        "import sys; before = set(sys.modules); import qsample.request.sampling_params, qsample.package.package, json\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(loaded - set(sys.stdlib_module_names))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert json.loads(result.stdout) == ["qsample"]


def test_padding_counts_for_total_lengths_and_not_for_new_tokens() -> None:
    assert SamplingParams(max_length=20, min_length=8).lengths(10, 100, padding=5) == (3, 15)
    assert SamplingParams(max_length=20, min_length=3).lengths(10, 100, padding=5) == (0, 15)
    assert SamplingParams(max_new_tokens=7, min_new_tokens=2).lengths(10, 100, padding=5) == (
        12,
        17,
    )
    assert SamplingParams().total_length(10, 5) == 10 + DEFAULT_NEW_TOKENS
    with pytest.raises(
        ValueError, match="max_length is 15 and the prompt already has 15 tokens with its padding"
    ):
        SamplingParams(max_length=15).lengths(10, 100, padding=5)


from_config = SamplingParams.from_generation_config


def test_an_empty_config_is_greedy_as_in_transformers() -> None:
    assert from_config({}).temperature == 0
    assert from_config(None).temperature == 0


def test_every_field_of_a_generation_config_is_read() -> None:
    read: dict[str, Any] = {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "min_length": 3, "min_new_tokens": 4, "max_length": 50,
        "max_new_tokens": 40, "eos_token_id": (2, 7),
    }  # fmt: skip
    ignored = {
        "pad_token_id": 0, "bos_token_id": 1, "transformers_version": "5.23.0", "use_cache": True,
        "cache_implementation": "hybrid", "output_scores": False, "return_dict_in_generate": False, "num_beams": 1,
        "_from_model_config": True, "typical_p": 1.0, "suppress_tokens": [], "a_key_of_the_model_itself": 5,
    }  # fmt: skip
    assert from_config({"do_sample": True, **read, **ignored}) == SamplingParams(**read)


def test_top_k_is_50_if_a_sampling_config_does_not_set_it() -> None:
    assert from_config({"do_sample": True}).top_k == 50
    assert from_config({"do_sample": True, "top_k": None}).top_k == 50
    assert from_config({"do_sample": True, "top_k": 0}).top_k == 0
    assert from_config({"do_sample": True}, top_k=None).top_k == 0
    assert from_config({}, temperature=0.5).top_k == 50


def test_a_greedy_config_ignores_its_sampling_fields() -> None:
    assert from_config(
        {"do_sample": False, "temperature": 0.6, "top_k": 5, "top_p": 0.5}
    ) == SamplingParams(temperature=0)
    assert from_config({"temperature": 0.6}).temperature == 0
    assert from_config(
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9}, do_sample=False
    ) == SamplingParams(temperature=0)


@pytest.mark.parametrize(
    "override", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
)
def test_a_sampling_override_implies_do_sample(override: dict[str, Any]) -> None:
    params = from_config({"do_sample": False, "top_k": 3}, **override)
    assert params == SamplingParams(**({"top_k": 3} | override))


def test_temperature_0_is_greedy() -> None:
    assert from_config({"do_sample": True, "top_k": 5}, temperature=0) == SamplingParams(
        temperature=0
    )
    assert from_config({}, do_sample=False, temperature=0.0).temperature == 0


def test_neutral_values_do_not_contradict_greedy_decoding() -> None:
    neutral = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    assert from_config({"do_sample": True}, do_sample=False, **neutral) == SamplingParams(
        temperature=0
    )
    assert from_config({}, do_sample=False, top_k=0) == SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (
            {},
            {"do_sample": False, "top_p": 0.5},
            r"do_sample=False chooses greedily, yet top_p=0.5 is given",
        ),
        ({}, {"do_sample": True, "temperature": 0}, "contradict"),
        ({"do_sample": True, "temperature": 0.0}, {}, "temperature is 0"),
        ({}, {"do_sample": 1}, "do_sample is 1; give True or False"),
        ({}, {"top_q": 0.5}, "sampling option 'top_q'; did you mean 'top_"),
        ({}, {"temprature": 0.5}, "did you mean 'temperature'"),
        (
            {},
            {"xyz": 0.5},
            "choose from adapter, adaptive_decay, adaptive_target, bad_words, bad_words_ids, do_sample",
        ),
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
    "given",
    [
        {(5,): 1.5, (6,): -2},
        [[[5], 1.5], [[6], -2]],
        (([5], 1.5), ((np.int64(6),), np.float32(-2))),
    ],
)
def test_biases_on_tokens_add_up(given: Any) -> None:
    params = SamplingParams(
        sequence_bias=given, suppress_tokens=np.array([7, 5, 7]), logit_bias={5: 1.0}
    )
    assert params.sequence_bias == {(5,): 1.5, (6,): -2.0}
    assert params.suppress_tokens == (7, 5)
    assert params.biases == {
        "logit_bias": {5: 1.0},
        "sequence_bias": {5: 1.5, 6: -2.0},
        "suppress_tokens": {7: -math.inf, 5: -math.inf},
    }
    assert replace(params, seed=1).biases == params.biases
    assert hash(params) == hash(replace(params))
    nothing = SamplingParams(sequence_bias=[], suppress_tokens=(), logit_bias={})
    assert nothing == SamplingParams()
    assert nothing.biases == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({(5, 6): 1.0}, "sequence_bias is .*give a bias for each single token.*bad_words_ids"),
        ({(): 1.0}, "sequence_bias is .*give a bias for each single token"),
        ({5: 1.0}, "sequence_bias is .*give a bias for each single token"),
        ([[5, 1.0]], "sequence_bias is .*give a bias for each single token"),
        ([[[5], 1.0, 2.0]], "sequence_bias is .*give a bias for each single token"),
        (7, "sequence_bias is 7; give a bias for each single token"),
        ({(-1,): 1.0}, "sequence_bias is -1; give"),
        ({(5,): math.nan}, "sequence_bias of token 5 is nan; give a finite number, or -inf"),
        ({(5,): math.inf}, "sequence_bias of token 5 is inf"),
        ({(5,): "1"}, "sequence_bias of token 5 is '1'"),
    ],
)
def test_a_bias_that_is_no_bias_of_tokens(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(sequence_bias=given)


@pytest.mark.parametrize("field", UNSUPPORTED_SETTINGS)
def test_unsupported_settings_are_refused_with_a_remedy(field: str) -> None:
    config = {"do_sample": True, field: 4}
    with pytest.raises(
        ValueError, match=rf"{field} is .*not supported: .*give {field}=None to go without"
    ):
        from_config(config)
    assert from_config(config, **{field: None}) == from_config({"do_sample": True})
    with pytest.raises(ValueError, match=field):
        from_config({"do_sample": True}, **{field: 4})


def test_several_unsupported_fields_are_listed_together() -> None:
    with pytest.raises(
        ValueError,
        match=r"num_beams is 4, .*num_beams=None .*; guidance_scale is 3, .*guidance_scale=None",
    ):
        from_config({"num_beams": 4, "guidance_scale": 3})


def test_filters_of_transformers() -> None:
    cutoffs = {"typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 6e-4}
    bans = {"no_repeat_ngram_size": 3, "bad_words_ids": [[5], [6, 7]]}
    tuples = {**bans, "bad_words_ids": ((5,), (6, 7))}
    assert from_config({"do_sample": True, **cutoffs, **bans}) == SamplingParams(
        top_k=50, **cutoffs, **tuples
    )
    # Greedy search ignores what chooses among several tokens, and not what forbids some.
    assert from_config({"do_sample": False, **cutoffs, **bans}) == SamplingParams(
        temperature=0, **tuples
    )
    assert from_config({}, typical_p=0.9) == SamplingParams(top_k=50, typical_p=0.9)
    assert from_config({}, no_repeat_ngram_size=3).temperature == 0
    with pytest.raises(
        ValueError, match=r"do_sample=False chooses greedily, yet xtc_probability=0\.5 is given"
    ):
        from_config({}, do_sample=False, xtc_probability=0.5)


def test_an_override_of_the_total_length_beats_the_configs_new_tokens() -> None:
    params = from_config({"max_new_tokens": 500, "min_new_tokens": 5}, max_length=20, min_length=3)
    assert params.lengths(10, 100) == (3, 20)
    assert from_config({"max_length": 20}, max_new_tokens=5).lengths(10, 100) == (0, 15)
    assert (
        from_config({"max_new_tokens": 500}, max_new_tokens=None).total_length(10)
        == 10 + DEFAULT_NEW_TOKENS
    )


def test_a_total_length_beats_the_new_tokens_of_an_earlier_layer() -> None:
    own = {"max_new_tokens": 500, "min_new_tokens": 2, "top_k": 5}
    assert layered(own, {"max_length": 20, "min_length": 3}) == {
        "max_length": 20,
        "min_length": 3,
        "top_k": 5,
    }
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
    known = {*UNSUPPORTED_SETTINGS, *SamplingParams.__slots__}
    fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert (
        fields
        - known
        - harmless_without_beams
        - same_distribution
        - needs_an_assistant_model
        - bookkeeping
        == set()
    )


def test_who_made_a_mistake_is_told() -> None:
    with pytest.raises(ValueError, match=r"^generation_config: repetition_penalty is 0; give"):
        SamplingParams.from_generation_config({"repetition_penalty": 0}, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"^max_new_tokens is 0; give"):
        SamplingParams.from_generation_config({"repetition_penalty": 0}, max_new_tokens=0)
    with pytest.raises(
        ValueError, match=r"^generation_config: min_new_tokens is 9, more than max_new_tokens \(3\)"
    ):
        SamplingParams.from_generation_config({"min_new_tokens": 9}, max_new_tokens=3)
