"""Fuses a graph into ONNX Runtime's own operators for one provider.

This is the only module that touches transformers' private fusion passes, which is why transformers is pinned to 5.23.
"""

from __future__ import annotations

import onnx_ir as ir
from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

FUSION_PROVIDERS = ("cpu", "cuda")


def fuse_operators(model: ir.Model, provider: str) -> bool:
    """Fuse norms, skip-norms, rotary embeddings and projections of one input, in place. Returns whether
    the graph has other nodes than before.

    provider: one of FUSION_PROVIDERS; ValueError otherwise.
    """
    if provider not in FUSION_PROVIDERS:
        raise ValueError(f"no fusions for provider {provider!r}; choose one of {', '.join(FUSION_PROVIDERS)}")
    nodes = list(model.graph)
    fuse_for_onnxruntime(model, provider)
    return list(model.graph) != nodes
