"""The transform that lets recurrent and convolutional layers run over retained states.

A layer that calls nothing but what `rules` has an operator for runs once over all tokens of a call; any other runs
token by token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext, RetainedCache
from qsample.transforms.recurrent import token_by_token, whole_chunk
from qsample.transforms.recurrent.call import LayerCall

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RetainRecurrentStates:
    """Replace the `forward` of every module that updates a convolutional or recurrent state of the cache."""

    context: DecodeContext

    def __call__(self, model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
        modified = False
        for module in model.modules():
            if _keeps_state(type(module)):
                replaced = module.__dict__.get("forward")
                own = replaced.args[2] if isinstance(replaced, functools.partial) else module.forward
                modified |= replaced is None
                module.forward = functools.partial(_forward, self.context, module, own)
        return model, modified


def _keeps_state(module: type[nn.Module]) -> bool:
    if "forward" not in module.__dict__:
        return False
    source = inspect.getsource(module.forward)
    return ".update_conv_state(" in source or ".update_recurrent_state(" in source


def _forward(context: DecodeContext, module: nn.Module, own: Forward, *args: Any, **kwargs: Any) -> Any:
    """`own(*args, **kwargs)` of `module`; in a decoder call, over its retained states."""
    chunked = whole_chunk.recurrence_of(type(module))
    if not context.active:
        context.module = id(module)
        try:
            return own(*args, **kwargs) if chunked is None else whole_chunk.probe(module, *args, **kwargs)
        finally:
            context.module = None
    call = _call(context, module, own, args, kwargs)
    result = token_by_token.run(own, call) if chunked is None else whole_chunk.run(module, call)
    context.next_states |= call.next_states
    return result


def _call(
    context: DecodeContext, module: nn.Module, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LayerCall:
    bound = inspect.signature(own).bind(*args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if name != "kwargs"} | bound.get("kwargs", {})
    given = {name: value for name, value in given.items() if not name.endswith("mask")}
    hidden = given.pop("hidden_states")
    cache = next((name for name, value in given.items() if isinstance(value, RetainedCache)), None)
    if cache is None or any(isinstance(value, Tensor) for value in given.values()):
        raise UnsupportedModelError(f"{type(module).__name__} takes {sorted(given)} beside its hidden states")
    del given[cache]
    assert context.input_lengths is not None
    assert context.positions is not None
    advances = context.input_lengths
    if context.running is not None:
        advances = torch.where(context.running, advances, 0)
    columns = torch.arange(hidden.shape[1], dtype=torch.int32)[None]
    # A row that begins still holds the states of the row before it.
    begun = context.positions[:, 0] > 0
    old = {key: context.states[key] for key in context.states_of[id(module)]}
    states = {key: torch.where(begun.reshape(-1, *[1] * (state.ndim - 1)), state, 0.0) for key, state in old.items()}
    return LayerCall(hidden, cache, given, states, advances, columns < advances[:, None])
