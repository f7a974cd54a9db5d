"""Attention over retained buffers: GroupQueryAttention, or a masked product if that operator does
not fit.

This module serves models that use transformers' attention interface. Any other model keeps its
attention, and its cache returns the buffers. A mask of transformers is a function of (batch, head,
query position, key position). It holds for buffers as well as for a growing cache, so the attention
takes the function itself, as a `MaskRule`.
https://huggingface.co/docs/transformers/attention_interface
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext, read_buffers, write_to_buffers

MaskFunction = Callable[..., Tensor]
# The name of this attention in transformers' interfaces.
IMPLEMENTATION: Final = "qsample_group_query_attention"
# An attribute of attention modules: factors on their queries, [B, S].
QUERY_SCALES: Final = "qsample_query_scales"
# An attribute of attention modules: the `DecodeContext` of the call that they are part of.
_CONTEXT: Final = "qsample_context"
_HEAD_SIZE_MULTIPLE: Final = 8  # GroupQueryAttention takes multiples of this size
_MAX_PROBED_EXPONENT: Final = 17


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """The keys that a query sees.

    Attributes:
        function: `function(batch, head, query, key)`, with index tensors that broadcast together.
    """

    function: MaskFunction

    def allowed(self, positions: Tensor, keys: int) -> Tensor:
        """[B, 1, S, keys] bool, for queries at `positions` [B, S] and keys at 0, 1, .. keys - 1."""
        batch = torch.arange(positions.shape[0])[:, None, None, None]
        head = torch.zeros(1, dtype=torch.int64)[None, None, None]
        key = torch.arange(keys)[None, None, None]
        allowed = self.function(batch, head, positions[:, None, :, None], key)
        return allowed.expand(positions.shape[0], 1, positions.shape[1], keys)

    def is_causal(self, window: int | None) -> bool:
        """Whether a query sees exactly the `window` latest keys up to its own, or all of them with
        None.

        Positions around the powers of two and around the window are probed: windows and chunks end
        there."""
        centers = [2**exponent for exponent in range(_MAX_PROBED_EXPONENT + 1)]
        if window not in (None, 0):
            centers += [window, 2 * window]
        probed = {max(0, center + offset) for center in centers for offset in (-2, -1, 0, 1)}
        positions = torch.tensor(sorted(probed))
        query = positions[:, None]
        key = positions[None]
        zero = torch.zeros(1, 1, dtype=torch.int64)
        expected = causal(window)(zero, zero, query, key)
        return bool((self.function(zero, zero, query, key).expand_as(expected) == expected).all())


def causal(window: int | None = None) -> MaskFunction:
    """The mask function of a query that sees the `window` latest keys up to its own; None: all of
    them."""
    if window is None or window == 0:
        return lambda batch, head, query, key: key <= query
    return lambda batch, head, query, key: (key <= query) & (query - key < window)


def mask_rule(*, mask_function: MaskFunction, **unused: Any) -> MaskRule:
    """The mask interface to register with transformers: it returns the rule, from which the
    attention makes a mask."""
    return MaskRule(mask_function)


@contextmanager
def eager_masks_over_buffers(positions: Tensor, capacity: int) -> Iterator[None]:
    """While open, transformers' "eager" masks are float masks [B, 1, S, capacity] for queries at
    `positions` [B, S]."""

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


def use_retained_attention(model: PreTrainedModel, context: DecodeContext) -> None:
    """Switch `model` to attention over the retained cache, or set `context.buffered` if it computes
    its own attention.

    In-place buffers, ragged rows, grouped heads, sliding windows, soft caps and sinks are
    supported."""
    context.buffered = not model._can_set_attn_implementation()
    if context.buffered:
        return
    AttentionInterface.register(IMPLEMENTATION, group_query_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_rule)
    model.set_attn_implementation(IMPLEMENTATION)
    for module in model.modules():
        setattr(module, _CONTEXT, context)


def use_own_attention(model: PreTrainedModel, context: DecodeContext) -> None:
    """Give `model` its original attention back; its cache then returns the buffers."""
    context.buffered = True
    model.set_attn_implementation("eager")


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of transformers' attention functions that decide the result.

    Attributes:
        scaling: the factor on the scores; 1 / sqrt(D) by default.
        sliding_window: the number of keys that a query sees, itself included.
        softcap: c in c * tanh(scores / c).
        s_aux: [heads], the logit of each head's attention sink.
        position_bias: numbers that are added to the scores.
        is_causal: whether a query sees no later keys.
    """

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    s_aux: Tensor | None
    position_bias: Tensor | None
    is_causal: bool | None


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How an attention turns the products of queries and keys into weights.

    Attributes:
        scale: the factor on the products.
        softcap: c in c * tanh(scores / c); None or 0 for no soft cap.
        sinks: [heads], the logit of each head's attention sink; None for no sinks.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of an attention layer.

    Attributes:
        query: [B, heads, S, D].
        key: [B, H, S, D], the keys of the new tokens only, rotated already.
        value: [B, H, S, D'], the values of the new tokens; D' is at most D.
        rule: the layer's mask; None if it is causal with `window`.
        window: the number of keys that a query sees, itself included; None or 0 for all keys.
        scoring: how the scores are computed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rule: MaskRule | None
    window: int | None
    scoring: Scoring


def group_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRule | None,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        module: the attention layer.
        query: [B, heads, S, D].
        key: [B, H, S, D], the keys of the new tokens only, rotated already.
        value: [B, H, S, D'], the values of the new tokens; D' is at most D.
        attention_mask: the layer's mask as a rule; None is causal.
        options: the options of the layer.

    Returns:
        [B, S, heads, D'], and None in place of the weights.

    Raises:
        UnsupportedModelError: the attention is not causal, or adds further numbers to the scores.
    """
    context: DecodeContext = getattr(module, _CONTEXT)
    _check_supported(module, query, key, value, attention_mask, options)
    rule = attention_mask if isinstance(attention_mask, MaskRule) else None
    layer, is_writer = _cache_layer(context, module, key, value)
    window = options.get("sliding_window")
    if not context.past:
        if is_writer:
            _note_shapes(context, layer, key, value, rule, window)
        return query.transpose(1, 2)[..., : value.shape[-1]], None

    scales = getattr(module, QUERY_SCALES, None)
    if scales is not None:
        query = (query * scales[:, None, :, None]).to(query.dtype)
    scaling = options.get("scaling")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    scoring = Scoring(scale, options.get("softcap"), options.get("s_aux"))
    call = AttentionCall(query, key, value, rule, window, scoring)
    if is_writer and layer not in context.masked:
        return _group_query_attention(context, layer, call), None
    return _attention_over_buffers(context, layer, call, is_writer=is_writer), None


def _note_shapes(
    context: DecodeContext,
    layer: int,
    key: Tensor,
    value: Tensor,
    rule: MaskRule | None,
    window: int | None,
) -> None:
    """Note the sizes of a layer's cache in the shape probe, and whether GroupQueryAttention can
    express its mask."""
    if rule is not None and not rule.is_causal(window):
        context.masked.add(layer)
    else:
        key = _padded(key, _operator_size(key))
    context.present[layer] = (key, value)


def _group_query_attention(context: DecodeContext, layer: int, call: AttentionCall) -> Tensor:
    """[B, S, heads, D'] of GroupQueryAttention, which writes the new keys and values into the
    buffers of `layer`."""
    batch, heads, length, _ = call.query.shape
    # The operator has one size for queries, keys and values; zeros behind them add nothing.
    size = _operator_size(call.query)
    query, key, value = (_padded(part, size) for part in (call.query, call.key, call.value))
    past_key, past_value = context.past[layer]
    scoring = call.scoring
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": key.shape[1],
        "scale": scoring.scale,
    }
    if call.window not in (None, 0):
        attributes["local_window_size"] = int(call.window)
    if scoring.softcap not in (None, 0):
        attributes["softcap"] = float(scoring.softcap)
    inputs: list[Tensor | None] = [_merge_heads(query), _merge_heads(key), _merge_heads(value)]
    inputs += [past_key, past_value, context.seqlens_k, context.total_length]
    if scoring.sinks is not None:
        # cos_cache, sin_cache, position_ids and attention_bias stay absent.
        inputs += [None, None, None, None, scoring.sinks.to(query.dtype)]
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attributes,
        dtypes=(query.dtype,) * 3,
        shapes=((batch, length, heads * size), past_key.shape, past_value.shape),
        version=1,
    )
    context.present[layer] = (present_key, present_value)
    by_head = output.reshape(batch, length, heads, size)
    value_size = call.value.shape[-1]
    return by_head if value_size == size else by_head[..., :value_size]


def _attention_over_buffers(
    context: DecodeContext, layer: int, call: AttentionCall, *, is_writer: bool
) -> Tensor:
    """[B, S, heads, D'] of plain operators. is_writer: whether the new keys and values belong to
    `layer`."""
    if is_writer:
        keys, values = write_to_buffers(context, layer, call.key, call.value)
    else:
        keys, values = read_buffers(context, layer)
    assert context.positions is not None
    rule = MaskRule(causal(call.window)) if call.rule is None else call.rule
    allowed = rule.allowed(context.positions, context.capacity)
    # The buffers may be padded: another layer's attention may be the operator.
    keys = keys[..., : call.query.shape[-1]]
    values = values[..., : call.value.shape[-1]]
    return masked_attention(call.query, keys, values, allowed, call.scoring)


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, scoring: Scoring
) -> Tensor:
    """softmax(mask(scale * Q K')) V with grouped heads.

    Args:
        query: [B, heads, S, D].
        keys: [B, H, T, D].
        values: [B, H, T, D'].
        allowed: [B, 1, S, T] bool, the keys that a query sees.
        scoring: how the scores are computed.

    Returns:
        [B, S, heads, D'], contiguous.
    """
    batch, heads, length, size = query.shape
    kv_heads = keys.shape[1]
    tokens = keys.shape[2]
    grouped_length = heads // kv_heads * length
    grouped = query.reshape(batch, kv_heads, grouped_length, size)
    products = (grouped @ keys.transpose(2, 3)).reshape(batch, heads, length, tokens)
    scores = products * scoring.scale
    if scoring.softcap not in (None, 0):
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = torch.where(allowed, scores.to(torch.float32), torch.finfo(torch.float32).min)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(torch.float32)[None, :, None, None]
        sinks = sinks.expand(batch, heads, length, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    grouped_weights = weights.to(query.dtype).reshape(batch, kv_heads, grouped_length, tokens)
    output = (grouped_weights @ values).reshape(batch, heads, length, values.shape[-1])
    return output.transpose(1, 2).contiguous()


def _operator_size(states: Tensor) -> int:
    """The head size that the operator takes for `states`, [.., D]."""
    return -(-states.shape[-1] // _HEAD_SIZE_MULTIPLE) * _HEAD_SIZE_MULTIPLE


def _padded(states: Tensor, size: int) -> Tensor:
    """`states`, [.., D], followed by zeros up to `size`."""
    if states.shape[-1] >= size:
        return states
    return F.pad(states, (0, size - states.shape[-1]))


def _merge_heads(states: Tensor) -> Tensor:
    """[B, heads, S, D] → [B, S, heads * D]."""
    return states.transpose(1, 2).flatten(2)


def _cache_layer(
    context: DecodeContext, module: nn.Module, key: Tensor, value: Tensor
) -> tuple[int, bool]:
    """The layer of the cache that `key` belongs to, and whether that layer itself is running.

    A layer that gets the keys and values of another layer shares its cache.
    """
    layer = context.updated
    context.updated = None
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
    options: AttentionOptions,
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
            f"{name} has queries, keys and values of sizes {query.shape[-1]}, {key.shape[-1]} and "
            f"{value.shape[-1]}; values may be smaller than keys, and queries have their size"
        )
