"""A decoder file as its authors run it: its caches and logits, against sums in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.addons.bake.conventions import FLAT, ForeignGraph, Layer
from qsample.addons.bake.original import Original, probes, reference
from qsample.addons.bake.rows import counted_positions
from tests.helpers.small_graphs import small_graph

VOCAB, SIZE = 30, 2
TABLE = np.random.default_rng(0).normal(size=(VOCAB, SIZE)).astype(np.float32)
HEAD = np.random.default_rng(1).normal(size=(SIZE, VOCAB)).astype(np.float32)
# Logits of a token: its embedding and all tokens' so far, their number, and its position.
DECODER = f"""
    decoder (int64[B,S] input_ids, int64[B,P] attention_mask, int64[B,S] position_ids,
        float[B,1,T,{SIZE}] past_key, float[B,1,T,{SIZE}] past_value, float[{VOCAB},{SIZE}] table,
        float[{SIZE},{VOCAB}] head, int64[1] one, int64[1] two, int64 nought, int64 step)
        => (float[B,S,{VOCAB}] logits, float[B,1,U,{SIZE}] present_key, float[B,1,U,{SIZE}] present_value) {{
        own = Gather (table, input_ids)
        new = Unsqueeze (own, one)
        negative = Neg (new)
        present_key = Concat <axis = 2> (past_key, new)
        present_value = Concat <axis = 2> (past_value, negative)
        sum = ReduceSum <keepdims = 0> (present_key, two)
        other = ReduceSum <keepdims = 0> (present_value, two)
        total = Sub (sum, other)
        both = Add (own, total)
        product = MatMul (both, head)
        length = ReduceSum <keepdims = 1> (attention_mask, one)
        places = Add (position_ids, length)
        shift = Cast <to = 1> (places)
        shifts = Unsqueeze (shift, two)
        logits = Add (product, shifts)
        count = Shape <start = 1, end = 2> (input_ids)
        before = Shape <start = 2, end = 3> (past_key)
        begin = Squeeze (before)
        stops = Add (before, count)
        stop = Squeeze (stops)
        range = Range (begin, stop, step)
        counted = Unsqueeze (range, nought)
        wrong = Add (counted, one)
    }}"""


def foreign_graph(folder: Path) -> ForeignGraph:
    integers = {
        "one": np.array([1]),
        "two": np.array([2]),
        "nought": np.array(0),
        "step": np.array(1),
    }
    model = small_graph(DECODER, constants={"table": TABLE, "head": HEAD, **integers})
    for node in model.graph:
        if node.name in ("before", "begin", "stops", "stop", "range", "counted", "wrong", "count"):
            node.outputs[0].dtype = ir.DataType.INT64
    ir.save(model, folder / "model.onnx")
    values = {str(value.name): value for value in (*model.graph.inputs, *model.graph.outputs)}
    names = ("past_key", "past_value", "present_key", "present_value")
    layer = Layer(0, *(values[name] for name in names), heads=1, head_dim=SIZE)
    return ForeignGraph(
        folder / "model.onnx", model, (layer,), values["logits"], VOCAB, ir.DataType.FLOAT
    )


def expected(tokens: list[int]) -> np.ndarray:
    own = TABLE[tokens].astype(np.float64)
    return (own[-1] + 2 * own.sum(0)) @ HEAD + 2 * len(tokens) - 1


def test_logits_after_each_of_a_rows_tokens(tmp_path: Path) -> None:
    foreign = foreign_graph(tmp_path)
    found = reference(Original(foreign), VOCAB, None, ())
    assert len({len(prompt) for prompt in found.prompts}) > 1
    for prompt, more, logits in zip(found.prompts, found.continuations, found.logits, strict=True):
        assert len(logits) == len(more) + 1
        for count, row in enumerate(logits):
            np.testing.assert_allclose(
                row, expected([*prompt, *more[:count]]), rtol=1e-4, atol=1e-4
            )


def test_positions_that_a_graph_counts(tmp_path: Path) -> None:
    foreign = foreign_graph(tmp_path)
    assert [value.name for value in counted_positions(foreign, 12)] == ["counted"]


def test_a_graph_and_its_cache_by_name(tmp_path: Path) -> None:
    foreign = foreign_graph(tmp_path)
    (layer,) = foreign.layers
    assert [value.name for value in (*layer.pasts, *layer.presents)] == [
        *("past_key", "past_value", "present_key", "present_value")
    ]
    assert foreign.input("position_ids") is foreign.graph.inputs[2]
    assert foreign.input("cache_position") is None
    assert layer.shape(7) == (1, 1, 7, SIZE)
    layer.past_key.shape = ir.Shape([None] * FLAT)
    assert layer.shape(7) == (1, 7, SIZE)


@pytest.mark.parametrize(
    ("longest", "calls"),
    [
        (128, [(0, 9), (80, 2), (126, 2)]),
        (9, [(0, 9), (5, 2), (7, 2)]),
        (8, [(0, 8), (5, 2), (6, 2)]),
        (1, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_probes_fill_a_cache_to_its_last_token(longest: int, calls: list[tuple[int, int]]) -> None:
    assert probes(longest) == calls
    assert sum(calls[-1]) == longest


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ((), "none"),
        ((-1, 0), "none"),
        ((4, -1, 4), "passed by a prompt"),
        ((4, 100_000, 90_000), "passed by a prompt, not compared: 90000, 100000"),
        ((100_000,), "not compared: 100000"),
    ],
)
def test_windows_that_a_prompt_passes(windows: tuple[int, ...], said: str, tmp_path: Path) -> None:
    original = Original(foreign_graph(tmp_path))
    found = reference(original, VOCAB, None, windows)
    assert found.windows == said
    again = reference(original, VOCAB, None, windows)
    assert (found.prompts, found.continuations) == (again.prompts, again.continuations)
    tokens = [token for row in (*found.prompts, *found.continuations) for token in row]
    assert (min(tokens), max(tokens)) == (0, VOCAB - 1)
    short = reference(original, VOCAB, 20, windows)
    sizes = zip(short.prompts, short.continuations, strict=True)
    assert max(len(row) + len(more) for row, more in sizes) < 20
