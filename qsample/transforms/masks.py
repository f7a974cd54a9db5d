"""transformers' mask patterns as masks over the retained buffers, and whether a pattern is plainly causal.

transformers describes a mask as a function of (batch, head, query position, key position), which holds for buffers as
it does for a growing cache: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

MaskFunction = Callable[..., Tensor]
_LARGEST_EXPONENT = 17


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """Which keys a query sees: `function(batch, head, query, key)`, of index tensors that broadcast together."""

    function: MaskFunction

    def allowed(self, positions: Tensor, keys: int) -> Tensor:
        """[B, 1, S, keys] bool, for queries at `positions` [B, S] and keys at 0, 1, .. keys - 1."""
        batch = torch.arange(positions.shape[0])[:, None, None, None]
        head = torch.zeros(1, dtype=torch.int64)[None, None, None]
        key = torch.arange(keys)[None, None, None]
        allowed = self.function(batch, head, positions[:, None, :, None], key)
        return allowed.expand(positions.shape[0], 1, positions.shape[1], keys)

    def is_causal(self, window: int | None) -> bool:
        """Whether a query sees itself and the keys before it, `window` in all (None: every one), and nothing else.

        Judged at positions around the powers of two and the window, where windows and chunks have their edges.
        """
        near = [2**exponent for exponent in range(_LARGEST_EXPONENT + 1)] + ([window, 2 * window] if window else [])
        at = torch.tensor(sorted({max(0, position + offset) for position in near for offset in (-2, -1, 0, 1)}))
        query, key, zero = at[:, None], at[None], torch.zeros(1, 1, dtype=torch.int64)
        expected = causal(window)(zero, zero, query, key)
        return bool((self.function(zero, zero, query, key).expand_as(expected) == expected).all())


def causal(window: int | None = None) -> MaskFunction:
    """A query sees itself and the keys before it, `window` in all; None: every one."""
    if window is None or window == 0:
        return lambda batch, head, query, key: key <= query
    return lambda batch, head, query, key: (key <= query) & (query - key < window)


def mask_rule(*, mask_function: MaskFunction, **unused: Any) -> MaskRule:
    """The mask function to register with transformers: returns the rule, from which the caller makes its mask."""
    return MaskRule(mask_function)


@contextmanager
def eager_masks_over_buffers(positions: Tensor, capacity: int) -> Iterator[None]:
    """While open, transformers' "eager" masks are float masks [B, 1, S, capacity] for queries at `positions` [B, S]."""

    def mask(*, mask_function: MaskFunction, dtype: torch.dtype = torch.float32, **unused: Any) -> Tensor:
        allowed = MaskRule(mask_function).allowed(positions, capacity)
        return torch.where(allowed, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = mask
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]  # type: ignore[no-untyped-call]
