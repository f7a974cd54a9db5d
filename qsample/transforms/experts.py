"""A mixture-of-experts model enters; the same model with experts computed by batched matrix products leaves.

The default implementation loops over the experts that were hit, which no static graph can express.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

IMPLEMENTATION = "batched_mm"


@dataclass(frozen=True, slots=True)
class BatchedExperts:
    """Select transformers' own `batched_mm` experts; a model without experts is left alone."""

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        if not model._can_set_experts_implementation() or model.config._experts_implementation == IMPLEMENTATION:
            return model, False
        model.set_experts_implementation(IMPLEMENTATION)
        return model, True
