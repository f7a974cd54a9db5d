"""Gives each expert of a decode step more than a single row, if the processor asks for it.

Kernels may round an expert's only row otherwise than several rows (`ort.rounding`), and which rows share an expert
depends on the whole batch. So in steps of one token a row, rows come as often as ROW_MULTIPLE says, and each of an
expert's rows has a copy. The pieces of prompts are always the same tokens, and stay as they are.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.tensors import INPUT_IDS, ROW_MULTIPLE
from qsample.graph import moe
from qsample.graph.edit import initializer, insert, put_behind
from qsample.graph.operators import is_contrib

_EXPERTS: Final = (moe.OP_TYPE, moe.QUANTIZED_OP_TYPE)
# Both operators have these inputs in the same places.
_INPUT_SLOTS: Final = (moe.Slot.INPUT, moe.Slot.ROUTER)


def repeat_expert_rows(model: ir.Model) -> bool:
    """Repeat the rows of each MoE and QMoE, and drop the copies' results."""
    graph = model.graph
    mixtures = [node for node in graph if is_contrib(node, *_EXPERTS)]
    if not mixtures:
        return False
    multiple = row_multiple(graph, 1)
    first = mixtures[0]
    ids = next(value for value in graph.inputs if value.name == INPUT_IDS.name)
    one = initializer(graph, "one", np.array([1], np.int64))
    zero = initializer(graph, "zero", np.array([0], np.int64))
    columns = insert(first, "Shape", [ids], [1], {"start": 1, "end": 2}, dtype=ir.DataType.INT64)
    single = insert(first, "Equal", [columns, one], [1], dtype=ir.DataType.BOOL)
    times = insert(first, "Where", [single, multiple, one], [1], dtype=ir.DataType.INT64)
    repeats = insert(first, "Concat", [times, one], [2], {"axis": 0})
    for node in mixtures:
        rows = node.inputs[moe.Slot.INPUT]
        assert rows is not None
        count = insert(node, "Shape", [rows], [1], {"start": 0, "end": 1}, dtype=ir.DataType.INT64)
        for slot in _INPUT_SLOTS:
            value = node.inputs[slot]
            assert value is not None
            assert value.shape is not None
            assert len(value.shape) == 2
            node.replace_input_with(
                slot, insert(node, "Tile", [value, repeats], [None, value.shape[1]])
            )
        output = node.outputs[0]
        put_behind(output, "Slice", [zero, count, zero], name=f"{node.name}_rows")
        output.shape = None
    return True


def row_multiple(graph: ir.Graph, default: int) -> ir.Value:
    """ROW_MULTIPLE in `graph`, an input with a default value: nothing folds it, and a session may replace it."""
    value = next((value for value in graph.inputs if value.name == ROW_MULTIPLE.name), None)
    if value is None:
        value = ir.Value(
            name=ROW_MULTIPLE.name, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64)
        )
        graph.inputs.append(value)
    if value.const_value is None:
        value.const_value = ir.tensor(np.array(default, np.int64), name=ROW_MULTIPLE.name)
        graph.register_initializer(value)
    return value
