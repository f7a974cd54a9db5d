"""Recurrent and convolutional layers, run token by token over retained states.

One token at a time is exact for ragged rows: a token that is padding, or of a row that has ended, does not change the
layer's states. In a traced graph the loop over the tokens is an ONNX Scan, which `exporters.control_flow` makes from
two markers.
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
from qsample.transforms.cache import DecodeContext, RetainedCache, StateKey

MARKER_DOMAIN = "qsample"
BEGIN = "ScanBegin"  # inputs: states, then inputs [B, S, ..]; outputs: states, then one token of each input [B, ..]
END = "ScanEnd"  # inputs: next states, then results [B, ..]; outputs: final states, then results [B, S, ..]
NUM_STATES = "num_states"

Forward = Callable[..., Any]
Step = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class ScanRecurrentLayers:
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


class StepCache:
    """The cache of one recurrent layer for one token: whatever state the layer asks for is there."""

    def __init__(self, states: dict[StateKey, Tensor]) -> None:
        # Copies, because a layer may write into the state that it got.
        self.states = {key: state.clone() for key, state in states.items()}

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer_idx, "conv_state", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get((layer_idx, "recurrent_state", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any) -> Tensor:
        key = (layer_idx, "conv_state", state_idx)
        full = torch.cat([self.states[key], conv_states], dim=-1)
        self.states[key] = full[..., -self.states[key].shape[-1] :]
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **unused: Any
    ) -> Tensor:
        self.states[layer_idx, "recurrent_state", state_idx] = recurrent_states
        return recurrent_states


def _forward(context: DecodeContext, module: nn.Module, own: Forward, *args: Any, **kwargs: Any) -> Any:
    """`own(*args, **kwargs)` of `module`; in a decoder call, token by token over its retained states."""
    if not context.active:
        context.module = id(module)
        try:
            return own(*args, **kwargs)
        finally:
            context.module = None
    bound = inspect.signature(own).bind(*args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if name != "kwargs"} | bound.get("kwargs", {})
    given = {name: value for name, value in given.items() if not name.endswith("mask")}
    keys = context.states_of[id(module)]
    hidden = given.pop("hidden_states")
    cache = next((name for name, value in given.items() if isinstance(value, RetainedCache)), None)
    if cache is None or any(isinstance(value, Tensor) for value in given.values()):
        raise UnsupportedModelError(f"{type(module).__name__} takes {sorted(given)} beside its hidden states")
    assert context.input_lengths is not None
    assert context.positions is not None
    columns = torch.arange(hidden.shape[1], dtype=torch.int32)[None]
    real = columns < context.input_lengths[:, None]
    if context.running is not None:
        real = real & context.running[:, None]
    is_tuple: list[bool] = []

    def step(states: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        token, advances = inputs
        step_cache = StepCache(dict(zip(keys, states, strict=True)))
        result = own(hidden_states=token[:, None], **{**given, cache: step_cache})
        is_tuple.append(isinstance(result, tuple))
        output = result[0] if is_tuple[0] else result
        after = [_where(advances, step_cache.states[key], old) for key, old in zip(keys, states, strict=True)]
        return after, output[:, 0]

    # A row that begins still holds the states of the row before it.
    begun = context.positions[:, 0] > 0
    start = [_where(begun, context.states[key], torch.zeros_like(context.states[key])) for key in keys]
    final, output = scan(step, start, [hidden, real])
    context.next_states |= dict(zip(keys, final, strict=True))
    return (output, None) if is_tuple[0] else output


def _where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in those rows, `old` in the others. rows: [B] bool."""
    return torch.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new.to(old.dtype), old)


def scan(step: Step, states: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Run `step(states, inputs)` for each index on axis 1 of `inputs`, each [B, S, ..].

    Returns the states after the last step, and the results stacked on axis 1.
    """
    if not torch.compiler.is_exporting():
        results = []
        for index in range(inputs[0].shape[1]):
            states, result = step(states, [tensor[:, index] for tensor in inputs])
            results.append(result)
        return states, torch.stack(results, dim=1)
    begun = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{BEGIN}",
        [*states, *inputs],
        {NUM_STATES: len(states)},
        dtypes=[tensor.dtype for tensor in (*states, *inputs)],
        shapes=[*(state.shape for state in states), *((x.shape[0], *x.shape[2:]) for x in inputs)],
        version=1,
    )
    after, result = step(list(begun[: len(states)]), list(begun[len(states) :]))
    length = inputs[0].shape[1]
    *final, output = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{END}",
        [*after, result],
        {NUM_STATES: len(states)},
        dtypes=[tensor.dtype for tensor in (*after, result)],
        shapes=[*(state.shape for state in after), (result.shape[0], length, *result.shape[1:])],
        version=1,
    )
    return final, output
