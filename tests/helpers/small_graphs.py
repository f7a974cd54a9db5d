"""Small graphs written by hand, with the shapes that an export records, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract.arrays import Array
from qsample.graph.edit import initializer

HEADER = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def small_graph(
    text: str,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT,
    constants: Mapping[str, Array | ir.TensorProtocol] | None = None,
) -> ir.Model:
    """The model of `text`, ONNX's own notation without the header. shapes: by name, of values that are computed; they
    are of `dtype`. constants: the numbers of inputs that become initializers, by name."""
    model = ir.from_onnx_text(HEADER + text)
    for node in model.graph:
        node.name = node.outputs[0].name
        for value in node.outputs:
            if shapes is not None and value.name in shapes:
                value.shape = ir.Shape(shapes[value.name])
                value.type = ir.TensorType(dtype)
    inputs = {value.name: value for value in model.graph.inputs}
    for name, numbers in (constants or {}).items():
        value = inputs[name]
        value.const_value = (
            ir.tensor(numbers, name=name) if isinstance(numbers, np.ndarray) else numbers
        )
        value.type, value.shape = ir.TensorType(value.const_value.dtype), value.const_value.shape  # type: ignore[assignment]
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    return model


def loop_graph(first: Array, second: Array) -> ir.Model:
    """x [B, S, 64] → a Scan over S whose state, [B, 32], adds up (token @ first) * (token @ second)."""
    model = small_graph("""
        loop (float[B,S,64] x, float[B,32] start, float[64,32] w1, float[64,32] w2)
            => (float[B,32] last, float[B,S,32] sums) {
            last, sums = Scan <
                num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
                body = step (float[B,32] state, float[B,64] token) => (float[B,32] next, float[B,32] sum) {
                    left = MatMul (token, w1)
                    right = MatMul (token, w2)
                    both = Mul (left, right)
                    next = Add (state, both)
                    sum = Identity (next)
                }
            > (start, x)
        }""")
    for value, array in zip(model.graph.inputs[2:], (first, second), strict=True):
        value.replace_all_uses_with(initializer(model.graph, f"{value.name}_weight", array))
        model.graph.inputs.remove(value)
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name
        for value in node.outputs:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    return model


def results(model: ir.Model, feeds: Mapping[str, Array]) -> list[Array]:
    """What ONNX Runtime computes on the CPU; feeds that the graph does not read are left out."""
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = {value.name for value in session.get_inputs()}
    return list(session.run(None, {name: array for name, array in feeds.items() if name in names}))


def check_same(
    model: ir.Model, plain: ir.Model, feeds: Mapping[str, Array], **tolerance: float
) -> None:
    """Both compute the same. tolerance: of `assert_allclose`."""
    for got, wanted in zip(results(model, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, **tolerance)


def operators(model: ir.Model) -> list[str]:
    """The operator of each node, in order."""
    return [node.op_type for node in model.graph]


def normal(*shape: int, seed: int = 0) -> Array:
    """float32 numbers from a standard normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
