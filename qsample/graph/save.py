"""A graph in memory enters; its ONNX file leaves, with the weights in a file next to it.

Weights are computed and written once, piece by piece: threads compute the next pieces while this one writes and hashes.
So the disk or all processors are busy, with a few pieces a thread in memory; tensors without pieces are there as a
whole.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.graph.edit import all_initializers
from qsample.graph.pieces import Piece, pieces_of

INLINE: Final = 1024  # bytes of a weight that stays in the graph's own file
_PAGE: Final = 4096  # tensors begin at a page: ONNX Runtime maps them
_LEAST: Final = 1 << 16  # bytes; smaller tensors are not compared
_AT_ONCE: Final = 1 << 24  # bytes that are compared or written at once
_AHEAD: Final = 3  # pieces a thread that are computed and not yet written

Place = tuple[int, int]  # offset and length in the file, in bytes


def save_graph(model: ir.Model, path: Path) -> str | None:
    """Write `model` to `path`, and its weights to a file next to it, `path` and `.data`; afterwards it refers to that.
    Returns the sha256 of the weights' file, in hexadecimal; None without that file, if no weight is large."""
    with WeightFile(path.with_name(f"{path.name}.data")) as weights:
        weights.take(model)
    ir.save(model, path)
    if not weights.places:
        weights.path.unlink()
        return None
    return weights.sha256


class WeightFile(AbstractContextManager["WeightFile"]):
    """A file of weights that is being written, to `path`; its tensors lie at `places`. Equal numbers are stored once,
    such as an embedding table that the head is tied to: operators want other shapes, so each has an initializer."""

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
        """Of all that was written, in hexadecimal."""
        return self._digest.hexdigest()

    def take(self, model: ir.Model) -> None:
        """Move weights of more than INLINE bytes here, unless they are, and smaller ones in files to the graph."""
        values = [
            value for value in all_initializers(model.graph) if not self._has(value.const_value)
        ]
        for value in values:
            if (
                isinstance(value.const_value, ir.ExternalTensor)
                and value.const_value.nbytes <= INLINE
            ):
                value.const_value = _in_memory(value.const_value)
        values = [value for value in values if _is_large(value.const_value)]
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
        return isinstance(tensor, ir.ExternalTensor) and os.path.abspath(
            tensor.path
        ) == os.path.abspath(self.path)

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
        """Write a tensor, whose bytes are `parts`, unless the file has these bytes. Returns its place."""
        end, digest = self._end, self._digest.copy()
        self._append(bytes(-self._end % _PAGE))
        offset, first = self._end, b""
        for part in parts:
            if len(first) < _PAGE:
                first += part[: _PAGE - len(first)].tobytes()
            self._append(part.data)
        length = self._end - offset
        earlier = self._earlier(offset, length, first) if length >= _LEAST else None
        if earlier is not None:
            self._file.seek(end)
            self._file.truncate()
            self._end, self._digest, offset = end, digest, earlier
        self.places.add((offset, length))
        return offset, length

    def _append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _AT_ONCE):
            piece = view[start : start + _AT_ONCE]
            self._digest.update(piece)
            while piece:
                piece = piece[self._file.write(piece) :]
        self._end += len(view)

    def _earlier(self, offset: int, length: int, first: bytes) -> int | None:
        """Where the `length` bytes from `offset` on, beginning with `first`, were written before; None if nowhere."""
        others = self._alike.setdefault((length, first), [])
        if others:
            written = np.memmap(self.path, np.uint8, "r")
            for other in others:
                if _equal(written, other, offset, length):
                    return other
        others.append(offset)
        return None


def _is_large(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.nbytes > INLINE


def _in_memory(tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)  # the file may go


def _equal(data: Array, one: int, other: int, length: int) -> bool:
    return all(
        np.array_equal(data[one + start : one + stop], data[other + start : other + stop])
        for start in range(0, length, _AT_ONCE)
        for stop in (min(start + _AT_ONCE, length),)
    )


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Job = tuple[
    ir.Value, Piece, bool
]  # the value, what computes a part of it, and whether any thread can do that


def _jobs(values: Iterable[ir.Value]) -> Iterator[Job]:
    for value in values:
        tensor = value.const_value
        assert tensor is not None
        pieces = pieces_of(tensor)
        if pieces is None:
            yield value, lambda tensor=tensor: np.frombuffer(tensor.tobytes(), np.uint8), False  # type: ignore[misc]
        else:
            for piece in pieces:
                yield value, piece, True


def _computed(pool: ThreadPoolExecutor, jobs: Iterable[Job]) -> Iterator[tuple[ir.Value, Array]]:
    """The results of `jobs` in order, flat bytes; threads are some pieces ahead."""
    waiting: deque[tuple[ir.Value, Piece, Future[Array] | None]] = deque()

    def take() -> tuple[ir.Value, Array]:
        value, compute, future = waiting.popleft()
        array = compute() if future is None else future.result()
        return value, array.reshape(-1).view(np.uint8)

    for value, compute, threaded in jobs:
        waiting.append((value, compute, pool.submit(compute) if threaded else None))
        while len(waiting) > _AHEAD * processors():
            yield take()
    while waiting:
        yield take()


def _by_value(
    results: Iterator[tuple[ir.Value, Array]],
) -> Iterator[tuple[ir.Value, Iterator[Array]]]:
    """Each value with its parts. Take them before the next value."""
    for value, parts in itertools.groupby(results, key=lambda result: result[0]):
        yield value, (array for _, array in parts)
