"""Lowers a graph to an older opset, for providers whose kernels end there."""

from __future__ import annotations

from typing import Final

import onnx.defs
import onnx_ir as ir

from qsample.errors import CompileError
from qsample.graph.operators import CONTRIB_DOMAIN

# Gelu is of opset 20; ONNX Runtime had both of its forms before.
_GELU: Final = {"none": "Gelu", "tanh": "FastGelu"}


def lower_opset(model: ir.Model, opset: int) -> bool:
    """Declare `model` to be of `opset`, in place, and rewrite what that opset writes differently.

    Returns whether it was of another one. Raises CompileError for an operator, or an attribute of one, that the opset
    does not have.
    """
    modified: bool = model.opset_imports.get("") != opset
    for node in model.graph.all_nodes():
        node.version = None
        if node.domain == "":
            _lower(node, opset)
    model.opset_imports[""] = opset
    return modified


def _lower(node: ir.Node, opset: int) -> None:
    if node.op_type == "Gelu":
        approximate = node.attributes.pop("approximate", None)
        node.op_type = _GELU["none" if approximate is None else approximate.as_string()]
        node.domain = CONTRIB_DOMAIN
        assert node.graph is not None
        node.graph.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
        return
    if node.op_type == "Cast":
        node.attributes.pop("saturate", None)  # of casts to float8
    if not onnx.defs.has(node.op_type, ""):
        return  # ONNX Runtime's own, like SimplifiedLayerNormalization
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError as error:
        raise CompileError(f"{node.op_type} {node.name} is not in opset {opset}, which this provider takes") from error
    unknown = [name for name in node.attributes if name not in schema.attributes]
    if unknown:
        raise CompileError(
            f"{node.op_type} {node.name} has {', '.join(unknown)}, which opset {opset} lacks, and this provider takes "
            "no newer one"
        )
