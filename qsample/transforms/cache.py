"""The retained key-value cache as transformers sees it: buffers that hand new keys and values straight through.

GroupQueryAttention itself writes into the retained buffers, so transformers must neither concatenate nor copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PassThroughLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's retained buffers, [B, H, T, D] each; `update` returns the new keys and values unchanged."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        # No int(): it would fix the capacity at the value it is traced with.
        self._capacity: int = keys.shape[-2] if keys.ndim == 4 else 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers come from outside."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        # Positions are always given; a model that asks the cache instead is caught by the parity gate.
        return 0

    def get_max_length(self) -> int:
        return self._capacity


class PassThroughCache(Cache):
    """A `transformers` cache over the retained buffers of every attention layer."""

    def __init__(self, buffers: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(layers=[PassThroughLayer(key, value) for key, value in buffers])


@dataclass(slots=True)
class DecodeContext:
    """What one call of the decoder shares with the modules inside the model, while that call is traced.

    input_lengths: [B] int32, real tokens a row. seqlens_k: [B] int32, index of the last key a row sees, counting its
    padding. total_length: scalar int32, GroupQueryAttention's total_sequence_length. past: the retained (key, value)
    buffers, a layer each. present: layer index → the (key, value) that GroupQueryAttention returned.
    """

    input_lengths: Tensor | None = None
    seqlens_k: Tensor | None = None
    total_length: Tensor | None = None
    past: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    present: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """True inside a decoder call; outside, the transformed modules behave as they did before."""
        return self.input_lengths is not None

    def clear(self) -> None:
        self.input_lengths = self.seqlens_k = self.total_length = None
        self.past, self.present = [], {}
