"""Features: what is refused by name, and what is set by another field."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.contract.interface import Features, Interface, KeyValueShape, RecurrentShape
from qsample.errors import ArgumentError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprobs": 1}, "logprobs is 1; give True or False"),
        ({"top_logprobs": -1}, "top_logprobs is -1; give an integer >= 0"),
        (
            {"filters": ("dry", "typical")},
            r"filters is \('dry', 'typical'\); give a list of typical_p, top_a",
        ),
        ({"filters": 5}, "filters is 5; give a list of"),
        ({"filters": [["dry"]]}, r"filters is \[\['dry'\]\]; give a list of"),
        ({"filters": "dry"}, "filters is 'dry'"),
        ({"filter_order": "vllm"}, "filter_order is 'vllm'; choose one of huggingface, llama.cpp"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65; give 0 to 64"),
        (
            {"max_loras": -1},
            "max_loras is -1; give the most LoRA adapters that a batch may use, 1 to 1024, or 0 for none",
        ),
        ({"max_loras": 1025}, "max_loras is 1025"),
        (
            {"max_loras": 2, "max_lora_rank": 0},
            "max_lora_rank is 0; give the largest rank of an adapter, 1 to 4096",
        ),
        ({"max_loras": 2, "max_lora_rank": 4097}, "max_lora_rank is 4097"),
        ({"max_loras": 2, "max_lora_rank": True}, "max_lora_rank is True"),
    ],
)
def test_wrong_features(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        Features(**given)


def test_equal_features_compare_as_equal() -> None:
    assert Features(filters=["dry", "top_a"]) == Features(filters=("top_a", "dry"))  # type: ignore[arg-type]
    assert Features(max_loras=0, max_lora_rank=8) == Features()
    assert Features(max_loras=2).max_lora_rank == 16


def window(layer: int, capacity: int | None) -> KeyValueShape:
    return KeyValueShape(1, 8, layer, capacity=capacity)


@pytest.mark.parametrize(
    ("capacities", "whole_up_to"),
    [
        ((), -1),
        ((None, None), -1),
        ((40,), 40),
        ((30, 40), 30),
        ((40, 30), 30),
        ((None, 40, 30, 50, None), 30),
    ],
)
def test_a_row_is_whole_up_to_the_smallest_of_its_windows(
    capacities: tuple[int | None, ...], whole_up_to: int
) -> None:
    key_values = tuple(window(layer, capacity) for layer, capacity in enumerate(capacities))
    assert Interface(9, key_values).whole_up_to == whole_up_to
    state = RecurrentShape(len(capacities), "conv_state", 0, (2, 3), "float32")
    assert Interface(9, key_values, recurrent=(state,)).whole_up_to == -1
