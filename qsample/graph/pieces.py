"""Weights in pieces of about a megabyte, which several threads read or compute separately.

So no whole matrix is in memory, and the data of a piece stay in the processor's cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.graph.weights import JoinedTensor, StoredTensor

# A megabyte of float32.
PIECE_ELEMENTS: Final = 1 << 18
# Tensors of narrower numbers have no array of their bytes.
_BITS_PER_BYTE: Final = 8

Piece = Callable[[], Array]
"""Computes a piece, in any thread: an array whose bytes follow those of the piece before."""


class PiecewiseTensor(ir.LazyTensor):
    """A tensor that is computed whenever it is read, as a whole or in pieces."""

    __slots__ = ("pieces",)

    def __init__(
        self,
        whole: Callable[[], ir.TensorProtocol],
        pieces: Callable[[], Iterator[Piece]],
        dtype: ir.DataType,
        shape: Sequence[int],
        name: str | None = None,
    ) -> None:
        """Make a tensor from functions.

        Args:
            whole: returns the tensor.
            pieces: returns its pieces in order. The function and the iterator run in one thread.
            dtype: the dtype of the tensor.
            shape: the shape of the tensor.
            name: the name of the tensor.
        """
        super().__init__(whole, dtype, ir.Shape(shape), name=name)
        self.pieces = pieces


def pieces_of(tensor: ir.TensorProtocol) -> Iterator[Piece] | None:
    """The pieces of `tensor`; None if it can only be computed as a whole."""
    if isinstance(tensor, PiecewiseTensor):
        return tensor.pieces()
    if not isinstance(tensor, StoredTensor | JoinedTensor | ir.ExternalTensor):
        return None
    if len(tensor.shape) == 0 or tensor.dtype.bitwidth < _BITS_PER_BYTE:
        return None
    return _along_first_axis(tensor)


def _along_first_axis(tensor: ir.TensorProtocol) -> Iterator[Piece]:
    rows, *others = (int(size) for size in tensor.shape.numpy())
    rows_per_piece = max(1, PIECE_ELEMENTS // max(1, math.prod(others)))
    source = readable(tensor)
    for start in range(0, rows, rows_per_piece):
        yield functools.partial(_read_rows, source, slice(start, start + rows_per_piece))


def _read_rows(source: ir.TensorProtocol, rows: slice) -> Array:
    return np.ascontiguousarray(read(source, rows))


def readable(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """`tensor`, prepared for `read` in any thread.

    Files are mapped, and tensors of which `read` cannot take a part are computed.
    """
    if isinstance(tensor, StoredTensor):
        return StoredTensor(readable(tensor.stored), tensor.name, transposed=tensor.transposed)
    if isinstance(tensor, JoinedTensor) and _has_parts(tensor):
        return JoinedTensor(
            [readable(part) for part in tensor.parts],
            tensor.axis,
            tensor.shape.numpy(),
            tensor.name,
        )
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)


def read(tensor: ir.TensorProtocol, *index: slice) -> Array:
    """`tensor.numpy()[index]`, without computing more of the tensor.

    Args:
        tensor: a result of `readable`.
        index: slices of the first axes.
    """
    if isinstance(tensor, StoredTensor):
        if not tensor.transposed:
            return read(tensor.stored, *index).astype(np.float32, copy=False)
        rows, columns = (*index, slice(None), slice(None))[:2]
        return read(tensor.stored, columns, rows).T.astype(np.float32, copy=False)
    if not isinstance(tensor, JoinedTensor):
        return tensor.numpy()[index]
    shape = tensor.shape.numpy()
    if tensor.joined_shape != shape:
        # The first axis is that of each part.
        first = np.concatenate([read(part, index[0]) for part in tensor.parts], tensor.axis)
        return first.reshape(len(first), *shape[1:])[(slice(None), *index[1:])]
    index = (*index, *[slice(None)] * (tensor.axis + 1 - len(index)))
    start, stop, _ = index[tensor.axis].indices(shape[tensor.axis])
    arrays: list[Array] = []
    before = 0
    for part in tensor.parts:
        size = int(part.shape.numpy()[tensor.axis])
        own = slice(min(max(start - before, 0), size), max(min(stop - before, size), 0))
        # If the whole result is empty, the last part gives its shape.
        gives_shape = not arrays and part is tensor.parts[-1]
        if own.start < own.stop or gives_shape:
            arrays.append(read(part, *index[: tensor.axis], own, *index[tensor.axis + 1 :]))
        before += size
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, tensor.axis)


def _has_parts(tensor: JoinedTensor) -> bool:
    """Whether `read` can take a part of a tensor.

    Its shape has to be that of the joined parts, or at least their first axis.
    """
    joined = tensor.joined_shape
    shape = tensor.shape.numpy()
    return joined == shape or (tensor.axis > 0 and joined[0] == shape[0])
