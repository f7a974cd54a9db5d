"""ONNX Runtime's fusions: for which providers, and whether there was anything to fuse."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from qsample.exporters.compiler import recipe
from qsample.exporters.compiler.passes.ort_fusions import FUSION_PROVIDERS, fuse_operators
from qsample.exporters.graph.axes import fix_axes
from tests.helpers.small_graphs import operators, small_graph


def test_an_unknown_provider() -> None:
    with pytest.raises(ValueError, match="no fusions for provider 'tpu'; choose one of cpu, cuda"):
        fuse_operators(small_graph("nothing (float[B] x) => (float[B] y) { y = Neg (x) }"), "tpu")


@pytest.mark.parametrize("provider", FUSION_PROVIDERS)
def test_whether_anything_changed(provider: str, llama_package: Path) -> None:
    assert not fuse_operators(small_graph("nothing (float[B] x) => (float[B] y) { y = Neg (x) }"), provider)
    model = ir.load(llama_package / "decoder.onnx")
    assert fuse_operators(model, provider)
    assert {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"} <= set(operators(model))


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
