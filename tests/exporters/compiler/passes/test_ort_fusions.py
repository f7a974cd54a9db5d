"""ONNX Runtime's fusions: for which providers, and whether there was anything to fuse."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from qsample.exporters.compiler.passes.ort_fusions import FUSION_PROVIDERS, fuse_operators
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
