"""Gemms: those that become MatMul and Add, on unflattened states where they were flattened, and those that stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.passes.gemm_to_matmul import replace_gemms
from qsample.compiler.recipe import run
from tests.helpers.small_graphs import normal, operators, results, small_graph

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
    model = small_graph(GRAPH % (NUMBERS, attributes, bias), {"flat": ["R", 8], "product": ["R", columns]})
    weight = model.graph.initializers["weight"]
    weight.shape = weight.const_value.shape  # type: ignore[union-attr,assignment]
    return model


@pytest.mark.parametrize("bias", ["", ", bias"], ids=["without bias", "with bias"])
def test_it_multiplies_the_states_before_they_were_flattened(bias: str) -> None:
    plain, replaced = gemm(bias=bias), gemm(bias=bias)
    assert run(replaced, [replace_gemms])
    added = ["Add"] if bias else []
    assert operators(replaced) == ["MatMul", *added, "Reshape", "Shape", "Reshape"]
    product = replaced.graph.node(0)
    assert product.inputs[0] is replaced.graph.inputs[0]
    assert list(product.outputs[0].shape or ()) == ["B", "S", 4]
    feeds = {"x": normal(2, 3, 8), "like": np.zeros((2, 3, 4), np.float32)}
    for got, wanted in zip(results(replaced, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
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
    assert run(replaced, [replace_gemms])
    feeds = {"x": normal(2, 3, 8), "y": normal(2, 3, 4, seed=1)}
    for got, wanted in zip(results(replaced, feeds), results(plain, feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


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
