"""Quantized weights in a file of scratch space: written a part at a time, mapped whenever their numbers are read."""

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
    """Quantized weights in a file of a new folder; their large parts are placeholders that a graph can refer to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder.resolve() / "blocks"  # ONNX Runtime opens no links
        self._weights: dict[str, QuantizedWeight] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._weights

    def read(self, key: str) -> QuantizedWeight:
        """The weight `key`; the same tensors for each reader."""
        return self._weights[key]

    def add(self, key: str, parts: Iterable[QuantizedWeight | None]) -> bool:
        """Write a weight, in parts of some rows each that have the same layout. Returns False if a part is None."""
        levels, scales, zero_points, offsets = 0, [], [], []
        start, any_zeros, last = self._end(), False, None
        for part in parts:
            if part is None:
                return False
            rows, blocks = part.blocks.shape[:2]
            levels += self._append(part.blocks)
            scales.append(part.scales)
            any_zeros |= part.zero_points is not None
            middle = torch.from_numpy(middle_zero_points(rows, blocks, part.bits))
            zero_points.append(middle if part.zero_points is None else part.zero_points)
            offsets += [] if part.offsets is None else [part.offsets]
            last = part
        assert last is not None
        shape = (levels // last.blocks[0].nbytes, *last.blocks.shape[1:])
        self._weights[key] = QuantizedWeight(
            last.bits,
            last.block_size,
            self._stored(start, shape, torch.uint8),
            self._copy(torch.cat(scales)),
            self._copy(torch.cat(zero_points)) if any_zeros else None,
            None if last.order is None else self._copy(last.order),
            self._copy(torch.cat(offsets, 1)) if offsets else None,
        )
        return True

    def _copy(self, tensor: Tensor) -> Tensor:
        start = self._end()
        self._append(tensor)
        return self._stored(start, tensor.shape, tensor.dtype)

    def _stored(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        mapped = partial(_mapped, self._file, start, shape, dtype)
        tensor = mapped()
        place = Place(self._file, start, tensor.nbytes)
        return (
            tensor.clone()
            if tensor.numel() < SMALLEST
            else defer(shape, dtype, mapped, dtype, place)
        )

    def _end(self) -> int:
        """The place of the next tensor."""
        with self._file.open("ab") as file:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            return file.tell()

    def _append(self, tensor: Tensor) -> int:
        """Write `tensor` at the end of the file; returns its bytes."""
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
