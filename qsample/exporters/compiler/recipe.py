"""A target's list of graph passes enters; the graph that they leave, without what none of it needs any more, leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

Pass = Callable[[ir.Model], bool]
"""Changes a model in place and says whether there was anything to change. It may leave nodes that nothing reads."""


def run(model: ir.Model, passes: Iterable[Pass]) -> bool:
    """Run `passes` on `model` in order, in place; each meets a graph without unused nodes.

    Returns whether any of them changed it.
    """
    modified = False
    for one in passes:
        if one(model):
            common_passes.RemoveUnusedNodesPass()(model)
            modified = True
    return modified
