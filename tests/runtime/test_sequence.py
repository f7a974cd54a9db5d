"""A sequence: what was read, what was taken, and where a stop string ends it."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.tensors import RUNNING, STOPPED
from qsample.runtime.sequence import Sequence
from qsample.text.generated_text import GeneratedText
from qsample.text.tokenizer import Tokenizer
from tests.helpers.fake_package import byte_tokenizer


def make(stop_strings: list[str] | None = None, most: int = 10) -> Sequence:
    """A prompt of three tokens; with stop strings, it has a text."""
    text = (
        None
        if stop_strings is None
        else GeneratedText(Tokenizer(byte_tokenizer()), [5, 6, 7], stop_strings)
    )
    parameters = {"max_length": np.array(3 + most, dtype=np.int32)}
    return Sequence(np.array([5, 6, 7]), parameters, 0, text=text)


def ids(text: str) -> list[int]:
    return Tokenizer(byte_tokenizer()).encode(text, add_special_tokens=False)


def test_each_token_is_taken_once() -> None:
    sequence = make([])
    assert sequence.take() == ([], "")
    sequence.sampled += ids("ab")
    assert sequence.token_ids == []
    assert sequence.take() == (ids("ab"), "ab")
    assert sequence.take() == ([], "")
    sequence.sampled += ids("cdé")[:-1]
    assert sequence.take() == (ids("cdé")[:-1], "cd")
    assert sequence.token_ids == sequence.sampled
    assert sequence.text is not None
    assert (sequence.text.whole, sequence.text.end(), sequence.text.whole) == (
        "abcd",
        "",
        "abcd",
    ), "é was cut"
    assert sequence.status == RUNNING


def test_without_a_tokenizer() -> None:
    sequence = make()
    sequence.sampled += [9, 8]
    assert sequence.take() == ([9, 8], "")
    assert sequence.token_ids == [9, 8]


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_what_was_sampled_after_a_stop_string_is_left_out(window: int) -> None:
    """The tokens stay in `sampled`: they are in the slot's cache."""
    sequence, sampled, taken, pieces = make([", "]), ids("no, yes!"), [], []
    for start in range(0, len(sampled), window):
        assert sequence.status == RUNNING
        sequence.sampled += sampled[start : start + window]
        tokens, piece = sequence.take()
        taken += tokens
        pieces.append(piece)
        if sequence.status != RUNNING:
            break
    assert sequence.status == STOPPED
    assert taken == sequence.token_ids == ids("no, ")
    assert sequence.sampled == sampled[: len(sequence.sampled)]
    assert sequence.text is not None
    assert "".join(pieces) == sequence.text.whole == "no"
    assert sequence.text.stop_string == ", "


def test_when_it_may_run() -> None:
    sequence = make(most=2)
    assert (sequence.max_length, sequence.limit) == (5, 2)
    assert not sequence.started
    running = []
    for sequence.issued in range(3):
        running.append(sequence.may_run)
    assert running == [False, True, False]
    sequence.sampled.append(4)
    assert sequence.started
    ended = make()
    ended.status = 3
    assert ended.started, "it ended without a token"
