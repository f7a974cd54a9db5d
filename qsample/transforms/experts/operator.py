"""Experts as one operator: rows in, each through the expert that was chosen for it.

Each choice of a token is a row of its own, which the router's weights are applied to behind the operator. So it does
not matter how a family routes (softmax or sigmoid, before or after the choice, normalised or scaled), a weight may be
any number, and the sum over a token's experts has one order whatever else is in the batch.

In a trace the operator is a marker, which `exporters.experts` turns into ONNX Runtime's MoE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsample.transforms import markers
from qsample.transforms.experts.swiglu import SwiGLU


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Parameters of `count` experts with I hidden units each, for inputs and outputs of H.

    gate: [count, 2 * I, H] with up in it, as `activation` says, or [count, I, H] where `up` is apart. up: [count, I,
    H]. down: [count, H, I]. The first axis may be merged with the second, and may have more experts, which are never
    chosen. gate_transposed, down_transposed: the last two axes are swapped; gate's is also up's. gate_bias: [count, 2 *
    I]. down_bias: [count, H].
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


def run_experts(hidden_states: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """hidden_states: [T, H]. chosen: [T, k], the experts of each token. Returns [T, k, H]: what each of them makes of
    its token. For a trace only."""
    k, size = chosen.shape[-1], hidden_states.shape[-1]
    rows = hidden_states.unsqueeze(1).expand(-1, k, -1).reshape(-1, size)
    return run_rows(rows, chosen, experts).reshape(-1, k, size)


def run_rows(rows: Tensor, chosen: Tensor, experts: ExpertWeights) -> Tensor:
    """rows: [S, H], one for each of `chosen`. Returns [S, H]. For a trace only: the marker computes nothing."""
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
        [rows, choice.to(rows.dtype), experts.gate, experts.down, experts.gate_bias, experts.down_bias, experts.up],
        attributes,
        dtype=rows.dtype,
        shape=rows.shape,
        version=1,
    )
    return result


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """The sum of a token's experts. outputs: [T, k, H]. weights: [T, k]. Returns [T, H].

    A product a token: ONNX Runtime's sum over k adds up in another order where there is one token.
    """
    dtype = torch.result_type(outputs, weights)
    return torch.matmul(weights.unsqueeze(1).to(dtype), outputs.to(dtype)).squeeze(1)
