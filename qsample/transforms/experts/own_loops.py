"""Experts of classes that transformers' experts implementations do not reach, as one operator.

Where DBRX's or LongCat's activation is another than the operator's, every expert runs on every token, weighted by the
router's choice (0 where it was not chosen).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from qsample.transforms.experts.operator import ExpertWeights, combine, run_experts, run_rows
from qsample.transforms.experts.swiglu import ACTIVATION, SwiGLU, find_swiglu


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """Replace the `forward` of such classes; a model without them is left alone."""

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for module in model.modules():
            kind = _KINDS.get(type(module).__name__)
            if kind is not None and "forward" not in module.__dict__:
                setattr(module, ACTIVATION, kind.activation(module))
                module.forward = functools.partial(kind.forward, module)
                modified = True
        return model, modified


def _traced(module: Any) -> bool:
    """Whether the operator takes the experts of `module`, in this call."""
    return getattr(module, ACTIVATION) is not None and torch.onnx.is_in_onnx_export()


def _weighted_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """DBRX and LongCat. hidden_states: [.., H]. top_k_index, top_k_weights: [tokens, k], in the order of the flattened
    tokens. An index beyond the experts stands for one that returns its input."""
    kind = _KINDS[type(module).__name__]
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    experts: ExpertWeights = kind.weights(module)
    is_expert = top_k_index < experts.count
    result = states * torch.where(is_expert, 0.0, top_k_weights).sum(-1, keepdim=True).to(states.dtype)
    if _traced(module):
        outputs = run_experts(states, top_k_index.clamp(max=experts.count - 1), experts)
        result = result + combine(outputs, torch.where(is_expert, top_k_weights, 0.0).to(states.dtype))
        return result.reshape(hidden_states.shape)
    assert kind.run is not None
    for expert in range(experts.count):
        weight = torch.where(top_k_index == expert, top_k_weights, 0.0).sum(-1, keepdim=True)
        result = result + kind.run(module, expert, states) * weight.to(states.dtype)
    return result.reshape(hidden_states.shape)


def _glu(activation: Callable[[Tensor], Tensor], joint: Tensor) -> Tensor:
    gate, up = joint.chunk(2, dim=-1)
    return activation(gate) * up


def _dbrx_weights(module: Any) -> ExpertWeights:
    mlp = module.mlp
    return ExpertWeights(
        getattr(module, ACTIVATION), module.num_experts, mlp.w1, mlp.w2, up=mlp.v1, down_transposed=True
    )


def _dbrx_expert(module: Any, expert: int, states: Tensor) -> Tensor:
    shape = (-1, module.ffn_hidden_size, module.hidden_size)
    w1, v1, w2 = (getattr(module.mlp, name).view(shape)[expert] for name in ("w1", "v1", "w2"))
    result: Tensor = module.mlp(states, w1, v1, w2)
    return result


def _longcat_weights(module: Any) -> ExpertWeights:
    return ExpertWeights(getattr(module, ACTIVATION), module.num_routed_experts, module.gate_up_proj, module.down_proj)


def _longcat_expert(module: Any, expert: int, states: Tensor) -> Tensor:
    hidden = _glu(module.act_fn, F.linear(states, module.gate_up_proj[expert]))
    result: Tensor = F.linear(hidden, module.down_proj[expert])
    return result


def _llama4(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's own runs every expert on every token, and applies the router's scores to the experts' inputs."""
    if not _traced(module):
        eager: tuple[Tensor, Tensor] = type(module).forward(module, hidden_states)
        return eager
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = module.router(states)  # [tokens, experts]; 0 where an expert was not chosen
    weights, chosen = torch.topk(logits, module.top_k, dim=-1)
    weights = torch.gather(scores, 1, chosen)
    rows = (states.unsqueeze(1) * weights.unsqueeze(-1)).reshape(-1, states.shape[-1])
    outputs = run_rows(rows, chosen, _llama4_weights(module)).reshape(-1, module.top_k, states.shape[-1])
    return module.shared_expert(states) + combine(outputs, torch.ones_like(weights)), logits


def _llama4_weights(module: Any) -> ExpertWeights:
    gate, down = module.experts.gate_up_proj, module.experts.down_proj
    activation = getattr(module, ACTIVATION)
    return ExpertWeights(activation, down.shape[0], gate, down, gate_transposed=True, down_transposed=True)


def _jetmoe(module: Any, layer_input: Tensor) -> Tensor:
    """JetMoE's own sorts the tokens by their experts. layer_input: [B, S, H]. Returns [B, S, H]."""
    if not _traced(module):
        eager: Tensor = type(module).forward(module, layer_input)
        return eager
    states = layer_input.reshape(-1, layer_input.shape[-1])
    scores, chosen = torch.topk(module.router.layer(states).float(), module.router.top_k, dim=-1)
    outputs = run_experts(states, chosen, _jetmoe_weights(module))
    result: Tensor = combine(outputs, torch.softmax(scores, dim=-1).to(states.dtype)) + module.bias
    return result.reshape(layer_input.shape)


def _jetmoe_weights(module: Any) -> ExpertWeights:
    gate, down = module.input_linear.weight, module.output_linear.weight
    return ExpertWeights(getattr(module, ACTIVATION), down.shape[0], gate, down)


class _Kind(NamedTuple):
    """forward: of the module, which it gets first. gate, size: what is applied to the gate, and how many there are.
    run: one expert on every token."""

    forward: Callable[..., Any]
    weights: Callable[[Any], ExpertWeights]
    gate: Callable[[Any], Callable[[Tensor], Tensor]]
    size: Callable[[Any], int]
    run: Callable[[Any, int, Tensor], Tensor] | None = None

    def activation(self, module: Any) -> SwiGLU | None:
        return find_swiglu(functools.partial(_glu, self.gate(module)), self.size(module))


_KINDS: Final[dict[str, _Kind]] = {
    "DbrxExperts": _Kind(
        _weighted_experts,
        _dbrx_weights,
        lambda module: module.mlp.activation_fn,
        lambda module: module.ffn_hidden_size,
        _dbrx_expert,
    ),
    "LongcatFlashExperts": _Kind(
        _weighted_experts,
        _longcat_weights,
        lambda module: module.act_fn,
        lambda module: module.intermediate_size,
        _longcat_expert,
    ),
    "Llama4TextMoe": _Kind(
        _llama4,
        _llama4_weights,
        lambda module: module.experts.act_fn,
        lambda module: module.experts.intermediate_size,
    ),
    "JetMoeMoE": _Kind(_jetmoe, _jetmoe_weights, lambda module: module.activation, lambda module: module.hidden_size),
}
