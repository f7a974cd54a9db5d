"""Fuses a graph into ONNX Runtime's own operators for one provider.

This is the only module that touches transformers' private fusion passes, which is why transformers is pinned to 5.23.
Where it is not installed, the fusions of onnxscript that a decode graph is left to gain from do: of norms, activations
and transposed products. transformers' know more kinds of attention that a model writes out itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.erfgelu import fuse_erfgelu
from onnxscript.rewriter.ort_fusions.fused_matmul_rule_sets import fused_matmul_rule_sets
from onnxscript.rewriter.ort_fusions.gelu import fuse_gelu
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import (
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
)

FUSION_PROVIDERS = ("cpu", "cuda")
_FUSIONS: Final[tuple[Callable[[ir.Model], Any], ...]] = (
    fuse_erfgelu,
    fuse_rms_normalization,
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
    fuse_gelu,
    fuse_bias_gelu,
)


def fuse_operators(model: ir.Model, provider: str) -> bool:
    """Fuse norms, skip-norms, rotary embeddings and projections of one input, in place. Returns whether
    the graph has other nodes than before.

    provider: one of FUSION_PROVIDERS; ValueError otherwise.
    """
    if provider not in FUSION_PROVIDERS:
        raise ValueError(f"no fusions for provider {provider!r}; choose one of {', '.join(FUSION_PROVIDERS)}")
    nodes = list(model.graph)
    try:
        from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime
    except ImportError:
        fuse_without_transformers(model)
    else:
        fuse_for_onnxruntime(model, provider)
    return list(model.graph) != nodes


def fuse_without_transformers(model: ir.Model) -> None:
    """Fuse norms with their skips, activations, and products with transposed or scaled matrices, in place."""
    optimizer.fold_constants_ir(model, onnx_shape_inference=True)
    for fuse in _FUSIONS:
        fuse(model)
    fused_matmul_rule_sets().apply_to_model(model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.DeduplicateInitializersPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
