"""Matrices whose inputs the block size does not divide: which blocks they get, and what these hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.quantize.report import quantization_report
from qsample.compiler.quantize.rounding import WeightQuantization
from qsample.compiler.quantize.weights import quantize_weights
from qsample.package import read_package
from tests.compiler.quantize.test_weights import (
    HIDDEN,
    VOCAB,
    WAYS,
    dequantized,
    make_weights,
    small_model,
)
from tests.helpers.small_graphs import normal


@pytest.mark.parametrize("method", ["rtn", "k_quant"])
@pytest.mark.parametrize(("asked", "inputs", "got"), [(128, 2880, 64), (256, 48, 16), (32, 80, 16), (64, 96, 32)])
def test_inputs_that_the_block_does_not_divide(asked: int, inputs: int, got: int, method: str, tmp_path: Path) -> None:
    """The largest smaller block that divides them is taken: for 2,880, gpt-oss's width, and 128 that is 64."""
    weights = {"table": normal(VOCAB, HIDDEN, seed=3), "matrix": normal(HIDDEN, 8, seed=4), "odd": normal(inputs, 24)}
    model, way = small_model(weights, odd=inputs), WeightQuantization(4, asked, method)
    assert quantize_weights(model, way)
    report = quantization_report(model)
    assert report is not None
    assert (report.matrices, report.float_bytes) == (3, 0)
    assert report.block_sizes == tuple(sorted({got, min(asked, HIDDEN)}))
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")

    taken = replace(way, block_size=got)
    expected = dequantized(tmp_path, "odd", taken)
    assert expected.shape == (24, inputs)
    error = np.abs(expected - weights["odd"].T).reshape(24, -1, got).mean(-1)
    assert (error < np.abs(weights["odd"].T).reshape(24, -1, got).max(-1) / 14).all()  # half of a level
    feeds = {"ids": np.zeros((1, 1), np.int64), "x": np.zeros((1, 1, HIDDEN), np.float32)}
    rest = ort.InferenceSession(tmp_path / "m.onnx").run(["rest"], feeds | {"part": np.eye(inputs, dtype=np.float32)})
    np.testing.assert_allclose(rest[0].T, expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[5], WAYS[6]], ids=str)
@pytest.mark.parametrize("inputs", [40, 1000])
def test_inputs_that_no_block_divides(inputs: int, way: WeightQuantization, tmp_path: Path) -> None:
    """The last block of a row is filled up, where the device takes that."""
    weights = {"table": normal(VOCAB, HIDDEN, seed=3), "matrix": normal(HIDDEN, 8, seed=4), "odd": normal(inputs, 24)}
    model = small_model(weights, odd=inputs)
    assert quantize_weights(model, way, pads=True)
    report = quantization_report(model)
    assert report is not None
    assert (report.matrices, report.float_bytes) == (3, 0)
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")

    taken = replace(way, block_size=min(way.block_size, 32 if inputs == 40 else 64))
    expected = dequantized(tmp_path, "odd", taken)[:, :inputs]
    error = np.abs(expected - weights["odd"].T)
    assert error.mean() < np.abs(weights["odd"]).max() / (2**way.bits - 2)
    session = ort.InferenceSession(tmp_path / "m.onnx")
    for rows in (1, 5):
        x = normal(rows, inputs, seed=5)
        feeds = {"ids": np.zeros((1, 1), np.int64), "x": np.zeros((1, 1, HIDDEN), np.float32), "part": x}
        exact = x @ expected.T
        # Activations are rounded to int8.
        assert np.abs(session.run(["rest"], feeds)[0] - exact).max() < 0.02 * np.abs(exact).max()


def test_what_is_not_filled_up() -> None:
    """Rows that are looked up, inputs of less than a block, and a device that does not take it."""
    for weights, pads in (({"table": normal(VOCAB, 40)}, True), ({"odd": normal(9, 8)}, True), ({}, False)):
        arrays = make_weights() | weights
        model = small_model(arrays, odd=len(arrays["odd"]))
        quantize_weights(model, WeightQuantization(4, 32), pads=pads)
        assert next(iter(weights), "odd") in model.graph.initializers


def test_a_packages_block_sizes(llama_package: Path, tmp_path: Path) -> None:
    """Its hidden size is 64, its inner size 96. The manifest says both what was asked for and what was taken."""
    compile_package(
        read_package(llama_package), tmp_path / "out", CompileOptions(ctx_len=32, weights="int8", block_size=128)
    )
    compilation = read_package(tmp_path / "out").manifest.compilation
    assert compilation is not None
    assert compilation.quantization is not None
    assert compilation.quantization["block_size"] == 128
    assert compilation.quantization["block_sizes"] == [32, 64]
