"""Weights stored in float16: the numbers, the space, and the same graph in float32 once it is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler.quantize.blocks import QuantizationReport, quantization_report
from qsample.compiler.quantize.float16 import store_as_float16
from qsample.models.model import PackagedModel
from qsample.package.package import Package
from tests.helpers.small_graphs import loop_graph, normal, operators, results, small_graph


def test_only_matrices_that_a_token_is_multiplied_by_are_stored_in_float16() -> None:
    arrays = {"weight": normal(8, 4), "offset": normal(4)}
    model = small_graph(
        """
        project (float[B,8] x, float[8,4] weight, float[4] offset) => (float[B,4] result) {
            product = MatMul (x, weight)
            result = Add (product, offset)
        }""",
        constants=arrays,
    )
    assert quantization_report(model) is None
    assert store_as_float16(model)
    assert quantization_report(model) == QuantizationReport(1, 128, 64)
    assert operators(model) == ["Cast", "MatMul", "Add"]
    assert {name: value.dtype for name, value in model.graph.initializers.items()} == {
        "weight_float16": ir.DataType.FLOAT16,
        "offset": ir.DataType.FLOAT,
    }
    x = normal(2, 8, seed=1)
    (result,) = results(model, {"x": x})
    rounded = arrays["weight"].astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(result, x @ rounded + arrays["offset"], rtol=1e-5, atol=1e-6)
    assert not store_as_float16(model)


def test_the_weights_of_a_loop_are_stored_in_float16() -> None:
    model, weights = (
        loop_graph(normal(64, 32, seed=1), normal(64, 32, seed=2)),
        ("w1_weight", "w2_weight"),
    )
    assert store_as_float16(model)
    assert sorted(model.graph.initializers) == [f"{name}_float16" for name in weights]
    first, second = (
        normal(64, 32, seed=seed).astype(np.float16).astype(np.float32) for seed in (1, 2)
    )
    x = normal(2, 3, 64)
    last, _ = results(model, {"x": x, "start": np.zeros((2, 32), np.float32)})
    np.testing.assert_allclose(last, ((x @ first) * (x @ second)).sum(1), rtol=1e-4, atol=1e-3)


def test_experts_are_stored_in_float16_and_other_dtypes_stay() -> None:
    """Both matrices of a mixture; the shape is that of the weight, and names tell what is what."""
    arrays = {
        "fc1": normal(2, 8, 4),
        "fc2": normal(2, 4, 4),
        "half": normal(4, 4).astype(np.float16),
    }
    model = small_graph(
        """
        mixture (float[B,4] x, float[B,2] router, float16[B,4] z, float[2,8,4] fc1, float[2,4,4] fc2, float16[4,4] half)
            => (float[B,4] y, float16[B,4] other, float[B,4] computed) {
            turned = Neg (fc2)
            computed = com.microsoft.MoE <k = 1> (x, router, fc1, , turned)
            y = com.microsoft.MoE <k = 1> (x, router, fc1, , fc2)
            other = MatMul (z, half)
        }""",
        constants=arrays,
    )
    assert store_as_float16(model)
    assert set(model.graph.initializers) == {"fc1_float16", "fc2_float16", "half"}
    assert quantization_report(model) == QuantizationReport(2, 4 * (64 + 32), 2 * (64 + 32))
    casts = {node.name: node for node in model.graph if node.op_type == "Cast"}
    assert set(casts) == {"fc1_cast", "fc2_cast"}
    for name in ("fc1", "fc2"):
        cast = casts[f"{name}_cast"]
        (result,) = cast.outputs
        assert (result.name, result.dtype) == (f"{name}_float32", ir.DataType.FLOAT)
        assert list(result.shape or ()) == list(arrays[name].shape)
        assert cast.attributes.get_int("to", 0) == ir.DataType.FLOAT
        stored = model.graph.initializers[f"{name}_float16"]
        assert stored.const_value is not None
        np.testing.assert_array_equal(stored.const_value.numpy(), arrays[name].astype(np.float16))


def test_float16_weights_are_stored_in_half_the_space(small: Package, tmp_path: Path) -> None:
    portable = PackagedModel(small)
    whole, half = (
        portable.compile(tmp_path / name, ctx_len=64, weights=name)
        for name in ("float32", "float16")
    )
    figures = half.package.manifest.compilation.quantization
    assert figures["bytes_after"] * 2 == figures["bytes_before"]
    assert 0 < figures["divergence"]["kl"]["value"] < 1e-4
    sizes = [model.package.manifest.files["decoder.onnx.data"].bytes for model in (whole, half)]
    assert sizes[0] - sizes[1] == pytest.approx(
        figures["bytes_after"], abs=200_000
    )  # tensors are aligned to pages

    nodes = ir.load(tmp_path / "float16" / "decoder.onnx").graph
    wanted = ir.load(tmp_path / "float32" / "decoder.onnx").graph.initializers
    stored = {
        name: value for name, value in nodes.initializers.items() if name.endswith("_float16")
    }
    assert len(stored) == figures["matrices"]
    for name, value in stored.items():
        array = wanted[name.removesuffix("_float16")].const_value.numpy()
        np.testing.assert_array_equal(value.const_value.numpy(), array.astype(np.float16))
