"""A fused decode graph enters; the same graph with as few nodes a layer as ONNX Runtime's operators allow leaves."""

from __future__ import annotations

import onnx_ir as ir

from qsample.exporters.compiler.passes.head_transposes import remove_head_transposes
from qsample.exporters.compiler.passes.packed_qkv import gemms_to_matmuls, pack_attention_inputs
from qsample.exporters.compiler.passes.reshapes import simplify_reshapes
from qsample.exporters.compiler.passes.rope_into_attention import absorb_rotary
from qsample.exporters.compiler.passes.rope_to_operator import fuse_rotations


def make_lean(model: ir.Model, capacity: int) -> bool:
    """Run the passes in the order in which each clears the way for the next, in place. capacity: T, fixed in `model`.

    Returns whether anything changed. A Llama layer is left with ten nodes: two norms with their skips, four matrix
    products, the attention, and the three of the gate.
    """
    modified = gemms_to_matmuls(model)
    modified |= fuse_rotations(model)
    modified |= remove_head_transposes(model)
    modified |= simplify_reshapes(model)
    modified |= absorb_rotary(model, capacity)
    modified |= pack_attention_inputs(model)
    return modified
