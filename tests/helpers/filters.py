"""One request that uses every filter of contract.EXTRA_PARAMETERS, and what a graph has to read then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.runtime.decode.slots import Slots
from tests.helpers.fake_package import byte_tokenizer

FILTERS = tuple(EXTRA_PARAMETERS)
ASKED: dict[str, Any] = {
    "typical_p": 0.9,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.002,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["a", ":"],
    "penalty_last_n": 64,
    "no_repeat_ngram_size": 4,
    "bad_words": ["ab", "c"],
    "dynatemp_range": 0.25,
    "dynatemp_exponent": 2.0,
    "mirostat": 2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.3,
    "adaptive_target": 0.4,
    "adaptive_decay": 0.8,
}


def read_by_the_graph() -> dict[str, Any]:
    """Input → its row, in a fake package. Each character of ASKED's texts is a token, and so is a space."""
    a, b, c, colon = byte_tokenizer().encode("abc:", add_special_tokens=False).ids
    one_a_row = [
        spec.name for specs in EXTRA_PARAMETERS.values() for spec in specs if len(spec.axes) == 1
    ]
    lists = {"dry_sequence_breakers": [a, colon], "bad_words_ids": [[a, b], [-1, c]]}
    return {**{name: ASKED[name] for name in one_a_row if name in ASKED}, **lists}


def record_parameters(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parameters of each row that begins from here on."""
    begun: list[dict[str, Any]] = []
    plain = Slots.begin

    def begin(
        self: Slots, slot: int, prompt: Any, seed: int, parameters: Mapping[str, Any], **rest: Any
    ) -> None:
        begun.append(dict(parameters))
        plain(self, slot, prompt, seed, parameters, **rest)

    monkeypatch.setattr(Slots, "begin", begin)
    return begun


def assert_read(row: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """`row` has the expected numbers, to float32's last digit."""
    for name, value in expected.items():
        np.testing.assert_array_equal(row[name], np.array(value, row[name].dtype), err_msg=name)
