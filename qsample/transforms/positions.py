"""Each row's own positions, for models that count them from the cache or from the longest row.

The rows of a batch differ in length, so no one cache length gives their positions. `UseRowPositions` serves position
embeddings that count on from that length, `GPTNeoWindows` the attention of GPT-Neo, which cuts its causal and local
pattern out of a table by the number of keys: here the capacity. `RopeByCapacity` keeps rotary embeddings from
following the length of the batch. `QueryScales` serves the attention of Llama 4, which scales queries by how far a text
has come.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from qsample.transforms.attention import QUERY_SCALES, masked_attention
from qsample.transforms.cache import DecodeContext
from qsample.transforms.masks import MaskRule, causal

_LONGROPE, _DYNAMIC = "longrope", "dynamic"
_LLAMA_4 = "Llama4TextAttention"
_PARAMETERS = {"past_key_values_length", "position_ids"}


class RowPositions(nn.Module):
    """`embedding`, a table of positions, looked up at `context.positions` [B, S] in a decoder call."""

    def __init__(self, embedding: nn.Module, context: DecodeContext) -> None:
        super().__init__()
        self.embedding = embedding
        self.context = context

    @property
    def weight(self) -> Tensor:
        """[positions, hidden]; where transformers initialises or resizes the table."""
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        positions = self.context.positions
        if positions is None:
            result: Tensor = self.embedding(*args, **kwargs)
            return result
        names = inspect.signature(self.embedding.forward).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        # Most tables expect one row of positions, which all rows have in common; some, the rows' own.
        own = given.get("position_ids")
        flat = own is None or own.ndim < positions.ndim
        given |= {"position_ids": positions.flatten() if flat else positions, "past_key_values_length": 0}
        embedded: Tensor = self.embedding(**given)
        return embedded.reshape(*positions.shape, embedded.shape[-1])


@dataclass(frozen=True, slots=True)
class UseRowPositions:
    """Wrap every position embedding whose `forward` knows both `position_ids` and `past_key_values_length`."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for parent in list(model.modules()):
            if isinstance(parent, RowPositions):
                parent.context = self.context  # an earlier export's otherwise
                continue
            for name, child in list(parent.named_children()):
                if _is_position_table(child):
                    setattr(parent, name, RowPositions(child, self.context))
                    modified = True
        return model, modified


def _is_position_table(module: nn.Module) -> bool:
    if "Position" not in type(module).__name__:
        return False
    return set(inspect.signature(module.forward).parameters) >= _PARAMETERS


@dataclass(frozen=True, slots=True)
class GPTNeoWindows:
    """Replace the step from queries, keys and values to their product in every attention layer of a GPT-Neo."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for module in model.modules():
            if isinstance(module, GPTNeoSelfAttention):
                modified |= not isinstance(module.__dict__.get("_attn"), functools.partial)
                module._attn = functools.partial(_attend, self.context, module)  # type: ignore[method-assign]
        return model, modified


@dataclass(frozen=True, slots=True)
class RopeByCapacity:
    """Let the capacity decide the frequencies of rotary embeddings that transformers chooses by the longest row of a
    batch: with those, a row would depend on the others and on how a prompt is cut, and its earlier keys would be of
    other frequencies.

    LongRoPE (https://arxiv.org/abs/2402.13753) has two sets, the long ones from the first training context on. A cache
    that can hold more tokens than that is filled with them from the start. "dynamic" (NTK-aware scaling,
    https://arxiv.org/abs/2309.00071, section 3.1) has other ones beyond max_position_embeddings, and no cache holds
    more tokens than these.
    """

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            if any(map(_is_chosen_by_length, kinds.values() if isinstance(kinds, dict) else [kinds])):
                modified |= "forward" not in module.__dict__
                module.forward = functools.partial(_rotary_embedding, self.context, module)
        return model, modified


def _is_chosen_by_length(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == _LONGROPE or _DYNAMIC in kind)  # as transformers tells them


class _WithFrequencies:
    """A rotary embedding with other frequencies: what its forward takes for `self`."""

    def __init__(self, module: nn.Module, name: str, frequencies: Tensor) -> None:
        self._module = module
        setattr(self, name, frequencies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _rotary_embedding(
    context: DecodeContext, module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> Any:
    """What the class's own forward computes, which it is outside of a decoder call."""
    own, layer = type(module).forward, {} if layer_type is None else {"layer_type": layer_type}
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if context.positions is None or not _is_chosen_by_length(kind):
        return own(module, x, position_ids, **layer)
    prefix = "" if layer_type is None else f"{layer_type}_"
    first = getattr(module, f"{prefix}original_inv_freq")
    frequencies = _long_or(first, context, module, x, layer_type) if kind == _LONGROPE else first
    # Behind the decorator that would choose them by the positions.
    return inspect.unwrap(own)(_WithFrequencies(module, f"{prefix}inv_freq", frequencies), x, position_ids, **layer)


def _long_or(short: Tensor, context: DecodeContext, module: Any, x: Tensor, layer_type: str | None) -> Tensor:
    """LongRoPE's frequencies for the capacity."""
    layer = {} if layer_type is None else {"layer_type": layer_type}
    parameters = module.config.rope_parameters
    first_context = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    long, _ = ROPE_INIT_FUNCTIONS[_LONGROPE](module.config, x.device, seq_len=first_context + 1, **layer)
    return torch.where(torch.scalar_tensor(context.capacity) > first_context, long, short)


@dataclass(frozen=True, slots=True)
class QueryScales:
    """Scale the queries of a Llama 4's layers without rotary embeddings by each row's own positions
    (https://arxiv.org/abs/2501.19399): log1p(floor((position + 1) / floor_scale)) * attn_scale + 1. The layers count
    positions from the cache, and scale nothing in a short text."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        module: Any
        for module in model.modules():
            if type(module).__name__ != _LLAMA_4 or not module.attn_temperature_tuning or module.use_rope:
                continue
            modified |= "forward" not in module.__dict__
            module.forward = functools.partial(_with_query_scales, self.context, module)
        return model, modified


def _with_query_scales(context: DecodeContext, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward, which in a decoder call leaves the queries to the attention."""
    own = type(module).forward
    if context.positions is None:
        return own(module, *args, **kwargs)
    steps = torch.floor((context.positions.float() + 1) / module.floor_scale)
    setattr(module, QUERY_SCALES, torch.log1p(steps) * module.attn_scale + 1)
    module.attn_temperature_tuning = False
    try:
        return own(module, *args, **kwargs)
    finally:
        module.attn_temperature_tuning = True
        delattr(module, QUERY_SCALES)


def _attend(
    context: DecodeContext,
    module: GPTNeoSelfAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """query: [B, heads, S, D]; key, value: [B, heads, T, D]. Returns [B, heads, S, D] and no weights.

    Outside a decoder call it is the class's own step.
    """
    if context.positions is None:
        own: tuple[Tensor, Tensor] = GPTNeoSelfAttention._attn(  # type: ignore[no-untyped-call]
            module, query, key, value, attention_mask
        )
        return own
    window = int(module.config.window_size) if module.attention_type == "local" else None
    allowed = MaskRule(causal(window)).allowed(context.positions, key.shape[2])
    return masked_attention(query, key, value, allowed, scale=1.0).transpose(1, 2), None
