"""Experts of the classes that transformers' experts implementations reach, as one operator.

Experts with another activation than the operator's run as transformers' own `batched_mm`, which gathers the weights of
each row's expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from qsample.transforms.experts.operator import ExpertWeights, combine, run_experts
from qsample.transforms.experts.swiglu import ACTIVATION, SwiGLU, find_swiglu

IMPLEMENTATION: Final = "qsample_experts"


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Select the operator for all experts that transformers' experts implementations reach; a model without them is
    left alone. Run eagerly, they compute as before."""

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        if not model._can_set_experts_implementation() or model.config._experts_implementation == IMPLEMENTATION:
            return model, False
        ExpertsInterface.register(IMPLEMENTATION, _experts)
        model.set_experts_implementation(IMPLEMENTATION)
        for module in model.modules():
            if hasattr(module, "_apply_gate") and hasattr(module, "has_gate"):
                setattr(module, ACTIVATION, _activation(module))
        return model, True


def _activation(module: Any) -> SwiGLU | None:
    """What the operator has to apply between the products; None where it cannot."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not module.has_gate or not all(isinstance(weight, nn.Parameter) for weight in weights):
        return None
    return find_swiglu(module._apply_gate, int(module.down_proj.shape[1 if module.is_transposed else 2]))


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls in every layer.

    hidden_states: [T, H]. top_k_index, top_k_weights: [T, k]. Returns [T, H].
    """
    activation: SwiGLU | None = getattr(module, ACTIVATION, None)
    if activation is None or not torch.onnx.is_in_onnx_export():
        eager: Tensor = batched_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return eager
    weights = ExpertWeights(
        activation,
        module.down_proj.shape[0],
        module.gate_up_proj,
        module.down_proj,
        gate_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        gate_transposed=module.is_transposed,
        down_transposed=module.is_transposed,
    )
    outputs = run_experts(hidden_states, top_k_index, weights)
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    return combine(outputs, top_k_weights).to(hidden_states.dtype)
