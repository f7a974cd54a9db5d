"""Mixtures of experts, whose loops a static graph cannot express, as one operator: each row through
its chosen expert.

Each choice of a token is a separate row; the router's weights are applied after the operator. So it
does not matter how a family routes (softmax or sigmoid, before or after the choice, normalised or
scaled), a weight may be any number, and the sum over a token's experts has one order in any batch.
In a trace the operator is a marker that `exporters.lowering` turns into ONNX Runtime's MoE. Run
eagerly, the experts compute as before.

`route_experts` serves the classes that transformers' experts implementations reach,
`replace_own_experts` all others."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

from qsample.transforms import markers
from qsample.transforms.quantized_experts import traced_matrices

Gate = Callable[[Tensor], Tensor]
"""[N, 2 * size] → [N, size]."""

IMPLEMENTATION: Final = "qsample_experts"
# The name of an attribute of a module of experts: the result of `find_swiglu`.
ACTIVATION: Final = "qsample_activation"
# Configurations state numbers such as 1.702 and 7.0.
_DECIMALS: Final = 5
# A number beyond any limit of an activation.
_UP_BEYOND_LIMITS: Final = 1e4
_PROBES: Final = (-30.0, -9.0, -3.0, -1.3, -0.7, -0.1, 0.0, 0.1, 0.7, 1.3, 3.0, 6.9, 9.0, 30.0)
# Some gates compute in float32.
_TOLERANCE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """gate * sigmoid(alpha * gate) * (up + beta).

    SiLU(gate) * up (https://arxiv.org/abs/2002.05202) has alpha 1, beta 0 and no limit.

    Attributes:
        alpha: the factor of the gate inside the sigmoid.
        beta: the number that is added to up.
        limit: the largest gate, and the largest absolute value of up; infinity for no limit.
        interleaved: whether gate and up alternate along the last axis; otherwise the first half is
            the gate.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    interleaved: bool = False

    def __call__(self, joint: Tensor) -> Tensor:
        """joint: [N, 2 * size]. Returns [N, size]."""
        gate, up = _parts(joint, self.interleaved)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


def find_swiglu(gate: Gate, size: int) -> SwiGLU | None:
    """Recognise the SwiGLU that an expert computes between its two products, by its results.

    Args:
        gate: the function between the products.
        size: the number of outputs of `gate`, which may treat each output differently.

    Returns:
        The SwiGLU, or None if `gate` computes anything else.
    """
    return _fitted(gate, size, interleaved=False) or _fitted(gate, size, interleaved=True)


def _fitted(gate: Gate, size: int, interleaved: bool) -> SwiGLU | None:
    def at(gate_value: float, up_value: float) -> float:
        return float(gate(_joint([(gate_value, up_value)], size, interleaved))[0, 0])

    # Within the limit, the function is linear in up, and its slope is sigmoid(alpha).
    slope = at(1.0, 1.0) - at(1.0, 0.0)
    if not 0 < slope < 1:
        return None
    beta = at(1.0, 0.0) / slope
    alpha = math.log(slope / (1 - slope))
    limit = at(1.0, _UP_BEYOND_LIMITS) / slope - beta
    if limit < 0.9 * _UP_BEYOND_LIMITS:
        limit = round(limit, _DECIMALS)
    else:
        limit = math.inf
    found = SwiGLU(round(alpha, _DECIMALS), round(beta, _DECIMALS), limit, interleaved)
    probes = _joint(list(itertools.product(_PROBES, _PROBES)), size, interleaved)
    # The offsets make the outputs of a row differ.
    offsets = torch.arange(size, dtype=probes.dtype).repeat_interleave(2) / (10 * size)
    probes = probes + offsets
    if torch.allclose(gate(probes).double(), found(probes), _TOLERANCE, _TOLERANCE):
        return found
    return None


def _joint(pairs: list[tuple[float, float]], size: int, interleaved: bool) -> Tensor:
    """[len(pairs), 2 * size]: each output of a row has the pair of that row."""
    gate, up = (
        torch.tensor(values, dtype=torch.float64).unsqueeze(1).expand(-1, size)
        for values in zip(*pairs, strict=True)
    )
    return (
        torch.stack([gate, up], dim=2).flatten(1) if interleaved else torch.cat([gate, up], dim=1)
    )


def _parts(joint: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return joint[..., 0::2], joint[..., 1::2]
    gate, up = joint.chunk(2, dim=-1)
    return gate, up


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The parameters of experts with I hidden units each, for inputs and outputs of size H.

    The first axis may be merged with the second, and may have further experts that are never
    chosen.

    Attributes:
        activation: the function between the two products.
        count: the number of experts.
        gate: [count, I, H]; or [count, 2 * I, H] with up in it, in the order of `activation`.
        down: [count, H, I].
        gate_bias: [count, 2 * I].
        down_bias: [count, H].
        up: [count, I, H]; None if it is in `gate`.
        gate_transposed: whether the last two axes of gate and up are swapped.
        down_transposed: whether the last two axes of down are swapped.
    """

    activation: SwiGLU
    count: int
    gate: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    down_bias: Tensor | None = None
    up: Tensor | None = None
    gate_transposed: bool = False
    down_transposed: bool = False


def _with_blocks(weights: ExpertWeights, module: nn.Module) -> ExpertWeights:
    """`weights` in a trace, with the matrices that `module` has in blocks computed from these.

    module: the module with the parameters gate_up_proj and down_proj.
    """
    gate = traced_matrices(module, "gate_up_proj")
    down = traced_matrices(module, "down_proj")
    if gate is not None:
        bias = weights.gate_bias
        if bias is not None and not weights.activation.interleaved:
            bias = torch.stack(bias.chunk(2, dim=-1), dim=-1).flatten(-2)
        activation = replace(weights.activation, interleaved=True)
        weights = replace(
            weights, activation=activation, gate=gate, gate_bias=bias, gate_transposed=False
        )
    if down is not None:
        weights = replace(weights, down=down, down_transposed=False)
    return weights


def run_experts(hidden_states: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """Each token through its experts, in a trace: [T, k, H]. hidden_states: [T, H]. chosen: [T, k]
    experts."""
    k = chosen.shape[-1]
    size = hidden_states.shape[-1]
    rows = hidden_states.unsqueeze(1).expand(-1, k, -1).reshape(-1, size)
    return run_rows(rows, chosen, experts).reshape(-1, k, size)


def run_rows(rows: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """Each row through its expert, in a trace: [S, H]. rows: [S, H]. chosen: S experts, in any
    shape."""
    activation = experts.activation
    choice = chosen.reshape(-1, 1) == torch.arange(experts.count, dtype=chosen.dtype)
    attributes: dict[str, Any] = {
        markers.ALPHA: activation.alpha,
        markers.BETA: activation.beta,
        markers.INTERLEAVED: int(activation.interleaved),
        markers.GATE_TRANSPOSED: int(experts.gate_transposed),
        markers.DOWN_TRANSPOSED: int(experts.down_transposed),
    }
    if activation.limit < math.inf:
        attributes[markers.LIMIT] = activation.limit
    result: Tensor = torch.onnx.ops.symbolic(
        f"{markers.MARKER_DOMAIN}::{markers.EXPERTS}",
        [
            rows,
            choice.to(rows.dtype),
            experts.gate,
            experts.down,
            experts.gate_bias,
            experts.down_bias,
            experts.up,
        ],
        attributes,
        dtype=rows.dtype,
        shape=rows.shape,
        version=1,
    )
    return result


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """The sum [T, H] of each token's experts, `outputs` [T, k, H] by `weights` [T, k]: a product
    for each token, because the order of ONNX Runtime's sum over k is another for a single token."""
    dtype = torch.result_type(outputs, weights)
    return torch.matmul(weights.unsqueeze(1).to(dtype), outputs.to(dtype)).squeeze(1)


def route_experts(model: PreTrainedModel) -> None:
    """Select the operator for all experts that transformers' experts implementations reach. Experts
    with another activation run as transformers' `batched_mm`: it gathers the weights of each row's
    expert."""
    if (
        not model._can_set_experts_implementation()
        or model.config._experts_implementation == IMPLEMENTATION
    ):
        return
    ExpertsInterface.register(IMPLEMENTATION, _experts)
    model.set_experts_implementation(IMPLEMENTATION)
    for module in model.modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "has_gate"):
            setattr(module, ACTIVATION, _activation(module))


def _activation(module: Any) -> SwiGLU | None:
    """The gate for the operator to apply between the products; None: it cannot."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not module.has_gate or not all(isinstance(weight, nn.Parameter) for weight in weights):
        return None
    return find_swiglu(
        module._apply_gate, int(module.down_proj.shape[1 if module.is_transposed else 2])
    )


def _experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function that transformers calls in every layer. hidden_states: [T, H]. top_k_index,
    top_k_weights: [T, k]. Returns [T, H]."""
    activation: SwiGLU | None = getattr(module, ACTIVATION, None)
    if activation is None or not torch.onnx.is_in_onnx_export():
        eager: Tensor = batched_mm_experts_forward(
            module, hidden_states, top_k_index, top_k_weights
        )
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
    outputs = run_experts(hidden_states, top_k_index, _with_blocks(weights, module))
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    return combine(outputs, top_k_weights).to(hidden_states.dtype)


def replace_own_experts(model: PreTrainedModel) -> None:
    """Let the operator run, in a trace, experts that transformers' experts implementations do not
    reach."""
    for module in model.modules():
        kind = _KINDS.get(type(module).__name__)
        if kind is not None and "forward" not in module.__dict__:
            setattr(
                module,
                ACTIVATION,
                find_swiglu(functools.partial(_glu, kind.gate(module)), kind.size(module)),
            )
            module.forward = functools.partial(_run_own, kind, module)


def _run_own(kind: _Kind, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's forward; in a trace the operator, if it has the experts' activation."""
    if getattr(module, ACTIVATION) is None or not torch.onnx.is_in_onnx_export():
        return type(module).forward(module, *args, **kwargs)
    return kind.forward(module, kind.weights(module, getattr(module, ACTIVATION)), *args, **kwargs)


def _glu(activation: Callable[[Tensor], Tensor], joint: Tensor) -> Tensor:
    gate, up = joint.chunk(2, dim=-1)
    return activation(gate) * up


def _weighted_experts(
    module: Any,
    experts: ExpertWeights,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """DBRX and LongCat. hidden_states: [.., H]. top_k_index, top_k_weights: [tokens, k], in the
    order of the flattened tokens. An index beyond the experts stands for an expert that returns its
    input."""
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    is_expert = top_k_index < experts.count
    result = states * torch.where(is_expert, 0.0, top_k_weights).sum(-1, keepdim=True).to(
        states.dtype
    )
    outputs = run_experts(states, top_k_index.clamp(max=experts.count - 1), experts)
    result = result + combine(outputs, torch.where(is_expert, top_k_weights, 0.0).to(states.dtype))
    return result.reshape(hidden_states.shape)


def _llama4(module: Any, experts: ExpertWeights, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's class runs every expert on every token, and applies the router's scores to the
    experts' inputs."""
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = module.router(states)  # [tokens, experts]; 0: not chosen
    weights, chosen = torch.topk(logits, module.top_k, dim=-1)
    weights = torch.gather(scores, 1, chosen)
    rows = (states.unsqueeze(1) * weights.unsqueeze(-1)).reshape(-1, states.shape[-1])
    outputs = run_rows(rows, chosen, experts).reshape(-1, module.top_k, states.shape[-1])
    return module.shared_expert(states) + combine(outputs, torch.ones_like(weights)), logits


def _jetmoe(module: Any, experts: ExpertWeights, layer_input: Tensor) -> Tensor:
    """JetMoE's class sorts the tokens by their experts. layer_input: [B, S, H]. Returns [B, S,
    H]."""
    states = layer_input.reshape(-1, layer_input.shape[-1])
    scores, chosen = torch.topk(module.router.layer(states).float(), module.router.top_k, dim=-1)
    outputs = run_experts(states, chosen, experts)
    result: Tensor = combine(outputs, torch.softmax(scores, dim=-1).to(states.dtype)) + module.bias
    return result.reshape(layer_input.shape)


def _dbrx_weights(module: Any, activation: SwiGLU) -> ExpertWeights:
    mlp = module.mlp
    return ExpertWeights(
        activation, module.num_experts, mlp.w1, mlp.w2, up=mlp.v1, down_transposed=True
    )


def _longcat_weights(module: Any, activation: SwiGLU) -> ExpertWeights:
    return ExpertWeights(
        activation, module.num_routed_experts, module.gate_up_proj, module.down_proj
    )


def _llama4_weights(module: Any, activation: SwiGLU) -> ExpertWeights:
    gate = module.experts.gate_up_proj
    down = module.experts.down_proj
    weights = ExpertWeights(
        activation, down.shape[0], gate, down, gate_transposed=True, down_transposed=True
    )
    return _with_blocks(weights, module.experts)


def _jetmoe_weights(module: Any, activation: SwiGLU) -> ExpertWeights:
    gate = module.input_linear.weight
    down = module.output_linear.weight
    return ExpertWeights(activation, down.shape[0], gate, down)


class _Kind(NamedTuple):
    """A class of experts, described by functions of its modules.

    Attributes:
        forward: the forward in a trace; its first arguments are the module and its weights.
        weights: the parameters, given the activation.
        gate: the function that is applied to the gate.
        size: the number of hidden units of an expert.
    """

    forward: Callable[..., Any]
    weights: Callable[[Any, SwiGLU], ExpertWeights]
    gate: Callable[[Any], Callable[[Tensor], Tensor]]
    size: Callable[[Any], int]


_KINDS: Final[dict[str, _Kind]] = {
    "DbrxExperts": _Kind(
        _weighted_experts,
        _dbrx_weights,
        lambda module: module.mlp.activation_fn,
        lambda module: module.ffn_hidden_size,
    ),
    "LongcatFlashExperts": _Kind(
        _weighted_experts,
        _longcat_weights,
        lambda module: module.act_fn,
        lambda module: module.intermediate_size,
    ),
    "Llama4TextMoe": _Kind(
        _llama4,
        _llama4_weights,
        lambda module: module.experts.act_fn,
        lambda module: module.experts.intermediate_size,
    ),
    "JetMoeMoE": _Kind(
        _jetmoe,
        _jetmoe_weights,
        lambda module: module.activation,
        lambda module: module.hidden_size,
    ),
}
