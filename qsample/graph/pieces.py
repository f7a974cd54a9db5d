"""Weights in pieces of about a megabyte: parts of a tensor that are read or computed separately, in several threads.

So no whole matrix is in memory, and what a piece needs stays in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.graph.weights import JoinedTensor, StoredTensor

PIECE: Final = 1 << 18  # numbers: a megabyte of float32

_BYTE: Final = 8  # bits; tensors of narrower numbers have no array of their bytes

Piece = Callable[[], Array]
"""Computes a piece, in any thread; an array whose bytes follow the piece before."""


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
        """whole: returns the tensor. pieces: returns its pieces in order; it and the iterator run in one thread."""
        super().__init__(whole, dtype, ir.Shape(shape), name=name)
        self.pieces = pieces


def pieces_of(tensor: ir.TensorProtocol) -> Iterator[Piece] | None:
    """The pieces of `tensor`; None if it is computed as a whole only."""
    if isinstance(tensor, PiecewiseTensor):
        return tensor.pieces()
    stays = isinstance(tensor, StoredTensor | JoinedTensor | ir.ExternalTensor)
    return (
        _along_first_axis(tensor)
        if stays and len(tensor.shape) and tensor.dtype.bitwidth >= _BYTE
        else None
    )


def _along_first_axis(tensor: ir.TensorProtocol) -> Iterator[Piece]:
    rows, *others = (int(size) for size in tensor.shape.numpy())
    at_once = max(1, PIECE // max(1, math.prod(others)))
    source = readable(tensor)
    for start in range(0, rows, at_once):
        yield lambda part=slice(start, start + at_once): np.ascontiguousarray(read(source, part))  # type: ignore[misc]


def readable(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """`tensor`, prepared for `read` in any thread: files mapped, and computed if `read` cannot take a part of it."""
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
    """`tensor.numpy()[index]`, computing no more. tensor: from `readable`. index: slices of the first axes."""
    if isinstance(tensor, StoredTensor):
        if not tensor.transposed:
            return read(tensor.stored, *index).astype(np.float32, copy=False)
        rows, columns = (*index, slice(None), slice(None))[:2]
        return read(tensor.stored, columns, rows).T.astype(np.float32, copy=False)
    if not isinstance(tensor, JoinedTensor):
        return tensor.numpy()[index]
    shape = tensor.shape.numpy()
    if tensor.joined_shape != shape:  # the first axis counts the parts
        first = np.concatenate([read(part, index[0]) for part in tensor.parts], tensor.axis)
        return first.reshape(len(first), *shape[1:])[(slice(None), *index[1:])]
    index = (*index, *[slice(None)] * (tensor.axis + 1 - len(index)))
    start, stop, _ = index[tensor.axis].indices(shape[tensor.axis])
    found: list[Array] = []
    before = 0
    for part in tensor.parts:
        size = int(part.shape.numpy()[tensor.axis])
        own = slice(min(max(start - before, 0), size), max(min(stop - before, size), 0))
        if own.start < own.stop or (
            not found and part is tensor.parts[-1]
        ):  # an empty part has a shape, too
            found.append(read(part, *index[: tensor.axis], own, *index[tensor.axis + 1 :]))
        before += size
    return found[0] if len(found) == 1 else np.concatenate(found, tensor.axis)


def _has_parts(tensor: JoinedTensor) -> bool:
    """Whether `read` can take a part of it: it has the shape of its joined parts, or at least their first axis."""
    joined, shape = tensor.joined_shape, tensor.shape.numpy()
    return joined == shape or (tensor.axis > 0 and joined[0] == shape[0])
