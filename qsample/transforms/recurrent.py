"""Recurrent and convolutional layers over retained states. Padding and rows that have ended change
no state.

A layer whose forward touches its states only in functions that `recurrent_operators` replaces runs
once over all tokens of a call: its forward, with these functions replaced, over a cache that shows
no previous state. Any other layer runs token by token, which is exact for ragged rows: a token that
is not real changes no state. In a traced graph that loop is an ONNX Scan, which
`exporters.lowering` makes from two markers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qsample.errors import UnsupportedModelError
from qsample.transforms.cache import DecodeContext, RetainedCache, StateKey
from qsample.transforms.markers import MARKER_DOMAIN, NUM_STATES, SCAN_BEGIN, SCAN_END
from qsample.transforms.recurrent_operators import CONVOLUTION, RECURRENCES, Chunk, replacement

Forward = Callable[..., Any]
Step = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]
_CONVOLUTION_STATE: Final = "conv_state"
_RECURRENT_STATE: Final = "recurrent_state"


def retain_recurrent_states(model: PreTrainedModel, context: DecodeContext) -> None:
    """Replace the `forward` of every module that updates a convolutional or recurrent state of the
    cache."""
    for module in model.modules():
        if _keeps_state(type(module)):
            replaced = module.__dict__.get("forward")
            forward = replaced.own if isinstance(replaced, RetainedForward) else module.forward
            module.forward = RetainedForward(context, module, forward)


def _keeps_state(module: type[nn.Module]) -> bool:
    """Whether the forward of that class updates a state of the cache."""
    if "forward" not in module.__dict__:
        return False
    source = inspect.getsource(module.forward)
    return ".update_conv_state(" in source or ".update_recurrent_state(" in source


@dataclass(frozen=True, slots=True, eq=False)
class RetainedForward:
    """The forward of a recurrent layer; in a decoder call it runs over the retained states.

    Attributes:
        context: the decoder call.
        module: the layer.
        own: the layer's own forward.
    """

    context: DecodeContext
    module: nn.Module
    own: Forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = self.context
        runs_whole = recurrence_of(type(self.module)) is not None
        if not context.active:
            context.module = id(self.module)
            try:
                if runs_whole:
                    return _forward(self.module, Chunk())(self.module, *args, **kwargs)
                return self.own(*args, **kwargs)
            finally:
                context.module = None
        call = self._layer_call(args, kwargs)
        if runs_whole:
            result = _run_whole(self.module, call)
        else:
            result = _run_by_token(self.own, call)
        context.next_states |= call.next_states
        return result

    def _layer_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """The call with these arguments, over the retained states of the layer."""
        context = self.context
        options = dict(inspect.signature(self.own).bind(*args, **kwargs).arguments)
        options |= options.pop("kwargs", {})
        options = {name: value for name, value in options.items() if not name.endswith("mask")}
        hidden = options.pop("hidden_states")
        caches = [name for name, value in options.items() if isinstance(value, RetainedCache)]
        if not caches or any(isinstance(value, Tensor) for value in options.values()):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} takes {sorted(options)} next to its hidden states"
            )
        cache_name = caches[0]
        del options[cache_name]
        assert context.input_lengths is not None
        assert context.positions is not None
        advances = context.input_lengths
        if context.running is not None:
            advances = torch.where(context.running, advances, 0)
        columns = torch.arange(hidden.shape[1], dtype=torch.int32)[None]
        # A row that begins still holds the states of the previous row in its place.
        continues = context.positions[:, 0] > 0
        states = {}
        for key in context.states_of[id(self.module)]:
            state = context.states[key]
            rows = continues.reshape(-1, *[1] * (state.ndim - 1))
            states[key] = torch.where(rows, state, 0.0)
        real = columns < advances[:, None]
        return LayerCall(hidden, cache_name, options, states, advances, real)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer, whether it runs over all tokens at once or token by token.

    Attributes:
        hidden: [B, S, hidden].
        cache_name: the name of the layer's argument for the cache.
        options: the layer's other arguments.
        states: the states before the first token, zeros for a row that begins.
        advances: [B] int32, the number of tokens that each row reads; 0 for a row that has ended.
        real: [B, S] bool, the tokens that the rows read.
        next_states: the states after the last token, filled in by the run.
    """

    hidden: Tensor
    cache_name: str
    options: Mapping[str, Any]
    states: Mapping[StateKey, Tensor]
    advances: Tensor
    real: Tensor
    next_states: dict[StateKey, Tensor] = field(default_factory=dict)


def recurrence_of(module: type[nn.Module]) -> tuple[str, ...] | None:
    """The functions in a layer's forward that `recurrent_operators` replaces; None if others touch
    its states."""
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
    recurrent = [state for (_, kind, _), state in call.states.items() if kind == _RECURRENT_STATE]
    chunk = Chunk(call.real, state=recurrent[0] if recurrent else None)
    cache = ChunkCache(call, chunk)
    # The value of padding does not matter, unless it is a NaN, which a factor of 0 would not stop.
    hidden = torch.where(call.real[..., None], call.hidden, 0.0)
    return _forward(module, chunk)(
        module, hidden_states=hidden, **call.options, **{call.cache_name: cache}
    )


class LayerCache:
    """The methods of transformers' caches that a recurrent layer calls to read its previous
    states."""

    def __init__(self, states: dict[StateKey, Tensor]) -> None:
        self.states = states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer_idx, _CONVOLUTION_STATE, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer_idx, _RECURRENT_STATE, state_idx))


class ChunkCache(LayerCache):
    """The cache of a recurrent layer for all tokens of a call: it shows no previous state."""

    def __init__(self, call: LayerCall, chunk: Chunk) -> None:
        super().__init__({})
        self._call = call
        self._chunk = chunk

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        """conv_states: [B, C, S], the convolution's input. The row's new state ends at its last
        real token."""
        key = (layer_idx, _CONVOLUTION_STATE, state_idx)
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
        key = (layer_idx, _RECURRENT_STATE, state_idx)
        self._call.next_states[key] = recurrent_states.to(self._call.states[key].dtype)
        return recurrent_states


def _code(module: type[nn.Module]) -> CodeType:
    function = inspect.unwrap(module.forward)
    assert isinstance(function, FunctionType)
    return function.__code__


def _forward(module: nn.Module, chunk: Chunk) -> FunctionType:
    """The forward of `module`'s class, with the functions of `recurrent_operators` in place of
    transformers'."""
    own = inspect.unwrap(type(module).forward)
    assert isinstance(own, FunctionType)
    names = recurrence_of(type(module)) or ()
    replacements = {name: replacement(name, chunk) for name in names}
    namespace = {**own.__globals__, **replacements}
    forward = FunctionType(own.__code__, namespace, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


class StepCache(LayerCache):
    """The cache of a recurrent layer for a single token: it has every state that the layer
    reads."""

    def __init__(self, states: dict[StateKey, Tensor]) -> None:
        # A layer may write into its state, so it gets copies.
        super().__init__({key: state.clone() for key, state in states.items()})

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        key = (layer_idx, _CONVOLUTION_STATE, state_idx)
        full = torch.cat([self.states[key], conv_states], dim=-1)
        self.states[key] = full[..., -self.states[key].shape[-1] :]
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        self.states[layer_idx, _RECURRENT_STATE, state_idx] = recurrent_states
        return recurrent_states


def _run_by_token(own: Forward, call: LayerCall) -> Any:
    """The layer's `own` forward, for each token of `call`."""
    keys = list(call.states)
    returns_tuple: list[bool] = []

    def step(states: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        token, advances = inputs
        step_cache = StepCache(dict(zip(keys, states, strict=True)))
        options = {**call.options, call.cache_name: step_cache}
        result = own(hidden_states=token[:, None], **options)
        returns_tuple.append(isinstance(result, tuple))
        output = result[0] if returns_tuple[0] else result
        after = []
        for key, old in zip(keys, states, strict=True):
            after.append(where(advances, step_cache.states[key], old))
        return after, output[:, 0]

    final, output = scan(step, list(call.states.values()), [call.hidden, call.real])
    call.next_states.update(zip(keys, final, strict=True))
    return (output, None) if returns_tuple[0] else output


def where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the `rows`, [B] bool, and `old` in all others."""
    return torch.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new.to(old.dtype), old)


def scan(step: Step, states: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Run a step for each index on axis 1 of the inputs; in an export, leave two markers for a
    Scan.

    Args:
        step: takes the states and an index of each input, [B, ..], and returns the next states and
            a result.
        states: the states before the first step.
        inputs: [B, S, ..] each.

    Returns:
        The states after the last step, and the results stacked on axis 1.
    """
    if not torch.compiler.is_exporting():
        results = []
        for index in range(inputs[0].shape[1]):
            states, result = step(states, [tensor[:, index] for tensor in inputs])
            results.append(result)
        return states, torch.stack(results, dim=1)
    num_states = len(states)
    token_shapes = [(tensor.shape[0], *tensor.shape[2:]) for tensor in inputs]
    begun = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{SCAN_BEGIN}",
        [*states, *inputs],
        {NUM_STATES: num_states},
        dtypes=[tensor.dtype for tensor in (*states, *inputs)],
        shapes=[*(state.shape for state in states), *token_shapes],
        version=1,
    )
    after, result = step(list(begun[:num_states]), list(begun[num_states:]))
    length = inputs[0].shape[1]
    stacked_shape = (result.shape[0], length, *result.shape[1:])
    *final, output = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{SCAN_END}",
        [*after, result],
        {NUM_STATES: num_states},
        dtypes=[tensor.dtype for tensor in (*after, result)],
        shapes=[*(state.shape for state in after), stacked_shape],
        version=1,
    )
    return final, output
