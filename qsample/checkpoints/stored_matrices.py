"""A matrix of small integers, the one form of every packed format: a reader makes it of what a checkpoint stores; float
weights, or the blocks of MatMulNBits, leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from qsample.contract.arrays import Array
from qsample.contract.tensors import BLOCK_SIZES
from qsample.graph.operators import pack_bits
from qsample.huggingface.facade import dtype_name
from qsample.transforms.quantized_linear import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
_PART: Final = 1 << 24  # levels that are in memory at a time
_ROWS: Final = 32  # rows of a part are a multiple: formats that pack along N have no word on both sides of a border


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """weight[n, k] = scales[n, g] * (levels[n, k] - zero_points[n, g]) + offsets[n, g], where g = groups[k].

    Attributes:
        bits: of a level, 1 to 8.
        levels: [N, K] uint8, below 2^bits.
        scales: [N, G] float32.
        zero_points: [N, G] uint8; None: 2^(bits - 1) each, or 0 each if there are offsets.
        offsets: [N, G] float32; None: none.
        groups: [K], the group of each input; None: K / G inputs each, in order.
    """

    bits: int
    levels: Bytes
    scales: Floats
    zero_points: Bytes | None = None
    offsets: Floats | None = None
    groups: Indices | None = None

    def rows(self, index: slice | Indices) -> IntegerWeight:
        """Some of the N rows, or all in another order."""
        zero_points = None if self.zero_points is None else self.zero_points[index]
        offsets = None if self.offsets is None else self.offsets[index]
        levels, scales = self.levels[index], self.scales[index]
        return replace(self, levels=levels, scales=scales, zero_points=zero_points, offsets=offsets)

    def floats(self) -> Floats:
        """[N, K]: each operation is rounded to float32, zero points first, offsets last."""
        result: Floats = self.levels.astype(np.float32)
        size = self._group_size()
        by_group = result if size is None else result.reshape(len(result), -1, size)

        def of_inputs(numbers: Array) -> Array:
            return numbers[:, self.groups] if size is None else numbers[:, :, None]

        if self.zero_points is not None:
            by_group -= of_inputs(self.zero_points)
        elif self.offsets is None:
            by_group -= np.float32(self._middle)
        by_group *= of_inputs(self.scales)
        if self.offsets is not None:
            by_group += of_inputs(self.offsets)
        return result

    def blocks(self, dtype: torch.dtype) -> QuantizedWeight | None:
        """The same integers as MatMulNBits reads them, scales and offsets in `dtype`; None if no block size fits the
        groups. Inputs that are not in the order of their groups (GPTQ's act-order) are put in order, a group that is
        larger than a block repeats its scale, and levels are stored in 4 or 8 bits. Without zero points, they fill
        these from the highest bit down (over a scale in float32, which then becomes smaller exactly): their middle is
        that of the stored bits, and offsets find a zero point nearby.

        With offsets, the zero point is the integer nearest to the number that stands for a weight of 0, so that
        activations in 8 bits lose as little as with symmetric weights; the offset is the rest.
        """
        bits = 4 if self.bits <= 4 else 8
        if self.bits < bits and self.zero_points is None and dtype == torch.float32:
            factor = 2 ** (bits - self.bits)
            wide, scales = self.levels * np.uint8(factor), self.scales / np.float32(factor)
            return replace(self, bits=bits, levels=wide, scales=scales).blocks(dtype)
        outputs, inputs = self.levels.shape
        groups = (
            self.groups
            if self.groups is not None
            else np.arange(inputs) // (inputs // self.scales.shape[1])
        )
        order = None
        if (np.diff(groups) < 0).any():
            order = np.argsort(groups, kind="stable")
            groups = groups[order]
        fitting = [
            size
            for size in BLOCK_SIZES
            if inputs % size == 0 and _uniform(groups.reshape(-1, size))
        ]
        if not fitting:
            return None
        size = max(fitting)
        of_block = groups[::size]
        levels = self.levels if order is None else self.levels[:, order]
        zero_points, offsets = self._zero_points(bits)
        zero_points = zero_points[:, of_block]
        packed_zeros = (
            None
            if (zero_points == 2 ** (bits - 1)).all()
            else _tensor(pack_bits(zero_points, bits))
        )
        return QuantizedWeight(
            bits,
            size,
            _tensor(pack_bits(levels, bits).reshape(outputs, len(of_block), size * bits // 8)),
            _tensor(self.scales[:, of_block]).to(dtype),
            None if packed_zeros is None else packed_zeros.reshape(-1),
            None if order is None else _tensor(order),
            None if offsets is None else _tensor(offsets[:, of_block].T).to(dtype),
        )

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _group_size(self) -> int | None:
        """The inputs of each group, if the groups are equal and in order: these are several times faster."""
        inputs = self.levels.shape[1]
        size, rest = divmod(inputs, self.scales.shape[1])
        in_order = self.groups is None or (
            rest == 0 and (self.groups == np.arange(inputs) // size).all()
        )
        return size if in_order else None

    def _zero_points(self, bits: int) -> tuple[Bytes, Floats | None]:
        """[N, G] zero points below 2^bits and offsets, with the meaning of this matrix."""
        if self.offsets is None:
            middle = np.full(self.scales.shape, self._middle, np.uint8)
            return middle if self.zero_points is None else self.zero_points, None
        scales = self.scales.astype(np.float64)
        at_zero = self.offsets - scales * (
            0 if self.zero_points is None else self.zero_points
        )  # the weight of level 0
        nearest = np.rint(np.divide(-at_zero, scales, out=np.zeros_like(scales), where=scales != 0))
        zero_points = np.clip(nearest, 0, 2**bits - 1)
        return zero_points.astype(np.uint8), (at_zero + scales * zero_points).astype(np.float32)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The weight of a layer in a checkpoint with integers.

    Attributes:
        layer: its name, without ".weight".
        shape: N, K.
        read: reads some of the N rows, those of a slice with start and stop. It is called in any thread, as long as
            the loaded model lives.
    """

    layer: str
    shape: tuple[int, int]
    read: Callable[[slice], IntegerWeight]

    def parts(self) -> Iterator[IntegerWeight]:
        """The matrix in parts of whole rows: the levels of a large head would take half a gigabyte."""
        for rows in self._slices():
            yield self.read(rows)

    def bytes_in_blocks(self, dtype: torch.dtype) -> int:
        """About how many bytes `IntegerWeight.blocks` of all rows take, by the first rows; 0 if no block size fits."""
        rows = min(_ROWS, self.shape[0])
        sample = self.read(slice(0, rows)).blocks(dtype)
        if sample is None:
            return 0
        once = 0 if sample.order is None else sample.order.nbytes
        return (sample.nbytes - once) * self.shape[0] // rows + once

    def floats(self) -> Floats:
        """[N, K]."""
        result = np.empty(self.shape, np.float32)
        for rows in self._slices():
            result[rows] = self.read(rows).floats()
        return result

    def _slices(self) -> Iterator[slice]:
        outputs, inputs = self.shape
        at_once = max(1, _PART // inputs // _ROWS) * _ROWS
        for start in range(0, outputs, at_once):
            yield slice(start, min(start + at_once, outputs))


def _uniform(blocks: Array) -> bool:
    return bool((blocks == blocks[:, :1]).all())


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def unpack_bits(words: Array, bits: int) -> Bytes:
    """[R, W] integers of any width as [R, W * width / bits]: a row is a stream of bits, lowest first."""
    rows = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return rows
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((rows[:, :, None] >> shifts) & np.uint8(2**bits - 1)).reshape(len(rows), -1)
    stream = np.unpackbits(rows, axis=1, bitorder="little")
    fields = stream[:, : stream.shape[1] // bits * bits].reshape(len(rows), -1, bits)
    levels: Bytes = fields @ (1 << np.arange(bits, dtype=np.uint8))
    return levels


def check_part(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    why: str,
) -> None:
    """Raise ValueError for a stored tensor of another dtype or shape. shape: the required sizes; None for 1 or more."""
    fits = tensor.ndim == len(shape) and all(
        size > 0 if wanted is None else size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if fits and tensor.dtype in dtypes:
        return
    sizes = ", ".join("1 or more" if size is None else str(size) for size in shape)
    kinds = " or ".join(dtype_name(dtype) for dtype in dtypes)
    raise ValueError(
        f"its parts do not fit: {name} is {dtype_name(tensor.dtype)} {list(tensor.shape)}, and must be {kinds} "
        f"[{sizes}]: {why}"
    )
