"""A recurrent or convolutional layer, run once over all tokens of a call.

The layer's own forward runs, with the functions of its module that touch a state replaced by those of `rules`, over a
cache that believes that the layer begins: what it starts from is known to these functions. Padding and rows that have
ended write nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from qsample.transforms.recurrent.call import LayerCall
from qsample.transforms.recurrent.rules import CONVOLUTION, RECURRENCES, Chunk, convolve


def recurrence_of(module: type[nn.Module]) -> tuple[str, ...] | None:
    """The functions that a layer's forward calls and that `rules` replaces; None if its states need others."""
    names = _code(module).co_names
    replaced = []
    if "update_conv_state" in names:
        if CONVOLUTION not in names:
            return None
        replaced.append(CONVOLUTION)
    if "update_recurrent_state" in names:
        recurrences = [name for name in RECURRENCES if name in names]
        if len(recurrences) != 1:
            return None
        replaced += recurrences
    return tuple(replaced)


def probe(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run `module` from the beginning, to see which states it keeps."""
    return _forward(module, Chunk())(module, *args, **kwargs)


def run(module: nn.Module, call: LayerCall) -> Any:
    """Run `module` over all tokens of `call`."""
    recurrent = [state for (_, kind, _), state in call.states.items() if kind == "recurrent_state"]
    chunk = Chunk(call.real, state=recurrent[0] if recurrent else None)
    cache = ChunkCache(call, chunk)
    # What padding computes has no meaning; it must not be a NaN either, which no factor of 0 would stop.
    hidden = torch.where(call.real[..., None], call.hidden, 0.0)
    return _forward(module, chunk)(module, hidden_states=hidden, **call.options, **{call.cache: cache})


class ChunkCache:
    """The cache of one recurrent layer for one call, which has no previous state to show."""

    def __init__(self, call: LayerCall, chunk: Chunk) -> None:
        self._call, self._chunk = call, chunk

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any) -> Tensor:
        """conv_states: [B, C, S], the convolution's input. The row's new state ends at its last real token."""
        key = (layer_idx, "conv_state", state_idx)
        before = self._call.states[key]
        window = torch.cat([before, conv_states.to(before.dtype)], dim=-1)
        columns = self._call.advances[:, None] + torch.arange(before.shape[-1], dtype=torch.int32)
        columns = columns.to(torch.int64)[:, None].expand(-1, before.shape[1], -1)
        self._call.next_states[key] = window.gather(2, columns)
        self._chunk.window = before
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        key = (layer_idx, "recurrent_state", state_idx)
        self._call.next_states[key] = recurrent_states.to(self._call.states[key].dtype)
        return recurrent_states


def _code(module: type[nn.Module]) -> CodeType:
    function = inspect.unwrap(module.forward)
    assert isinstance(function, FunctionType)
    return function.__code__


def _forward(module: nn.Module, chunk: Chunk) -> FunctionType:
    """The forward of `module`'s class, with functions of `rules` in place of its module's."""
    own = inspect.unwrap(type(module).forward)
    assert isinstance(own, FunctionType)
    rules: Mapping[str, Any] = {CONVOLUTION: convolve, **RECURRENCES}
    names = {name: functools.partial(rules[name], chunk) for name in recurrence_of(type(module)) or ()}
    forward = FunctionType(own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward
