"""Attention over retained buffers: GroupQueryAttention, or a masked product if that operator does not fit.

This takes a model that uses transformers' attention interface. Any other model keeps its attention, and its cache hands
it the buffers. A mask of transformers is a function of (batch, head, query position, key position). It holds for
buffers as it does for a growing cache: `MaskRule`.
https://huggingface.co/docs/transformers/attention_interface
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext, read_buffers, write_to_buffers

MaskFunction = Callable[..., Tensor]
_LARGEST_EXPONENT = 17


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """The keys that a query sees: `function(batch, head, query, key)`, of index tensors that broadcast together."""

    function: MaskFunction

    def allowed(self, positions: Tensor, keys: int) -> Tensor:
        """[B, 1, S, keys] bool, for queries at `positions` [B, S] and keys at 0, 1, .. keys - 1."""
        batch = torch.arange(positions.shape[0])[:, None, None, None]
        head = torch.zeros(1, dtype=torch.int64)[None, None, None]
        key = torch.arange(keys)[None, None, None]
        allowed = self.function(batch, head, positions[:, None, :, None], key)
        return allowed.expand(positions.shape[0], 1, positions.shape[1], keys)

    def is_causal(self, window: int | None) -> bool:
        """Whether a query sees itself and the keys before it, `window` in all (None: all of them), and nothing else;
        judged at positions around the powers of two and the window: the edges of windows and chunks."""
        near = [2**exponent for exponent in range(_LARGEST_EXPONENT + 1)] + (
            [window, 2 * window] if window else []
        )
        at = torch.tensor(
            sorted({max(0, position + offset) for position in near for offset in (-2, -1, 0, 1)})
        )
        query, key, zero = at[:, None], at[None], torch.zeros(1, 1, dtype=torch.int64)
        expected = causal(window)(zero, zero, query, key)
        return bool((self.function(zero, zero, query, key).expand_as(expected) == expected).all())


def causal(window: int | None = None) -> MaskFunction:
    """A query sees itself and the keys before it, `window` in all; None: all of them."""
    if window is None or window == 0:
        return lambda batch, head, query, key: key <= query
    return lambda batch, head, query, key: (key <= query) & (query - key < window)


def mask_rule(*, mask_function: MaskFunction, **unused: Any) -> MaskRule:
    """The mask function to register with transformers: returns the rule, from which the caller makes its mask."""
    return MaskRule(mask_function)


@contextmanager
def eager_masks_over_buffers(positions: Tensor, capacity: int) -> Iterator[None]:
    """While open, transformers' "eager" masks are float masks [B, 1, S, capacity] for queries at `positions` [B, S]."""

    def mask(
        *, mask_function: MaskFunction, dtype: torch.dtype = torch.float32, **unused: Any
    ) -> Tensor:
        allowed = MaskRule(mask_function).allowed(positions, capacity)
        return torch.where(allowed, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = mask
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]  # type: ignore[no-untyped-call]


NAME = "qsample_group_query_attention"
# Attributes of attention modules: the call that they are part of; and factors of their queries, [B, S].
_CONTEXT = "qsample_context"
QUERY_SCALES = "qsample_query_scales"
_MULTIPLE = 8  # GroupQueryAttention takes head sizes that are multiples of this


def use_retained_attention(model: PreTrainedModel, context: DecodeContext) -> None:
    """Switch `model` to attention over the retained cache; if it computes its attention itself, `context.buffered`.
    In-place buffers, ragged rows, grouped heads, sliding windows, soft caps and sinks are served."""
    context.buffered = not model._can_set_attn_implementation()
    if context.buffered:
        return
    AttentionInterface.register(NAME, group_query_attention)
    AttentionMaskInterface.register(NAME, mask_rule)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        setattr(module, _CONTEXT, context)


def use_own_attention(model: PreTrainedModel, context: DecodeContext) -> None:
    """Give `model` its original attention back; its cache then hands it the buffers."""
    context.buffered = True
    model.set_attn_implementation("eager")


def group_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRule | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        query: [B, heads, S, D].
        key, value: [B, H, S, D], the new tokens only, rotated already; values may be smaller.
        attention_mask: the layer's mask as a rule; causal by default.
        scaling: factor on the scores, by default 1 / sqrt(D).
        sliding_window: how many keys a query sees, itself included.
        softcap: c in c * tanh(scores / c).
        s_aux: [heads], the attention sink's logit per head.

    Returns [B, S, heads, D] with the D of the values, and None for the weights. Raises UnsupportedModelError if the
    attention is not causal, or adds further numbers to the scores.
    """
    context: DecodeContext = getattr(module, _CONTEXT)
    _check_supported(module, query, key, value, attention_mask, options)
    layer, is_writer = _cache_layer(context, module, key, value)
    size = value.shape[-1]
    if not context.past:  # the shape probe
        if is_writer:
            if isinstance(attention_mask, MaskRule) and not attention_mask.is_causal(
                sliding_window
            ):
                context.masked.add(layer)
            else:
                key = _padded(key, _operator_size(key))
            context.present[layer] = (key, value)
        return query.transpose(1, 2)[..., :size], None

    if (scales := getattr(module, QUERY_SCALES, None)) is not None:
        query = (query * scales[:, None, :, None]).to(query.dtype)
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    if is_writer and layer not in context.masked:
        whole = _operator_size(query)  # the operator has one size for all; zeros add nothing
        query, key, value = (_padded(states, whole) for states in (query, key, value))
        options = {
            "scale": scale,
            "sliding_window": sliding_window,
            "softcap": softcap,
            "s_aux": s_aux,
        }
        output = _group_query_attention(context, layer, query, key, value, **options)
        return (output if size == whole else output[..., :size]), None

    keys, values = (
        write_to_buffers(context, layer, key, value) if is_writer else read_buffers(context, layer)
    )
    assert context.positions is not None
    rule = (
        attention_mask if isinstance(attention_mask, MaskRule) else MaskRule(causal(sliding_window))
    )
    allowed = rule.allowed(context.positions, context.capacity)
    keys, values = keys[..., : query.shape[-1]], values[..., :size]  # another layer's may be padded
    return masked_attention(query, keys, values, allowed, scale, softcap, s_aux), None


def _group_query_attention(
    context: DecodeContext,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """[B, S, heads, D]; writes the new keys and values into the buffers of `layer`."""
    batch, heads, length, size = query.shape
    past_key, past_value = context.past[layer]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": key.shape[1], "scale": scale}
    if sliding_window:
        attributes["local_window_size"] = int(sliding_window)
    if softcap:
        attributes["softcap"] = float(softcap)
    inputs: list[Tensor | None] = [_merge_heads(query), _merge_heads(key), _merge_heads(value)]
    inputs += [past_key, past_value, context.seqlens_k, context.total_length]
    if s_aux is not None:
        # cos_cache, sin_cache, position_ids and attention_bias stay absent
        inputs += [None, None, None, None, s_aux.to(query.dtype)]
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attributes,
        dtypes=(query.dtype,) * 3,
        shapes=((batch, length, heads * size), past_key.shape, past_value.shape),
        version=1,
    )
    context.present[layer] = (present_key, present_value)
    return output.reshape(batch, length, heads, size)


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor,
    scale: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """softmax(mask(scale * Q K')) V with grouped heads, [B, S, heads, D']. query: [B, heads, S, D]. keys: [B, H, T, D].
    values: [B, H, T, D']. allowed: [B, 1, S, T] bool. softcap, s_aux: as in `group_query_attention`."""
    batch, heads, length, size = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * length, size)
    scores = (grouped @ keys.transpose(2, 3)).reshape(batch, heads, length, keys.shape[2]) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = torch.where(allowed, scores.to(torch.float32), torch.finfo(torch.float32).min)
    if s_aux is not None:
        sink = s_aux.to(torch.float32)[None, :, None, None].expand(batch, heads, length, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    grouped = weights.to(query.dtype).reshape(
        batch, kv_heads, heads // kv_heads * length, keys.shape[2]
    )
    return (
        (grouped @ values)
        .reshape(batch, heads, length, values.shape[-1])
        .transpose(1, 2)
        .contiguous()
    )


def _operator_size(states: Tensor) -> int:
    """The head size that the operator takes for `states`, [.., D]."""
    return -(-states.shape[-1] // _MULTIPLE) * _MULTIPLE


def _padded(states: Tensor, size: int) -> Tensor:
    """`states`, [.., D], and zeros after them, up to `size`."""
    return F.pad(states, (0, size - states.shape[-1])) if states.shape[-1] < size else states


def _merge_heads(states: Tensor) -> Tensor:
    """[B, heads, S, D] → [B, S, heads * D]."""
    return states.transpose(1, 2).flatten(2)


def _cache_layer(
    context: DecodeContext, module: nn.Module, key: Tensor, value: Tensor
) -> tuple[int, bool]:
    """The layer of the cache that `key` belongs to, and whether this is the layer itself: another layer that is handed
    the same keys and values shares its cache."""
    layer, context.updated = context.updated, None
    if layer is not None:
        context.given[layer] = (key, value)
        return layer, True
    for source, (keys, values) in context.given.items():
        if keys is key and values is value:
            return source, False
    raise UnsupportedModelError(
        f"{type(module).__name__} attends to keys and values that are not in the cache"
    )


def _check_supported(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRule | None,
    options: dict[str, Any],
) -> None:
    name = type(module).__name__
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise UnsupportedModelError(f"{name} builds an attention mask of its own")
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(f"{name} adds a position bias to its attention scores")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"{name} attends to later tokens; only causal attention is supported"
        )
    if query.shape[-1] != key.shape[-1] or value.shape[-1] > key.shape[-1]:
        raise UnsupportedModelError(
            f"{name} has queries, keys and values of sizes {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}; "
            "values may be smaller than keys, and queries have their size"
        )
