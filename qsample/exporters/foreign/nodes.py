"""Appends nodes to a graph that is sorted when all of them are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import initializer

PREFIX = "qsample."

Dims = Iterable[Any]


class Nodes:
    """What is put into `graph`; every name starts with PREFIX, which no other exporter uses."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._made = 0

    def __call__(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        dtype: ir.DataType | None,
        shape: Dims | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """The only output of a new node. shape: None = unknown."""
        return self.several(op_type, inputs, [(dtype, shape)], **attributes)[0]

    def several(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType | None, Dims | None]],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """The outputs of a new node, each with its dtype and shape."""
        self._made += 1
        name = f"{PREFIX}{op_type}_{self._made}"
        node = ir.node(op_type, list(inputs), attributes, domain=domain, num_outputs=len(outputs), name=name)
        for index, (value, (dtype, shape)) in enumerate(zip(node.outputs, outputs, strict=True)):
            value.name = f"{name}.{index}"
            value.type = None if dtype is None else ir.TensorType(dtype)
            # Without its dtype, a shape cannot be written.
            value.shape = None if shape is None or dtype is None else ir.Shape(list(shape))
        self.graph.append(node)
        return node.outputs

    def integers(self, *numbers: int, dtype: str = "int64") -> ir.Value:
        """A constant [n]."""
        name = f"{PREFIX}{dtype}_" + "_".join(map(str, numbers))
        return initializer(self.graph, name, np.array(numbers, dtype))

    def integer(self, number: int) -> ir.Value:
        """A constant int64 scalar."""
        return initializer(self.graph, f"{PREFIX}scalar_{number}", np.array(number, np.int64))

    def merged_heads(self, value: ir.Value, dtype: ir.DataType, heads: int, size: int) -> ir.Value:
        """[B, heads, S, D] as [B, S, heads * D]."""
        by_token = self("Transpose", [value], dtype, ["B", "S", heads, size], perm=[0, 2, 1, 3])
        return self.reshaped(by_token, heads * size)

    def reshaped(self, value: ir.Value, *sizes: int) -> ir.Value:
        """[B, S, ...] as [B, S, sizes]."""
        return self("Reshape", [value, self.integers(0, 0, *sizes)], value.dtype, ["B", "S", *sizes])
