"""The graphs of policy components of ONNX workflows: sampler, termination and state update.

Sources: onnx/onnx#8184 and onnx-genai. The graphs have exactly the tensors
of version 2 of the contracts: no penalties, no masks, no log-probabilities. A row is enabled if it
is active and not done. The first axis of every tensor is `batch`. onnx-genai leaves the random
numbers to the producer: number `counter` of a row's seed is the same as in a package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.addons.policy.uniforms import uniforms
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import CANDIDATES, NOISE_STREAM, REPLAY_ROWS, VOCAB, TensorSpec
from qsample.sampler.build import finished, new_graph, set_outputs
from qsample.sampler.call import DrawCall, Uniforms
from qsample.sampler.draw import draw
from qsample.sampler.replay_draw import draw_processed
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    building,
    constant,
    maximum,
    minimum,
    op,
    size,
    where,
)

SAMPLER: Final = "onnx-genai.token-sampler"
TERMINATION: Final = "onnx-genai.termination-predicate"
STATE_UPDATE: Final = "onnx-genai.state-update"
VERSION: Final = "2"
NO_TOKEN: Final = -1
_BATCH: Final = "batch"
_LARGEST_TOP_K: Final = 2**31 - 1
# Positions are int32, so a key has numbers for this many counters.
_POSITIONS_PER_KEY: Final = 2**31


def _rows(name: str, dtype: str, *axes: str | int) -> TensorSpec:
    """A tensor with a row for each row of the batch; axes: its further axes."""
    return TensorSpec(name, dtype, (_BATCH, *axes), "")


def sampler_ports(logit_axes: tuple[str | int, ...] = (VOCAB,)) -> GraphSpec:
    """The tensors of `build_token_sampler`.

    Args:
        logit_axes: the axes of the logits after the batch.
    """
    inputs = (
        _rows("logits", "float32", *logit_axes),
        _rows("temperature", "float32"),
        _rows("top_k", "int64"),
        _rows("top_p", "float32"),
        _rows("min_p", "float32"),
        _rows("seed", "int64"),
        _rows("counter", "int64"),
        _rows("active", "bool"),
        _rows("done", "bool"),
    )
    return GraphSpec(inputs, (), (_rows("token", "int64"), _rows("next_counter", "int64")))


TERMINATION_PORTS: Final = GraphSpec(
    (
        _rows("tokens", "int64"),
        _rows("eos_ids", "int64", "num_eos"),
        _rows("eos_lengths", "int64"),
        TensorSpec("iteration", "int64", (1,), ""),
        _rows("max_iterations", "int64"),
        _rows("active", "bool"),
    ),
    (),
    (_rows("done", "bool"), _rows("next_active", "bool"), TensorSpec("continue", "bool", (1,), "")),
)
STATE_UPDATE_PORTS: Final = GraphSpec(
    (
        _rows("current", "int64", 1),
        _rows("update", "int64", 1),
        _rows("active", "bool"),
        _rows("done", "bool"),
    ),
    (),
    (_rows("next", "int64", 1),),
)


class _PolicyCall(DrawCall):
    """The inputs of the sampler component, as the draw reads the inputs of a decode step."""

    def __init__(self, interface: Interface, inputs: Mapping[str, Tensor]) -> None:
        enabled = inputs["active"] & ~inputs["done"]
        # Larger counters continue with other keys.
        self._position = op("Mod", inputs["counter"], _POSITIONS_PER_KEY)
        self._key = inputs["seed"] + (inputs["counter"] - self._position) / _POSITIONS_PER_KEY
        top_k = minimum(maximum(inputs["top_k"], 0), _LARGEST_TOP_K).to(INT32)
        temperature = where(inputs["top_k"].equals(1), 0.0, inputs["temperature"])
        read = {**inputs, "temperature": temperature, "top_k": top_k}
        if interface.captured:
            # Without control flow, nothing is left out: the host does not say what its rows need.
            rows = op("Range", 0, op("Squeeze", size(inputs["counter"], 0)), 1)
            read |= {spec.name: rows for spec in REPLAY_ROWS}
        super().__init__(interface, read)
        self.running = enabled
        self.sampling = enabled

    def uniforms(self) -> Uniforms:
        """Number `counter` of each row's seed, computed once, for all branches of the draw."""
        number = uniforms(self._key, self._position.to(INT32), NOISE_STREAM)
        return lambda buffer: number


def build_token_sampler(
    vocab_size: int, *, positions: bool = False, control_flow: bool = True
) -> ir.Model:
    """Build the component `onnx-genai.token-sampler@2`, with the tensors of `sampler_ports`.

    A row with a temperature of 0 or less, or with a top_k of 1, gets the first of its largest
    logits. Otherwise temperature, top-k (0 or less: off), top-p in (0, 1] (1: off) and min-p in [0,
    1] (0: off) apply in this order, as in packages, and the token is drawn; a logit of -inf is
    never drawn. A row that is not enabled gets token -1 and keeps its counter; other counters rise
    by 1. An enabled row also gets -1 if a NaN or +inf is among its logits, or if no logit is
    finite.

    Args:
        vocab_size: V, at least 1.
        positions: whether the logits are [batch, S, V], of which the last position counts;
            otherwise they are [batch, V].
        control_flow: use If to skip computations that no row needs; False for devices that capture
            and replay graphs.

    Raises:
        ValueError: the vocabulary is empty.
    """
    interface = Interface(vocab_size, (), captured=not control_flow)
    spec = sampler_ports(("sequence", VOCAB) if positions else (VOCAB,))
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        call = _PolicyCall(interface, inputs)
        logits = inputs["logits"]
        if positions:
            logits = op("Gather", logits, np.array(-1), axis=1)
        token, emitted = _drawn(call, logits)
        token = where(emitted, token.squeeze(), NO_TOKEN)
        counter = inputs["counter"] + call.running.to(INT64)
        tensors = {"token": token, "next_counter": counter}
        set_outputs(graph, interface, spec.outputs, tensors)
    return finished(graph)


def _drawn(call: _PolicyCall, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The token of each row, [B, 1] int64, and whether it counts, [B] bool."""
    if call.captured:
        processed = draw_processed(call, logits, CANDIDATES)
        return processed.token, call.sampling & processed.is_valid.squeeze()
    drawn = draw(call, logits, CANDIDATES)
    return drawn.token, drawn.emitted


def build_termination() -> ir.Model:
    """Build the component `onnx-genai.termination-predicate@2`, with `TERMINATION_PORTS`.

    An active row ends if its token is among the first `eos_lengths` of its `eos_ids`, or if
    `iteration` + 1 is its `max_iterations`.
    """
    interface = Interface(1, ())
    graph, inputs = new_graph(interface, TERMINATION_PORTS)
    with building(graph):
        ids = inputs["eos_ids"]
        columns = op("Range", 0, op("Squeeze", size(ids, 1)), 1)
        is_equal = ids.equals(inputs["tokens"].unsqueeze())
        matches = is_equal & (columns < inputs["eos_lengths"].unsqueeze())
        ended = op("ReduceSum", matches.to(FLOAT), [-1], keepdims=0) > 0
        full = inputs["iteration"] + 1 >= inputs["max_iterations"]
        next_active = inputs["active"] & ~(ended | full)
        # The zero is the maximum of an empty batch.
        flags = op("Concat", next_active.to(INT32), constant(np.zeros(1, np.int32)), axis=0)
        any_active = op("ReduceMax", flags, keepdims=1)
        tensors = {"done": ~next_active, "next_active": next_active, "continue": any_active > 0}
        set_outputs(graph, interface, TERMINATION_PORTS.outputs, tensors)
    return finished(graph)


def build_state_update() -> ir.Model:
    """Build the component `onnx-genai.state-update@2`, with `STATE_UPDATE_PORTS`.

    Enabled rows get `update`, other rows keep `current`.
    """
    interface = Interface(1, ())
    graph, inputs = new_graph(interface, STATE_UPDATE_PORTS)
    with building(graph):
        enabled = (inputs["active"] & ~inputs["done"]).unsqueeze()
        tensors = {"next": where(enabled, inputs["update"], inputs["current"])}
        set_outputs(graph, interface, STATE_UPDATE_PORTS.outputs, tensors)
    return finished(graph)
