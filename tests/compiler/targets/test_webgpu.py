"""Passes of the target for WebGPU that show without a device: products, total lengths. More: tests/webgpu."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.compiler.targets.webgpu import plain_products, take_total_from_shape
from tests.helpers.small_graphs import check_same, small_graph


@pytest.mark.parametrize(
    ("flags", "left", "right", "operators"),
    [
        ("transB = 1", "B,1,6", "5,6", ["Squeeze", "Gemm", "Unsqueeze"]),  # a head
        ("transB = 1", "B,3,6", "5,6", ["Transpose", "MatMul"]),
        ("transB = 1", "B,3,6", "B,5,6", ["Transpose", "MatMul"]),
        ("transA = 1", "B,6,3", "6,5", ["Transpose", "MatMul"]),
        ("transA = 1, transB = 1", "B,6,3", "5,6", ["Transpose", "Transpose", "MatMul"]),
        ("transB = 0", "B,3,6", "6,5", ["MatMul"]),
        ("alpha = 0.5", "B,3,6", "6,5", ["FusedMatMul"]),  # it stays
        ("alpha = 0.0", "B,3,6", "6,5", ["FusedMatMul"]),
        ("transBatchA = 1", "3,B,6", "3,6,5", ["FusedMatMul"]),
    ],
)
def test_products_without_flags(flags: str, left: str, right: str, operators: list[str]) -> None:
    text = f"""
        products (float[{left}] x, float[{right}] w) => (float[B,S,5] y) {{
            y = com.microsoft.FusedMatMul <{flags}> (x, w)
        }}"""
    plain, model = small_graph(text), small_graph(text)
    assert plain_products(model) == (operators != ["FusedMatMul"])
    assert [node.op_type for node in model.graph] == operators
    rng = np.random.default_rng(0)
    sizes = [
        [2 if size == "B" else int(size) for size in shape.split(",")] for shape in (left, right)
    ]
    feeds = {
        name: rng.normal(size=size).astype(np.float32)
        for name, size in zip("xw", sizes, strict=True)
    }
    if flags != "transBatchA = 1":
        check_same(model, plain, feeds, rtol=1e-5, atol=1e-6)


def test_the_total_length_is_the_capacity() -> None:
    text = """
        attention (float[B,S,8] q, float[B,S,8] k, float[B,S,8] v, float[B,1,T,8] pk, float[B,1,T,8] pv,
            int32[B] last, int32 longest) => (float[B,S,8] y, float[B,1,T,8] nk, float[B,1,T,8] nv) {
            y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1>
                (q, k, v, pk, pv, last, longest)
        }"""
    plain, model = small_graph(text), small_graph(text)
    assert take_total_from_shape(model)
    assert not model.graph.inputs[6].uses()
    rng = np.random.default_rng(0)
    shapes = {
        "q": (2, 1, 8),
        "k": (2, 1, 8),
        "v": (2, 1, 8),
        "pk": (2, 1, 12, 8),
        "pv": (2, 1, 12, 8),
    }
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    feeds |= {"last": np.array([3, 6], np.int32), "longest": np.array(12, np.int32)}
    check_same(model, plain, feeds, rtol=1e-6)
    assert not take_total_from_shape(
        small_graph("empty (float[2] x) => (float[2] y) { y = Neg (x) }")
    )
