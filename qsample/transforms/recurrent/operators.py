"""ONNX Runtime's operators for linear attention and causal convolutions, and what they compute.

A traced graph holds the operator; run eagerly, the same is computed in torch. Both are float32.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.LinearAttention
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.CausalConvWithState
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

DOMAIN = "com.microsoft"


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Read and write a matrix of memory per head, token by token.

    Per head, S' = exp(decay) S, then S = S' + k (beta (v - S'^T k))^T with beta (the gated delta rule, Yang et al.,
    https://arxiv.org/abs/2412.06464), S = S' + k v^T without (gated linear attention, https://arxiv.org/abs/2312.06635);
    the result is scale * S^T q.

    Args, all float32, with H a multiple of h:
        query, key: [B, S, h, K]; H / h heads of the memory, in a row, share one.
        value: [B, S, H, V]. state: [B, H, K, V], before the first token.
        decay: [B, S, H], or [B, S, H, K] for one of each row of the memory; at most 0. beta: [B, S, H].

    Returns the results, [B, S, H, V], and the state after the last token. A token of decay 0 and beta 0, or value 0
    where there is no beta, leaves the state as it is.
    """
    if not torch.compiler.is_exporting():
        return _linear_attention(query, key, value, state, decay, beta, scale)
    batch, length, heads, size = value.shape
    inputs = [tensor.reshape(batch, length, -1) for tensor in (query, key, value)]
    inputs += [state, decay.reshape(batch, length, -1)]
    if beta is not None:
        inputs.append(beta)
    attributes: dict[str, Any] = {
        "q_num_heads": query.shape[2],
        "kv_num_heads": heads,
        "scale": scale,
        "update_rule": "gated" if beta is None else "gated_delta",
    }
    output, after = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::LinearAttention",
        inputs,
        attributes,
        dtypes=(value.dtype, state.dtype),
        shapes=((batch, length, heads * size), state.shape),
        version=1,
    )
    return output.reshape(batch, length, heads, size), after


def _linear_attention(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, decay: Tensor, beta: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    group = value.shape[2] // key.shape[2]
    query, key = query.repeat_interleave(group, dim=2) * scale, key.repeat_interleave(group, dim=2)
    rows = decay.exp()[..., None] if decay.ndim == 4 else decay.exp()[..., None, None]
    results = []
    for token in range(value.shape[1]):
        k, v = key[:, token, :, :, None], value[:, token, :, None]
        state = state * rows[:, token]
        if beta is not None:
            v = (v - (state * k).sum(-2, keepdim=True)) * beta[:, token, :, None, None]
        state = state + k * v
        results.append((state * query[:, token, :, :, None]).sum(-2))
    return torch.stack(results, dim=1), state


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, *, silu: bool = False) -> Tensor:
    """A convolution along the tokens, each channel by itself: a token sees itself and the K - 1 before it.

    x: [B, C, S] float32. weight: [C, K], the last for the token itself. bias: [C]. past: [B, C, K - 1], before the
    first token. silu: the activation behind it. Returns [B, C, S].
    """
    if not torch.compiler.is_exporting():
        result = F.conv1d(torch.cat([past, x], dim=-1), weight[:, None], bias, groups=len(weight))
        return F.silu(result) if silu else result
    operands = [x, weight[:, None], bias, past]
    output, _ = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::CausalConvWithState",
        operands,
        {"activation": "silu" if silu else "none"},
        dtypes=(x.dtype, x.dtype),
        shapes=(x.shape, past.shape),
        version=1,
    )
    return output
