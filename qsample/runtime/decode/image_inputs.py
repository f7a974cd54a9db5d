"""The image inputs of a call: which rows of image features the tokens of each row take, and the offsets of their
positions. Calls over text read memory that stays, and so do decode steps: a step costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    BATCH,
    IMAGE_FEATURES,
    IMAGE_ROWS,
    IMAGE_TOKENS,
    POSITION_OFFSETS,
    SEQUENCE,
)
from qsample.images.prompt import ImagePrompt
from qsample.ort.buffers import Buffer


class ImagePiece(NamedTuple):
    """What a piece of a prompt takes of its images.
    rows: [n] int32, rows of `features`; -1 for text. features: [F, C], of these tokens. offsets: [n, 3] int32, or None.
    """

    rows: Array
    features: Array
    offsets: Array | None


def image_piece(
    images: ImagePrompt | None, features: Array | None, piece: range
) -> ImagePiece | None:
    """The piece of a prompt with `images`; None without any. features: [F, C], of the whole prompt."""
    if images is None:
        return None
    assert features is not None
    part = slice(piece.start, piece.stop)
    rows = images.rows[part]
    taken = rows[rows >= 0]
    first, end = (int(taken.min()), int(taken.max()) + 1) if len(taken) else (0, 0)
    offsets = None if images.offsets is None else images.offsets[part]
    return ImagePiece(np.where(rows < 0, -1, rows - first), features[first:end], offsets)


class ImageInputs:
    """The memory of the image inputs, none for packages that read text only. No method may be called while a graph
    runs."""

    def __init__(
        self, interface: Interface, rows: int, capacity: int, device: str, prompt_device: str
    ) -> None:
        """rows: of the batch. device, prompt_device: of the inputs of steps and of prompts."""
        self._specs = {spec.name: spec for spec in interface.image_inputs}
        self._device = prompt_device
        self._step: dict[str, Buffer] = {}
        self._text: dict[
            str, Buffer
        ] = {}  # of calls over text, in the shape [1, rows * capacity, ...]
        for name, spec in self._specs.items():
            if name == IMAGE_FEATURES:
                self._no_features = [
                    Buffer.allocate(spec, {IMAGE_TOKENS: 1}, place)
                    for place in (device, prompt_device)
                ]
            else:
                step, text = (
                    spec.shape({BATCH: rows, SEQUENCE: 1}),
                    spec.shape({BATCH: 1, SEQUENCE: rows * capacity}),
                )
                self._step[name] = Buffer.of(np.full(step, spec.off, spec.dtype), device)
                self._text[name] = Buffer.of(np.full(text, spec.off, spec.dtype), prompt_device)

    def begin(self, row: int, images: ImagePrompt | None) -> None:
        """Let a row decode after a prompt with these images."""
        if POSITION_OFFSETS.name in self._step:
            offsets = None if images is None else images.offsets
            self._step[POSITION_OFFSETS.name].write_at(row, 0 if offsets is None else offsets[-1:])

    def swap_rows(self, one: int, other: int) -> None:
        """On the CPU."""
        if POSITION_OFFSETS.name in self._step:
            self._step[POSITION_OFFSETS.name].swap_rows(one, other)

    def of_step(self, rows: range) -> dict[str, Buffer]:
        """The inputs of a decode step over `rows`, by name."""
        if not self._specs:
            return {}
        inputs = {name: buffer.rows(rows.start, len(rows)) for name, buffer in self._step.items()}
        return inputs | {IMAGE_FEATURES: self._no_features[0]}

    def of_prompts(self, pieces: Sequence[ImagePiece | None], width: int) -> dict[str, Buffer]:
        """The inputs of a call over a piece of each of several rows, by name. width: tokens of a row, padding included,
        which has the last offsets of its row."""
        if not self._specs:
            return {}
        rows = len(pieces)
        inputs = {
            name: text.reshaped(rows, width, *text.shape[2:]) for name, text in self._text.items()
        }
        inputs[IMAGE_FEATURES] = self._no_features[1]
        if all(piece is None for piece in pieces):
            return inputs
        arrays = {
            name: np.full(inputs[name].shape, self._specs[name].off, np.int32)
            for name in self._text
        }
        features: list[Array] = []
        for row, piece in enumerate(pieces):
            if piece is not None:
                before = sum(map(len, features))
                arrays[IMAGE_ROWS.name][row, : len(piece.rows)] = np.where(
                    piece.rows < 0, -1, piece.rows + before
                )
                features += [piece.features] if len(piece.features) else []
                if piece.offsets is not None:
                    arrays[POSITION_OFFSETS.name][row] = piece.offsets[-1]
                    arrays[POSITION_OFFSETS.name][row, : len(piece.offsets)] = piece.offsets
        if features:
            joined = features[0] if len(features) == 1 else np.concatenate(features)
            # NumPy has bfloat16 as uint16 of the same bits.
            inputs[IMAGE_FEATURES] = replace(
                Buffer.of(joined, self._device), dtype=self._specs[IMAGE_FEATURES].dtype
            )
        # Other memory for each call: the call before it may still read.
        return inputs | {name: Buffer.of(array, self._device) for name, array in arrays.items()}
