"""A sequence: the tokens that were read and taken, stop strings, and the writers of its parts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import INVALID_LOGITS, LENGTH, RUNNING, STOPPED
from qsample.request.repetition import RepetitionDetection, RepetitionDetector
from qsample.request.structured.tables import TokenGrammar
from qsample.request.text.generated_text import GeneratedText
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import sequence as sequence_module
from qsample.runtime.sequence import (
    Delivery,
    DraftStats,
    Placement,
    PrefixStats,
    Progress,
    ScoredTokens,
    Sequence,
    SequenceImages,
    SequenceRequest,
    sequences_array,
)
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


def request(prompt: tuple[int, ...] = (5, 6, 7), **fields: Any) -> SequenceRequest:
    """A request for at most 10 tokens, and 4 at least, without a stop token."""
    parameters = {
        "max_length": np.array(len(prompt) + 10),
        "min_length": np.array(len(prompt) + 4),
        "stop_ids": np.array([-1]),
        "grammar_deadline": np.array(len(prompt) + 2),
    }
    return SequenceRequest(np.array(prompt), parameters, 0, **fields)


def test_guesses_are_counted() -> None:
    first, second = DraftStats(1, 2, 3, 4), DraftStats(10, 20, 30, 70)
    assert first + second == DraftStats(11, 22, 33, 74)
    assert second - first == DraftStats(9, 18, 27, 66)
    assert second.tokens_per_step == 8
    assert DraftStats(num_steps=4, num_accepted_tokens=2).tokens_per_step == 1.5
    assert DraftStats(num_steps=1, num_accepted_tokens=2).tokens_per_step == 3
    assert DraftStats().tokens_per_step == 1
    assert dataclasses.astuple(DraftStats()) == (0, 0, 0, 0)


def test_all_statistics_of_prefixes_begin_at_zero() -> None:
    assert dataclasses.astuple(PrefixStats()) == (0, 0, 0, 0, 0, 0)


def test_scored_tokens_of_a_piece() -> None:
    """Places from the start of the piece; its end belongs to the next."""
    scored = ScoredTokens(np.array([1, 3, 3, 4, 9]), np.array([10, 11, 12, 13, 14]))
    assert scored.num_unread == 0
    for piece, places, ids in (
        (range(4), [1, 3, 3], [10, 11, 12]),
        (range(3, 4), [0, 0], [11, 12]),
        (range(4, 9), [0], [13]),
        (range(5, 9), [], []),
        (range(9, 12), [0], [14]),
    ):
        part = scored.in_piece(piece)
        assert (part.places.tolist(), part.ids.tolist()) == (places, ids)


def test_numbers_of_a_request() -> None:
    plain = request()
    assert (plain.max_length, plain.max_new_tokens, plain.min_new_tokens) == (13, 10, 4)
    assert plain.stop_ids == []
    plain.parameters["stop_ids"] = np.array([0, -1, 7])  # type: ignore[index]
    assert request().stop_ids == []
    assert dataclasses.replace(plain).stop_ids == [0, 7]
    assert plain.given_prompt is plain.prompt
    padded = np.array([0, 5, 6, 7])
    assert request(padded_prompt=padded).given_prompt is padded
    assert plain.adapter_sha256 == ""
    assert request(adapter=SimpleNamespace(sha256="ab")).adapter_sha256 == "ab"
    assert (plain.guided, plain.priority, plain.max_time, plain.output_names) == (
        False,
        0,
        None,
        (),
    )
    assert not plain.is_read_every_step
    assert request(guided=True).is_read_every_step
    assert request(expected_tokens=np.array([])).is_read_every_step


@pytest.mark.parametrize(
    ("scored", "prompt_tokens", "reads_all"),
    [
        (None, 3, False),
        # After the last token, which is always read; or also after an earlier one.
        (ScoredTokens(np.array([2, 2]), np.array([8, 9])), 3, False),
        (ScoredTokens(np.array([1, 2]), np.array([8, 9]), num_unread=1), 4, True),
        (ScoredTokens(np.array([0]), np.array([8]), num_unread=2), 5, True),
    ],
)
def test_a_request_that_scores(
    scored: ScoredTokens | None, prompt_tokens: int, reads_all: bool
) -> None:
    given = request(scored=scored)
    assert (given.num_prompt_tokens, given.reads_every_token) == (prompt_tokens, reads_all)
    sequence = Sequence(given)
    sequence.progress.sampled.append(9)
    sequence.progress.status = STOPPED
    # Nobody gets the token that such a request samples.
    assert sequence.take() == (([9], "") if scored is None else ([], ""))
    assert sequence.ended


ONCE = TokenGrammar(  # a single token of class 1, and then nothing
    classes=np.array([0] * 8 + [1, 0], np.int32),
    transitions=np.array([[0, 0], [-1, 2], [-1, -1]], np.int32),
    distances=np.array([0, 1, 0], np.int32),
    late=np.arange(3, dtype=np.int32),
    drafts=np.full(3, -1, np.int32),
)


@pytest.mark.parametrize(
    ("grammar", "sampled", "status", "expected"),
    [
        (ONCE, [8], LENGTH, STOPPED),
        (ONCE, [8], INVALID_LOGITS, STOPPED),
        (ONCE, [8], STOPPED, STOPPED),
        (ONCE, [8], RUNNING, RUNNING),
        (ONCE, [], LENGTH, LENGTH),
        (ONCE, [8, 8], LENGTH, LENGTH),
        (None, [8], LENGTH, LENGTH),
        (None, [8], INVALID_LOGITS, INVALID_LOGITS),
    ],
)
def test_a_complete_answer_without_a_stop_token_has_stopped(
    grammar: TokenGrammar | None, sampled: list[int], status: int, expected: int
) -> None:
    assert request(grammar=grammar).status_at_end(status, sampled) == expected
    assert request(grammar=grammar).tables is grammar


def test_room_and_budget_of_an_answer_without_a_stop_token() -> None:
    """The grammar is asked with what is left after the prompt; one with masks by its tokens alone."""
    asked: list[Any] = []

    class Tables(TokenGrammar):
        def is_over(self, *arguments: Any) -> bool:
            asked.append(arguments)
            return True

    fields = {field.name: getattr(ONCE, field.name) for field in dataclasses.fields(ONCE)}
    assert request(grammar=Tables(**fields)).status_at_end(LENGTH, [8, 9]) == STOPPED
    masks: Any = SimpleNamespace(is_over=lambda *arguments: asked.append(arguments) or False)
    assert request(grammar=masks).status_at_end(LENGTH, [8, 9]) == LENGTH
    assert asked == [([8, 9], 8, 2), ([8, 9],)]
    assert request(grammar=masks).tables is None
    with_stop = request(grammar=masks)
    with_stop.parameters["stop_ids"] = np.array([4])  # type: ignore[index]
    assert with_stop.status_at_end(LENGTH, [8]) == LENGTH
    assert len(asked) == 2


def test_a_sequence_at_its_beginning() -> None:
    sequence = Sequence(request())
    assert sequence.identities is sequence.request.prompt
    assert sequence.placement.slot is None
    assert len(sequence.placement.marked_prompt) == 0
    places = sequence.placement
    assert (
        places.adapter_place,
        places.tokens_reused,
        places.tokens_read,
        places.tokens_issued,
    ) == (0, 0, 0, 0)
    progress = sequence.progress
    assert (progress.admitted_at, progress.status, progress.prediction) == (None, RUNNING, None)
    assert (sequence.started, sequence.may_run, sequence.ended, sequence.untaken) == (False,) * 4
    assert (sequence.stop_string, sequence.finish_reason) == (None, "running")
    identities = np.array([5, -1, -2])
    images: Any = SimpleNamespace(identities=identities)
    assert Sequence(request(), images=SequenceImages(images)).identities is identities


def test_tokens_wait_for_their_outputs() -> None:
    sequence = Sequence(request(output_names=("probs",)))
    sequence.progress.sampled += [8, 9]
    assert not sequence.untaken
    assert sequence.take() == ([], "")
    sequence.progress.outputs.append({"probs": np.zeros(1)})
    assert sequence.untaken
    assert sequence.take() == ([8], "")
    sequence.progress.status = STOPPED
    sequence.progress.outputs.append({"probs": np.zeros(1)})
    assert not sequence.ended
    assert sequence.take(1) == ([9], "")
    assert sequence.ended
    assert sequence.finish_reason == "stop"


def test_a_reason_from_outside_ends_a_sequence() -> None:
    sequence = Sequence(request())
    sequence.progress.sampled += [8, 9]
    sequence.end("time")
    assert (sequence.ended, sequence.finish_reason, sequence.status) == (True, "time", RUNNING)


@pytest.mark.parametrize(("taken", "ended"), [(3, False), (4, True)])
def test_no_repetition_counts_before_the_fewest_tokens(taken: int, ended: bool) -> None:
    """Of four."""
    detection = RepetitionDetection(max_pattern_size=1, min_count=2)
    sequence = Sequence(request(), Delivery(repetitions=RepetitionDetector(detection)))
    sequence.progress.sampled += [9, 9, 9, 9][:taken]
    sequence.take()
    assert sequence.ended == ended


def test_an_array_of_rows_of_different_lengths() -> None:
    """Prompts end in one column; padding is that of the caller, or the pad token."""
    first = Sequence(request((5, 6), padded_prompt=np.array([4, 5, 6])))
    second = Sequence(request((7,)))
    first.progress.sampled += [8]
    second.progress.sampled += [9, 9, 3]
    second.take(2)
    first.take()
    found = sequences_array([first, second], 0)
    assert found.tolist() == [[4, 5, 6, 8, 0], [0, 0, 7, 9, 9]]
    assert found.dtype == np.int64
