"""Joint projections: the same numbers from one matrix, and no weight read on the way."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.joint_projections import join_projections
from qsample.compiler.passes.ort_fusions import fuse_operators
from qsample.compiler.recipe import run
from qsample.graph.edit import initializer, lazy_initializer
from qsample.graph.operators import pack_bits
from qsample.tensors import Array
from tests.helpers.small_graphs import loop_graph, normal, operators, results, small_graph

HIDDEN = 8
WIDTHS = {"query": 6, "key": 3, "value": 5}


def model(widths: dict[str, int], *, unread: bool = False) -> ir.Model:
    """x [B, 8] → one MatMul by each width's matrix → an output. unread: the matrices raise when they are read."""
    rng = np.random.default_rng(0)
    x = ir.Value(name="x", shape=ir.Shape(["B", HIDDEN]), type=ir.TensorType(ir.DataType.FLOAT))
    nodes, weights = [], []
    for name, width in widths.items():
        array = rng.standard_normal((HIDDEN, width)).astype(np.float32)

        def fail() -> Array:
            raise AssertionError("a weight was read")

        if unread:
            weight = lazy_initializer(f"{name}_weight", array.shape, ir.DataType.FLOAT, fail)
        else:
            tensor = ir.Tensor(array, name=f"{name}_weight")
            weight = ir.Value(name=tensor.name, shape=tensor.shape, type=x.type, const_value=tensor)
        node = ir.Node("", "MatMul", [x, weight], name=name)
        node.outputs[0].name, node.outputs[0].type = name, x.type
        node.outputs[0].shape = ir.Shape(["B", width])
        nodes.append(node)
        weights.append(weight)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=weights, opset_imports={"": 20}, name="small")
    return ir.Model(graph, ir_version=10)


def test_one_product_gives_what_three_gave() -> None:
    joint = model(WIDTHS)
    assert join_projections(joint)
    assert Counter(operators(joint)) == {"MatMul": 1, "Split": 1}
    assert len(joint.graph.initializers) == 2
    feeds = {"x": normal(4, HIDDEN, seed=1)}
    for got, wanted in zip(results(joint, feeds), results(model(WIDTHS), feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_nothing_is_left_to_join_the_second_time() -> None:
    joint = model(WIDTHS)
    join_projections(joint)
    assert not join_projections(joint)
    assert not join_projections(model({"query": 6}))


def test_no_weight_is_read() -> None:
    assert join_projections(model(WIDTHS, unread=True))


Orders = tuple[list[int], list[int]]


def quantized(bits: int, zero_points: tuple[bool, bool], orders: Orders | None = None) -> ir.Model:
    """x [B, 48] → Identity → two MatMulNBits of 6 and 4 outputs. zero_points: which of them has some. orders: those of
    the columns of x that they read."""
    rng = np.random.default_rng(0)
    result = small_graph("copy (float[B,48] x) => (float[B,48] states) { states = Identity (x) }")
    graph = result.graph
    states = graph.outputs.pop()
    for index, (name, rows) in enumerate({"first": 6, "second": 4}.items()):
        levels = rng.integers(0, 2**bits, (rows * 3, 16), np.uint8)
        operands = {"blocks": pack_bits(levels, bits).reshape(rows, 3, -1)}
        operands["scales"] = rng.uniform(0.1, 1, rows * 3).astype(np.float32)
        if zero_points[index]:
            operands["zero_points"] = pack_bits(rng.integers(0, 2**bits, (rows, 3), np.uint8), bits).reshape(-1)
        x = states
        if orders is not None:
            order = initializer(graph, f"{name}_order", np.array(orders[index]))
            gather = ir.node("Gather", [x, order], {"axis": 1}, name=f"{name}_gather")
            gather.outputs[0].type = x.type
            graph.append(gather)
            x = gather.outputs[0]
        inputs = [x, *(initializer(graph, f"{name}_{kind}", array) for kind, array in operands.items())]
        attributes = {"K": 48, "N": rows, "bits": bits, "block_size": 16}
        node = ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft", name=name)
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, states.type, ir.Shape(["B", rows])
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    return result


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", [(False, False), (True, True), (False, True)])
def test_quantized_weights_are_joined_as_they_are(bits: int, zero_points: tuple[bool, bool]) -> None:
    plain, joint = (quantized(bits, zero_points) for _ in range(2))
    assert run(joint, [join_projections])
    assert operators(joint) == ["Identity", "MatMulNBits", "Split"]
    assert len(joint.graph.initializers) == (4 if any(zero_points) else 3)
    feeds = {"x": normal(3, 48)}
    for got, wanted in zip(results(joint, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


def test_projections_that_read_columns_in_one_order_are_joined() -> None:
    order = np.random.default_rng(2).permutation(48).tolist()
    plain, joint = (quantized(4, (False, False), (order, order)) for _ in range(2))
    assert run(joint, [join_projections])
    assert operators(joint) == ["Identity", "Gather", "MatMulNBits", "Split"]
    feeds = {"x": normal(3, 48)}
    for got, wanted in zip(results(joint, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    assert not join_projections(quantized(4, (False, False), (order, order[::-1])))


def test_of_lookups_in_one_order_the_first_in_the_graph_stays() -> None:
    """Whatever connected them last."""
    order = np.random.default_rng(2).permutation(48).tolist()
    plain, joint = (quantized(4, (False, False), (order, order)) for _ in range(2))
    gather = next(node for node in joint.graph if node.op_type == "Gather")
    states = gather.inputs[0]
    gather.replace_input_with(0, None)
    gather.replace_input_with(0, states)
    joint.graph.node("second").attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)  # nor are they joined
    assert run(joint, [join_projections])
    assert [node.name for node in joint.graph if node.op_type == "Gather"] == ["first_gather"]
    feeds = {"x": normal(3, 48)}
    for got, wanted in zip(results(joint, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)


def test_projections_of_a_token_are_joined_in_its_loop() -> None:
    plain, joint = (loop_graph(normal(64, 32, seed=1), normal(64, 32, seed=2)) for _ in range(2))
    assert run(joint, [join_projections])
    body = joint.graph.node(0).attributes["body"].as_graph()
    assert [node.op_type for node in body] == ["MatMul", "Split", "Mul", "Add", "Identity"]
    assert sorted(value.shape.numpy() for value in joint.graph.initializers.values()) == [(2,), (64, 64)]
    feeds = {"x": normal(2, 3, 64), "start": normal(2, 32)}
    for got, wanted in zip(results(joint, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    assert not fuse_operators(joint, "cpu")  # transformers' own joining stumbles over nodes of a body
