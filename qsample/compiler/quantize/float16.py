"""Stores the matrices of a float32 graph in float16, for half the space.

A Cast in front of each matrix makes float32 of it. ONNX Runtime folds it when it loads the graph, so that memory and
speed equal float32's: the CPU has no kernels that would multiply by float16 as it is.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.blocks import QuantizationReport, report_quantization
from qsample.compiler.quantize.weights import matrix_of, offset_products
from qsample.contract.arrays import Array
from qsample.graph import moe
from qsample.graph.edit import lazy_initializer, with_loop_bodies


def store_as_float16(model: ir.Model) -> bool:
    """Store every constant float32 matrix that a token is multiplied by in float16, experts included, in place: when
    the model is saved, one by one. `model` is optimised already: ONNX Runtime's offline optimisation would fold the
    casts. Returns whether there was a matrix; `quantization_report` has the figures."""
    graph = model.graph
    kept = offset_products(graph)
    nodes = (node for node in with_loop_bodies(graph) if node not in kept)
    matrices = {
        matrix.value: matrix.tensor for matrix in map(matrix_of, nodes) if matrix is not None
    }
    experts = [
        node.inputs[slot] for node in moe.mixtures(graph) for slot in (moe.Slot.FC1, moe.Slot.FC2)
    ]
    matrices |= {
        value: value.const_value
        for value in experts
        if value is not None and value.const_value is not None
    }
    matrices = {
        value: tensor for value, tensor in matrices.items() if tensor.dtype == ir.DataType.FLOAT
    }
    for value, tensor in matrices.items():
        stored = _stored(tensor, f"{value.name}_float16")
        graph.register_initializer(stored)
        cast = ir.Node(
            "",
            "Cast",
            [stored],
            [ir.AttrInt64("to", int(ir.DataType.FLOAT))],
            name=f"{value.name}_cast",
        )
        result = cast.outputs[0]
        result.shape = value.shape
        result.type = value.type
        graph.insert_before(graph[0], cast)
        value.replace_all_uses_with(result)
        graph.initializers.pop(str(value.name))
        result.name = f"{value.name}_float32"
    before = sum(tensor.nbytes for tensor in matrices.values())
    report_quantization(model, QuantizationReport(len(matrices), before, before // 2))
    return bool(matrices)


def _stored(tensor: ir.TensorProtocol, name: str) -> ir.Value:
    def half() -> Array:
        return tensor.numpy().astype(np.float16)

    return lazy_initializer(name, tensor.shape.numpy(), ir.DataType.FLOAT16, half)
