"""vision.onnx as a graph: its precision, its session, and the distance of features."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract.arrays import Array
from qsample.graph.edit import all_initializers, put_behind
from qsample.graph.runner import serialized
from qsample.graph.weights import StoredTensor, load_graph
from qsample.ort.options import WEIGHTS_FOLDER_KEY, session_options
from qsample.ort.providers import CPU, open_session
from qsample.ort.session import VISION, VisionSession

_FLOAT: Final = ir.DataType.FLOAT
_HALF: Final = ir.DataType.FLOAT16


def compute_in_float32(model: ir.Model) -> None:
    """Make a graph of float16 compute in float32, in place; its weights stay in float16.

    The CPU has no kernels for float16, in which towers that were trained in bfloat16 overflow.
    """
    graph = model.graph
    for value in all_initializers(graph):
        tensor = value.const_value
        if tensor is not None and tensor.dtype == _HALF:
            value.const_value = StoredTensor(tensor, str(value.name))
    for node in graph.all_nodes():
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) == _HALF:
            node.attributes["to"] = ir.AttrInt64("to", _FLOAT)
    computed = [output for node in graph.all_nodes() for output in node.outputs]
    for value in [*all_initializers(graph), *computed]:
        if value.dtype == _HALF:
            value.type = ir.TensorType(_FLOAT)


def give_features_as(model: ir.Model, dtype: ir.DataType) -> None:
    """Cast the result of a graph to `dtype`, in place."""
    (result,) = model.graph.outputs
    if result.dtype == dtype:
        return
    name = str(result.name)
    result.name = f"{name}_{str(result.dtype).lower()}"
    put_behind(result, "Cast", attributes={"to": dtype}, dtype=dtype).name = name


def vision_session(folder: Path, level: ort.GraphOptimizationLevel | None = None) -> VisionSession:
    """Open vision.onnx on the CPU, as the runtime does.

    Args:
        folder: the folder of the file, whose weights may lie elsewhere.
        level: the level of optimization, by default that of the runtime.
    """
    options = session_options()
    if level is not None:
        options.graph_optimization_level = level
    graph, weights = serialized(load_graph(folder / VISION), folder)
    options.add_session_config_entry(WEIGHTS_FOLDER_KEY, str(weights))
    return VisionSession(open_session(graph, options, [CPU]))


def furthest(got: Array, wanted: Array) -> float:
    """The largest difference between rows, [F, C], of two graphs; NaN if a number is NaN.

    If the numbers of rows differ, each row is compared with the nearest row of the other side: a
    graph returns some rows once that a model returns several times, in another order.
    """
    if got.shape != wanted.shape:
        squares = (got**2).sum(1)[:, None] + (wanted**2).sum(1) - 2 * got @ wanted.T
        pairs = [(got, wanted[squares.argmin(1)]), (got[squares.argmin(0)], wanted)]
    else:
        pairs = [(got, wanted)]
    return float(np.max([np.abs(one - other).max(initial=0.0) for one, other in pairs]))
