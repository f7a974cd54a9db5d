"""ONNX Runtime's fusions: for which providers, and whether there was anything to fuse."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import recipe
from qsample.compiler.passes.ort_fusions import FUSION_PROVIDERS, fuse_operators
from qsample.graph.edit import fix_axes
from tests.helpers.small_graphs import normal, operators, results, small_graph


def test_an_unknown_provider() -> None:
    with pytest.raises(ValueError, match="no fusions for provider 'tpu'; choose one of cpu, cuda"):
        fuse_operators(small_graph("nothing (float[B] x) => (float[B] y) { y = Neg (x) }"), "tpu")


@pytest.mark.parametrize("provider", FUSION_PROVIDERS)
def test_whether_anything_changed(provider: str, llama_package: Path) -> None:
    assert not fuse_operators(small_graph("nothing (float[B] x) => (float[B] y) { y = Neg (x) }"), provider)
    model = ir.load(llama_package / "decoder.onnx")
    assert fuse_operators(model, provider)
    assert {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"} <= set(operators(model))


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
    recipe.run(model, [lambda model: fuse_operators(model, provider)])
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert {"SimplifiedLayerNormalization", "Mul", "Add"} <= set(operators(model))
    after = results(model, {"x": x})
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5)
    assert all(np.array_equal(*pair) for pair in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize(
    "model_type", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "olmo_hybrid"))]
)
def test_without_transformers_a_graph_gets_the_same_nodes(
    model_type: str, exported: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lean() -> Counter[str]:
        model = ir.load(exported(model_type, include_sampler=False) / "decoder.onnx")
        fix_axes(model, {"T": 64})
        recipe.run(model, recipe.lean_passes("cpu", 64))
        return Counter(operators(model))

    fused = lean()
    monkeypatch.setitem(sys.modules, "transformers.exporters.onnxruntime_fusions", None)
    assert lean() == fused
