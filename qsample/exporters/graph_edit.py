"""What the graph passes share: constants and nodes put into a graph with their shapes and dtypes recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """The initializer `name` of `graph`, made from `array` unless it is there already."""
    if name not in graph.initializers:
        tensor = ir.tensor(np.ascontiguousarray(array), name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    shape: Iterable[int | ir.SymbolicDim | None],
    attributes: dict[str, Any] | None = None,
    domain: str = "",
) -> ir.Value:
    """Put a node with one output of `shape`, and of the first input's dtype, before `before`; return that output."""
    node = ir.node(op_type, inputs, attributes, domain=domain)
    output = node.outputs[0]
    output.shape = ir.Shape(list(shape))
    if inputs[0] is not None and inputs[0].dtype is not None:
        output.type = ir.TensorType(inputs[0].dtype)  # of its own: a type can be changed in place
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return output


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The numbers of a constant, None for what is computed."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def reshape(before: ir.Node, source: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """`source` with its last axes as in `sizes`, which start with a 0 for each axis that is kept."""
    assert source.shape is not None
    assert before.graph is not None
    kept = list(source.shape)[: list(sizes).count(0)]
    name = "shape_" + "_".join(map(str, sizes))
    target = initializer(before.graph, name, np.array(sizes, dtype=np.int64))
    return insert(before, "Reshape", [source, target], [*kept, *sizes[len(kept) :]])
