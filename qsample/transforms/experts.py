"""Mixture-of-experts layers in a form that a static graph can express.

transformers' default loops over the experts that were chosen, whose number depends on the data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
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


def _dbrx_expert(module: Any, expert: int, states: Tensor) -> Tensor:
    shape = (-1, module.ffn_hidden_size, module.hidden_size)
    w1, v1, w2 = (getattr(module.mlp, name).view(shape)[expert] for name in ("w1", "v1", "w2"))
    result: Tensor = module.mlp(states, w1, v1, w2)
    return result


def _longcat_expert(module: Any, expert: int, states: Tensor) -> Tensor:
    gate, up = F.linear(states, module.gate_up_proj[expert]).chunk(2, dim=-1)
    return F.linear(module.act_fn(gate) * up, module.down_proj[expert])


# Classes that loop over experts themselves: the attribute with their number, and one expert on every token. Experts
# beyond that number return their input.
_LOOPS: Final[dict[str, tuple[str, Callable[[Any, int, Tensor], Tensor]]]] = {
    "DbrxExperts": ("num_experts", _dbrx_expert),
    "LongcatFlashExperts": ("num_routed_experts", _longcat_expert),
}


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Run every expert on every token, weighted by the router's choice (0 where it was not chosen), in classes that
    transformers' experts implementations do not reach."""

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for module in model.modules():
            if type(module).__name__ in _LOOPS and "forward" not in module.__dict__:
                module.forward = functools.partial(_every_expert, module)
                modified = True
        return model, modified


def _every_expert(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden_states: [.., hidden]. top_k_index, top_k_weights: [tokens, k], in the order of the flattened tokens."""
    name, run = _LOOPS[type(module).__name__]
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    count = int(getattr(module, name))
    identity_weight = torch.where(top_k_index >= count, top_k_weights, 0.0).sum(-1, keepdim=True)
    result = states * identity_weight.to(states.dtype)
    for expert in range(count):
        weight = torch.where(top_k_index == expert, top_k_weights, 0.0).sum(-1, keepdim=True)
        result = result + run(module, expert, states) * weight.to(states.dtype)
    return result.reshape(hidden_states.shape)
