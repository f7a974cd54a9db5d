"""Policy components of ONNX workflows (onnx/onnx#8184, onnx-genai): sampler, termination and state update, as graphs.

They have the tensors that version 2 of their contracts asks for, and nothing else: no penalties, no masks, no
log-probabilities. A row is enabled if it is active and not done. The first axis of every tensor is `batch`. onnx-genai
leaves the random numbers to the producer: number `counter` of a row's seed is the same as in a package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.addons.policy.uniforms import uniforms
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import CANDIDATES, NOISE_STREAM, SEARCHED_ROWS, VOCAB, TensorSpec
from qsample.sampler.build import finished, new_graph, set_outputs
from qsample.sampler.call import DrawCall, Uniforms
from qsample.sampler.draw import draw
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
_LARGEST: Final = 2**31 - 1
_ROW_CONTROLS: Final = (
    ("temperature", "float32"),
    ("top_k", "int64"),
    ("top_p", "float32"),
    ("min_p", "float32"),
)
_ROW_STATES: Final = (("seed", "int64"), ("counter", "int64"), ("active", "bool"), ("done", "bool"))


def _rows(name: str, dtype: str, *axes: str | int) -> TensorSpec:
    return TensorSpec(name, dtype, (_BATCH, *axes), "")


def sampler_ports(vocab_axes: tuple[str | int, ...] = (VOCAB,)) -> GraphSpec:
    """The tensors of `build_token_sampler`. vocab_axes: of the logits after the batch."""
    inputs = (
        _rows("logits", "float32", *vocab_axes),
        *(_rows(*row) for row in (*_ROW_CONTROLS, *_ROW_STATES)),
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
        # Philox takes 2**31 positions; the counters after them have other keys.
        self._position = op("Mod", inputs["counter"], 2**31)
        self._key = inputs["seed"] + (inputs["counter"] - self._position) / 2**31
        top_k = minimum(maximum(inputs["top_k"], 0), _LARGEST).to(INT32)
        temperature = where(inputs["top_k"].equals(1), 0.0, inputs["temperature"])
        read = {**inputs, "temperature": temperature, "top_k": top_k}
        if interface.captured:
            # Without control flow, all rows are searched: which ones need it is unknown before the call.
            rows = op("Range", 0, op("Squeeze", size(inputs["counter"], 0)), 1)
            read[SEARCHED_ROWS.name] = rows
        super().__init__(interface, read, running=enabled, sampling=enabled)

    def uniforms(self) -> Uniforms:
        """Number `counter` of each row's seed, computed in the graph."""
        number = uniforms(self._key, self._position.to(INT32), NOISE_STREAM)
        return lambda buffer: number


def build_token_sampler(
    vocab_size: int, *, positions: bool = False, control_flow: bool = True
) -> ir.Model:
    """The component `onnx-genai.token-sampler@2`, with the tensors of `sampler_ports`.

    A row with temperature 0 or less, or top_k 1, gets the first of its largest logits. Otherwise temperature, top-k (0
    or less: off), top-p in (0, 1] (1: off) and min-p in [0, 1] (0: off) apply in this order, as in packages, and the
    token is drawn; a logit of -inf is never drawn. A row that is not enabled gets token -1 and keeps its counter; other
    counters rise by 1. An enabled row with a NaN or +inf among its logits, or no finite logit, gets -1, too.

    Args:
        vocab_size: V, at least 1; otherwise ValueError is raised.
        positions: the logits are [batch, S, V], of which the last position counts; otherwise [batch, V].
        control_flow: use If to skip what no row needs; False for devices that capture and replay graphs.
    """
    interface = Interface(vocab_size, (), captured=not control_flow)
    spec = sampler_ports(("sequence", VOCAB) if positions else (VOCAB,))
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        call = _PolicyCall(interface, inputs)
        logits = inputs["logits"]
        if positions:
            logits = op("Gather", logits, np.array(-1), axis=1)
        drawn = draw(call, logits, CANDIDATES)
        token = where(drawn.emitted, drawn.token.squeeze(), NO_TOKEN)
        counter = inputs["counter"] + call.running.to(INT64)
        set_outputs(graph, interface, spec.outputs, {"token": token, "next_counter": counter})
    return finished(graph)


def build_termination() -> ir.Model:
    """The component `onnx-genai.termination-predicate@2`, with the tensors of `TERMINATION_PORTS`: an active row ends
    with the first `eos_lengths` of its `eos_ids`, or if `iteration` + 1 is its `max_iterations`."""
    interface = Interface(1, ())
    graph, inputs = new_graph(interface, TERMINATION_PORTS)
    with building(graph):
        ids, active = inputs["eos_ids"], inputs["active"]
        columns = op("Range", 0, op("Squeeze", size(ids, 1)), 1)
        ends = ids.equals(inputs["tokens"].unsqueeze()) & (
            columns < inputs["eos_lengths"].unsqueeze()
        )
        ended = op("ReduceSum", ends.to(FLOAT), [-1], keepdims=0) > 0
        full = inputs["iteration"] + 1 >= inputs["max_iterations"]
        next_active = active & ~(ended | full)
        some = op(
            "ReduceMax",
            op("Concat", next_active.to(INT32), constant(np.zeros(1, np.int32)), axis=0),
            keepdims=1,
        )
        found = {"done": ~next_active, "next_active": next_active, "continue": some > 0}
        set_outputs(graph, interface, TERMINATION_PORTS.outputs, found)
    return finished(graph)


def build_state_update() -> ir.Model:
    """The component `onnx-genai.state-update@2`, by `STATE_UPDATE_PORTS`: `update` for enabled rows, else `current`."""
    interface = Interface(1, ())
    graph, inputs = new_graph(interface, STATE_UPDATE_PORTS)
    with building(graph):
        enabled = (inputs["active"] & ~inputs["done"]).unsqueeze()
        found = {"next": where(enabled, inputs["update"], inputs["current"])}
        set_outputs(graph, interface, STATE_UPDATE_PORTS.outputs, found)
    return finished(graph)
