"""Sampling parameters: defaults, ranges, lengths, and messages that say what is accepted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.contract import EXTRA_PARAMETERS
from qsample.sampling_params import DEFAULT_NEW_TOKENS, SamplingParams


def test_defaults_sample_from_the_models_own_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.eos_token_id is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-30),
        ("top_k", 2**31 - 1),
        ("top_p", 1),
        ("top_p", 1e-6),
        ("min_p", 1.0),
        ("repetition_penalty", 0.5),
        ("presence_penalty", -2),
        ("frequency_penalty", -2.5),
        ("min_length", 0),
        ("min_new_tokens", 0),
        ("max_length", 1),
        ("max_new_tokens", 1),
        ("seed", 2**63 - 1),
        ("dry_penalty_last_n", -1),
        ("no_repeat_ngram_size", 65),
        ("mirostat", 2),
        ("top_k", np.int64(5)),
        ("temperature", np.float32(0.5)),
    ],
)
def test_accepted_values(field: str, value: Any) -> None:
    stored = getattr(SamplingParams(**{field: value}), field)
    assert stored == value
    assert type(stored) in (int, float)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),  # infinite in float32
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("top_p", 1e-50),  # zero in float32
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 1e39),
        ("presence_penalty", math.nan),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", "1"),
        ("min_length", -1),
        ("min_length", None),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1.5),
        ("max_length", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**31),
        ("eos_token_id", -1),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, True]),
        ("eos_token_id", [2, 1.0]),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: -1e39}),
        ("typical_p", 0),
        ("epsilon_cutoff", 1.1),
        ("eta_cutoff", -0.1),
        ("top_n_sigma", -1),
        ("xtc_probability", 2),
        ("xtc_threshold", math.nan),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", "\n"),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", [-1]),
        ("no_repeat_ngram_size", 66),
        ("bad_words_ids", [5]),
        ("bad_words_ids", [[]]),
        ("bad_words_ids", [list(range(65))]),
        ("bad_words_ids", [[True]]),
        ("bad_words", "word"),
        ("bad_words", [5]),
        ("dynatemp_range", math.inf),
        ("dynatemp_exponent", -1),
        ("mirostat", 1),
        ("mirostat", 2.0),
        ("mirostat_tau", 0),
        ("mirostat_eta", -0.1),
    ],
)
def test_refused_values_name_the_field_and_what_is_accepted(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}.* is .+; give "):
        SamplingParams(**{field: value})


def test_lists_of_the_filters_are_tuples_and_none_where_they_are_empty() -> None:
    words = np.array([[5, 6]])
    params = SamplingParams(bad_words_ids=words, dry_sequence_breakers=["a", 5, "a"], bad_words=("x",))  # type: ignore[arg-type]
    assert (params.bad_words_ids, params.dry_sequence_breakers, params.bad_words) == (((5, 6),), ("a", 5), ("x",))
    none = SamplingParams(bad_words_ids=[], dry_sequence_breakers=[], bad_words=[])  # type: ignore[arg-type]
    assert none == SamplingParams()
    assert hash(params) != hash(none)


def test_defaults_are_the_contracts_and_switch_every_filter_off() -> None:
    params = SamplingParams()
    for specs in EXTRA_PARAMETERS.values():
        for spec in specs:
            assert (params.value_of(spec.name) or spec.off) == spec.off, spec.name
    assert params.filters == {}
    on = {"xtc_probability": 0.5, "mirostat": 2, "mirostat_tau": 3.0, "bad_words": ["x"], "dry_base": 2.0}
    asked = SamplingParams(**on)  # type: ignore[arg-type]
    assert asked.filters == {"xtc": "xtc_probability", "mirostat": "mirostat", "bad_words_ids": "bad_words"}
    assert asked.value_of("mirostat_tau") == 3.0


def test_the_message_shows_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"^top_p is 1\.5; give a number > 0 and <= 1 \(1 = off\)$"):
        SamplingParams(top_p=1.5)


def test_contradicting_lengths() -> None:
    with pytest.raises(ValueError, match=r"min_new_tokens is 5, more than max_new_tokens \(4\)"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4)


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
def test_lengths(params: SamplingParams, prompt: int, capacity: int, expected: tuple[int, int]) -> None:
    assert params.lengths(prompt, capacity) == expected


def test_no_room_for_a_token() -> None:
    with pytest.raises(ValueError, match="prompt has 100 tokens and the context length is 100; give at most 99"):
        SamplingParams().lengths(100, 100)
    with pytest.raises(ValueError, match="max_length is 10 and the prompt already has 10 tokens"):
        SamplingParams(max_length=10).lengths(10, 100)


def test_it_needs_the_standard_library_only() -> None:
    program = (
        "import sys; before = set(sys.modules); import qsample.sampling_params, qsample.package, json\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(loaded - set(sys.stdlib_module_names))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert json.loads(result.stdout) == ["qsample"]


def test_padding_counts_for_total_lengths_and_not_for_new_tokens() -> None:
    assert SamplingParams(max_length=20, min_length=8).lengths(10, 100, padding=5) == (3, 15)
    assert SamplingParams(max_length=20, min_length=3).lengths(10, 100, padding=5) == (0, 15)
    assert SamplingParams(max_new_tokens=7, min_new_tokens=2).lengths(10, 100, padding=5) == (12, 17)
    assert SamplingParams().total_length(10, 5) == 10 + DEFAULT_NEW_TOKENS
    with pytest.raises(ValueError, match="max_length is 15 and the prompt already has 15 tokens with its padding"):
        SamplingParams(max_length=15).lengths(10, 100, padding=5)
