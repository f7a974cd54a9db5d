"""Replaces Gemm by MatMul and Add.

onnxscript's gemm_to_matmul_add_rule wants a reshape behind the Gemm as well, a bias, and shapes without symbolic axes.
"""

from __future__ import annotations

import onnx_ir as ir

from qsample.graph.edit import insert, reshape_target


def replace_gemms(model: ir.Model) -> bool:
    """Turn each Gemm by a constant matrix into MatMul and Add, in place. Returns whether there was one.

    A MatMul keeps [B, S, N] as it is where a Gemm needs flattened rows, and weight quantization reads only MatMuls.

    1. The Gemm neither scales nor transposes, its weight is an initializer, its input and output have recorded shapes,
       and the output is none of the graph.
    2. Where a reshape flattens the states before it, the MatMul reads them unflattened, unless what is added to its
       result is flattened, too.
    """
    modified = False
    for node in list(model.graph):
        if node.op_type == "Gemm" and _is_plain(node):
            ir.convenience.replace_all_uses_with(node.outputs[0], _matmul(node))
            modified = True
    return modified


def _is_plain(node: ir.Node) -> bool:
    attributes = node.attributes
    scaled = attributes.get_float("alpha", 1.0) != 1.0 or attributes.get_float("beta", 1.0) != 1.0
    transposed = attributes.get_int("transA", 0) or attributes.get_int("transB", 0)
    weight = node.inputs[1]
    constant = weight is not None and weight.is_initializer()
    source, result = node.inputs[0], node.outputs[0]
    known = source is not None and source.shape is not None and result.shape is not None
    return constant and not scaled and not transposed and known and not result.is_graph_output()


def _matmul(node: ir.Node) -> ir.Value:
    """What `node` computes, [rows, N], from the states before they were flattened where a reshape did that."""
    source, weight, bias, *_ = [*node.inputs, None]
    result = node.outputs[0]
    assert node.graph is not None
    assert source is not None
    assert result.shape is not None
    flattening = source.producer()
    unflattened = flattening.inputs[0] if flattening is not None and flattening.op_type == "Reshape" else None
    # Other reshapes than a flattening end in another size than the matrix takes.
    is_vector = bias is None or (bias.shape is not None and len(bias.shape) <= 1)
    if is_vector and unflattened is not None and unflattened.shape is not None and weight is not None and weight.shape:
        source = unflattened if unflattened.shape[-1] == weight.shape[0] else source
    assert source.shape is not None
    shape = [*source.shape[:-1], result.shape[-1]]
    product = insert(node, "MatMul", [source, weight], shape)
    if bias is not None:
        product = insert(node, "Add", [product, bias], shape)
    if len(shape) == 2:
        return product
    assert isinstance(shape[-1], int)
    return insert(node, "Reshape", [product, reshape_target(node.graph, [-1, shape[-1]])], result.shape)
