"""Every form of prompt, and every form that is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import SamplingParams
from qsample.runtime.call import Call, parse_prompts
from tests.helpers.fake_package import BOS, byte_tokenizer


def call(inputs: Any, mask: Any = None, pad: int | None = None) -> Call:
    return Call(inputs=inputs, params=SamplingParams(), attention_mask=mask, pad=pad)


def rows(inputs: Any, mask: Any = None, pad: int | None = None) -> list[list[int]]:
    prompts = parse_prompts(call(inputs, mask, pad), Tokenizer(byte_tokenizer()), 320, BOS)
    return [prompt.ids.tolist() for prompt in prompts]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("ab", [[1, 68, 69]]),
        (["ab", "c"], [[1, 68, 69], [1, 70]]),
        (("ab", "c"), [[1, 68, 69], [1, 70]]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([np.array([5, 6]), [7], (8,), "a"], [[5, 6], [7], [8], [1, 68]]),
        ([np.int64(5), np.int32(6)], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        (np.array([[5, 6], [7, 8]], dtype=np.int32), [[5, 6], [7, 8]]),
        ("", [[1]]),  # the tokenizer itself adds it
        ([[]], [[1]]),
        ([[5], []], [[5], [1]]),
        (np.zeros((2, 0), dtype=np.int64), [[1], [1]]),
    ],
)
def test_forms_of_prompts(inputs: Any, expected: list[list[int]]) -> None:
    assert rows(inputs) == expected


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 1]]])
def test_left_and_right_padding(mask: list[list[int]]) -> None:
    ids = np.array([[5, 6, 7, 8], [9, 10, 11, 12]])
    expected = [ids[0][np.array(mask[0]) == 1].tolist(), [9, 10, 11, 12]]
    for form in (np.array(mask), np.array(mask, dtype=bool), mask):
        assert rows(ids, form) == expected


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([5, 6], [1, 0]),
        ([[5, 6]], [[1, 0]]),
        ([[5, 6]], [1, 0]),
        (np.array([5, 6]), [1, 0]),
        ([[5, 6]], ([1, 0],)),
    ],
)
def test_lists_take_masks_too(ids: Any, mask: Any) -> None:
    assert rows(ids, mask) == rows(ids, np.array(mask, dtype=bool)) == [[5]]
    assert rows([[5, 6, 7], [8]], [[0, 1, 1], [1]]) == [[6, 7], [8]]


@pytest.mark.parametrize("form", [list, np.array])
def test_the_pad_token_is_padding_in_a_block_without_a_mask(form: Any) -> None:
    ids = form([[0, 0, 5], [6, 0, 7], [8, 9, 0]])
    assert rows(ids, pad=0) == [[5], [6, 7], [8, 9]]
    assert (
        rows(ids, np.ones((3, 3), dtype=int), pad=0)
        == rows(ids)
        == [[0, 0, 5], [6, 0, 7], [8, 9, 0]]
    )
    assert rows(form([[0, 5]]), pad=0) == [[5]]
    assert rows(["a"], pad=68) == [[1, 68]]  # text has no padding


@pytest.mark.parametrize(
    "prompts",
    [
        [5, 0, 6, 0],
        np.array([5, 0, 6, 0]),
        [[5, 6, 0], [0, 7]],
        [np.array([5, 6, 0]), np.array([0, 7])],
        [[5, 6, 0], [0, 7], []],
    ],
)
def test_a_single_row_and_rows_of_different_lengths_have_no_padding(prompts: Any) -> None:
    assert rows(prompts, pad=0) == rows(prompts)
    assert 0 in rows(prompts)[0]


def test_padding_between_tokens_is_refused_for_recurrent_models() -> None:
    def parse(ids: Any, mask: Any = None) -> list[list[int]]:
        prompts = parse_prompts(call(ids, mask, pad=0), None, 320, BOS, holes=False)
        return [prompt.ids.tolist() for prompt in prompts]

    assert parse([[0, 5, 6], [5, 6, 0], [5, 6, 7], [0, 0, 0]])[:3] == [[5, 6], [5, 6], [5, 6, 7]]
    assert parse([[], [5]]) == [[BOS], [5]]
    for ids, mask in (([[5, 5, 5], [6, 0, 7]], None), ([[9], [6, 8, 7]], [[1], [1, 0, 1]])):
        with pytest.raises(ValueError, match="prompt 1 has padding between its tokens"):
            parse(ids, mask)


def test_a_row_that_is_all_padding_is_an_empty_prompt() -> None:
    assert rows(np.array([[5, 6], [7, 8]]), [[0, 0], [1, 1]]) == [[BOS], [7, 8]]


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[0, 5], [6, 7]])
    assert rows(ids) == [[0, 5], [6, 7]]
    assert rows(ids, torch.tensor([[0, 1], [1, 1]])) == [[5], [6, 7]]
    assert rows([torch.tensor([5, 6]), torch.tensor([7])]) == [[5, 6], [7]]
