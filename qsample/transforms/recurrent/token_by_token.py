"""A recurrent or convolutional layer, run token by token over its retained states.

One token at a time is exact for ragged rows: a token that is padding, or of a row that has ended, does not change the
layer's states. In a traced graph the loop over the tokens is an ONNX Scan, which `exporters.control_flow` makes from
two markers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsample.transforms.cache import StateKey
from qsample.transforms.markers import MARKER_DOMAIN, NUM_STATES, SCAN_BEGIN, SCAN_END
from qsample.transforms.recurrent.call import LayerCall

Forward = Callable[..., Any]
Step = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]


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


def run(own: Forward, call: LayerCall) -> Any:
    """The layer's `own` forward, for each token of `call`."""
    keys = list(call.states)
    is_tuple: list[bool] = []

    def step(states: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        token, advances = inputs
        step_cache = StepCache(dict(zip(keys, states, strict=True)))
        result = own(hidden_states=token[:, None], **{**call.options, call.cache: step_cache})
        is_tuple.append(isinstance(result, tuple))
        output = result[0] if is_tuple[0] else result
        after = [where(advances, step_cache.states[key], old) for key, old in zip(keys, states, strict=True)]
        return after, output[:, 0]

    final, output = scan(step, list(call.states.values()), [call.hidden, call.real])
    call.next_states.update(zip(keys, final, strict=True))
    return (output, None) if is_tuple[0] else output


def where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
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
