"""Lists of graph passes: the runner, which cleans up behind each pass, and the list that several targets begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.compiler.passes.gemm_to_matmul import replace_gemms
from qsample.compiler.passes.head_transposes import remove_head_transposes
from qsample.compiler.passes.joint_projections import join_projections
from qsample.compiler.passes.ort_fusions import fuse_operators
from qsample.compiler.passes.packed_qkv import pack_qkv
from qsample.compiler.passes.reshapes import simplify_reshapes
from qsample.compiler.passes.rope_into_attention import absorb_rope
from qsample.compiler.passes.rope_to_operator import fuse_rope

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


def lean_passes(provider: str, capacity: int) -> tuple[Pass, ...]:
    """What makes ONNX Runtime's own operators of a decode graph, as few a layer as they allow.

    provider: one of `ort_fusions.FUSION_PROVIDERS`. capacity: T, fixed in the graph. A Llama layer is left with ten
    nodes: two norms with their skips, four matrix products, the attention, and the three of the gate.
    """
    return (
        join_projections,  # as the fusions would, but without reading the weights
        partial(fuse_operators, provider=provider),
        # From here on, each clears the way for the next.
        replace_gemms,
        fuse_rope,
        remove_head_transposes,
        simplify_reshapes,
        partial(absorb_rope, capacity=capacity),
        pack_qkv,
    )
