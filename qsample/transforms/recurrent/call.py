"""`LayerCall`: what one decoder call asks of one recurrent layer, however the layer runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from qsample.transforms.cache import StateKey


@dataclass(frozen=True, slots=True)
class LayerCall:
    """hidden: [B, S, hidden]. cache: the name of the argument for the cache. options: the layer's other arguments.
    states: before the first token, zeros for a row that begins. advances: [B] int32, how many tokens a row moves on by,
    0 for one that has ended. real: [B, S] bool, which they are. next_states: what the layer leaves."""

    hidden: Tensor
    cache: str
    options: Mapping[str, Any]
    states: Mapping[StateKey, Tensor]
    advances: Tensor
    real: Tensor
    next_states: dict[StateKey, Tensor] = field(default_factory=dict)
