"""Writes a graph as an ONNX file, with the weights in a file next to it.

Weights are computed and written once, piece by piece: threads compute the next pieces while the
calling thread writes and hashes. So the disk or all processors are busy, and memory holds only a
few pieces for each thread; tensors without pieces are in memory as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.graph.edit import all_initializers
from qsample.graph.pieces import Piece, pieces_of

# A weight up to this size stays in the file of the graph.
MAX_INLINE_BYTES: Final = 1024
# Tensors begin at a page, because ONNX Runtime maps them.
_PAGE_BYTES: Final = 4096
# Smaller tensors are not compared with others.
_MIN_COMPARED_BYTES: Final = 1 << 16
# Bytes that are compared or written at once.
_CHUNK_BYTES: Final = 1 << 24
# Pieces for each thread that are computed and not yet written.
_PIECES_AHEAD: Final = 3

# The offset and the length of a tensor in the file, in bytes.
Place = tuple[int, int]


def save_graph(model: ir.Model, path: Path) -> str | None:
    """Write `model` to `path`, and its weights to `path` with `.data` appended.

    Afterwards the model refers to that file.

    Returns:
        The sha256 of the file of weights, in hexadecimal; None if no weight is large, so that there
        is no such file.
    """
    with WeightFile(path.with_name(f"{path.name}.data")) as weights:
        weights.take(model)
    ir.save(model, path)
    if not weights.places:
        weights.path.unlink()
        return None
    return weights.sha256


class WeightFile(AbstractContextManager["WeightFile"]):
    """A file of weights that is being written.

    Equal bytes are stored once, such as an embedding table to which the head is tied: operators
    need different shapes, so each has an initializer of the same bytes.

    Attributes:
        path: the file.
        places: the places of its tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: set[Place] = set()
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._end = 0
        self._alike: dict[tuple[int, bytes], list[int]] = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        """The sha256 of the bytes written so far, in hexadecimal."""
        return self._digest.hexdigest()

    def take(self, model: ir.Model) -> None:
        """Move weights of more than MAX_INLINE_BYTES into the file, unless they are there already.

        Smaller weights in other files move to the graph.
        """
        values: list[ir.Value] = []
        for value in all_initializers(model.graph):
            tensor = value.const_value
            if self._has(tensor):
                continue
            if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes <= MAX_INLINE_BYTES:
                value.const_value = _in_memory(tensor)
            elif _is_large(tensor):
                values.append(value)
        with ThreadPoolExecutor(processors(), "qsample-weights") as pool:
            jobs = _jobs(values)
            try:
                for value, parts in _by_value(_computed(pool, jobs)):
                    place = self._write(parts)
                    value.const_value = self._reference(value, place)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _has(self, tensor: ir.TensorProtocol | None) -> bool:
        """Whether `tensor` lies in the file."""
        if not isinstance(tensor, ir.ExternalTensor):
            return False
        return os.path.abspath(tensor.path) == os.path.abspath(self.path)

    def _reference(self, value: ir.Value, place: Place) -> ir.ExternalTensor:
        tensor = value.const_value
        assert tensor is not None
        offset, length = place
        if length != tensor.nbytes:
            raise ValueError(
                f"{value.name} has {length} bytes; its dtype and shape make {tensor.nbytes}"
            )
        return ir.ExternalTensor(
            self.path.name,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=str(value.name),
            base_dir=self.path.parent,
        )

    def _write(self, parts: Iterable[Array]) -> Place:
        """Write a tensor with the bytes `parts`, unless the file has these bytes; returns its
        place."""
        end = self._end
        digest = self._digest.copy()
        self._append(bytes(-self._end % _PAGE_BYTES))
        offset = self._end
        first = b""
        for part in parts:
            if len(first) < _PAGE_BYTES:
                first += part[: _PAGE_BYTES - len(first)].tobytes()
            self._append(part.data)
        length = self._end - offset
        earlier = self._earlier(offset, length, first) if length >= _MIN_COMPARED_BYTES else None
        if earlier is not None:
            self._file.seek(end)
            self._file.truncate()
            self._end = end
            self._digest = digest
            offset = earlier
        self.places.add((offset, length))
        return offset, length

    def _append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            self._digest.update(piece)
            while piece:
                piece = piece[self._file.write(piece) :]
        self._end += len(view)

    def _earlier(self, offset: int, length: int, first: bytes) -> int | None:
        """The offset of earlier bytes that equal those at `offset`; None if there are none.

        Args:
            offset: the offset of the bytes.
            length: their number.
            first: the bytes of their first page.
        """
        others = self._alike.setdefault((length, first), [])
        if others:
            written = np.memmap(self.path, np.uint8, "r")
            for other in others:
                if _equal(written, other, offset, length):
                    return other
        others.append(offset)
        return None


def _is_large(tensor: ir.TensorProtocol | None) -> bool:
    return (
        tensor is not None
        and tensor.dtype != ir.DataType.STRING
        and tensor.nbytes > MAX_INLINE_BYTES
    )


def _in_memory(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    """A copy of a tensor whose file may be removed."""
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def _equal(data: Array, one: int, other: int, length: int) -> bool:
    """Whether the bytes at two offsets are equal."""
    for start in range(0, length, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, length)
        if not np.array_equal(data[one + start : one + stop], data[other + start : other + stop]):
            return False
    return True


def processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return max(os.cpu_count() or 0, 1)


@dataclass(frozen=True, slots=True)
class _Job:
    """A part of a weight to compute.

    Attributes:
        value: the weight.
        compute: computes the part.
        in_any_thread: whether any thread can do that, or only the calling thread.
    """

    value: ir.Value
    compute: Piece
    in_any_thread: bool


def _jobs(values: Iterable[ir.Value]) -> Iterator[_Job]:
    for value in values:
        tensor = value.const_value
        assert tensor is not None
        pieces = pieces_of(tensor)
        if pieces is None:
            yield _Job(value, functools.partial(_bytes_of, tensor), in_any_thread=False)
        else:
            for piece in pieces:
                yield _Job(value, piece, in_any_thread=True)


def _bytes_of(tensor: ir.TensorProtocol) -> Array:
    return np.frombuffer(tensor.tobytes(), np.uint8)


def _computed(pool: ThreadPoolExecutor, jobs: Iterable[_Job]) -> Iterator[tuple[ir.Value, Array]]:
    """The results of jobs in order, as flat bytes; threads compute some pieces ahead."""
    waiting: deque[tuple[_Job, Future[Array] | None]] = deque()

    def take() -> tuple[ir.Value, Array]:
        job, future = waiting.popleft()
        array = job.compute() if future is None else future.result()
        return job.value, array.reshape(-1).view(np.uint8)

    for job in jobs:
        waiting.append((job, pool.submit(job.compute) if job.in_any_thread else None))
        while len(waiting) > _PIECES_AHEAD * processors():
            yield take()
    while waiting:
        yield take()


def _by_value(
    results: Iterator[tuple[ir.Value, Array]],
) -> Iterator[tuple[ir.Value, Iterator[Array]]]:
    """Each value with its parts, which have to be read before the next value."""
    for value, parts in itertools.groupby(results, key=lambda result: result[0]):
        yield value, (array for _, array in parts)
