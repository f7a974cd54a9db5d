"""Packed projections: the same numbers from one matrix, and no weight read on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.exporters.compiler.passes.joint_projections import join_projections

HIDDEN = 8
WIDTHS = {"query": 6, "key": 3, "value": 5}


def model(widths: dict[str, int], *, unread: bool = False) -> ir.Model:
    """x [B, 8] → one MatMul by each width's matrix → an output. unread: the matrices raise when they are read."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["B", HIDDEN]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes, weights = [], []
    for name, width in widths.items():
        array = rng.standard_normal((HIDDEN, width)).astype(np.float32)

        def fail() -> ir.TensorProtocol:
            raise AssertionError("a weight was read")

        shape = ir.Shape(array.shape)
        tensor: ir.TensorProtocol = ir.Tensor(array, name=f"{name}_weight")
        if unread:
            tensor = ir.LazyTensor(fail, dtype=ir.DataType.FLOAT, shape=shape, name=f"{name}_weight")
        weight = ir.Value(name=tensor.name, shape=shape, type=x.type, const_value=tensor)
        node = ir.Node("", "MatMul", [x, weight], name=name)
        node.outputs[0].name, node.outputs[0].type = name, x.type
        node.outputs[0].shape = ir.Shape(["B", width])
        nodes.append(node)
        weights.append(weight)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=weights, opset_imports={"": 20}, name="small")
    return ir.Model(graph, ir_version=10)


def results(found: ir.Model) -> list[np.ndarray]:
    session = ort.InferenceSession(ir.to_proto(found).SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((4, HIDDEN)).astype(np.float32)
    outputs: list[np.ndarray] = session.run(list(WIDTHS), {"x": x})
    return outputs


def test_one_product_gives_what_three_gave() -> None:
    packed = model(WIDTHS)
    assert join_projections(packed)
    assert Counter(node.op_type for node in packed.graph) == {"MatMul": 1, "Split": 1}
    assert len(packed.graph.initializers) == 2
    for found, wanted in zip(results(packed), results(model(WIDTHS)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_nothing_is_left_to_pack_the_second_time() -> None:
    packed = model(WIDTHS)
    join_projections(packed)
    assert not join_projections(packed)
    assert not join_projections(model({"query": 6}))


def test_no_weight_is_read() -> None:
    assert join_projections(model(WIDTHS, unread=True))
