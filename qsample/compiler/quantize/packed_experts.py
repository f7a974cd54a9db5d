"""Experts that a checkpoint brought as integers: a portable graph makes them float in front of an MoE; here QMoE
takes the integers as they are, or float constants take their place if it cannot.

Nothing is rounded. Levels and scales are put into QMoE's form when the graph is saved; a matrix of all experts of a
layer is in memory then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.quantize.experts import FC1_SLOTS, FC2_SLOTS, replace_mixture
from qsample.contract.arrays import Array
from qsample.contract.tensors import BLOCK_SIZES
from qsample.graph import moe
from qsample.graph.edit import lazy_initializer
from qsample.graph.moe import PackedMatrices, QuantizedSlot, Slot
from qsample.graph.operators import pack_bits

_WEIGHT_SLOTS: Final = (Slot.FC1, Slot.FC2)
_REPORT: Final = "qsample.packed_experts"


def keep_packed_experts(model: ir.Model, block_sizes: Collection[int] = BLOCK_SIZES) -> bool:
    """Let QMoE compute with the integers of a checkpoint, in place.

    QMoE has a single number of bits and a single block size for its two matrices: it gets the larger bits and the
    smaller blocks of the two, for the same numbers. If a matrix of a layer came as float, or the device takes no such
    block size, both become float constants, to be quantized like any other experts.

    Args:
        model: the graph; `num_packed_experts` has the number of experts that QMoE took.
        block_sizes: the sizes that the device's QMoE takes.

    Returns:
        Whether any experts came as integers.
    """
    found = [node for node in moe.mixtures(model.graph) if moe.packed_weights(node)]
    kept = 0
    for node in found:
        packed = moe.packed_weights(node)
        common = [size for size in block_sizes if all(one.block_size % size == 0 for one in packed)]
        if len(packed) == len(_WEIGHT_SLOTS) and common:
            _keep(node, packed, max(common))
            kept += packed[0].shape[0]
        else:
            _make_float(node)
    model.meta[_REPORT] = kept
    return bool(found)


def num_packed_experts(model: ir.Model) -> int:
    """The number of experts, in all layers, whose integers `keep_packed_experts` kept since `model` was loaded."""
    count: int = model.meta.get(_REPORT, 0)
    return count


def _keep(node: ir.Node, packed: Sequence[PackedMatrices], block_size: int) -> None:
    bits = max(one.bits for one in packed)
    inputs: dict[QuantizedSlot, ir.Value | None] = {
        QuantizedSlot.INPUT: node.inputs[Slot.INPUT],
        QuantizedSlot.ROUTER: node.inputs[Slot.ROUTER],
        QuantizedSlot.FC1_BIAS: _input(node, Slot.FC1_BIAS),
        QuantizedSlot.FC2_BIAS: _input(node, Slot.FC2_BIAS),
    }
    for one, (levels, scales) in zip(packed, (FC1_SLOTS, FC2_SLOTS), strict=True):
        inputs[levels] = _levels(node, one, bits)
        inputs[scales] = _scales(node, one, block_size)
    replace_mixture(node, inputs, bits, block_size)


def _make_float(node: ir.Node) -> None:
    for slot in _WEIGHT_SLOTS:
        packed = moe.packed_matrices(node.inputs[slot])
        if packed is not None:
            node.replace_input_with(slot, _floats(node, packed))


def _input(node: ir.Node, slot: Slot) -> ir.Value | None:
    return node.inputs[slot] if slot < len(node.inputs) else None


def _levels(node: ir.Node, packed: PackedMatrices, bits: int) -> ir.Value:
    """[E, N, K * bits / 8], the levels of `packed` in 4 or 8 bits with the middle level for 0."""
    if bits == packed.bits:
        return packed.levels
    experts, outputs, inputs = packed.shape
    shape = (experts, outputs, inputs * bits // 8)

    def compute() -> Array:
        shift = (1 << bits - 1) - (1 << packed.bits - 1)
        levels = _unpacked(_numbers(packed.levels), packed.bits) + np.uint8(shift)
        return pack_bits(levels.reshape(-1, inputs), bits).reshape(shape)

    return _initializer(node, f"{packed.levels.name}_int{bits}", shape, ir.DataType.UINT8, compute)


def _scales(node: ir.Node, packed: PackedMatrices, block_size: int) -> ir.Value:
    """[E, N, K / block size]: each scale is repeated for the blocks that its block is cut into."""
    if block_size == packed.block_size:
        return packed.scales
    experts, outputs, inputs = packed.shape
    shape = (experts, outputs, inputs // block_size)
    assert packed.scales.dtype is not None

    def compute() -> Array:
        return np.repeat(_numbers(packed.scales), packed.block_size // block_size, axis=-1)

    name = f"{packed.scales.name}_{block_size}"
    return _initializer(node, name, shape, packed.scales.dtype, compute)


def _floats(node: ir.Node, packed: PackedMatrices) -> ir.Value:
    """[E, N, K], the numbers of the levels and scales, in the dtype of the scales."""
    dtype = packed.scales.dtype
    assert dtype is not None

    def compute() -> Array:
        levels = _unpacked(_numbers(packed.levels), packed.bits).astype(np.float32)
        levels -= np.float32(1 << packed.bits - 1)
        blocks = levels.reshape(*levels.shape[:2], -1, packed.block_size)
        blocks *= _numbers(packed.scales).astype(np.float32)[..., None]
        return levels.astype(dtype.numpy(), copy=False)

    name = f"{packed.levels.name}_float"
    return _initializer(node, name, packed.shape, dtype, compute)


def _initializer(
    node: ir.Node, name: str, shape: Sequence[int], dtype: ir.DataType, compute: Callable[[], Array]
) -> ir.Value:
    """The initializer `name`, made once for all layers that share it."""
    assert isinstance(node.graph, ir.Graph)
    made = lazy_initializer(name, shape, dtype, compute)
    return node.graph.initializers.setdefault(name, made)


def _numbers(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy()


def _unpacked(levels: Array, bits: int) -> Array:
    """[.., bytes] of levels of 4 or 8 bits as [.., levels]."""
    if bits == 8:
        return levels
    return np.stack([levels & 15, levels >> 4], axis=-1).reshape(*levels.shape[:-1], -1)
