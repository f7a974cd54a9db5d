"""A sequence: the tokens that were read and taken, stop strings, and the writers of its parts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from qsample.contract.tensors import RUNNING, STOPPED
from qsample.request.repetition import RepetitionDetection, RepetitionDetector
from qsample.request.text.generated_text import GeneratedText
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import sequence as sequence_module
from qsample.runtime.sequence import Delivery, Placement, Progress, Sequence, SequenceRequest
from tests.helpers.fake_package import byte_tokenizer


def make_sequence(
    stop_strings: list[str] | None = None, most: int = 10, least: int = 0
) -> Sequence:
    """A sequence with a prompt of three tokens; it has a text only with stop strings."""
    text = (
        None
        if stop_strings is None
        else GeneratedText(Tokenizer(byte_tokenizer()), [5, 6, 7], stop_strings)
    )
    parameters = {
        "max_length": np.array(3 + most, dtype=np.int32),
        "min_length": np.array(3 + least, dtype=np.int32),
        "stop_ids": np.array([*token_ids_of("b"), -1], dtype=np.int32),
    }
    return Sequence(SequenceRequest(np.array([5, 6, 7]), parameters, 0), Delivery(text))


def token_ids_of(text: str) -> list[int]:
    return Tokenizer(byte_tokenizer()).encode(text, add_special_tokens=False)


def test_each_token_is_taken_once() -> None:
    sequence = make_sequence([])
    assert sequence.take() == ([], "")
    sequence.progress.sampled += token_ids_of("ab")
    assert sequence.token_ids == []
    assert sequence.take() == (token_ids_of("ab"), "ab")
    assert sequence.take() == ([], "")
    sequence.progress.sampled += token_ids_of("cdé")[:-1]
    assert sequence.take() == (token_ids_of("cdé")[:-1], "cd")
    assert sequence.token_ids == sequence.progress.sampled
    text = sequence.delivery.text
    assert text is not None
    assert (text.whole, text.end(), text.whole) == ("abcd", "", "abcd"), "é was cut"
    assert sequence.status == RUNNING


def test_tokens_are_taken_without_a_tokenizer() -> None:
    sequence = make_sequence()
    sequence.progress.sampled += [9, 8]
    assert sequence.take() == ([9, 8], "")
    assert sequence.token_ids == [9, 8]


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_tokens_after_a_stop_string_are_left_out(window: int) -> None:
    """The tokens stay in `sampled`, because they are in the cache of the slot."""
    sequence, sampled, taken, pieces = make_sequence([", "]), token_ids_of("no, yes!"), [], []
    for start in range(0, len(sampled), window):
        assert sequence.status == RUNNING
        sequence.progress.sampled += sampled[start : start + window]
        tokens, piece = sequence.take()
        taken += tokens
        pieces.append(piece)
        if sequence.status != RUNNING:
            break
    assert sequence.status == STOPPED
    assert taken == sequence.token_ids == token_ids_of("no, ")
    assert sequence.progress.sampled == sampled[: len(sequence.progress.sampled)]
    assert sequence.delivery.text is not None
    assert "".join(pieces) == sequence.delivery.text.whole == "no"
    assert sequence.delivery.text.stop_string == ", "


def test_a_sequence_may_run_between_its_first_token_and_its_limit() -> None:
    sequence = make_sequence(most=2)
    assert (sequence.request.max_length, sequence.request.max_new_tokens) == (5, 2)
    assert not sequence.started
    running = []
    for tokens in range(3):
        sequence.placement.tokens_issued = tokens
        running.append(sequence.may_run)
    assert running == [False, True, False]
    sequence.progress.sampled.append(4)
    assert sequence.started
    ended = make_sequence()
    ended.progress.status = 3
    assert ended.started, "it ended without a token"


@pytest.mark.parametrize(
    ("part", "writer"),
    [
        (Placement, "decode/scheduler.py"),
        (Progress, "decode/loop.py"),
        (Delivery, "sequence.py"),
    ],
)
def test_each_part_has_one_writer(part: type, writer: str) -> None:
    """Attributes of `sequence.placement` and so on are assigned in a single module."""
    names = "|".join(field.name for field in dataclasses.fields(part))
    assigns = re.compile(rf"\b{part.__name__.lower()}\.({names}) [-+]?= ")
    runtime = Path(sequence_module.__file__).parent
    writers = {
        path.relative_to(runtime).as_posix()
        for path in runtime.rglob("*.py")
        if assigns.search(path.read_text(encoding="utf-8"))
    }
    assert writers == {writer}


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_a_repetition_ends_a_sequence(window: int) -> None:
    sequence = make_sequence()
    detection = RepetitionDetection(max_pattern_size=2, min_count=3)
    sequence.delivery.repetitions = RepetitionDetector(detection)
    taken: list[int] = []
    tokens = [4, 5, 6, 5, 6, 5, 6, 5, 6]
    for start in range(0, len(tokens), window):
        sequence.progress.sampled += tokens[start : start + window]
        taken += sequence.take()[0]
        if sequence.ended:
            break
    assert taken == sequence.token_ids == tokens[:7]
    assert (sequence.ended, sequence.finish_reason) == (True, "repetition")


@pytest.mark.parametrize(
    ("status", "least", "reason"),
    [(RUNNING, 0, "repetition"), (RUNNING, 3, "running"), (STOPPED, 0, "stop"), (2, 0, "length")],
)
def test_what_the_graph_says_comes_before_a_repetition(
    status: int, least: int, reason: str
) -> None:
    sequence = make_sequence(least=least)
    detection = RepetitionDetection(max_pattern_size=1, min_count=2)
    sequence.delivery.repetitions = RepetitionDetector(detection)
    sequence.progress.sampled += [9, 9]
    sequence.progress.status = status
    assert sequence.take() == ([9, 9], "")
    assert sequence.finish_reason == reason


@pytest.mark.parametrize("includes", [False, True])
def test_the_token_that_ends_a_row_is_text_only_if_texts_include_it(includes: bool) -> None:
    text = GeneratedText(Tokenizer(byte_tokenizer()), [5], include_stop_str_in_output=includes)
    sequence = make_sequence()
    sequence.delivery.text = text
    sequence.progress.sampled += token_ids_of("ab")
    assert sequence.take() == (token_ids_of("ab"), "ab")
    sequence.progress.sampled += token_ids_of("ab")
    sequence.progress.status = STOPPED
    assert sequence.take(1) == (token_ids_of("a"), "a")
    assert sequence.take() == (token_ids_of("b"), "b" if includes else "")
    assert text.whole == ("abab" if includes else "aba")


def test_an_answer_that_stops_without_a_stop_token_has_all_its_text() -> None:
    sequence = make_sequence([])
    sequence.progress.sampled += token_ids_of("xyz")
    sequence.progress.status = STOPPED
    assert sequence.take() == (token_ids_of("xyz"), "xyz")
