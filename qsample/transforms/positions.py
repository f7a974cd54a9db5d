"""Positions of each row, for models that count them from the cache or from the longest row.

The rows of a batch differ in length, so a single cache length does not give their positions. In a
decoder call, position tables, GPT-Neo's windows, rotary embeddings and Llama 4's query scales read
`context.positions`; outside, a model computes as before. `real_rotary_embeddings` rotates without
complex numbers: ONNX lacks them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from qsample.errors import UnsupportedModelError, install_hint
from qsample.transforms.attention import (
    QUERY_SCALES,
    MaskRule,
    Scoring,
    causal,
    masked_attention,
)
from qsample.transforms.cache import DecodeContext

_LONGROPE: Final = "longrope"
_DYNAMIC: Final = "dynamic"
_POSITIONS: Final = "position_ids"
_LLAMA_4: Final = "transformers.models.llama4.modeling_llama4"
_LLAMA_4_ATTENTION: Final = "Llama4TextAttention"
_DEEPSEEK_V2: Final = "transformers.models.deepseek_v2.modeling_deepseek_v2"
# Module of transformers → what this file finds in it by name. A part under another name would be
# passed over, and some of these change nothing in texts as short as those of the parity gate.
_NAMED_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    _LLAMA_4: (_LLAMA_4_ATTENTION, "apply_rotary_emb"),
    _DEEPSEEK_V2: ("apply_rotary_emb",),
}


def check_named_parts(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if the modules of transformers that define `model` lack a part
    that this file finds by name."""
    for module in {type(part).__module__ for part in model.modules()} & _NAMED_PARTS.keys():
        for name in _NAMED_PARTS[module]:
            if not hasattr(sys.modules[module], name):
                raise UnsupportedModelError(
                    f"{type(model).__name__} cannot be exported with transformers {version('transformers')}: {module} "
                    f"has no {name}, which counts each row's own positions; {_OTHER_VERSION}"
                )


_OTHER_VERSION: Final = f"install another release of it: {install_hint('export')}"


class RowPositions(nn.Module):
    """`embedding`, a table of positions, looked up at `context.positions` [B, S] in a decoder
    call."""

    def __init__(self, embedding: nn.Module, context: DecodeContext) -> None:
        super().__init__()
        self.embedding = embedding
        self.context = context

    @property
    def weight(self) -> Tensor:
        """[positions, hidden]; transformers reads it to initialise or resize the table."""
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
        # Most tables expect a single row of positions, common to all rows; some expect a row for
        # each.
        own = given.get(_POSITIONS)
        flat = own is None or own.ndim < positions.ndim
        given[_POSITIONS] = positions.flatten() if flat else positions
        given |= dict.fromkeys(_counts(self.embedding), 0)
        embedded: Tensor = self.embedding(**given)
        return embedded.reshape(*positions.shape, embedded.shape[-1])


def use_row_positions(model: PreTrainedModel, context: DecodeContext) -> None:
    """Wrap every table of positions that counts them from the length of the cache.

    Raises UnsupportedModelError for a table that takes no positions.
    """
    for parent in list(model.modules()):
        if isinstance(parent, RowPositions):
            parent.context = context  # an earlier export had another
            continue
        for name, child in list(parent.named_children()):
            if "Position" in type(child).__name__ and _counts(child):
                _check_takes_positions(child)
                setattr(parent, name, RowPositions(child, context))


def _counts(table: nn.Module) -> list[str]:
    """The parameters of a table that are a number of earlier tokens, by default 0. Releases of
    transformers differ in their name: `past_key_values_length`, `cache_length`."""
    parameters = inspect.signature(table.forward).parameters
    return [
        name for name, one in parameters.items() if type(one.default) is int and one.default == 0
    ]


def _check_takes_positions(table: nn.Module) -> None:
    parameters = inspect.signature(table.forward).parameters
    if _POSITIONS not in parameters:
        raise UnsupportedModelError(
            f"{type(table).__name__} takes {', '.join(parameters)} in transformers {version('transformers')}, and no "
            f"{_POSITIONS}: it counts the positions of all rows from the length of the cache, and the rows of a batch "
            f"differ in length. Choose another model, or {_OTHER_VERSION}"
        )


def use_row_windows(model: PreTrainedModel, context: DecodeContext) -> None:
    """Replace the step from queries, keys and values to their product in every attention layer of a
    GPT-Neo: it cuts its causal and local pattern out of a table by the number of keys: here the
    capacity."""
    for module in model.modules():
        if isinstance(module, GPTNeoSelfAttention):
            module._attn = functools.partial(_attend, context, module)  # type: ignore[method-assign]


def use_rope_of_capacity(model: PreTrainedModel, context: DecodeContext) -> None:
    """Let the capacity decide the frequencies of rotary embeddings that transformers chooses by the
    longest row: with those, a row would depend on the rest and on how a prompt is cut, and its
    earlier keys would have other frequencies.

    LongRoPE (https://arxiv.org/abs/2402.13753) has two sets, the long frequencies from the first
    training context on. A cache that can hold more tokens than that is filled with them from the
    start. "dynamic" (NTK-aware scaling, https://arxiv.org/abs/2309.00071, section 3.1) changes them
    beyond max_position_embeddings, and no cache holds more."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(map(_is_chosen_by_length, kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.forward = functools.partial(_rotary_embedding, context, module)


def _is_chosen_by_length(kind: Any) -> bool:
    # transformers distinguishes the types of rotary embeddings in the same way.
    return isinstance(kind, str) and (kind == _LONGROPE or _DYNAMIC in kind)


class _WithFrequencies:
    """A rotary embedding with other frequencies, passed to its forward as `self`."""

    def __init__(self, module: nn.Module, name: str, frequencies: Tensor) -> None:
        self._module = module
        setattr(self, name, frequencies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _rotary_embedding(
    context: DecodeContext,
    module: Any,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> Any:
    """The class's forward, in a decoder call with the frequencies of the capacity."""
    own = type(module).forward
    layer = {} if layer_type is None else {"layer_type": layer_type}
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if context.positions is None or not _is_chosen_by_length(kind):
        return own(module, x, position_ids, **layer)
    prefix = "" if layer_type is None else f"{layer_type}_"
    first = getattr(module, f"{prefix}original_inv_freq")
    frequencies = _long_or(first, context, module, x, layer_type) if kind == _LONGROPE else first
    # Without the decorator that would choose them by the positions.
    return inspect.unwrap(own)(
        _WithFrequencies(module, f"{prefix}inv_freq", frequencies), x, position_ids, **layer
    )


def _long_or(
    short: Tensor, context: DecodeContext, module: Any, x: Tensor, layer_type: str | None
) -> Tensor:
    """LongRoPE's frequencies for the capacity."""
    layer = {} if layer_type is None else {"layer_type": layer_type}
    parameters = module.config.rope_parameters
    first_context = (parameters if layer_type is None else parameters[layer_type])[
        "original_max_position_embeddings"
    ]
    long, _ = ROPE_INIT_FUNCTIONS[_LONGROPE](
        module.config, x.device, seq_len=first_context + 1, **layer
    )
    return torch.where(torch.scalar_tensor(context.capacity) > first_context, long, short)


def use_row_query_scales(model: PreTrainedModel, context: DecodeContext) -> None:
    """Scale the queries of a Llama 4's layers without rotary embeddings by each row's own
    positions. The factor is log1p(floor((position + 1) / floor_scale)) * attn_scale + 1
    (https://arxiv.org/abs/2501.19399). The layers count positions from the cache, and scale nothing
    in a short text."""
    module: Any
    for module in model.modules():
        if (
            type(module).__name__ == _LLAMA_4_ATTENTION
            and module.attn_temperature_tuning
            and not module.use_rope
        ):
            module.forward = functools.partial(_with_query_scales, context, module)


def _with_query_scales(context: DecodeContext, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's forward; in a decoder call it leaves the scales to the attention."""
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
    """query: [B, heads, S, D]; key, value: [B, heads, T, D]. Returns [B, heads, S, D] and no
    weights."""
    if context.positions is None:
        own: tuple[Tensor, Tensor] = GPTNeoSelfAttention._attn(  # type: ignore[no-untyped-call]
            module, query, key, value, attention_mask
        )
        return own
    window = int(module.config.window_size) if module.attention_type == "local" else None
    allowed = MaskRule(causal(window)).allowed(context.positions, key.shape[2])
    return masked_attention(query, key, value, allowed, Scoring(1.0)).transpose(1, 2), None


# Modules of transformers with a function `apply_rotary_emb(query, key, frequencies)`: the axis of
# their heads.
_HEADS_AXIS: Final = {
    _DEEPSEEK_V2: 1,
    _LLAMA_4: 2,
}


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of every position's angles, [B, S, D / 2] each, in place of a complex tensor: (a
    + bi)(cos + i sin) = (a cos - b sin) + (a sin + b cos) i."""

    cos: Tensor
    sin: Tensor

    def to(self, *unused: Any, **ignored: Any) -> Rotation:
        """The rotation itself: device and dtype never change."""
        return self

    def rotate(self, states: Tensor, heads_axis: int) -> Tensor:
        """Rotate pairs of neighbours. states: [B, .., D] with the heads on `heads_axis`."""
        cos = self.cos.unsqueeze(heads_axis)
        sin = self.sin.unsqueeze(heads_axis)
        pairs = states.float().reshape(*states.shape[:-1], -1, 2)
        first = pairs[..., 0]
        second = pairs[..., 1]
        rotated = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        return rotated.flatten(3).type_as(states)


@contextmanager
def real_rotary_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """While open, `model` rotates queries and keys without complex numbers, if it has used them."""
    with ExitStack() as stack:
        for name in {type(module).__module__ for module in model.modules()} & _HEADS_AXIS.keys():
            stack.enter_context(
                _replaced(sys.modules[name], "apply_rotary_emb", _apply(_HEADS_AXIS[name]))
            )
        for module in model.modules():
            if type(module).__module__ in _HEADS_AXIS and type(module).__name__.endswith(
                "RotaryEmbedding"
            ):
                stack.enter_context(_replaced(module, "forward", _forward(module)))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _apply(heads_axis: int) -> Any:
    def apply_rotary_emb(
        query: Tensor, key: Tensor, rotation: Rotation, *unused: Any
    ) -> tuple[Tensor, Tensor]:
        return rotation.rotate(query, heads_axis), rotation.rotate(key, heads_axis)

    return apply_rotary_emb


def _forward(module: nn.Module) -> Any:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Rotation:
        parts = torch.view_as_real(own(*args, **kwargs))
        return Rotation(parts[..., 0], parts[..., 1])

    return forward
