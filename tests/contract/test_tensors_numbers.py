"""The numbers and names that hosts in other languages have written into their code, as docs/contract.md states them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from qsample.contract import tensors
from qsample.contract.tensors import TensorSpec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "contract.md").read_text("utf-8")

NUMBERS = {
    # Versions
    "CONTRACT_VERSION": "2.0",
    "STEPS_VERSION": "2.1",
    "STEPS_ONNXRUNTIME": "1.32",
    "IMAGES_VERSION": "2.2",
    "CACHES_VERSION": "2.3",
    "GRAMMARS_VERSION": "2.4",
    "REPLAY_VERSION": "2.5",
    "CONTRACT_VERSIONS": ("2.0", "2.1", "2.2", "2.3", "2.4", "2.5"),
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


def specs_in(value: Any) -> Iterator[TensorSpec]:
    """The tensors of a constant, which may be a group of groups of them."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, Mapping):
        yield from specs_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from specs_in(item)


# The page says in words what these are: between the graphs of a package, or inside one.
IN_WORDS = {"logits": ("B", "V"), "adjusted_logits": ("B", "V"), "all_logits": ("B + U", "V")}
SPECS = {
    (name, place): spec
    for name, value in vars(tensors).items()
    if name.isupper()
    for place, spec in enumerate(specs_in(value))
}


def rows_of_page() -> list[list[str]]:
    """The cells of each row of the page's tables of tensors, from the name of the tensor on."""
    rows = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line[:1] == "|" else []
        types = [
            place
            for place, cell in enumerate(cells)
            if re.fullmatch(r"u?(int|float)\d+|bool", cell)
        ]
        if types:  # of a state, the name of its output stands between
            rows.append([cells[types[0] - 1], *cells[types[0] :]])
            if cells[types[0] - 1].startswith("— ") or "_RetainedState" in cells[types[0] - 1]:
                rows[-1][0] = cells[0]
    return rows


ROWS = rows_of_page()


@pytest.mark.parametrize(("name", "place"), SPECS)
def test_each_tensor_is_that_of_the_page(name: str, place: int) -> None:
    spec = SPECS[name, place]
    shape = f"[{', '.join(map(str, spec.axes))}]" if spec.axes else "scalar"
    rows = [row for row in ROWS if row[0] == f"`{spec.name}`" and row[1:3] == [spec.dtype, shape]]
    if not rows:
        assert (IN_WORDS[spec.name], "float32", None) == (spec.axes, spec.dtype, spec.off)
    offs = [float(row[3]) for row in rows if re.fullmatch(r"-?[\d.]+", row[3])]
    assert all(off == spec.off for off in offs), rows


def test_the_inputs_and_the_states_of_filters() -> None:
    listed = [
        (name if place == 0 else "", spec.name)
        for name, inputs in tensors.EXTRA_PARAMETERS.items()
        for place, spec in enumerate(inputs)
    ]
    rows = re.findall(r"^\| (?:`(\w+)`)? \| `(\w+)` \| \w+ \| \[B", PAGE, re.MULTILINE)
    assert listed == rows[: len(listed)]
    assert {name: spec.name for name, spec in tensors.FILTER_STATES.items()} == {
        "xtc": "xtc_noise", "mirostat": "mirostat_mu", "adaptive_p": "adaptive_error",
    }  # fmt: skip
    read_only = re.findall(r"^\| `(\w+)` \| — \(read-only\)", PAGE, re.MULTILINE)
    assert {spec.name for spec in SPECS.values() if spec.read_only} == {*read_only}
    assert tensors.retained_name("status") == "status_RetainedState"
    assert tensors.retained_name("past_key_values.3.value") == "present.3.value"
    spec = TensorSpec("x", "int32", ("B", 3, "T"), "")
    assert (spec.off, spec.read_only, spec.shape({"B": 5, "T": 7})) == (None, False, (5, 3, 7))
