"""A decode graph enters; the same graph in ONNX Runtime's own operators for one provider leaves.

This is the only module that touches transformers' private fusion passes, which is why transformers is pinned to 5.23.
"""

from __future__ import annotations

import onnx_ir as ir
from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

FUSION_PROVIDERS = ("cpu", "cuda")


def fuse(model: ir.Model, provider: str) -> ir.Model:
    """Fuse norms, skip-norms, rotary embeddings and packed projections in place, and return the model.

    provider: one of FUSION_PROVIDERS; ValueError otherwise.
    """
    if provider not in FUSION_PROVIDERS:
        raise ValueError(f"no fusions for provider {provider!r}; choose one of {', '.join(FUSION_PROVIDERS)}")
    fuse_for_onnxruntime(model, provider)
    return model
