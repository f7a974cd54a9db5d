"""Stores numbers once that a graph on disk has twice, such as the table of embeddings that the head is tied to.

Operators want them in shapes of their own, so that the graph has an initializer for each. ONNX Runtime maps both from
one place of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.graph.edit import all_initializers
from qsample.tensors import Array

_LEAST: Final = 1 << 16  # bytes; smaller ones are not worth a look
_PAGE: Final = 4096
_PIECE: Final = 1 << 24  # bytes that are compared at once

Place = tuple[int, int]  # offset and length in the file, in bytes


def share_equal_data(path: Path) -> None:
    """Let initializers of the graph at `path` with the same bytes in its data file have one place there, in place.

    The data file is written anew where there are such, beside the old one.
    """
    model = ir.load(path)
    stored = {
        value: value.const_value
        for value in all_initializers(model.graph)
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    files = {os.fspath(tensor.location) for tensor in stored.values()}
    if len(files) != 1:
        return
    data = path.parent / files.pop()
    mapped = np.memmap(data, np.uint8, "r")
    places = _places(mapped, (_place(tensor) for tensor in stored.values()))
    kept = sorted(set(places.values()))
    if len(kept) == len(places):
        return
    part = data.with_name(f"{data.name}.part")
    moved = _copy(mapped, part, kept)
    for value, tensor in stored.items():
        offset, length = moved[places[_place(tensor)]]
        value.const_value = ir.ExternalTensor(
            tensor.location,
            offset,
            length,
            tensor.dtype,
            shape=tensor.shape,
            name=str(value.name),
            base_dir=path.parent,
        )
    part.replace(data)
    ir.save(model, path)


def _place(tensor: ir.ExternalTensor) -> Place:
    return tensor.offset or 0, tensor.nbytes


def _places(data: Array, wanted: Iterable[Place]) -> dict[Place, Place]:
    """Each place of `data`, [bytes of the file] uint8 → the first one that has the same bytes."""
    alike: dict[tuple[int, bytes], list[Place]] = {}
    found: dict[Place, Place] = {}
    for offset, length in sorted(set(wanted)):
        place = (offset, length)
        found[place] = place
        if length >= _LEAST:
            others = alike.setdefault((length, data[offset : offset + _PAGE].tobytes()), [])
            found[place] = next((other for other in others if _equal(data, other[0], offset, length)), place)
            if found[place] is place:
                others.append(place)
    return found


def _equal(data: Array, one: int, other: int, length: int) -> bool:
    steps = range(0, length, _PIECE)
    sizes = [min(_PIECE, length - start) for start in steps]
    return all(
        np.array_equal(data[one + start : one + start + size], data[other + start : other + start + size])
        for start, size in zip(steps, sizes, strict=True)
    )


def _copy(data: Array, target: Path, places: Iterable[Place]) -> dict[Place, Place]:
    """Write these places of a file to another one, each at the beginning of a page; returns where they are there."""
    moved = {}
    with target.open("wb") as file:
        for offset, length in places:
            file.write(bytes(-file.tell() % _PAGE))
            moved[offset, length] = (file.tell(), length)
            file.write(data[offset : offset + length].data)
    return moved
