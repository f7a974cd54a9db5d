"""Recurrent and convolutional layers over retained states. Padding and rows that have ended change no state.

A layer whose forward calls nothing but functions that `recurrent_operators` replaces runs once over all tokens of a
call: its forward, with these functions replaced, over a cache that believes that the layer begins. Any other layer
runs token by token: exact for ragged rows, since a token that does not count changes no state. In a traced graph that
loop is an ONNX Scan, made by `exporters.lowering` from two markers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext, RetainedCache, StateKey
from qsample.transforms.markers import MARKER_DOMAIN, NUM_STATES, SCAN_BEGIN, SCAN_END
from qsample.transforms.recurrent_operators import CONVOLUTION, RECURRENCES, Chunk, convolve

Forward = Callable[..., Any]
Step = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]


def retain_recurrent_states(model: PreTrainedModel, context: DecodeContext) -> None:
    """Replace the `forward` of every module that updates a convolutional or recurrent state of the cache."""
    for module in model.modules():
        if _keeps_state(type(module)):
            replaced = module.__dict__.get("forward")
            own = replaced.args[2] if isinstance(replaced, functools.partial) else module.forward
            module.forward = functools.partial(_run_layer, context, module, own)


def _keeps_state(module: type[nn.Module]) -> bool:
    if "forward" not in module.__dict__:
        return False
    source = inspect.getsource(module.forward)
    return ".update_conv_state(" in source or ".update_recurrent_state(" in source


def _run_layer(
    context: DecodeContext, module: nn.Module, own: Forward, *args: Any, **kwargs: Any
) -> Any:
    """`own(*args, **kwargs)` of `module`; in a decoder call, over its retained states."""
    chunked = recurrence_of(type(module))
    if not context.active:
        context.module = id(module)
        try:
            return (
                own(*args, **kwargs)
                if chunked is None
                else _forward(module, Chunk())(module, *args, **kwargs)
            )
        finally:
            context.module = None
    call = _call(context, module, own, args, kwargs)
    result = _run_by_token(own, call) if chunked is None else _run_whole(module, call)
    context.next_states |= call.next_states
    return result


def _call(
    context: DecodeContext,
    module: nn.Module,
    own: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> LayerCall:
    bound = inspect.signature(own).bind(*args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if name != "kwargs"} | bound.get(
        "kwargs", {}
    )
    given = {name: value for name, value in given.items() if not name.endswith("mask")}
    hidden = given.pop("hidden_states")
    cache = next((name for name, value in given.items() if isinstance(value, RetainedCache)), None)
    if cache is None or any(isinstance(value, Tensor) for value in given.values()):
        raise UnsupportedModelError(
            f"{type(module).__name__} takes {sorted(given)} next to its hidden states"
        )
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
    states = {
        key: torch.where(begun.reshape(-1, *[1] * (state.ndim - 1)), state, 0.0)
        for key, state in old.items()
    }
    return LayerCall(hidden, cache, given, states, advances, columns < advances[:, None])


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer, however it runs. hidden: [B, S, hidden]. cache: the name of the argument for the cache.
    options: the layer's other arguments. states, next_states: before the first token (zeros for a row that begins), and
    after the last. advances: [B] int32, how many tokens a row moves on by, 0 for a row that has ended. real: [B, S]
    bool, these tokens."""

    hidden: Tensor
    cache: str
    options: Mapping[str, Any]
    states: Mapping[StateKey, Tensor]
    advances: Tensor
    real: Tensor
    next_states: dict[StateKey, Tensor] = field(default_factory=dict)


def recurrence_of(module: type[nn.Module]) -> tuple[str, ...] | None:
    """The functions of a layer's forward that `recurrent_operators` replaces; None if its states need more."""
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


def _run_whole(module: nn.Module, call: LayerCall) -> Any:
    """Run `module` over all tokens of `call`."""
    recurrent = [state for (_, kind, _), state in call.states.items() if kind == "recurrent_state"]
    chunk = Chunk(call.real, state=recurrent[0] if recurrent else None)
    cache = ChunkCache(call, chunk)
    # Padding has no meaning, but it must not be a NaN: no factor of 0 would stop it.
    hidden = torch.where(call.real[..., None], call.hidden, 0.0)
    return _forward(module, chunk)(
        module, hidden_states=hidden, **call.options, **{call.cache: cache}
    )


class LayerCache:
    """The methods of transformers' caches that a recurrent layer calls to read its previous states."""

    def __init__(self, states: dict[StateKey, Tensor]) -> None:
        self.states = states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer_idx, "conv_state", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer_idx, "recurrent_state", state_idx))


class ChunkCache(LayerCache):
    """The cache of a recurrent layer for all tokens of a call: it shows no previous state."""

    def __init__(self, call: LayerCall, chunk: Chunk) -> None:
        super().__init__({})
        self._call, self._chunk = call, chunk

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
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
    """The forward of `module`'s class, with the functions of `recurrent_operators` in place of transformers'."""
    own = inspect.unwrap(type(module).forward)
    assert isinstance(own, FunctionType)
    rules: Mapping[str, Any] = {CONVOLUTION: convolve, **RECURRENCES}
    names = {
        name: functools.partial(rules[name], chunk) for name in recurrence_of(type(module)) or ()
    }
    forward = FunctionType(
        own.__code__, {**own.__globals__, **names}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


class StepCache(LayerCache):
    """The cache of a recurrent layer for a single token: it has every state that the layer reads."""

    def __init__(self, states: dict[StateKey, Tensor]) -> None:
        # Copies: a layer may write into its state.
        super().__init__({key: state.clone() for key, state in states.items()})

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        key = (layer_idx, "conv_state", state_idx)
        full = torch.cat([self.states[key], conv_states], dim=-1)
        self.states[key] = full[..., -self.states[key].shape[-1] :]
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        self.states[layer_idx, "recurrent_state", state_idx] = recurrent_states
        return recurrent_states


def _run_by_token(own: Forward, call: LayerCall) -> Any:
    """The layer's `own` forward, for each token of `call`."""
    keys = list(call.states)
    is_tuple: list[bool] = []

    def step(states: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        token, advances = inputs
        step_cache = StepCache(dict(zip(keys, states, strict=True)))
        result = own(hidden_states=token[:, None], **{**call.options, call.cache: step_cache})
        is_tuple.append(isinstance(result, tuple))
        output = result[0] if is_tuple[0] else result
        after = [
            where(advances, step_cache.states[key], old)
            for key, old in zip(keys, states, strict=True)
        ]
        return after, output[:, 0]

    final, output = scan(step, list(call.states.values()), [call.hidden, call.real])
    call.next_states.update(zip(keys, final, strict=True))
    return (output, None) if is_tuple[0] else output


def where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in `rows`, `old` in the rest. rows: [B] bool."""
    return torch.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new.to(old.dtype), old)


def scan(step: Step, states: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Run `step(states, inputs)` for each index on axis 1 of `inputs`, each [B, S, ..]: the states after the last step,
    and the results stacked on axis 1."""
    if not torch.compiler.is_exporting():
        results = []
        for index in range(inputs[0].shape[1]):
            states, result = step(states, [tensor[:, index] for tensor in inputs])
            results.append(result)
        return states, torch.stack(results, dim=1)
    begun = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{SCAN_BEGIN}",
        [*states, *inputs],
        {NUM_STATES: len(states)},
        dtypes=[tensor.dtype for tensor in (*states, *inputs)],
        shapes=[*(state.shape for state in states), *((x.shape[0], *x.shape[2:]) for x in inputs)],
        version=1,
    )
    after, result = step(list(begun[: len(states)]), list(begun[len(states) :]))
    length = inputs[0].shape[1]
    *final, output = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{SCAN_END}",
        [*after, result],
        {NUM_STATES: len(states)},
        dtypes=[tensor.dtype for tensor in (*after, result)],
        shapes=[*(state.shape for state in after), (result.shape[0], length, *result.shape[1:])],
        version=1,
    )
    return final, output
