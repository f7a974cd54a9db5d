"""transformers' functions for convolutions and recurrences, computed by ONNX Runtime's operators.

A layer's module calls the functions named in `CONVOLUTION` and `RECURRENCES`; their replacements take the same
arguments, after the `Chunk`, and give the same results. A traced graph holds the operator; run eagerly, torch computes
the same. Both are float32.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.LinearAttention
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.CausalConvWithState
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from qsample.errors import UnsupportedModelError

CONVOLUTION: Final = "causal_conv1d_fn"


@dataclass(slots=True)
class Chunk:
    """The tokens of one call of a layer, and the states before them. real: [B, S] bool, tokens of a row that runs,
    without padding; by default all. window: [B, C, K - 1 or more], the latest inputs of the next convolution; by
    default zeros. state: of the recurrence, by default zeros; a layer that runs several in turn keeps theirs stacked on
    axis 1. started: how many recurrences have run."""

    real: Tensor | None = None
    window: Tensor | None = None
    state: Tensor | None = None
    started: int = 0

    def kept(self, values: Tensor) -> Tensor:
        """`values`, [B, S, ..], 0 for tokens that are not real."""
        if self.real is None:
            return values
        return torch.where(
            self.real.reshape(*self.real.shape, *[1] * (values.ndim - 2)), values, 0.0
        )

    def past(self, x: Tensor, width: int) -> Tensor:
        """The inputs of a convolution over `x`, [B, C, S], before its first token: [B, C, width]."""
        window, self.window = self.window, None
        if window is None:
            return torch.zeros(*x.shape[:2], width)
        if window.shape[-1] < width:
            raise UnsupportedModelError(
                f"a convolution over {width + 1} tokens keeps {window.shape[-1]} of them"
            )
        return window[..., window.shape[-1] - width :].float()

    def start(self, *shape: int) -> Tensor:
        """The first state of the next recurrence, of that shape."""
        state, number = self.state, self.started
        self.started += 1
        if state is None:
            return torch.zeros(shape)
        if state.ndim == len(shape) + 1:
            state = state[:, number]
        if tuple(state.shape[1:]) != shape[1:]:
            raise UnsupportedModelError(
                f"a recurrence over {shape[1:]} keeps a state of {tuple(state.shape[1:])}"
            )
        return state.float()


def convolve(
    chunk: Chunk,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **unused: Any,
) -> Tensor:
    """hidden_states: [B, C, S]. weight: [C, K]."""
    past = chunk.past(hidden_states, weight.shape[-1] - 1)
    silu = activation in ("silu", "swish")
    constants = (weight.float(), None if bias is None else bias.float())
    result = causal_convolution(hidden_states.float(), *constants, past, silu=silu)
    if activation is not None and not silu:
        result = ACT2FN[activation](result)
    return result.to(hidden_states.dtype)


def gated_delta_rule(
    chunk: Chunk,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """query, key: [B, S, h, K]. value: [B, S, H, V]. g: the decay's logarithm, [B, S, H], or [B, S, H, K] as in Kimi
    Delta Attention. beta: [B, S, H]."""
    batch, _, _, size = key.shape
    dtype = query.dtype
    query, key, value, g, beta = (tensor.float() for tensor in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _l2_norm(query), _l2_norm(key)
    state = chunk.start(batch, value.shape[2], size, value.shape[3])
    output, after = linear_attention(
        query, key, value, state, chunk.kept(g), chunk.kept(beta), scale=float(size**-0.5)
    )
    return output.to(dtype), after


def _l2_norm(vectors: Tensor) -> Tensor:
    """Each vector over sqrt(its sum of squares + 1e-6), as a root mean square: ONNX Runtime has a kernel for that."""
    size = vectors.shape[-1]
    mean = vectors.pow(2).mean(-1, keepdim=True)
    return vectors * torch.rsqrt(mean + 1e-6 / size) * torch.full((size,), size**-0.5)


def state_space_dual(
    chunk: Chunk,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence (https://arxiv.org/abs/2405.21060) is gated linear attention: B are the keys, C the queries,
    dt * x the values and dt * A the decay. The state is kept as [B, H, N, P]. hidden_states: [B, S, H, P]. dt: [B, S,
    H]. A, D: [H]. B, C: [B, S, G, N]. z: a gate like hidden_states."""
    batch, _, heads, size = hidden_states.shape
    x, dt = hidden_states.float(), dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limit != (0.0, float("inf")):
        dt = dt.clamp(*dt_limit)
    dt = chunk.kept(dt)  # no decay, and nothing to write
    state = chunk.start(batch, heads, B.shape[-1], size)
    output, after = linear_attention(
        C.float(), B.float(), x * dt[..., None], state, dt * A.float(), scale=1.0
    )
    if D is not None:
        output = output + x * D.float()[:, None]
    if z is not None:
        output = output * F.silu(z.float())
    return output.to(hidden_states.dtype), after


def selective_scan(
    chunk: Chunk,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence (https://arxiv.org/abs/2312.00752) is gated linear attention with a head for each channel:
    values of size 1, and a decay for each row of the memory. The state is kept as [B, channels, N, 1]. hidden_states,
    dt, z: [B, channels, S]. A: [channels, N]. B, C: [B, N, S]. D, delta_bias: [channels]."""
    batch, channels, _ = hidden_states.shape
    dt = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
    if delta_softplus:
        dt = F.softplus(dt)
    dt = chunk.kept(dt.transpose(1, 2))  # no decay, and nothing to write
    x = hidden_states.float().transpose(1, 2)
    keys, queries = (matrix.float().transpose(1, 2)[:, :, None] for matrix in (B, C))
    state = chunk.start(batch, channels, A.shape[-1], 1)
    decay = dt[..., None] * A.float()
    output, after = linear_attention(queries, keys, (x * dt)[..., None], state, decay, scale=1.0)
    output = output[..., 0]
    if D is not None:
        output = output + x * D.float()
    output = output.transpose(1, 2)
    if z is not None:
        output = output * F.silu(z.float())
    return output.to(hidden_states.dtype), after


RECURRENCES: Final[Mapping[str, Callable[..., tuple[Tensor, Tensor]]]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": state_space_dual,
    "mamba_selective_scan": selective_scan,
}


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
    """Read and write a matrix of memory per head, token by token: the results, [B, S, H, V], and the last state.

    Per head, S' = exp(decay) S, then S = S' + k (beta (v - S'^T k))^T with beta (the gated delta rule, Yang et al.,
    https://arxiv.org/abs/2412.06464), S = S' + k v^T without (gated linear attention,
    https://arxiv.org/abs/2312.06635); the result is scale * S^T q. A token of decay 0 and beta 0, or value 0 without
    beta, leaves the state as it is.

    All tensors are float32. query, key: [B, S, h, K]; H / h heads of the memory in a row share them. value: [B, S, H,
    V]. state: [B, H, K, V], before the first token. decay: at most 0, [B, S, H], or [B, S, H, K] with a decay for each
    row of the memory. beta: [B, S, H].
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    scale: float,
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


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, *, silu: bool = False
) -> Tensor:
    """A convolution along the tokens, each channel by itself, [B, C, S]: a token sees itself and the K - 1 before it.
    x: [B, C, S] float32. weight: [C, K], the last for the token itself. bias: [C]. past: [B, C, K - 1], before the
    first token. silu: whether SiLU follows."""
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
