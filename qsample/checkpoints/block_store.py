"""Quantized weights in a file of scratch space, written a part at a time, and mapped whenever their
numbers are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from qsample.checkpoints.mapped_weights import Place
from qsample.graph.operators import middle_zero_points
from qsample.transforms.deferred import SMALLEST, defer
from qsample.transforms.quantized_linear import QuantizedWeight

_ALIGNMENT: Final = 64  # bytes


class BlockStore:
    """Quantized weights in a file of a new folder. Their large tensors are placeholders that a
    graph can refer to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder.resolve() / "blocks"  # ONNX Runtime opens no links
        self._weights: dict[str, QuantizedWeight] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._weights

    def read(self, key: str) -> QuantizedWeight:
        """The weight of a key; all readers get the same tensors."""
        return self._weights[key]

    def add(self, key: str, parts: Iterable[QuantizedWeight | None]) -> bool:
        """Write a weight, in parts of some rows each that have the same layout. Returns False if a
        part is None."""
        start = self._end()
        blocks_bytes = 0
        scales = []
        zero_points = []
        offsets = []
        has_zero_points = False
        last = None
        for part in parts:
            if part is None:
                return False
            blocks_bytes += self._append(part.blocks)
            scales.append(part.scales)
            if part.zero_points is None:
                rows, blocks = part.blocks.shape[:2]
                middle = middle_zero_points(rows, blocks, part.bits)
                zero_points.append(torch.from_numpy(middle))
            else:
                zero_points.append(part.zero_points)
                has_zero_points = True
            if part.offsets is not None:
                offsets.append(part.offsets)
            last = part
        assert last is not None
        rows = blocks_bytes // last.blocks[0].nbytes
        self._weights[key] = QuantizedWeight(
            bits=last.bits,
            block_size=last.block_size,
            blocks=self._stored(start, (rows, *last.blocks.shape[1:]), torch.uint8),
            scales=self._copy(torch.cat(scales)),
            zero_points=self._copy(torch.cat(zero_points)) if has_zero_points else None,
            order=None if last.order is None else self._copy(last.order),
            offsets=self._copy(torch.cat(offsets, 1)) if offsets else None,
        )
        return True

    def _copy(self, tensor: Tensor) -> Tensor:
        """Write a tensor, and return it as it is read from the file."""
        start = self._end()
        self._append(tensor)
        return self._stored(start, tensor.shape, tensor.dtype)

    def _stored(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of the file: a placeholder, or a copy if it is small. start: its first byte."""
        mapped = partial(_mapped, self._file, start, shape, dtype)
        tensor = mapped()
        if tensor.numel() < SMALLEST:
            return tensor.clone()
        return defer(shape, dtype, mapped, dtype, Place(self._file, start, tensor.nbytes))

    def _end(self) -> int:
        """The first byte of the next tensor; the file is filled up to it."""
        with self._file.open("ab") as file:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            return file.tell()

    def _append(self, tensor: Tensor) -> int:
        """Write a tensor at the end of the file, and return the number of its bytes."""
        with self._file.open("ab") as file:
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
        return tensor.nbytes


def _mapped(file: Path, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.from_numpy(np.memmap(file, np.uint8, "c", start, (size,)))
        .view(dtype)
        .view(tuple(shape))
    )
