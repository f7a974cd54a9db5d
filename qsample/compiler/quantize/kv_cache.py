"""Quantizes the cache of keys and values to int8 or int4.

A key or value x of channel c is held as round(x / scale[c]), with scale[c] fixed at compile time: GroupQueryAttention
quantizes new keys and values and reads them back by itself. A quarter or an eighth of float32's memory, and of its
traffic a step. In 4 bits, a byte holds two neighbouring channels, the first in the low bits, each 8 more than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.own_text import opening_of, write_text
from qsample.compiler.trial import logits_of
from qsample.contract.arrays import Array
from qsample.contract.tensors import retained_name
from qsample.graph.edit import initializer
from qsample.graph.gqa import Slot, attentions, set_inputs
from qsample.graph.runner import GraphRunner
from qsample.package.package import Package

BITS: Final = {"int8": 8, "int4": 4}
# Room above the largest measured value. Larger values are clipped; the divergence shows whether that matters.
_MARGIN: Final = 1.2
_FACTORS: Final = {
    8: (1.0,),
    4: tuple(1 - 0.05 * step for step in range(14)),
}  # of the scales that are tried
_ROWS: Final = 4
_TOKENS_PER_ROW: Final = 64
# The divergence is measured on a text of another seed.
_SEED: Final = 1
_SCALE_OF: Final = {Slot.PAST_KEY: Slot.K_SCALE, Slot.PAST_VALUE: Slot.V_SCALE}


def measure_scales(
    source: Package,
    bits: int,
    capacity: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> dict[str, Array]:
    """State name → each channel's scale, [H, D] float32, from text that the portable package `source` writes."""
    interface = source.interface
    opening = opening_of(source, capacity)
    runner = GraphRunner(
        logits_of(source.path, interface), source.path, interface, capacity, weights_mapped=True
    )
    state = runner.start(_ROWS)
    text = write_text(
        partial(runner.step, state=state),
        opening,
        interface.vocab_size,
        rows=_ROWS,
        tokens=min(_TOKENS_PER_ROW, capacity - max(len(opening.ids), 1)),
        seed=_SEED,
        progress=progress,
    )
    read = text.rows.shape[1] - 1  # the last token was not
    return {
        spec.name: scales_of(state[spec.name][:, :, :read], bits) for spec in interface.cache_states
    }


def scales_of(values: Array, bits: int) -> Array:
    """[H, D] float32: each channel's scale for `values` [B, H, n, D]. In 8 bits it leaves room above the largest; in 4
    it is the scale with the least squared error, which clips some. A channel that was always 0 gets scale 1."""
    limit = 2 ** (bits - 1)
    values = values.astype(np.float32)
    largest = np.abs(values).max(axis=(0, 2)) * np.float32(_MARGIN)
    widest = np.where(largest > 0, largest / (limit - 1), 1).astype(np.float32)
    tried = np.array(_FACTORS[bits], np.float32)[:, None, None] * widest
    errors = []
    for scales in tried:
        steps = scales[:, None]
        errors.append(
            np.square(np.clip(np.rint(values / steps), -limit, limit - 1) * steps - values).sum(
                axis=(0, 2)
            )
        )
    found: Array = np.take_along_axis(tried, np.argmin(errors, axis=0)[None], 0)[0]
    return found


def quantize_kv_cache(model: ir.Model, scales: Mapping[str, Array], bits: int) -> bool:
    """Hold every cache state of `model` in `bits` bits, in place; only GroupQueryAttention reads and writes them.

    Args:
        model: the graph.
        scales: the result of `measure_scales`.
        bits: the bits of a number, 8 or 4.

    Returns:
        Whether the graph had such a state.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    for name, own in scales.items():
        for value in (inputs[name], outputs[retained_name(name)]):
            value.dtype = ir.DataType.INT8 if bits == 8 else ir.DataType.UINT8
            assert value.shape is not None
            value.shape = ir.Shape([*value.shape[:-1], own.shape[-1] * bits // 8])
    for node in attentions(model.graph):
        for slot, scale_slot in _SCALE_OF.items():
            past = node.inputs[slot]
            assert past is not None
            scale = scales[str(past.name)][None, :, None]
            set_inputs(node, {scale_slot: initializer(model.graph, f"{past.name}_scale", scale)})
        for attribute in ("k_quant_type", "v_quant_type"):
            node.attributes[attribute] = ir.AttrString(attribute, "PER_CHANNEL")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", bits)
    return bool(scales)
