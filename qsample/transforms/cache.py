"""The retained key-value cache as transformers sees it: buffers of fixed capacity in place of a
growing cache.

The attention writes into the buffers itself (`PassThroughLayer`), or reads the buffers that the
cache returns (`BufferedLayer`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from qsample.errors import UnsupportedModelError

# The layer of a state, its kind, and its index among the layer's states of that kind.
StateKey = tuple[int, str, int]
_MAX_STATES_OF_A_KIND: Final = 8


@dataclass(slots=True)
class DecodeContext:
    """The values that a call of the decoder shares with the modules inside the model, while that
    call is traced.

    Attributes:
        input_lengths: [B] int32, the number of real tokens of each row.
        positions: [B, S] int64, the positions of the new tokens.
        seqlens_k: [B] int32, index of the last key that a row sees, counting its padding.
        total_length: scalar int32, GroupQueryAttention's total_sequence_length.
        past: each layer → its retained key and value buffers.
        present: each layer → the next values of its buffers.
        updated: the layer that updated the cache last, until its attention runs.
        given: each layer → the new keys and values of its attention.
        buffered: whether the model's own attention runs over the buffers, not transformers'
            attention interface. This is decided before any call.
        masked: the layers whose masks GroupQueryAttention cannot express. They are found before any
            call.
        states: the states of other kinds.
        next_states: the next values of these states.
        running: [B] bool, the rows that have not ended.
        module: the id of the recurrent layer that runs.
        states_of: the id of each recurrent layer → the states that it keeps.
        image_rows: the input of that name.
        image_features: the input of that name.
        position_offsets: the input of that name.
        added_features: [B, S, hidden] each, the features to add after the first layers.
    """

    input_lengths: Tensor | None = None
    positions: Tensor | None = None
    seqlens_k: Tensor | None = None
    total_length: Tensor | None = None
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    present: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    updated: int | None = None
    given: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    buffered: bool = False
    masked: set[int] = field(default_factory=set)

    states: dict[StateKey, Tensor] = field(default_factory=dict)
    next_states: dict[StateKey, Tensor] = field(default_factory=dict)
    running: Tensor | None = None
    module: int | None = None
    states_of: dict[int, list[StateKey]] = field(default_factory=dict)

    image_rows: Tensor | None = None
    image_features: Tensor | None = None
    position_offsets: Tensor | None = None
    added_features: list[Tensor] = field(default_factory=list)

    @property
    def active(self) -> bool:
        """True inside a decoder call; outside, the transformed modules behave as they did
        before."""
        return self.input_lengths is not None

    @property
    def capacity(self) -> int:
        """T, the size of the buffers."""
        return next(iter(self.past.values()))[0].shape[2]

    def clear(self) -> None:
        """Forget the call; `buffered`, `masked` and `states_of` stay."""
        self.input_lengths = None
        self.positions = None
        self.seqlens_k = None
        self.total_length = None
        self.past = {}
        self.present = {}
        self.given = {}
        self.updated = None
        self.states = {}
        self.next_states = {}
        self.running = None
        self.image_rows = None
        self.image_features = None
        self.position_offsets = None
        self.added_features = []

    def note_state(self, layer: int, kind: str, index: int) -> None:
        """Remember that the module that is running keeps this state."""
        if self.module is None:
            raise UnsupportedModelError(
                f"layer {layer} keeps a {kind.replace('_', ' ')} outside of any known layer"
            )
        keys = self.states_of.setdefault(self.module, [])
        if (layer, kind, index) not in keys:
            keys.append((layer, kind, index))


class PassThroughLayer(LinearAttentionLayer, CacheLayerMixin):  # type: ignore[no-untyped-call, override]
    """One layer of the cache; `update` returns the new keys and values unchanged.

    Convolutional and recurrent states are kept as transformers keeps them, and noted when a layer
    makes them. Only the shape probe does so: in a decoder call, recurrent layers have a separate
    cache (`recurrent.LayerCache`)."""

    is_sliding = False

    def __init__(self, context: DecodeContext, index: int) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        LinearAttentionLayer.__init__(self, number_of_states=_MAX_STATES_OF_A_KIND)
        self._context = context
        self._index = index
        self.keys = self.values = torch.empty(0)  # no layer mistakes it for a state
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._context.updated = self._index
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        # Rows differ in length, so positions are always given. The parity gate refuses a model that
        # counts on this.
        return 0

    def get_max_length(self) -> int:
        return -1

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        self._context.note_state(self._index, "conv_state", state_idx)
        result: Tensor = super().update_conv_state(
            conv_states, state_idx, conv_kernel_size, **kwargs
        )
        return result

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._context.note_state(self._index, "recurrent_state", state_idx)
        result: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return result


class BufferedLayer(PassThroughLayer):  # type: ignore[no-untyped-call]
    """`update` writes the new keys and values into the layer's buffers and returns all of them, [B,
    H, T, D]."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        context = self._context
        if not context.past:  # the shape probe
            context.present[self._index] = (key_states, value_states)
            return key_states, value_states
        key, value = write_to_buffers(context, self._index, key_states, value_states)
        return key[..., : key_states.shape[-1]], value[..., : value_states.shape[-1]]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self._context.capacity if self._context.past else query_length), 0


class RetainedCache(Cache):
    """A `transformers` cache over the buffers of `context`, with `layers` layers at first; a
    further layer is added when it is used."""

    def __init__(self, context: DecodeContext, layers: int) -> None:
        kind = BufferedLayer if context.buffered else PassThroughLayer
        super().__init__(layer_class_to_replicate=lambda: kind(context, len(self.layers)))  # type: ignore[arg-type]
        self.layers.extend(kind(context, index) for index in range(layers))


def write_to_buffers(
    context: DecodeContext, layer: int, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Write new keys and values, [B, H, S, D or fewer], into the buffers of `layer`, and return
    `read_buffers`.

    Padding has no effect: it writes the first new token once more.
    """
    assert context.positions is not None
    assert context.input_lengths is not None
    columns = torch.arange(key.shape[2], dtype=torch.int32)[None]
    real = columns < context.input_lengths[:, None]
    positions = torch.where(real, context.positions, context.positions[:, :1])[:, None, :, None]
    result = []
    for buffer, states in zip(context.past[layer], (key, value), strict=True):
        states = torch.where(real[:, None, :, None], states, states[:, :, :1])
        states = F.pad(states, (0, buffer.shape[-1] - states.shape[-1]))
        result.append(buffer.scatter(2, positions.expand_as(states), states))
    context.present[layer] = (result[0], result[1])
    return read_buffers(context, layer)


def read_buffers(context: DecodeContext, layer: int) -> tuple[Tensor, Tensor]:
    """The keys and values of `layer`, [B, H, T, D], with 0 at positions without a token.

    Memory beyond a row's tokens may hold any numbers, and a NaN would get through a mask.
    """
    assert context.positions is not None
    assert context.input_lengths is not None
    total = context.positions[:, 0] + context.input_lengths
    key, value = context.present[layer]
    held = (torch.arange(key.shape[2])[None] < total[:, None])[:, None, :, None]
    return torch.where(held, key, 0.0), torch.where(held, value, 0.0)
