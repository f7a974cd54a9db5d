"""Guides, processors and criteria, called with sequences that no graph runs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.contract.tensors import RUNNING, STOPPED
from qsample.runtime.callbacks import BatchEnd, Guide, LogitsProcessors, Step
from qsample.runtime.sequence import Sequence, SequenceRequest

NO_SAMPLER: Any = SimpleNamespace(
    features=SimpleNamespace(
        sampler=False, logprobs=False, top_logprobs=0, logprobs_mode="raw_logprobs"
    )
)


def sequence(*prompt: int, outputs: bool = False, **parameters: Any) -> Sequence:
    limits = {"max_length": np.array(99), "min_length": np.array(0), "stop_ids": np.array([-1])}
    names = ("probs",) if outputs else ()
    return Sequence(
        SequenceRequest(np.array(prompt or (5,)), limits | parameters, 0, output_names=names)
    )


def sampled(one: Sequence, token: int, output: float | None = None) -> None:
    one.progress.sampled.append(token)
    if output is not None:
        one.progress.outputs.append({"probs": np.array([output, 1], np.float32)})


class Recorder:
    """A function for masks, and what it got."""

    def __init__(self) -> None:
        self.steps: list[Step | None] = []

    def __call__(self, step: Step | None, mask: np.ndarray) -> None:
        self.steps.append(step)
        mask[:] = len(self.steps)


def test_a_function_is_called_for_new_tokens_only() -> None:
    recorder = Recorder()
    rows = [sequence(), sequence()]
    mask = np.full((2, 3), -1, np.int32)
    guide = Guide(recorder, rows, mask, pad_token_id=9)
    guide.start()
    assert recorder.steps == [None]
    assert (mask == 1).all()
    written: list[Any] = []

    def write(one: Sequence, name: str, values: np.ndarray) -> None:
        written.append((rows.index(one), name, values.tolist()))

    guide.update(write)
    assert (recorder.steps, written) == ([None], [])
    sampled(rows[1], 7)
    rows[0].progress.status = STOPPED
    guide.update(write)
    step = recorder.steps[1]
    assert step is not None
    assert (step.tokens.tolist(), step.emitted.tolist()) == ([9, 7], [False, True])
    assert step.status.tolist() == [STOPPED, RUNNING]
    assert (step.tokens.dtype, step.status.dtype) == (np.int64, np.int32)
    assert written == [(0, "allowed_tokens", [2, 2, 2]), (1, "allowed_tokens", [2, 2, 2])]
    guide.update(write)
    assert len(recorder.steps) == 2


def test_outputs_of_a_step_are_read_when_they_are_wanted() -> None:
    """Within the call; afterwards only what was read."""
    looked: list[Any] = []
    reads: list[int] = []
    rows = [sequence(outputs=True), sequence(outputs=True), sequence()]

    def look(step: Step | None, mask: np.ndarray) -> None:
        if step is None:
            return
        looked.append(step.outputs)
        if len(looked) != 2:
            assert len(step.outputs) == 1
            assert list(step.outputs) == ["probs"]

    def read() -> None:
        reads.append(1)
        rows[1].progress.outputs.append({"probs": np.array([0.25, 1], np.float32)})

    guide = Guide(look, rows, np.full((3, 1), -1, np.int32), 0)
    sampled(rows[1], 7)
    sampled(rows[2], 7)
    guide.update(lambda *_: None, read)
    assert reads == [1]
    assert looked[0]["probs"].tolist() == [[0, 0], [0.25, 1], [0, 0]]
    assert looked[0]["probs"].dtype == np.float32

    sampled(rows[1], 8)
    guide.update(lambda *_: None, read)
    assert reads == [1]
    with pytest.raises(RuntimeError, match="the outputs of a step were not read"):
        looked[1]["probs"]
    # Those that came meanwhile may still be looked at.
    rows[1].progress.outputs.append({"probs": np.array([0.5, 1], np.float32)})
    assert looked[1]["probs"][1].tolist() == [0.5, 1]


def test_no_step_is_open_after_an_exception() -> None:
    kept: list[Any] = []

    def fail(step: Step | None, mask: np.ndarray) -> None:
        assert step is not None
        kept.append(step.outputs)
        raise LookupError("no")

    rows = [sequence(outputs=True)]
    guide = Guide(fail, rows, np.full((1, 1), -1, np.int32), 0)
    sampled(rows[0], 7)
    with pytest.raises(LookupError):
        guide.update(lambda *_: pytest.fail("no mask"), lambda: pytest.fail("no read"))
    with pytest.raises(RuntimeError, match="were not read"):
        len(kept[0])


# Processors


def test_processors_see_the_rows_that_are_sampled() -> None:
    """Of the slots of a step, each with its prompt as it was given; one after the other."""
    seen: list[Any] = []

    def add_one(ids: np.ndarray, scores: np.ndarray) -> Any:
        seen.append((ids.tolist(), scores.tolist(), ids.dtype))
        ids[:] = 0
        scores += 1
        return scores

    def double(ids: np.ndarray, scores: np.ndarray) -> Any:
        return 2 * scores

    rows = [sequence(5, 6), sequence(7), sequence(8)]
    for slot, row in zip((2, 3, None), rows, strict=True):
        row.placement.slot = slot
    sampled(rows[1], 9)
    processors = LogitsProcessors([add_one, double], rows, NO_SAMPLER)
    logits = np.array([[1, 2], [3, 4]], np.float32)
    found = processors(range(3, 5), logits)
    assert found.tolist() == [[4, 6], [3, 4]]
    assert logits.tolist() == [[1, 2], [3, 4]]
    assert seen == [([[7, 9]], [[1, 2]], np.int64)]
    assert processors(range(2, 4), logits).tolist() == [[4, 6], [8, 10]]
    assert processors(range(2), logits).tolist() == logits.tolist()


@pytest.mark.parametrize(
    "result",
    [np.zeros((1, 3), np.float32), np.zeros(2, np.float32), np.zeros((1, 2), np.int64), None, np.zeros((2, 2))],
)  # fmt: skip
def test_what_a_processor_may_not_return(result: Any) -> None:
    row = sequence()
    row.placement.slot = 0
    processors = LogitsProcessors(lambda ids, scores: result, [row], NO_SAMPLER)
    with pytest.raises(
        ValueError, match=r"a logits processor returned .*shape of its scores, \(1, 2\)"
    ):
        processors(range(1), np.zeros((1, 2), np.float32))


@pytest.mark.parametrize(
    ("features", "given", "parameters", "message"),
    [
        ({"sampler": True}, [], {}, "the logits stay in this package's graph; export with include_sampler=False"),
        ({}, 5, {}, "logits_processor has a int; give a function of"),
        ({}, [len, None], {}, "logits_processor has a NoneType"),
        ({"logprobs": True}, [], {}, "logits_processor changes the logits that the package's logprobs are of"),
        ({"top_logprobs": 1}, [], {}, "changes the logits that the package's logprobs"),
        ({"logprobs": True, "logprobs_mode": "processed_logprobs"}, [], {}, None),
        ({}, [], {"repetition_penalty": np.float32(1.5)}, "logits_processor and repetition_penalty were given"),
        ({}, [], {"presence_penalty": np.float32(0.5)}, "presence_penalty"),
        ({}, [], {"frequency_penalty": np.float32(-0.5)}, "frequency_penalty"),
        ({}, [], {"min_length": np.array(3)}, "min_length"),
        ({}, [], {"logit_bias": np.array([0, 1.5])}, "logit_bias"),
        ({}, [], {"allowed_tokens": np.array([-1, 5])}, "allowed_tokens"),
        ({}, [], {"repetition_penalty": np.float32(1), "presence_penalty": np.float32(0),
                  "frequency_penalty": np.float32(0), "logit_bias": np.zeros(2), "allowed_tokens": np.array([-1, -1])},
         None),
    ],
)  # fmt: skip
def test_processors_that_would_see_other_logits(
    features: dict[str, Any], given: Any, parameters: dict[str, Any], message: str | None
) -> None:
    of: Any = SimpleNamespace(features=SimpleNamespace(**{**vars(NO_SAMPLER.features), **features}))
    rows = [sequence(), sequence(**parameters)]
    if message is None:
        LogitsProcessors(given, rows, of)
    else:
        with pytest.raises(ValueError, match=message):
            LogitsProcessors(given, rows, of)


# Criteria


class Loop:
    """The part of a loop that ends rows; `deliver` takes a token."""

    def __init__(self) -> None:
        self.left: list[Sequence] = []
        self.delivered: list[Sequence] = []

    def update(self, end: BatchEnd) -> None:
        end.update(self.left.append, self.deliver)

    def deliver(self, one: Sequence) -> None:
        self.delivered.append(one)
        one.take(1)


def test_a_criterion_sees_a_token_of_every_row_at_a_time() -> None:
    seen: list[Any] = []

    def criterion(ids: np.ndarray, scores: Any) -> Any:
        seen.append((ids.tolist(), scores))
        return ids[:, -1] == 9

    rows = [sequence(5), sequence(6, 7)]
    end = BatchEnd(criterion, None, rows, pad=0)
    loop = Loop()
    for token in (8, 9, 8):
        sampled(rows[0], token)
    loop.update(end)
    assert seen == [], "the other row has no token yet"
    for token in (8, 8, 8):
        sampled(rows[1], token)
    loop.update(end)
    assert [ids for ids, _ in seen] == [
        [[0, 5, 8], [6, 7, 8]],
        [[0, 5, 8, 9], [6, 7, 8, 8]],
        [[0, 5, 8, 9, 0], [6, 7, 8, 8, 8]],
    ]
    assert {scores for _, scores in seen} == {None}
    assert loop.left == [rows[0]]
    assert (rows[0].token_ids, rows[0].finish_reason) == ([8, 9], "stop")
    assert rows[1].token_ids == [8, 8, 8]
    assert not rows[1].ended


def test_any_of_several_criteria_ends_rows() -> None:
    rows = [sequence(), sequence()]
    for row in rows:
        sampled(row, 8)
    loop = Loop()
    criteria = [lambda *_: np.array([False, True]), lambda *_: False]
    loop.update(BatchEnd(criteria, None, rows, 0))
    assert loop.left == [rows[1]]
    sampled(rows[0], 8)
    loop.update(BatchEnd(lambda *_: True, None, rows[:1], 0))
    assert loop.left == [rows[1], rows[0]]


def test_time_ends_rows_after_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    rows = [sequence(), sequence()]
    end = BatchEnd(None, 5, rows, 0)
    loop = Loop()
    for row in rows:
        sampled(row, 8)
    now = 105.0
    loop.update(end)
    assert loop.left == []
    now = 105.1
    loop.update(end)
    assert loop.left == [], "no row has a new token"
    rows[1].progress.status = STOPPED
    for row in rows:
        sampled(row, 9)
    loop.update(end)
    assert [row.finish_reason for row in rows] == ["time", "stop"]
    assert loop.left == rows
    assert [row.token_ids for row in rows] == [[8, 9]] * 2


def test_a_criterion_comes_before_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [sequence()]
    end = BatchEnd(lambda *_: True, 0.001, rows, 0)
    monkeypatch.setattr(time, "perf_counter", lambda: float("inf"))
    sampled(rows[0], 8)
    Loop().update(end)
    assert rows[0].finish_reason == "stop"


@pytest.mark.parametrize("answer", [1, "yes", None, [True, False, True], [], np.array([1.0, 0.0])])
def test_what_a_criterion_may_not_return(answer: Any) -> None:
    rows = [sequence(), sequence()]
    for row in rows:
        sampled(row, 8)
    with pytest.raises(
        ValueError, match=r"a stopping criterion returned .* for each of the 2 rows"
    ):
        Loop().update(BatchEnd(lambda *_: answer, None, rows, 0))
    with pytest.raises(ValueError, match="stopping_criteria has a int; give a function of"):
        BatchEnd(5, None, rows, 0)
