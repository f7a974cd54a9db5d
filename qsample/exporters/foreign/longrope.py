"""Rotary tables that follow the length of a batch (longrope): one of the two is kept, whichever the caller asks for.

Another row in the batch must not change a row's tokens, and a cache that was filled with one table cannot be read with
the other.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.errors import QsampleError
from qsample.exporters.foreign.interface import MASK, POSITIONS, ForeignGraph, refusal
from qsample.graph.edit import constant, initializer
from qsample.graph.evaluate import inputs_of
from qsample.tensors import Array

CHOICES: Final = ("short", "long")


def choose_table(foreign: ForeignGraph, rope: str | None) -> int | None:
    """Put one table in the place of each If that chooses between two, in place. Returns the tokens up to which the file
    itself takes the short one, or the long table's rows; None where there is no such If.

    rope: "short" or "long"; None = "short". Raises QsampleError for a `rope` that the file cannot follow, and
    UnsupportedModelError for an If that chooses anything but constants.
    """
    choices = [node for node in foreign.graph if node.op_type == "If"]
    if not choices:
        if rope is not None:
            raise QsampleError(f"{foreign.path} has one rotary table, not a short and a long one; leave rope out")
        return None
    if rope not in (None, *CHOICES):
        raise QsampleError(f"rope is {rope!r}; choose one of {', '.join(CHOICES)}")
    limits = []
    for node in choices:
        condition = node.inputs[0]
        if condition is None or not {*inputs_of([condition])} <= {MASK, POSITIONS}:
            raise refusal(foreign.path, f"it has an If, {node.name}, that no length decides")
        greater = condition.producer()
        threshold = constant(greater.inputs[1]) if greater is not None and greater.op_type == "Greater" else None
        if threshold is None or threshold.size != 1:
            raise refusal(foreign.path, f"it has an If, {node.name}, that no length decides")
        branch = "then_branch" if rope == "long" else "else_branch"
        tables = _constants(foreign, node, node.attributes[branch].as_graph())
        for output, table in zip(node.outputs, tables, strict=True):
            output.replace_all_uses_with(initializer(foreign.graph, f"{output.name}.{rope or 'short'}", table))
        limits.append(int(tables[0].shape[0]) if rope == "long" else min(int(threshold.item()), tables[0].shape[0]))
    common_passes.RemoveUnusedNodesPass()(foreign.model)
    return min(limits)


def _constants(foreign: ForeignGraph, node: ir.Node, branch: ir.Graph) -> list[Array]:
    tables = []
    for value in branch.outputs:
        source = value
        while (maker := source.producer()) is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
            source = maker.inputs[0]
        table = constant(source)
        if table is None:
            raise refusal(foreign.path, f"it has an If, {node.name}, that chooses between computed values")
        tables.append(table)
    return tables
