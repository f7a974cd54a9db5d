"""Experts whose rows come twice: a row's result does not depend on the others, on any processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.expert_rows import repeat_expert_rows, row_multiple
from qsample.compiler.quantize.experts import quantize_experts
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.graph.moe import OP_TYPE, QUANTIZED_OP_TYPE
from tests.compiler.quantize.test_experts import (
    ROWS,
    make_weights,
    mixture_graph,
    random_rows,
    saved,
)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_row_alone_is_as_among_others(bits: int | None, tmp_path: Path) -> None:
    model = mixture_graph(make_weights(64, 128))
    model.graph.inputs.append(ir.val("input_ids", ir.DataType.INT64, ["B", "S"]))
    if bits is not None:
        quantize_experts(model, WeightQuantization(bits, 64))
    assert repeat_expert_rows(model)
    assert sorted(node.op_type for node in model.graph if node.domain) == [
        QUANTIZED_OP_TYPE if bits else OP_TYPE
    ]
    session, _ = saved(model, tmp_path)
    assert [one.name for one in session.get_overridable_initializers()] == ["row_multiple"]
    _, _, feeds = random_rows(64)

    def run(rows: slice, columns: int = 1, **more: int) -> np.ndarray:
        fed = {name: array[rows] for name, array in feeds.items()}
        fed["input_ids"] = np.zeros((len(fed["rows"]) // columns, columns), np.int64)
        return session.run(None, fed | {name: np.array(number) for name, number in more.items()})[0]

    together = run(slice(ROWS), row_multiple=2)
    assert together.shape == (ROWS, 64)
    for row in range(ROWS):
        np.testing.assert_array_equal(run(slice(row, row + 1), row_multiple=2)[0], together[row])
    np.testing.assert_array_equal(
        run(slice(6), 3, row_multiple=2), run(slice(6), row_multiple=1)
    )  # a prompt
    np.testing.assert_array_equal(
        run(slice(6)), run(slice(6), row_multiple=1)
    )  # unless a session asks for it


@pytest.mark.parametrize("declared", [False, True])
def test_the_row_multiple_is_an_input_with_a_default(declared: bool) -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="g")
    if declared:
        graph.inputs.append(ir.val("row_multiple", ir.DataType.INT64, []))
    value = row_multiple(graph, 2)
    assert row_multiple(graph, 1) is value
    assert (list(graph.inputs), list(graph.initializers.values())) == ([value], [value])
    assert (value.name, value.dtype, value.shape) == (
        "row_multiple",
        ir.DataType.INT64,
        ir.Shape([]),
    )
    assert value.const_value is not None
    assert value.const_value.numpy() == 2, "of the first who asked"
