"""Gives named axes of a model a fixed size."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir


def fix_axes(model: ir.Model, sizes: Mapping[str, int]) -> bool:
    """Give the named axes in `sizes` their size, in every shape of the graph; in place. Returns whether anything had
    one of them.

    Sizes computed from several axes lose their recorded name: shape inference finds them again.
    """
    modified = False
    for value in _values(model):
        if value.shape is None:
            continue
        dims = [_fixed(dim, sizes) for dim in value.shape]
        if list(value.shape) != dims:
            value.shape = ir.Shape(dims)
            modified = True
    return modified


def _values(model: ir.Model) -> list[ir.Value]:
    return [*model.graph.inputs, *(output for node in model.graph.all_nodes() for output in node.outputs)]


def _fixed(dim: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | ir.SymbolicDim:
    name = getattr(dim, "value", None)
    return sizes.get(name, dim) if isinstance(name, str) else dim
