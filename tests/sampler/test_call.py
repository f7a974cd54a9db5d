"""The retained tokens: those that a step reads, those that it writes, and their places."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.interface import Interface
from qsample.contract.tensors import LENGTH
from qsample.sampler.call import Call
from qsample.sampler.tensor import Tensor, Tensors
from tests.helpers.computed import computed, graph_of
from tests.helpers.sampler_cases import PAD, interface, make_inputs, sampler

FACES = [Interface(300, (), captured=captured) for captured in (False, True)]
LOGITS = np.arange(300, dtype=np.float32)  # greedy: 299


def step(face: Interface, rows: int = 1, **values: object) -> dict[str, np.ndarray]:
    return sampler(face)(
        np.tile(LOGITS, (rows, 1)), make_inputs(face, rows, temperature=0, **values)
    )


@pytest.mark.parametrize("face", FACES)
def test_first_call_fills_the_tail_with_a_token_of_the_row(face: Interface) -> None:
    """With the first; in a graph for replay, with the newest."""
    result = step(face, sequence=4, input_ids=[[7, 8, 9, 0]], input_lengths=3, tokens=33)
    tail = 299 if face.captured else 7
    assert result["tokens_RetainedState"][0].tolist() == [7, 8, 9, 299] + [tail] * 12
    assert result["lengths_RetainedState"][0] == 3


@pytest.mark.parametrize("face", FACES)
def test_later_calls_write_their_tokens(face: Interface) -> None:
    """Next to a new row, a row that records inputs only, a row of status 1 and a full row."""
    tokens = np.repeat([[4, 5, 6] + [4] * 13], 5, 0)
    ids, lengths, status = [[7, 8]] * 5, [3, 0, 3, 3, 15], [0, 0, 0, 1, 0]
    emit, counts = [True, True, False, True, True], [2, 1, 2, 2, 1]
    result = step(
        face,
        5,
        sequence=2,
        tokens=tokens,
        input_ids=ids,
        lengths=lengths,
        status=status,
        emit=emit,
        input_lengths=counts,
    )
    first, second = (299, 299) if face.captured else (4, 7)
    # The host has written the inputs to the tokens of a row that does not run.
    kept = [4, 5, 6, 7, 8] + [4] * 11 if face.captured else [4, 5, 6] + [4] * 13
    assert result["tokens_RetainedState"].tolist() == [
        [4, 5, 6, 7, 8, 299] + [first] * 10,
        [7, 299] + [second] * 14,
        [4, 5, 6, 7, 8] + [4] * 11,
        kept,
        [4, 5, 6] + [4] * 12 + [7],  # full: the sampled token has no place
    ]
    assert result["lengths_RetainedState"].tolist() == [5, 1, 5, 3, 16]
    assert result["next_ids"][:, 0].tolist() == [299, 299, PAD, PAD, 299]


@pytest.mark.parametrize("face", FACES)
def test_prompt_up_to_the_last_position(face: Interface) -> None:
    """15 tokens in 16 places: the sampled token takes the last. The padding beyond the capacity goes nowhere."""
    result = step(face, sequence=20, input_ids=[list(range(1, 21))], input_lengths=15)
    assert result["tokens_RetainedState"][0].tolist() == [*range(1, 16), 299]
    assert result["status_RetainedState"][0] == LENGTH


def test_what_a_step_reads() -> None:
    """Ids with duplicates for penalties, as far as some row needs them; and each row's tokens in their places."""
    tokens = np.array([[5, 6, 7, 5, 5], [8, 9, 9, 9, 8], [1, 2, 3, 4, 5]], np.int32)
    start, lengths = np.array([3, 0, 4], np.int32), np.array([2, 1, 1], np.int32)
    ids = np.array([[10, 11], [20, 21], [30, 31]])

    def function(
        tokens: Tensor, start: Tensor, ids: Tensor, lengths: Tensor, most: Tensor
    ) -> Tensors:
        inputs = {"tokens": tokens, "lengths": start, "input_ids": ids, "input_lengths": lengths}
        call = Call(interface(300), inputs | {"status": start, "emit": start > 0})
        return call.history(most), call.row_tokens()

    read, rows = computed(function, tokens, start, ids, lengths, np.array(4))
    assert read.tolist() == [[5, 6, 7, 5, 10, 11], [20] * 6, [1, 2, 3, 4, 30, 30]]
    assert [row[:n].tolist() for row, n in zip(rows, (5, 1, 5), strict=True)] == [
        [5, 6, 7, 10, 11],
        [20],
        [1, 2, 3, 4, 30],
    ]


@pytest.mark.parametrize(("width", "read"), [(1, 6), (3, 9), (4, 0)])
def test_the_newest_tokens(width: int, read: int) -> None:
    """Of every start, length and count: exactly so many columns, those whose tokens are the newest."""
    grid = np.meshgrid(np.arange(read + 1), np.arange(1, width + 1), np.arange(15))
    start, lengths, count = (axis.ravel().astype(np.int32) for axis in grid)
    tokens = np.tile(np.arange(100, 110, dtype=np.int32), (len(start), 1))
    ids = np.tile(np.arange(200, 200 + width), (len(start), 1))

    def function(
        tokens: Tensor, start: Tensor, ids: Tensor, lengths: Tensor, *more: Tensor
    ) -> Tensors:
        inputs = {"tokens": tokens, "lengths": start, "input_ids": ids, "input_lengths": lengths}
        call, (count, most) = (
            Call(interface(300), inputs | {"status": start, "emit": start > 0}),
            more,
        )
        return call.newest(most, count.unsqueeze()), call.history(most)

    newest, history = computed(function, tokens, start, ids, lengths, count, np.array([read]))
    assert newest.shape == history.shape == (len(start), read + width)
    assert set(newest.ravel()) <= {0.0, 1.0}
    for row, many in enumerate(count.tolist()):
        text = [*tokens[row, : start[row]], *ids[row, : lengths[row]]]
        assert history[row][newest[row] == 1].tolist() == text[max(len(text) - many, 0) :]


def test_a_new_row_has_no_past() -> None:
    """The old content of its buffer is not penalized."""
    for face in FACES:
        tokens = np.repeat([[299] * 16], 2, 0)
        result = step(
            face, 2, tokens=tokens, input_ids=[[5], [5]], lengths=[0, 9], repetition_penalty=100
        )
        assert result["next_ids"][:, 0].tolist() == [299, 298]


def test_chunks_do_not_change_the_token() -> None:
    """A prompt at once or in chunks: the same token, decided by its position's u, and the same state."""
    rng = np.random.default_rng(0)
    face = interface(320)
    logits, noise, prompt = (
        rng.normal(size=(1, 320)).astype(np.float32),
        rng.random((1, 16)),
        [[3, 1, 4, 1, 5, 9]],
    )
    whole = sampler(face)(
        logits, make_inputs(face, sequence=6, input_ids=prompt, noise=noise, repetition_penalty=1.5)
    )
    state = make_inputs(face, noise=noise)
    names = ("lengths", "status", "tokens", "output_counts")
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        call = make_inputs(
            face,
            sequence=end - begin,
            input_ids=[prompt[0][begin:end]],
            emit=end == 6,
            repetition_penalty=1.5,
            **{name: state[name] for name in (*names, "noise")},
        )
        result = sampler(face)(logits, call)
        state |= {name: result[f"{name}_RetainedState"] for name in names}
    for name, value in whole.items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)


@pytest.mark.parametrize("captured", [False, True])
def test_what_only_some_rows_need_is_a_branch_but_in_a_captured_graph(captured: bool) -> None:
    """A graph for replay has no control flow: it always computes what a row may need."""

    def function(start: Tensor, values: Tensor) -> Tensor:
        inputs = {"tokens": values, "lengths": start, "input_ids": values, "input_lengths": start}
        face = Interface(300, (), captured=captured)
        call = Call(face, inputs | {"status": start, "emit": start > 0})
        return call.branch(start > 3, lambda: values + 1.0, lambda: values)

    for start in ([4, 0], [3, 0]):
        given = (np.array(start, np.int32), np.zeros((2, 5), np.float32))
        nodes = [node.op_type for node in graph_of(function, *given).graph.all_nodes()]
        assert ("If" in nodes) != captured
        assert (computed(function, *given)[0] == (4 in start or captured)).all()
