"""ONNX Runtime's fusions: for which providers, and whether there was anything to fuse."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.fusions import (
    FUSION_PROVIDERS,
    fuse_operators,
    join_projections,
    replace_gemms,
)
from qsample.compiler.pipeline import apply, lean_phases
from qsample.contract.arrays import Array
from qsample.graph.edit import fix_axes, initializer, lazy_initializer
from qsample.graph.operators import pack_bits
from tests.helpers.building import run_on
from tests.helpers.small_graphs import (
    check_same,
    loop_graph,
    normal,
    operators,
    results,
    small_graph,
)


def test_an_unknown_provider() -> None:
    with pytest.raises(ValueError, match="no fusions for provider 'tpu'; choose one of cpu, cuda"):
        fuse_operators(small_graph("nothing (float[B] x) => (float[B] y) { y = Neg (x) }"), "tpu")


@pytest.mark.parametrize("provider", FUSION_PROVIDERS)
def test_whether_anything_changed(provider: str, llama_package: Path) -> None:
    assert not fuse_operators(
        small_graph("nothing (float[B] x) => (float[B] y) { y = Neg (x) }"), provider
    )
    model = ir.load(llama_package / "decoder.onnx")
    assert fuse_operators(model, provider)
    assert {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"} <= set(
        operators(model)
    )


NEAR_NUMBERS = """
near (float[B,S,128] x) => (float[B,S,128] normed, double[B,S,128] drawn, float[B,S,128] shifted, float[B,S,128] same)
    <float eps = {7.8125e-9}, float two = {2.0}, int64[1] last = {-1}, float[128] weight = {%s},
     double below_one = {0.99999994}, float tiny = {1e-9}, float one = {1.0}, float zero = {0.0}>
{
    squares = Pow (x, two)
    mean = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (squares, last)
    safe = Add (mean, eps)
    root = Sqrt (safe)
    inverse = Reciprocal (root)
    unit = Mul (x, inverse)
    normed = Mul (unit, weight)
    wide = Cast <to = 11> (x)
    drawn = Mul (wide, below_one)
    shifted = Add (x, tiny)
    multiplied = Mul (x, one)
    same = Add (multiplied, zero)
}
"""


@pytest.mark.parametrize("with_transformers", [True, False])
@pytest.mark.parametrize("provider", FUSION_PROVIDERS)
def test_numbers_near_0_and_1_are_what_they_are(
    provider: str, with_transformers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's eps keeps zeros from becoming NaN; the draw's factor keeps it below a sum. Nothing but 0 and 1 goes."""
    if not with_transformers:
        monkeypatch.setitem(sys.modules, "transformers.exporters.onnxruntime_fusions", None)
    model = small_graph(NEAR_NUMBERS % ", ".join(["0.088"] * 128))
    x = normal(2, 3, 128)
    x[0, 0] = 0
    before = results(model, {"x": x})
    apply(model, lambda model: fuse_operators(model, provider))
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert {"SimplifiedLayerNormalization", "Mul", "Add"} <= set(operators(model))
    after = results(model, {"x": x})
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5)
    assert all(np.array_equal(*pair) for pair in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "olmo_hybrid")),
    ],
)
def test_without_transformers_a_graph_gets_the_same_nodes(
    model_type: str, exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lean() -> Counter[str]:
        model = ir.load(exported(model_type, include_sampler=False) / "decoder.onnx")
        for value in (
            model.graph.initializers.values()
        ):  # biases of 0, as random models have them, are left out
            zeros = value.const_value
            if (
                zeros is not None
                and zeros.dtype == ir.DataType.FLOAT
                and zeros.size > 1
                and not zeros.numpy().any()
            ):
                value.const_value = ir.tensor(
                    np.linspace(-1, 1, zeros.size, dtype=np.float32).reshape(zeros.shape)
                )
        fix_axes(model, {"T": 64})
        run_on(model, lean_phases("cpu", 64))
        return Counter(operators(model))

    fused = lean()
    monkeypatch.setitem(sys.modules, "transformers.exporters.onnxruntime_fusions", None)
    assert lean() == fused


GRAPH = """
project (float[B,S,8] x, float[B,S,4] like) => (float[B,S,4] result)
    <int64[2] rows = {-1, 8}, float[8,4] weight = {%s}, float[4] bias = {1, 2, 3, 4}>
{
    flat = Reshape (x, rows)
    product = Gemm <%s> (flat, weight%s)
    shape = Shape (like)
    result = Reshape (product, shape)
}
"""
NUMBERS = ", ".join(str(number) for number in range(32))


def gemm(attributes: str = "alpha = 1.0", bias: str = ", bias", columns: int = 4) -> ir.Model:
    model = small_graph(
        GRAPH % (NUMBERS, attributes, bias), {"flat": ["R", 8], "product": ["R", columns]}
    )
    weight = model.graph.initializers["weight"]
    weight.shape = weight.const_value.shape  # type: ignore[union-attr,assignment]
    return model


@pytest.mark.parametrize("bias", ["", ", bias"], ids=["without bias", "with bias"])
def test_it_multiplies_the_states_before_they_were_flattened(bias: str) -> None:
    plain, replaced = gemm(bias=bias), gemm(bias=bias)
    assert apply(replaced, replace_gemms)
    added = ["Add"] if bias else []
    assert operators(replaced) == ["MatMul", *added, "Reshape", "Shape", "Reshape"]
    product = replaced.graph.node(0)
    assert product.inputs[0] is replaced.graph.inputs[0]
    assert list(product.outputs[0].shape or ()) == ["B", "S", 4]
    feeds = {"x": normal(2, 3, 8), "like": np.zeros((2, 3, 4), np.float32)}
    check_same(replaced, plain, feeds, rtol=1e-5)
    assert not replace_gemms(replaced)


def test_what_is_added_may_be_flattened_too() -> None:
    text = f"""
        residual (float[B,S,8] x, float[B,S,4] y) => (float[rows,4] result)
            <int64[2] rows = {{-1, 8}}, int64[2] few = {{-1, 4}}, float[8,4] weight = {{{NUMBERS}}}>
        {{
            flat = Reshape (x, rows)
            added = Reshape (y, few)
            product = Gemm (flat, weight, added)
            result = Neg (product)
        }}"""
    plain, replaced = (small_graph(text, {"flat": ["R", 8], "product": ["R", 4]}) for _ in range(2))
    weight = replaced.graph.initializers["weight"]
    weight.shape = weight.const_value.shape  # type: ignore[union-attr,assignment]
    assert apply(replaced, replace_gemms)
    feeds = {"x": normal(2, 3, 8), "y": normal(2, 3, 4, seed=1)}
    check_same(replaced, plain, feeds, rtol=1e-5)


@pytest.mark.parametrize("attributes", ["alpha = 2.0", "beta = 0.5", "transA = 1", "transB = 1"])
def test_one_that_scales_or_transposes_stays(attributes: str) -> None:
    assert not replace_gemms(gemm(attributes))


def test_one_of_unknown_shape_stays() -> None:
    model = gemm()
    model.graph.node(1).outputs[0].shape = None
    assert not replace_gemms(model)


def test_one_that_the_graph_returns_stays() -> None:
    model = gemm()
    product = model.graph.node(1).outputs[0]
    product.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(product)
    assert not replace_gemms(model)


HIDDEN = 8
WIDTHS = {"query": 6, "key": 3, "value": 5}


def model(widths: dict[str, int], *, unread: bool = False) -> ir.Model:
    """x [B, 8] → one MatMul by each width's matrix → an output. unread: the matrices raise when they are read."""

    def fail() -> Array:
        raise AssertionError("a weight was read")

    constants: dict[str, Any] = {
        f"w_{name}": normal(HIDDEN, width, seed=width) for name, width in widths.items()
    }
    if unread:
        constants = {
            name: lazy_initializer(name, array.shape, ir.DataType.FLOAT, fail).const_value
            for name, array in constants.items()
        }
    weights = "".join(f", float[8,{width}] w_{name}" for name, width in widths.items())
    outputs = ", ".join(f"float[B,{width}] {name}" for name, width in widths.items())
    products = "\n".join(f"{name} = MatMul (x, w_{name})" for name in widths)
    return small_graph(
        f"g (float[B,8] x{weights}) => ({outputs}) {{ {products} }}", constants=constants
    )


def test_one_product_gives_what_three_gave() -> None:
    joint = model(WIDTHS)
    assert join_projections(joint)
    assert Counter(operators(joint)) == {"MatMul": 1, "Split": 1}
    assert len(joint.graph.initializers) == 2
    feeds = {"x": normal(4, HIDDEN, seed=1)}
    check_same(joint, model(WIDTHS), feeds, rtol=1e-6, atol=1e-6)


def test_nothing_is_left_to_join_the_second_time() -> None:
    joint = model(WIDTHS)
    join_projections(joint)
    assert not join_projections(joint)
    assert not join_projections(model({"query": 6}))


def test_no_weight_is_read() -> None:
    assert join_projections(model(WIDTHS, unread=True))


Orders = tuple[list[int], list[int]]


def quantized(
    bits: int,
    zero_points: tuple[bool, bool],
    orders: Orders | None = None,
    offsets: tuple[bool, bool] = (False, False),
) -> ir.Model:
    """x [B, 48] → Identity → two MatMulNBits of 6 and 4 outputs. zero_points, offsets: which of them has some. orders:
    those of the columns of x that they read."""
    rng = np.random.default_rng(0)
    result = small_graph("copy (float[B,48] x) => (float[B,48] states) { states = Identity (x) }")
    graph = result.graph
    states = graph.outputs.pop()
    for index, (name, rows) in enumerate({"first": 6, "second": 4}.items()):
        levels = rng.integers(0, 2**bits, (rows * 3, 16), np.uint8)
        operands = {"blocks": pack_bits(levels, bits).reshape(rows, 3, -1)}
        operands["scales"] = rng.uniform(0.1, 1, rows * 3).astype(np.float32)
        if zero_points[index]:
            operands["zero_points"] = pack_bits(
                rng.integers(0, 2**bits, (rows, 3), np.uint8), bits
            ).reshape(-1)
        x = states
        if orders is not None:
            order = initializer(graph, f"{name}_order", np.array(orders[index]))
            gather = ir.node("Gather", [x, order], {"axis": 1}, name=f"{name}_gather")
            gather.outputs[0].type = x.type
            graph.append(gather)
            x = gather.outputs[0]
        inputs = [
            x,
            *(initializer(graph, f"{name}_{kind}", array) for kind, array in operands.items()),
        ]
        attributes = {"K": 48, "N": rows, "bits": bits, "block_size": 16}
        node = ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft", name=name)
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = (
            name,
            states.type,
            ir.Shape(["B", rows]),
        )
        graph.append(node)
        graph.outputs.append(with_offsets(node, rng) if offsets[index] else node.outputs[0])
    return result


def with_offsets(product: ir.Node, rng: np.random.Generator) -> ir.Value:
    """The result of `product` plus random offsets of its blocks, behind it, as a trace has them."""
    graph, size = product.graph, product.attributes.get_int("block_size", 0)
    assert isinstance(graph, ir.Graph)
    rows, blocks = product.attributes.get_int("N", 0), product.attributes.get_int("K", 0) // size
    numbers = rng.normal(size=(blocks, rows)).astype(np.float32)
    shape = initializer(graph, "blocks_shape", np.array([-1, blocks, size]))
    parts = ir.node("Reshape", [product.inputs[0], shape])
    sums = ir.node(
        "ReduceSum", [parts.outputs[0], initializer(graph, "last", np.array([-1]))], {"keepdims": 0}
    )
    added = ir.node(
        "MatMul", [sums.outputs[0], initializer(graph, f"{product.name}_offsets", numbers)]
    )
    total = ir.node("Add", [product.outputs[0], added.outputs[0]], name=f"{product.name}_total")
    graph.extend([parts, sums, added, total])
    old, new = product.outputs[0], total.outputs[0]
    new.name, new.type, new.shape = f"{product.name}_total", old.type, old.shape
    return new


@pytest.mark.parametrize("offsets", [(True, True), (True, False), (False, True)])
def test_offsets_are_joined_with_their_weights(offsets: tuple[bool, bool]) -> None:
    plain, joint = (quantized(4, (True, True), offsets=offsets) for _ in range(2))
    assert apply(joint, join_projections)
    expected = ["Identity", "MatMulNBits", "Reshape", "ReduceSum", "MatMul", "Add", "Split"]
    assert sorted(operators(joint)) == sorted(expected)
    feeds = {"x": normal(3, 48)}
    check_same(joint, plain, feeds, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", [(False, False), (True, True), (False, True)])
def test_quantized_weights_are_joined_as_they_are(
    bits: int, zero_points: tuple[bool, bool]
) -> None:
    plain, joint = (quantized(bits, zero_points) for _ in range(2))
    assert apply(joint, join_projections)
    assert operators(joint) == ["Identity", "MatMulNBits", "Split"]
    assert len(joint.graph.initializers) == (4 if any(zero_points) else 3)
    feeds = {"x": normal(3, 48)}
    check_same(joint, plain, feeds, rtol=1e-5, atol=1e-4)


def test_projections_that_read_columns_in_one_order_are_joined() -> None:
    order = np.random.default_rng(2).permutation(48).tolist()
    plain, joint = (quantized(4, (False, False), (order, order)) for _ in range(2))
    assert apply(joint, join_projections)
    assert operators(joint) == ["Identity", "Gather", "MatMulNBits", "Split"]
    feeds = {"x": normal(3, 48)}
    check_same(joint, plain, feeds, rtol=1e-5, atol=1e-4)
    assert not join_projections(quantized(4, (False, False), (order, order[::-1])))


def test_of_lookups_in_one_order_the_first_in_the_graph_stays() -> None:
    """Whatever connected them last."""
    order = np.random.default_rng(2).permutation(48).tolist()
    plain, joint = (quantized(4, (False, False), (order, order)) for _ in range(2))
    gather = next(node for node in joint.graph if node.op_type == "Gather")
    states = gather.inputs[0]
    gather.replace_input_with(0, None)
    gather.replace_input_with(0, states)
    joint.graph.node("second").attributes["accuracy_level"] = ir.AttrInt64(
        "accuracy_level", 1
    )  # nor are they joined
    assert apply(joint, join_projections)
    assert [node.name for node in joint.graph if node.op_type == "Gather"] == ["first_gather"]
    feeds = {"x": normal(3, 48)}
    check_same(joint, plain, feeds, rtol=1e-5, atol=1e-4)


def test_projections_of_a_token_are_joined_in_its_loop() -> None:
    plain, joint = (loop_graph(normal(64, 32, seed=1), normal(64, 32, seed=2)) for _ in range(2))
    assert apply(joint, join_projections)
    body = joint.graph.node(0).attributes["body"].as_graph()
    assert [node.op_type for node in body] == ["MatMul", "Split", "Mul", "Add", "Identity"]
    assert sorted(value.shape.numpy() for value in joint.graph.initializers.values()) == [
        (2,),
        (64, 64),
    ]
    feeds = {"x": normal(2, 3, 64), "start": normal(2, 32)}
    check_same(joint, plain, feeds, rtol=1e-5, atol=1e-4)
    assert not fuse_operators(
        joint, "cpu"
    )  # transformers' own joining stumbles over nodes of a body
