"""Layouts of one linear layer: from the stored tensors of GPTQ or AWQ to its integers, scales and zero points, and from
those to its float weight and to the blocks of MatMulNBits.

GPTQ: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", ICLR 2023.
AWQ: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024. The
layouts are those that AutoGPTQ, GPTQModel and AutoAWQ write; neither paper has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from qsample.graph.operators import BLOCK_SIZES, pack_bits
from qsample.tensors import Array
from qsample.transforms.quantized_linear import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
WORD: Final = 32  # bits of a stored integer
# AWQ's "gemm" layout: four bits number i of a word belong to column _AWQ_ORDER[i] of its eight.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
# Zero points minus one, as GPTQ's first format stores them, were subtracted from whole words; so a one is added back to
# every field of a word, carries included. GPTQModel does the same (gptqmodel/utils/model.py, v1 to v2).
_ONES: Final = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """weight[n, k] = scales[n, groups[k]] * (levels[n, k] - zero_points[n, groups[k]]).

    levels: [N, K] uint8, below 2^bits. scales: [N, G] float32. zero_points: [N, G] uint8. groups: [K] int64.
    """

    bits: int
    levels: Bytes
    scales: Array
    zero_points: Bytes
    groups: npt.NDArray[np.int64]


def unpack_gptq(
    qweight: Array,
    scales: Array,
    qzeros: Array | None,
    g_idx: Array | None,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    version: int,
) -> GroupedWeight:
    """The integers of a GPTQ layer.

    qweight: [K * bits / 32, N] int32, a column's levels from the low bits up. qzeros: [G, N * bits / 32] int32, along
    N; None in a symmetric checkpoint = 2^(bits - 1). scales: [G, N] float32. g_idx: [K], the group of each input;
    None = in order. bits: 2, 3, 4 or 8. group_size: -1 = all of K. version: 1 stores zero points minus one, 2 as they
    are.

    Checkpoints exist that say version 1 and store what version 2 would (vllm-project/vllm#38966), so in a symmetric one
    the stored number itself tells. Raises ValueError where shapes do not fit one another.
    """
    outputs = scales.shape[1]
    levels = _unpack(qweight.T, bits)
    inputs = levels.shape[1]
    groups = _in_order(inputs, group_size) if g_idx is None else g_idx.astype(np.int64)
    middle = 2 ** (bits - 1)
    if qzeros is None:
        if not symmetric:
            raise ValueError("it has no qzeros, and the checkpoint is not symmetric")
        zero_points = np.full((outputs, len(scales)), middle, np.uint8)
    else:
        zero_points = _gptq_zero_points(qzeros, bits, version)[:, :outputs].T
        stored = _unpack(qzeros, bits)[:, :outputs]
        if symmetric and (stored == stored.flat[0]).all() and stored.flat[0] in (middle - 1, middle):
            zero_points = np.full_like(zero_points, middle)
    return _checked(GroupedWeight(bits, levels, np.ascontiguousarray(scales.T), zero_points, groups))


def unpack_awq(qweight: Array, scales: Array, qzeros: Array, *, group_size: int) -> GroupedWeight:
    """The integers of a layer in AWQ's "gemm" layout, 4 bits.

    qweight: [K, N / 8] int32. qzeros: [G, N / 8] int32. scales: [G, N] float32. group_size: -1 = all of K. Raises
    ValueError where shapes do not fit one another.
    """
    levels, zero_points = (_awq_columns(words) for words in (qweight, qzeros))
    groups = _in_order(len(levels), group_size)
    return _checked(
        GroupedWeight(4, np.ascontiguousarray(levels.T), np.ascontiguousarray(scales.T), zero_points.T, groups)
    )


def dequantize(weight: GroupedWeight) -> npt.NDArray[np.float32]:
    """[N, K]: the weight in float32, which holds it exactly where the scales are of half precision."""
    result: npt.NDArray[np.float32] = weight.levels.astype(np.float32)
    zero_points, scales = weight.zero_points, weight.scales
    size, rest = divmod(len(weight.groups), scales.shape[1])
    if rest == 0 and (weight.groups == _in_order(len(weight.groups), size)).all():  # several times faster
        by_group = result.reshape(len(result), -1, size)
        by_group -= zero_points[:, :, None]
        by_group *= scales[:, :, None]
    else:
        result -= zero_points[:, weight.groups]
        result *= scales[:, weight.groups]
    return result


def to_blocks(weight: GroupedWeight, dtype: torch.dtype) -> QuantizedWeight | None:
    """The same integers as MatMulNBits reads them, scales in `dtype`; None where no block size fits the groups.

    Inputs that are not in the order of their groups (GPTQ's act-order) are put in order. A group that is larger than a
    block repeats its scale; levels of 2 or 3 bits are stored in 4.
    """
    groups, order = weight.groups, None
    if (np.diff(groups) < 0).any():
        order = np.argsort(groups, kind="stable")
        groups = groups[order]
    inputs = len(groups)
    fitting = [size for size in BLOCK_SIZES if inputs % size == 0 and _uniform(groups.reshape(-1, size))]
    if not fitting:
        return None
    size = max(fitting)
    bits = max(4, weight.bits)
    of_block = groups[::size]
    levels = weight.levels if order is None else weight.levels[:, order]
    outputs, count = len(levels), len(of_block)
    blocks = pack_bits(levels, bits).reshape(outputs, count, size * bits // 8)
    zero_points = weight.zero_points[:, of_block]
    packed_zeros = None if (zero_points == 2 ** (bits - 1)).all() else pack_bits(zero_points, bits).reshape(-1)
    return QuantizedWeight(
        bits,
        size,
        torch.from_numpy(np.ascontiguousarray(blocks)),
        torch.from_numpy(weight.scales[:, of_block].reshape(-1)).to(dtype),
        None if packed_zeros is None else torch.from_numpy(np.ascontiguousarray(packed_zeros)),
        None if order is None else torch.from_numpy(order),
    )


def _unpack(words: Array, bits: int) -> Bytes:
    """[R, W] int32 as [R, W * 32 / bits]: a row is one stream of bits, lowest first, also for 3."""
    rows = np.ascontiguousarray(words, dtype="<i4").view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return rows
    if bits == 3:
        stream = np.unpackbits(rows, axis=1, bitorder="little")
        fields = stream[:, : stream.shape[1] // 3 * 3].reshape(len(rows), -1, 3)
        three: Bytes = fields @ np.array([1, 2, 4], np.uint8)
        return three
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((rows[:, :, None] >> shifts) & np.uint8(2**bits - 1)).reshape(len(rows), -1)


def _gptq_zero_points(qzeros: Array, bits: int, version: int) -> Bytes:
    """[G, >= N]."""
    if version == 2:
        return _unpack(qzeros, bits)
    if bits in _ONES:
        return _unpack((qzeros.view(np.uint32) + np.uint32(_ONES[bits])).view(np.int32), bits)
    return (_unpack(qzeros, bits) + np.uint8(1)) & np.uint8(2**bits - 1)


def _awq_columns(words: Array) -> Bytes:
    """[R, N / 8] int32 as [R, N]."""
    fields = _unpack(words, 4).reshape(len(words), -1, len(_AWQ_ORDER))
    columns: Bytes = fields[:, :, np.argsort(_AWQ_ORDER)].reshape(len(words), -1)
    return columns


def _in_order(inputs: int, group_size: int) -> npt.NDArray[np.int64]:
    return np.arange(inputs, dtype=np.int64) // (inputs if group_size == -1 else group_size)


def _uniform(blocks: Array) -> bool:
    return bool((blocks == blocks[:, :1]).all())


def _checked(weight: GroupedWeight) -> GroupedWeight:
    outputs, inputs = weight.levels.shape
    groups = weight.scales.shape[1]
    if (
        weight.scales.shape != (outputs, groups)
        or weight.zero_points.shape != (outputs, groups)
        or weight.groups.shape != (inputs,)
        or not 0 <= weight.groups.min() <= weight.groups.max() < groups
    ):
        raise ValueError(
            f"its parts do not fit: levels [{outputs}, {inputs}], scales {list(weight.scales.shape)}, zero points "
            f"{list(weight.zero_points.shape)}, groups {weight.groups.min()} to {weight.groups.max()} for "
            f"{len(weight.groups)} inputs"
        )
    return weight
