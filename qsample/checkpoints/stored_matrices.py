"""The weight of a quantized layer as a checkpoint stores it: small integers with scales, or floats
of a few bits.

A reader of a format makes a `StoredMatrix` or a `FloatMatrix` of a layer's tensors. Both give float
weights; only the integers also give the blocks that MatMulNBits reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from qsample.contract.arrays import Array
from qsample.contract.tensors import BLOCK_SIZES
from qsample.graph.operators import pack_bits
from qsample.request.huggingface.facade import dtype_name
from qsample.transforms.quantized_linear import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
_MAX_LEVELS_IN_MEMORY: Final = 1 << 24
# Parts begin at multiples of this number of rows: a word of a format that packs along N then lies
# in a single part.
_ROWS_MULTIPLE: Final = 32


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """weight[n, k] = scales[n, g] * (levels[n, k] - zero_points[n, g]) + offsets[n, g], where g =
    groups[k].

    Attributes:
        bits: the bits of a level, 1 to 8.
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

    @property
    def is_symmetric(self) -> bool:
        """Whether a level means scale * (level - 2^(bits - 1)) in every group."""
        return self.zero_points is None and self.offsets is None

    def rows(self, index: slice | Indices) -> IntegerWeight:
        """Some of the N rows, or all of them in another order."""
        return replace(
            self,
            levels=self.levels[index],
            scales=self.scales[index],
            zero_points=None if self.zero_points is None else self.zero_points[index],
            offsets=None if self.offsets is None else self.offsets[index],
        )

    def inputs(self, index: Indices) -> IntegerWeight:
        """All of the K inputs in another order. The groups are numbered in the order of their first
        inputs, so that whole groups that change places stay groups in order."""
        groups = self._group_of_each_input()[index]
        _, first_inputs = np.unique(groups, return_index=True)
        old_numbers = groups[np.sort(first_inputs)]
        new_numbers = np.argsort(old_numbers)

        def by_group(numbers: Array | None) -> Any:
            return None if numbers is None else numbers[:, old_numbers]

        return replace(
            self,
            levels=self.levels[:, index],
            scales=by_group(self.scales),
            zero_points=by_group(self.zero_points),
            offsets=by_group(self.offsets),
            groups=new_numbers[groups],
        )

    def floats(self) -> Floats:
        """The weight, [N, K]. Each operation is rounded to float32: zero points are subtracted
        first, offsets added last."""
        result: Floats = self.levels.astype(np.float32)
        size = self._group_size()
        by_group = result if size is None else result.reshape(len(result), -1, size)

        def by_input(numbers: Array) -> Array:
            """Numbers [N, G], each beside the inputs of its group in `by_group`."""
            return numbers[:, self.groups] if size is None else numbers[:, :, None]

        if self.zero_points is not None:
            by_group -= by_input(self.zero_points)
        elif self.offsets is None:
            by_group -= np.float32(self._middle)
        by_group *= by_input(self.scales)
        if self.offsets is not None:
            by_group += by_input(self.offsets)
        return result

    def blocks(self, dtype: torch.dtype) -> QuantizedWeight | None:
        """The same integers in the layout that MatMulNBits reads; None if no block size fits the
        groups.

        - Levels are stored in 4 or 8 bits. Levels of other widths without zero points, for float32,
          are shifted to the highest bits, and their scale is divided by the same power of two,
          which is exact: the middle of the stored bits is then theirs, too.
        - Inputs that are not in the order of their groups (GPTQ's act-order) are put in order.
        - A group that is larger than a block repeats its scale.
        - With offsets, the zero point is the integer nearest to the level of a weight of 0, so that
          activations in 8 bits lose as little as with symmetric weights; the offset is the
          remainder.

        Args:
            dtype: the dtype of scales and offsets.
        """
        bits = 4 if self.bits <= 4 else 8
        if self.bits < bits and self.zero_points is None and dtype == torch.float32:
            return self._in_highest_bits(bits).blocks(dtype)
        groups = self._group_of_each_input()
        order = None
        if (np.diff(groups) < 0).any():
            order = np.argsort(groups, kind="stable")
            groups = groups[order]
        size = _largest_block_size(groups)
        if size is None:
            return None
        group_of_block = groups[::size]
        outputs = len(self.levels)
        levels = self.levels if order is None else self.levels[:, order]
        packed_levels = pack_bits(levels, bits).reshape(
            outputs, len(group_of_block), size * bits // 8
        )
        zero_points, offsets = self._zero_points_and_offsets(bits)
        zero_points = zero_points[:, group_of_block]
        packed_zero_points = None
        if not (zero_points == 2 ** (bits - 1)).all():
            packed_zero_points = _tensor(pack_bits(zero_points, bits)).reshape(-1)
        return QuantizedWeight(
            bits=bits,
            block_size=size,
            blocks=_tensor(packed_levels),
            scales=_tensor(self.scales[:, group_of_block]).to(dtype),
            zero_points=packed_zero_points,
            order=None if order is None else _tensor(order),
            offsets=None if offsets is None else _tensor(offsets[:, group_of_block].T).to(dtype),
        )

    def _in_highest_bits(self, bits: int) -> IntegerWeight:
        """The same weight with levels of `bits`, each a multiple of a power of two."""
        factor = 2 ** (bits - self.bits)
        levels = self.levels * np.uint8(factor)
        scales = self.scales / np.float32(factor)
        return replace(self, bits=bits, levels=levels, scales=scales)

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _group_of_each_input(self) -> Indices:
        """[K]."""
        if self.groups is not None:
            return self.groups
        inputs = self.levels.shape[1]
        size = inputs // self.scales.shape[1]
        groups: Indices = np.arange(inputs) // size
        return groups

    def _group_size(self) -> int | None:
        """The number of inputs of each group if all groups are equal and in order, because these
        are several times faster; otherwise None."""
        inputs = self.levels.shape[1]
        count = self.scales.shape[1]
        size: int = inputs // count
        if self.groups is None:
            return size
        are_equal = size * count == inputs
        in_order = are_equal and bool((self.groups == np.arange(inputs) // size).all())
        return size if in_order else None

    def _zero_points_and_offsets(self, bits: int) -> tuple[Bytes, Floats | None]:
        """[N, G] zero points below 2^bits, and offsets, which together mean the same as those of
        this weight."""
        if self.offsets is None:
            if self.zero_points is not None:
                return self.zero_points, None
            return np.full(self.scales.shape, self._middle, np.uint8), None
        scales = self.scales.astype(np.float64)
        zero_points = 0 if self.zero_points is None else self.zero_points
        weight_of_level_0 = self.offsets - scales * zero_points
        level_of_weight_0 = np.divide(
            -weight_of_level_0, scales, out=np.zeros_like(scales), where=scales != 0
        )
        nearest = np.clip(np.rint(level_of_weight_0), 0, 2**bits - 1)
        offsets = (weight_of_level_0 + scales * nearest).astype(np.float32)
        return nearest.astype(np.uint8), offsets


def in_turns(first: IntegerWeight, second: IntegerWeight) -> IntegerWeight:
    """The rows of two weights in turns. Both are symmetric, with the same bits, shapes and groups
    in order."""

    def alternating(one: Array, other: Array) -> Array:
        return np.stack([one, other], axis=1).reshape(-1, one.shape[1])

    levels = alternating(first.levels, second.levels)
    return IntegerWeight(first.bits, levels, alternating(first.scales, second.scales))


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The weight of a layer that a checkpoint stores as integers.

    Attributes:
        layer: the layer's name, without ".weight".
        shape: N, K.
        read: a function that reads some of the N rows, a slice with start and stop. It is called in
            any thread, as long as the loaded model lives.
    """

    layer: str
    shape: tuple[int, int]
    read: Callable[[slice], IntegerWeight]

    def parts(self) -> Iterator[IntegerWeight]:
        """The matrix in parts of whole rows: the levels of a large head would take half a
        gigabyte."""
        for rows in self._slices():
            yield self.read(rows)

    def bytes_in_blocks(self, dtype: torch.dtype) -> int:
        """About how many bytes `IntegerWeight.blocks` of all rows take, judged by the first rows; 0
        if no block size fits."""
        rows = min(_ROWS_MULTIPLE, self.shape[0])
        sample = self.read(slice(0, rows)).blocks(dtype)
        if sample is None:
            return 0
        order_bytes = 0 if sample.order is None else sample.order.nbytes
        return (sample.nbytes - order_bytes) * self.shape[0] // rows + order_bytes

    def floats(self) -> Floats:
        """The weight, [N, K]."""
        result = np.empty(self.shape, np.float32)
        for rows in self._slices():
            result[rows] = self.read(rows).floats()
        return result

    def _slices(self) -> Iterator[slice]:
        outputs, inputs = self.shape
        multiples = max(1, _MAX_LEVELS_IN_MEMORY // inputs // _ROWS_MULTIPLE)
        step = multiples * _ROWS_MULTIPLE
        for start in range(0, outputs, step):
            yield slice(start, min(start + step, outputs))


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The matrices of the experts of a layer that a checkpoint stores as integers without zero
    points and offsets.

    Attributes:
        parameter: the name of the parameter that has the matrices of all experts.
        count: the number of experts, E.
        matrix: the matrices [N, K] of all experts as one [E * N, K]. If they are both the gates and
            the up projections, the rows of both take turns.
    """

    parameter: str
    count: int
    matrix: StoredMatrix


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """The weight of a layer that a checkpoint stores as floats of a few bits, for which there are
    no kernels.

    Attributes:
        layer: the layer's name, without ".weight".
        shape: N, K.
        read: a function that computes the weight, [N, K] float32.
    """

    layer: str
    shape: tuple[int, int]
    read: Callable[[], torch.Tensor]

    def floats(self) -> Floats:
        """The weight, [N, K]."""
        result: Floats = self.read().numpy()
        return result


def _largest_block_size(groups: Indices) -> int | None:
    """The largest block size whose blocks each lie within one group; None if there is none. groups:
    [K], the group of each input."""
    fitting = []
    for size in BLOCK_SIZES:
        if len(groups) % size != 0:
            continue
        blocks = groups.reshape(-1, size)
        if (blocks == blocks[:, :1]).all():
            fitting.append(size)
    return max(fitting, default=None)


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def unpack_bits(words: Array, bits: int) -> Bytes:
    """The levels that integers of any width hold: a row is a stream of bits, lowest first.

    Args:
        words: [R, W] integers.
        bits: the bits of a level, 1 to 8.

    Returns:
        [R, W * width / bits] uint8.
    """
    rows = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return rows
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        mask = np.uint8(2**bits - 1)
        return ((rows[:, :, None] >> shifts) & mask).reshape(len(rows), -1)
    stream = np.unpackbits(rows, axis=1, bitorder="little")
    used_bits = stream.shape[1] // bits * bits
    fields = stream[:, :used_bits].reshape(len(rows), -1, bits)
    levels: Bytes = fields @ (1 << np.arange(bits, dtype=np.uint8))
    return levels


def check_part(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    why: str,
) -> None:
    """Raise ValueError for a stored tensor of another dtype or shape.

    Args:
        name: the tensor's name in its layer.
        tensor: the stored tensor.
        dtypes: the accepted dtypes.
        shape: the required sizes; None for any size of 1 or more.
        why: the reason for that shape, or the meaning of its axes, at the end of the message.
    """
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
