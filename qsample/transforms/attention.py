"""A causal LM on transformers' attention interface enters; the same model attending through GroupQueryAttention over
retained buffers leaves.

The interface is documented at https://huggingface.co/docs/transformers/attention_interface and the operator at
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from qsample.contract import KeyValueShape
from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext, PassThroughCache

NAME = "qsample_group_query_attention"
_CONTEXT = "qsample_context"  # attribute by which an attention module finds the call it is part of


@dataclass(frozen=True, slots=True)
class RetainedAttention:
    """Attention over the retained cache of `context`: in-place buffers, ragged rows, grouped heads, sliding windows,
    soft caps and sinks."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        """Switch `model` to GroupQueryAttention. Raises UnsupportedModelError where the model does not use the
        attention interface."""
        if not model._can_set_attn_implementation():
            raise UnsupportedModelError(
                f"{type(model).__name__} computes its attention itself instead of through transformers' attention "
                "interface, so it cannot be given a retained cache"
            )
        modified: bool = model.config._attn_implementation != NAME
        if modified:
            AttentionInterface.register(NAME, group_query_attention)
            # A name without a mask function: transformers then builds no mask, which the operator does not need.
            model.set_attn_implementation(NAME)
        for module in model.modules():
            setattr(module, _CONTEXT, self.context)
        return model, modified


def group_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    Args:
        query: [B, heads, S, D]. key, value: [B, H, S, D], the new tokens only, rotated already.
        scaling: factor on the scores; None = 1 / sqrt(D). sliding_window: how many keys a query sees, itself included.
        softcap: c in c * tanh(scores / c). s_aux: [heads], the attention sink's logit per head.

    Returns ([B, S, heads, D], None).
    """
    context: DecodeContext = getattr(module, _CONTEXT)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _check_supported(module, query, key, value, attention_mask, unused)
    batch, heads, length, size = query.shape
    kv_heads = key.shape[1]
    if not context.past:  # the shape probe: only the sizes matter
        context.present[layer] = (key, value)
        return query.transpose(1, 2), None

    past_key, past_value = context.past[layer]
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "scale": float(scaling if scaling is not None else size**-0.5),
    }
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
    return output.reshape(batch, length, heads, size), None


def _merge_heads(states: Tensor) -> Tensor:
    """[B, heads, S, D] → [B, S, heads * D]."""
    return states.transpose(1, 2).flatten(2)


def _check_supported(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> None:
    name = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if not hasattr(module, "layer_idx"):
        raise UnsupportedModelError(f"{name} has no layer_idx, so its cache cannot be told from the others'")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} builds an attention mask of its own; only causal attention is supported")
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(f"{name} adds a position bias to its attention scores, which is not supported")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} attends to later tokens; only causal attention is supported")
    if value.shape[-1] != key.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise UnsupportedModelError(
            f"{name} has queries, keys and values of sizes {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}; "
            "GroupQueryAttention needs one size"
        )


def key_value_shapes(model: PreTrainedModel, context: DecodeContext) -> tuple[KeyValueShape, ...]:
    """The cache shape of every attention layer, read off a two-token run of the transformed model.

    Raises UnsupportedModelError where a layer does not reach the attention function, shares another layer's cache or
    keeps a state of another kind.
    """
    context.clear()
    try:
        with torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.int64)
            cache = PassThroughCache([(torch.empty(0), torch.empty(0))] * _layer_count(model))
            model(input_ids=ids, position_ids=torch.arange(2)[None], past_key_values=cache, use_cache=True)
        found = dict(context.present)
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a layer raises that meets a cache of another kind than its own
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run over key-value buffers alone ({error}); recurrent and convolutional "
            "states are not supported yet"
        ) from error
    finally:
        context.clear()
    if not found or sorted(found) != list(range(_layer_count(model))):
        missing = sorted(set(range(_layer_count(model))) - set(found))
        raise UnsupportedModelError(
            f"{type(model).__name__}: layers {missing} of {_layer_count(model)} do not attend through transformers' "
            "attention interface (recurrent, convolutional or shared-cache layers are not supported yet)"
        )
    return tuple(KeyValueShape(found[i][0].shape[1], found[i][0].shape[3]) for i in range(len(found)))


def _layer_count(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)
