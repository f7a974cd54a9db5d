"""transformers' functions for convolutions and recurrences, computed by ONNX Runtime's operators.

A layer's module calls functions of these names. Their replacements take the same arguments and give
the same results, and read the previous states from a `Chunk`. A traced graph has the operator; run
eagerly, torch computes the same. Both compute in float32.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.LinearAttention
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.CausalConvWithState
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from qsample.errors import UnsupportedModelError

CONVOLUTION: Final = "causal_conv1d_fn"
_DOMAIN: Final = "com.microsoft"
_NO_LIMIT: Final = (0.0, float("inf"))


@dataclass(slots=True)
class Chunk:
    """The tokens of one call of a layer, and the states before them.

    Attributes:
        real: [B, S] bool, the tokens that a running row reads, without padding; None for all
            tokens.
        window: [B, C, K - 1 or more], the latest inputs of the next convolution; None for zeros.
        state: the state of the recurrence; None for zeros. A layer that runs several recurrences in
            turn keeps their states stacked on axis 1.
        started: the number of recurrences that have run.
    """

    real: Tensor | None = None
    window: Tensor | None = None
    state: Tensor | None = None
    started: int = 0

    def without_padding(self, values: Tensor) -> Tensor:
        """`values`, [B, S, ..], with 0 for tokens that are not real."""
        if self.real is None:
            return values
        real = self.real.reshape(*self.real.shape, *[1] * (values.ndim - 2))
        return torch.where(real, values, 0.0)

    def take_window(self, x: Tensor, width: int) -> Tensor:
        """The inputs of a convolution over `x`, [B, C, S], before its first token: [B, C, width]
        float32."""
        window = self.window
        self.window = None
        if window is None:
            return torch.zeros(*x.shape[:2], width)
        if window.shape[-1] < width:
            raise UnsupportedModelError(
                f"a convolution over {width + 1} tokens keeps {window.shape[-1]} of them"
            )
        return window[..., window.shape[-1] - width :].float()

    def next_state(self, *shape: int) -> Tensor:
        """The state of that shape, float32, from which the next recurrence starts."""
        state = self.state
        number = self.started
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


class Recurrence(Protocol):
    """A call of one of transformers' recurrences. The fields of an implementation have the names of
    its arguments."""

    def run(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """The results, and the state after the last token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaRule:
    """The gated delta rule, with a decay per head or, as in Kimi Delta Attention, per channel.

    Attributes:
        query: [B, S, h, K].
        key: [B, S, h, K].
        value: [B, S, H, V].
        g: the logarithm of the decay, [B, S, H] or [B, S, H, K].
        beta: [B, S, H].
        use_qk_l2norm_in_kernel: whether queries and keys are normalised first.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    use_qk_l2norm_in_kernel: bool = False

    def run(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """[B, S, H, V], and the state [B, H, K, V]."""
        batch, _, _, size = self.key.shape
        query = self.query.float()
        key = self.key.float()
        value = self.value.float()
        g = self.g.float()
        beta = self.beta.float()
        if self.use_qk_l2norm_in_kernel:
            query = _l2_norm(query)
            key = _l2_norm(key)
        state = chunk.next_state(batch, value.shape[2], size, value.shape[3])
        output, after = linear_attention(
            query,
            key,
            value,
            state,
            chunk.without_padding(g),
            chunk.without_padding(beta),
            scale=float(size**-0.5),
        )
        return output.to(self.query.dtype), after


def _l2_norm(vectors: Tensor) -> Tensor:
    """Each vector over sqrt(its sum of squares + 1e-6), as a root mean square: ONNX Runtime has a
    kernel for that."""
    size = vectors.shape[-1]
    mean = vectors.pow(2).mean(-1, keepdim=True)
    return vectors * torch.rsqrt(mean + 1e-6 / size) * torch.full((size,), size**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class StateSpaceDual:
    """Mamba-2's recurrence (https://arxiv.org/abs/2405.21060), which is gated linear attention.

    B are the keys, C the queries, dt * x the values and dt * A the decay. The state is kept as [B,
    H, N, P].

    Attributes:
        hidden_states: x, [B, S, H, P].
        dt: [B, S, H].
        A: [H].
        B: [B, S, G, N].
        C: [B, S, G, N].
        chunk_size: a number of tokens that changes no result.
        D: [H], the factor of x in the results.
        z: a gate on the results, [B, S, H, P].
        dt_bias: [H], added to dt.
        dt_softplus: whether softplus is applied to dt.
        dt_limit: the smallest and the largest dt.
    """

    hidden_states: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    chunk_size: int
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = _NO_LIMIT

    def run(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """[B, S, H, P], and the state [B, H, N, P]."""
        batch, _, heads, size = self.hidden_states.shape
        x = self.hidden_states.float()
        dt = self.dt.float()
        if self.dt_bias is not None:
            dt = dt + self.dt_bias.float()
        if self.dt_softplus:
            dt = F.softplus(dt)
        if self.dt_limit != _NO_LIMIT:
            dt = dt.clamp(*self.dt_limit)
        dt = chunk.without_padding(dt)  # no decay, and nothing to write
        state = chunk.next_state(batch, heads, self.B.shape[-1], size)
        output, after = linear_attention(
            self.C.float(), self.B.float(), x * dt[..., None], state, dt * self.A.float(), scale=1.0
        )
        if self.D is not None:
            output = output + x * self.D.float()[:, None]
        if self.z is not None:
            output = output * F.silu(self.z.float())
        return output.to(self.hidden_states.dtype), after


@dataclass(frozen=True, slots=True, eq=False)
class SelectiveScan:
    """Mamba's recurrence (https://arxiv.org/abs/2312.00752), which is gated linear attention with a
    head per channel.

    Values have size 1, and each row of the memory has a decay. The state is kept as [B, channels,
    N, 1].

    Attributes:
        hidden_states: x, [B, channels, S].
        dt: [B, channels, S].
        A: [channels, N].
        B: [B, N, S].
        C: [B, N, S].
        D: [channels], the factor of x in the results.
        z: a gate on the results, [B, channels, S].
        delta_bias: [channels], added to dt.
        delta_softplus: whether softplus is applied to dt.
    """

    hidden_states: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    delta_bias: Tensor | None = None
    delta_softplus: bool = False

    def run(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """[B, channels, S], and the state [B, channels, N, 1]."""
        batch, channels, _ = self.hidden_states.shape
        dt = self.dt.float()
        if self.delta_bias is not None:
            dt = dt + self.delta_bias.float()[:, None]
        if self.delta_softplus:
            dt = F.softplus(dt)
        dt = chunk.without_padding(dt.transpose(1, 2))  # no decay, and nothing to write
        x = self.hidden_states.float().transpose(1, 2)
        keys = self.B.float().transpose(1, 2)[:, :, None]
        queries = self.C.float().transpose(1, 2)[:, :, None]
        state = chunk.next_state(batch, channels, self.A.shape[-1], 1)
        decay = dt[..., None] * self.A.float()
        output, after = linear_attention(
            queries, keys, (x * dt)[..., None], state, decay, scale=1.0
        )
        output = output[..., 0]
        if self.D is not None:
            output = output + x * self.D.float()
        output = output.transpose(1, 2)
        if self.z is not None:
            output = output * F.silu(self.z.float())
        return output.to(self.hidden_states.dtype), after


RECURRENCES: Final[Mapping[str, type[Any]]] = {
    "torch_chunk_gated_delta_rule": GatedDeltaRule,
    "chunk_kimi_delta_attention": GatedDeltaRule,
    "mamba2_chunk_scan": StateSpaceDual,
    "mamba_selective_scan": SelectiveScan,
}


def replacement(name: str, chunk: Chunk) -> Callable[..., Any]:
    """The function over `chunk` for a layer to call in place of transformers' function of that
    name."""
    if name == CONVOLUTION:
        return functools.partial(_convolve, chunk)
    return functools.partial(_recur, RECURRENCES[name], chunk)


def _recur(kind: type[Any], chunk: Chunk, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Run a recurrence with transformers' arguments; options that are no fields of it, such as
    states, are ignored."""
    names = {entry.name for entry in fields(kind)}
    known = {name: value for name, value in options.items() if name in names}
    recurrence: Recurrence = kind(*arguments, **known)
    return recurrence.run(chunk)


def _convolve(
    chunk: Chunk,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **unused: Any,
) -> Tensor:
    """hidden_states: [B, C, S]. weight: [C, K]."""
    past = chunk.take_window(hidden_states, weight.shape[-1] - 1)
    silu = activation in ("silu", "swish")
    float_bias = None if bias is None else bias.float()
    result = causal_convolution(hidden_states.float(), weight.float(), float_bias, past, silu=silu)
    if activation is not None and not silu:
        result = ACT2FN[activation](result)
    return result.to(hidden_states.dtype)


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

    Per head, S' = exp(decay) S, then S = S' + k (beta (v - S'^T k))^T with beta (the gated delta
    rule, Yang et al., https://arxiv.org/abs/2412.06464), S = S' + k v^T without (gated linear
    attention, https://arxiv.org/abs/2312.06635); the result is scale * S^T q. A token of decay 0
    and beta 0, or value 0 without beta, leaves the state as it is. All tensors are float32.

    Args:
        query: [B, S, h, K]; H / h consecutive heads of the memory share a head of the queries and
            keys.
        key: [B, S, h, K].
        value: [B, S, H, V].
        state: [B, H, K, V], before the first token.
        decay: no number above 0; [B, S, H], or [B, S, H, K] with a decay for each row of the
            memory.
        beta: [B, S, H].
        scale: the factor on the results.

    Returns:
        The results, [B, S, H, V], and the state after the last token.
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
        f"{_DOMAIN}::LinearAttention",
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
    query = query.repeat_interleave(group, dim=2) * scale
    key = key.repeat_interleave(group, dim=2)
    rows = decay.exp()[..., None] if decay.ndim == 4 else decay.exp()[..., None, None]
    results = []
    for token in range(value.shape[1]):
        k = key[:, token, :, :, None]
        v = value[:, token, :, None]
        state = state * rows[:, token]
        if beta is not None:
            v = (v - (state * k).sum(-2, keepdim=True)) * beta[:, token, :, None, None]
        state = state + k * v
        results.append((state * query[:, token, :, :, None]).sum(-2))
    return torch.stack(results, dim=1), state


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor, *, silu: bool = False
) -> Tensor:
    """A convolution along the tokens, each channel by itself: a token sees itself and the K - 1
    before it.

    Args:
        x: [B, C, S] float32.
        weight: [C, K]; the last column is the weight of the token itself.
        bias: [C].
        past: [B, C, K - 1], the inputs before the first token.
        silu: whether SiLU follows.

    Returns:
        [B, C, S].
    """
    if not torch.compiler.is_exporting():
        result = F.conv1d(torch.cat([past, x], dim=-1), weight[:, None], bias, groups=len(weight))
        return F.silu(result) if silu else result
    operands = [x, weight[:, None], bias, past]
    output, _ = torch.onnx.ops.symbolic_multi_out(
        f"{_DOMAIN}::CausalConvWithState",
        operands,
        {"activation": "silu" if silu else "none"},
        dtypes=(x.dtype, x.dtype),
        shapes=(x.shape, past.shape),
        version=1,
    )
    return output
