"""Weights that were asked for and that nothing is: one error that says why, and what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.quantize import weights
from qsample.compiler.quantize.check import check_quantized
from qsample.compiler.quantize.rounding import WeightQuantization
from qsample.compiler.quantize.weights import quantize_weights
from qsample.errors import CompileError
from qsample.graph.edit import initializer
from qsample.package import read_package


def products(*sizes: int, dtype: ir.DataType = ir.DataType.FLOAT, packed: bool = False) -> ir.Model:
    """A product for each input size; packed: by weights that came quantized."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "com.microsoft": 1}, name="products")
    for index, size in enumerate(sizes):
        x = ir.Value(name=f"x{index}", shape=ir.Shape(["B", size]), type=ir.TensorType(dtype))
        graph.inputs.append(x)
        if packed:
            levels = [
                initializer(graph, f"b{index}", np.zeros((8, size // 32, 16), np.uint8)),
                initializer(graph, f"s{index}", np.ones(size // 4, dtype.numpy())),
            ]
            node = ir.node("MatMulNBits", [x, *levels], {"K": size, "N": 8, "block_size": 32}, domain="com.microsoft")
        else:
            node = ir.node("MatMul", [x, initializer(graph, f"w{index}", np.ones((size, 8), dtype.numpy()))])
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("model", "block_size", "message"),
    [
        (products(20, 9), 16, r"none of their input sizes \(9, 20\) is a multiple of 16, the smallest block; leave"),
        (
            products(40, 1000),
            256,
            r"none of their input sizes \(40, 1000\) is a multiple of 16, the smallest block",
        ),
        (products(64, dtype=ir.DataType.DOUBLE), 16, "by no constant matrix of float32, float16 or bfloat16; leave"),
        (
            products(64, packed=True),
            16,
            "no constant matrix .* brought quantized, which stay as they are; leave weights",
        ),
    ],
    ids=lambda value: None if isinstance(value, ir.Model) else str(value)[:20],
)
def test_nothing_to_quantize(model: ir.Model, block_size: int, message: str) -> None:
    way = WeightQuantization(4, block_size)
    assert not quantize_weights(model, way)
    with pytest.raises(
        CompileError, match=f"4-bit weights were asked for and no matrix .* can be quantized: .*{message}"
    ):
        check_quantized(model, way)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16])
def test_one_matrix_is_enough(dtype: ir.DataType) -> None:
    model = products(20, 64, dtype=dtype)
    assert quantize_weights(model, WeightQuantization(8, 64))
    check_quantized(model, WeightQuantization(8, 64))


def test_a_package_of_which_nothing_is_quantized(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hidden size is 64, its inner size 96."""
    monkeypatch.setattr(weights, "BLOCK_SIZES", (256,))
    with pytest.raises(CompileError, match=r"no matrix of the model can be quantized: .*input sizes \(64, 96\)"):
        compile_package(
            read_package(llama_package), tmp_path / "out", CompileOptions(ctx_len=32, weights="int4", block_size=256)
        )
    assert list(tmp_path.iterdir()) == []
