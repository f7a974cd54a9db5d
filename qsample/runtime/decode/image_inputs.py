"""The image inputs of a call: the rows of image features that the tokens of each row take, and the
offsets of their positions. Calls over text and decode steps read memory that stays, so a step costs
nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, eq=False)
class ImagePiece:
    """The images in a piece of n tokens of a prompt.

    Attributes:
        rows: [n] int32, the row of `features` that each token takes; -1 for text.
        features: [F, C], the features of these tokens.
        offsets: [n, 3] int32, the offsets of their positions; None without `ImageShape.axial`.
    """

    rows: Array
    features: Array
    offsets: Array | None


def image_piece(
    images: ImagePrompt | None, features: Array | None, piece: range
) -> ImagePiece | None:
    """The images in a piece of a prompt; None for a prompt without images. features: the features of
    the whole prompt, [F, C]."""
    if images is None:
        return None
    assert features is not None
    part = slice(piece.start, piece.stop)
    rows = images.rows[part]
    offsets = None if images.offsets is None else images.offsets[part]
    taken = rows[rows >= 0]
    if len(taken) == 0:
        return ImagePiece(rows, features[:0], offsets)
    first = int(taken.min())
    end = int(taken.max()) + 1
    return ImagePiece(np.where(rows < 0, -1, rows - first), features[first:end], offsets)


class ImageInputs:
    """The memory of the image inputs; none for packages that read text only. No method may be called
    while a graph runs."""

    def __init__(
        self, interface: Interface, rows: int, capacity: int, device: str, prompt_device: str
    ) -> None:
        """Allocate the memory that stays.

        Args:
            interface: the interface of the package.
            rows: the number of rows of the batch.
            capacity: the number of tokens of a row.
            device: the device of the inputs of steps.
            prompt_device: the device of the inputs of prompts.
        """
        self._specs = {spec.name: spec for spec in interface.image_inputs}
        self._prompt_device = prompt_device
        self._step_inputs: dict[str, Buffer] = {}
        # The inputs of calls over text, in the shape [1, rows * capacity, ...].
        self._text_inputs: dict[str, Buffer] = {}
        for name, spec in self._specs.items():
            if name == IMAGE_FEATURES:
                one_row = {IMAGE_TOKENS: 1}
                self._no_step_features = Buffer.allocate(spec, one_row, device)
                self._no_prompt_features = Buffer.allocate(spec, one_row, prompt_device)
            else:
                step_shape = spec.shape({BATCH: rows, SEQUENCE: 1})
                text_shape = spec.shape({BATCH: 1, SEQUENCE: rows * capacity})
                off_step = np.full(step_shape, spec.off, spec.dtype)
                off_text = np.full(text_shape, spec.off, spec.dtype)
                self._step_inputs[name] = Buffer.of(off_step, device)
                self._text_inputs[name] = Buffer.of(off_text, prompt_device)

    def begin(self, row: int, images: ImagePrompt | None) -> None:
        """Prepare a row for the decode steps after a prompt with these images."""
        if POSITION_OFFSETS.name in self._step_inputs:
            offsets = None if images is None else images.offsets
            last = 0 if offsets is None else offsets[-1:]
            self._step_inputs[POSITION_OFFSETS.name].write_at(row, last)

    def swap_rows(self, one: int, other: int) -> None:
        """Swap two rows; only on the CPU."""
        if POSITION_OFFSETS.name in self._step_inputs:
            self._step_inputs[POSITION_OFFSETS.name].swap_rows(one, other)

    def of_step(self, rows: range) -> dict[str, Buffer]:
        """The inputs of a decode step over `rows`, by name."""
        if not self._specs:
            return {}
        inputs = {
            name: buffer.rows(rows.start, len(rows)) for name, buffer in self._step_inputs.items()
        }
        inputs[IMAGE_FEATURES] = self._no_step_features
        return inputs

    def of_prompts(self, pieces: Sequence[ImagePiece | None], width: int) -> dict[str, Buffer]:
        """The inputs of a call over pieces of prompts, by name.

        Args:
            pieces: the images in the piece of each row; None for a text.
            width: the number of tokens of a row, padding included. Padding has the last offsets of
                its row.
        """
        if not self._specs:
            return {}
        rows = len(pieces)
        inputs = {
            name: text.reshaped(rows, width, *text.shape[2:])
            for name, text in self._text_inputs.items()
        }
        inputs[IMAGE_FEATURES] = self._no_prompt_features
        if all(piece is None for piece in pieces):
            return inputs
        arrays = {
            name: np.full(inputs[name].shape, self._specs[name].off, np.int32)
            for name in self._text_inputs
        }
        features: list[Array] = []
        feature_rows = 0
        for row, piece in enumerate(pieces):
            if piece is None:
                continue
            tokens = len(piece.rows)
            joined_rows = np.where(piece.rows < 0, -1, piece.rows + feature_rows)
            arrays[IMAGE_ROWS.name][row, :tokens] = joined_rows
            if piece.offsets is not None:
                arrays[POSITION_OFFSETS.name][row] = piece.offsets[-1]
                arrays[POSITION_OFFSETS.name][row, :tokens] = piece.offsets
            if len(piece.features) > 0:
                features.append(piece.features)
                feature_rows += len(piece.features)
        # Each call gets other memory: the call before it may still read.
        for name, array in arrays.items():
            inputs[name] = Buffer.of(array, self._prompt_device)
        if features:
            inputs[IMAGE_FEATURES] = self._features_input(features)
        return inputs

    def _features_input(self, features: list[Array]) -> Buffer:
        """The features of several pieces, one below the other."""
        joined = features[0] if len(features) == 1 else np.concatenate(features)
        buffer = Buffer.of(joined, self._prompt_device)
        # NumPy has bfloat16 as uint16 of the same bits.
        return replace(buffer, dtype=self._specs[IMAGE_FEATURES].dtype)
