"""Quantizes the cache of keys and values to int8.

A key or value x of channel c is held as round(x / scale[c]), with scale[c] fixed at compile time: GroupQueryAttention
quantizes new keys and values and reads them back by itself. A quarter of float32's memory, and of its traffic a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.divergence import sampled
from qsample.compiler.trial import logits_of, write
from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import retained_name
from qsample.graph.edit import initializer
from qsample.graph.gqa import Slot, attentions, set_inputs
from qsample.graph.runner import GraphRunner

# Room above the largest measured value. Larger values are clipped; the divergence shows whether that matters.
_MARGIN: Final = 1.2
_LARGEST: Final = 127
_ROWS: Final = 4
_STEPS: Final = 64
_SCALE_OF: Final = {Slot.PAST_KEY: Slot.K_SCALE, Slot.PAST_VALUE: Slot.V_SCALE}


def measure_ranges(
    folder: Path,
    interface: Interface,
    capacity: int,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Array]:
    """State name → each channel's largest absolute value, [H, D], over text that the model samples at temperature 1."""
    runner = GraphRunner(logits_of(folder, interface), folder, interface, capacity, weights_mapped=True)
    state = runner.start(_ROWS)
    rng = np.random.default_rng(1)  # another text than the divergence is measured on
    prompt = rng.integers(0, interface.vocab_size, (_ROWS, 1))
    steps = min(_STEPS, capacity - 1)
    for step, _ in enumerate(
        write(partial(runner.step, state=state), prompt, np.ones(_ROWS, np.int64), steps, sampled(rng))
    ):
        if progress is not None:
            progress((step + 1) / steps)
    return {spec.name: np.abs(state[spec.name][:, :, :steps]).max(axis=(0, 2)) for spec in interface.cache_states}


def quantize_kv_cache(model: ir.Model, ranges: Mapping[str, Array]) -> bool:
    """Make every cache state of `model` int8, in place; only GroupQueryAttention reads and writes them. Returns whether
    there was one. ranges: as `measure_ranges` returns them. A channel that was always 0 gets scale 1."""
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    for name in ranges:
        for value in (inputs[name], outputs[retained_name(name)]):
            value.dtype = ir.DataType.INT8
    for node in attentions(model.graph):
        for slot, scale_slot in _SCALE_OF.items():
            past = node.inputs[slot]
            assert past is not None
            largest = ranges[str(past.name)].astype(np.float32) * _MARGIN
            scale = np.where(largest > 0, largest / _LARGEST, 1).astype(np.float32)
            set_inputs(node, {scale_slot: initializer(model.graph, f"{past.name}_scale", scale[None, :, None])})
        for attribute in ("k_quant_type", "v_quant_type"):
            node.attributes[attribute] = ir.AttrString(attribute, "PER_CHANNEL")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)
    return bool(ranges)
