"""generate() compared with transformers' own, over a table of inputs: the same sequences, pads and all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from qsample.runtime import CausalLM, load
from tests.helpers.tiny_models import VOCAB_SIZE, byte_tokenizer

PAD, BOS, EOS = 0, 1, 2
ROWS = [[17, 40, 5, 261], [90, 91, 92, 93, 94, 95, 96], [33]]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def wanted(original: Any) -> Callable[[str], list[list[int]]]:
    """The name of a case → what transformers makes of it."""

    @functools.cache
    def generate(case: str) -> list[list[int]]:
        rows: list[list[int]] = original.generate(**in_torch({**GREEDY, **TABLE[case]})).tolist()
        return rows

    return generate


@pytest.fixture(scope="module")
def original(checkpoint: Callable[[str], Path]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("llama"), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def packaged(llama_package: Path) -> CausalLM:
    return load(llama_package)


def block(*, pad: int = PAD, left: bool = True) -> np.ndarray:
    """ROWS, padded on one side."""
    width = max(map(len, ROWS))
    pads = [[pad] * (width - len(row)) for row in ROWS]
    return np.array([[*p, *row] if left else [*row, *p] for p, row in zip(pads, ROWS, strict=True)])


def mask(*, left: bool = True) -> np.ndarray:
    return (block(pad=-1, left=left) >= 0).astype(np.int64)


def in_torch(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.tensor(value) if name in INPUTS else value for name, value in arguments.items()
    }


def as_lists(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.asarray(value).tolist() if name in INPUTS else value
        for name, value in arguments.items()
    }


INPUTS = ("input_ids", "inputs", "attention_mask")
HOLE = np.array([[17, 40, PAD, 5, 261, 9], [PAD, 90, 91, 92, PAD, 93]])
TABLE: dict[str, dict[str, Any]] = {
    "no mask, left pads": {"input_ids": block()},
    "no mask, no pads": {"input_ids": block()[1:2]},
    "no mask, left pads, as inputs": {"inputs": block()},
    "mask, left pads": {"input_ids": block(), "attention_mask": mask()},
    "mask over tokens that are no pads": {"input_ids": block(pad=77), "attention_mask": mask()},
    "no mask, pads are eos": {"input_ids": block(pad=EOS), "pad_token_id": EOS},
    "no mask, pads are another eos": {
        "input_ids": block(pad=9),
        "pad_token_id": 9,
        "eos_token_id": [EOS, 9],
    },
    "mask, pads are eos": {
        "input_ids": block(pad=EOS),
        "attention_mask": mask(),
        "pad_token_id": EOS,
    },
    "no mask, another pad token": {"input_ids": block(pad=77), "pad_token_id": 77},
    "no mask, the pad token is not the one used": {"input_ids": block(pad=77)},
    "no mask, no eos": {"input_ids": block(), "eos_token_id": None},
    "no mask, the pad is the bos": {"input_ids": block(pad=BOS), "pad_token_id": BOS},
    "mask of ones over pads": {"input_ids": block(), "attention_mask": np.ones_like(mask())},
    "one row": {"input_ids": block()[:1]},
    "pads between tokens": {"input_ids": HOLE},
    "mask with a hole": {"input_ids": HOLE + 30, "attention_mask": (HOLE != PAD).astype(int)},
    "max_length counts pads": {"input_ids": block(), "max_new_tokens": None, "max_length": 11},
    "min_length counts pads": {
        "input_ids": block(),
        "min_length": 10,
        "eos_token_id": list(range(3, VOCAB_SIZE, 2)),
    },
    "rows that end early": {"input_ids": block(), "eos_token_id": list(range(3, VOCAB_SIZE, 5))},
    "repetition penalty": {"input_ids": block(), "repetition_penalty": 1.4},
}


@pytest.mark.parametrize("form", [in_torch, dict, as_lists], ids=["torch", "numpy", "lists"])
@pytest.mark.parametrize("case", TABLE)
def test_the_sequences_are_those_of_transformers(
    case: str, form: Any, wanted: Callable[[str], list[list[int]]], packaged: CausalLM
) -> None:
    arguments = {**GREEDY, **TABLE[case]}
    got = packaged.generate(**form(arguments))
    assert got.sequences.tolist() == wanted(case)
    width = arguments.get("input_ids", arguments.get("inputs")).shape[1]
    for row, tokens in enumerate(got.token_ids):
        assert got.sequences[row, width:][: len(tokens)].tolist() == tokens


def test_the_table_tells_its_cases_apart(wanted: Callable[[str], list[list[int]]]) -> None:
    """Padding that is read, and padding that is not, give other tokens; rows end at other lengths."""
    new = {
        case: [row[7:] for row in wanted(case)]
        for case in ("no mask, left pads", "mask of ones over pads")
    }
    assert all(a != b for a, b in zip(*(rows[::2] for rows in new.values()), strict=True))
    early = [row[7:].count(PAD) for row in wanted("rows that end early")]
    assert len(set(early)) > 1


@pytest.mark.parametrize(
    "single", [[17, 40, 5], np.array([17, 40, 5]), torch.tensor([17, 40, 5], dtype=torch.int32)]
)
def test_one_row_without_a_batch(single: Any, original: Any, packaged: CausalLM) -> None:
    wanted = original.generate(torch.tensor([[17, 40, 5]]), **GREEDY).tolist()
    assert packaged.generate(single, **GREEDY).sequences.tolist() == wanted
    assert (
        packaged.generate(input_ids=single, attention_mask=[1, 1, 1], **GREEDY).sequences.tolist()
        == wanted
    )


def test_the_result_of_a_tokenizer_is_accepted(original: Any, packaged: CausalLM) -> None:
    """And the texts themselves, which are padded on the left in `sequences` as the tokenizer pads them."""
    texts = ["In the beginning", "Blessed", "x"]
    tokenizer = byte_tokenizer()
    tensors = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    wanted = original.generate(**tensors, **GREEDY).tolist()
    for form in ({"return_tensors": "pt"}, {"return_tensors": "np"}, {}):
        batch = tokenizer(texts, padding=True, padding_side="left", **form)
        assert packaged.generate(**batch, **GREEDY).sequences.tolist() == wanted
        assert packaged.generate(batch, **GREEDY).sequences.tolist() == wanted
    assert packaged.generate(**tokenizer(texts), **GREEDY).sequences.tolist() == wanted
    output = packaged.generate(texts, **GREEDY)
    assert output.sequences.tolist() == wanted
    assert tokenizer.batch_decode(output) == tokenizer.batch_decode(
        wanted
    )  # an array, as the prompts are no tensors
    assert tokenizer.decode(output[0]) == tokenizer.decode(wanted[0])


@pytest.mark.parametrize("masked", [True, False])
def test_padding_on_the_right_is_not_read(masked: bool, original: Any, packaged: CausalLM) -> None:
    """transformers warns and goes on from the padding: here a row gives the tokens that it gives without any."""
    ids, given = block(left=False), {"attention_mask": mask(left=False)} if masked else {}
    output = packaged.generate(ids, **given, **GREEDY)
    for row, prompt in enumerate(ROWS):
        alone = original.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist()
        assert output.sequences[row].tolist() == [*ids[row].tolist(), *alone]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mistral", "gpt2"])
def test_a_model_with_a_window_and_one_with_learned_positions(
    model_type: str, checkpoint: Callable[[str], Path], exported: Callable[..., Path]
) -> None:
    original = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(model_type), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    packaged = load(exported(model_type))
    for case in (
        "no mask, left pads",
        "mask over tokens that are no pads",
        "max_length counts pads",
    ):
        arguments = {**GREEDY, **TABLE[case]}
        assert (
            packaged.generate(**arguments)[:].tolist()
            == original.generate(**in_torch(arguments)).tolist()
        )
