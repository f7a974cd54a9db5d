"""The numbers and names that hosts in other languages have written into their code, as docs/contract.md states them."""

from __future__ import annotations

import pytest

from qsample.contract import tensors

NUMBERS = {
    # Versions
    "CONTRACT_VERSION": "2.0",
    "STEPS_VERSION": "2.1",
    "STEPS_ONNXRUNTIME": "1.32",
    "IMAGES_VERSION": "2.2",
    "CACHES_VERSION": "2.3",
    "GRAMMARS_VERSION": "2.4",
    "CONTRACT_VERSIONS": ("2.0", "2.1", "2.2", "2.3", "2.4"),
    # Random numbers
    "PHILOX_UNIFORM_SCALE": 1 / 16777216,
    "NOISE_STREAM": 0,
    "XTC_STREAM": 1,
    "NOISE_STREAMS": {"noise": 0, "xtc_noise": 1},
    # The status of a row
    "RUNNING": 0,
    "STOPPED": 1,
    "LENGTH": 2,
    "INVALID_LOGITS": 3,
    "STATUS_NAMES": {0: "running", 1: "stop", 2: "length", 3: "invalid"},
    # Sizes
    "CANDIDATES": 64,
    "MOST_SPECULATIVE_TOKENS": 64,
    "LONGEST_MATCH": 64,
    "PAD_STOP_ID": -1,
    # Choices
    "FILTER_ORDERS": ("huggingface", "llama.cpp"),
    "LOGPROBS_MODES": ("raw_logprobs", "processed_logprobs"),
    "MODEL_DTYPES": ("float32", "float16", "bfloat16"),
    "KV_CACHE_DTYPES": ("float32", "float16", "bfloat16", "int8", "int4"),
    "BLOCK_SIZES": (16, 32, 64, 128, 256),
    "STATEFUL_FILTERS": ("mirostat", "adaptive_p"),
    "IMAGE_FEATURES": "image_features",
    "PIXEL_VALUES": "pixel_values",
}
AXES = {
    "BATCH": "B",
    "SEQUENCE": "S",
    "CAPACITY": "T",
    "VOCAB": "V",
    "STOPS": "E",
    "BIASES": "N",
    "MASK_WORDS": "W",
    "TOP_LOGPROBS": "M",
    "SEARCHED": "R",
    "BREAKERS": "D",
    "BAD_WORDS": "Q",
    "BAD_WORD_LENGTH": "L",
    "ADAPTER_RANKS": "P",
    "GUESSES": "G",
    "NEW_TOKENS": "J",
    "IMAGE_TOKENS": "F",
    "TILES": "I",
    "PATCHES": "A",
    "GRAMMAR_STATES": "X",
    "TOKEN_CLASSES": "Y",
    "CLASS_MAPS": "Z",
    "SCORED": "U",
    "HEIGHT": "tile_height",
    "WIDTH": "tile_width",
}


@pytest.mark.parametrize("name", [*NUMBERS, *AXES])
def test_a_host_may_rely_on(name: str) -> None:
    assert getattr(tensors, name) == {**NUMBERS, **AXES}[name]


def test_each_axis_has_a_meaning_of_its_own() -> None:
    # The sides of a tile are named by what they are.
    assert set(tensors.AXIS_MEANINGS) == set(AXES.values()) - {"tile_height", "tile_width"}
    assert len(set(tensors.AXIS_MEANINGS.values())) == len(tensors.AXIS_MEANINGS)


def test_the_axes_whose_size_a_host_chooses() -> None:
    assert set(tensors.HOST_AXES) == {"E", "N", "D", "Q", "L", "F", "X", "Y", "Z"}
    assert set(tensors.GRAMMAR_AXES) == {"X", "Y", "Z"}
