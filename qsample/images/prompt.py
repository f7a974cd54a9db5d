"""The images of a prompt: `ProcessedImage` for vision.onnx, and `ImagePrompt` for the decoder."""

from __future__ import annotations

from dataclasses import dataclass

from qsample.contract.arrays import Array


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as vision.onnx reads it, and its place in a prompt.

    Attributes:
        key: the sha256 of the pixels and of the package's vision part. Equal keys have equal
            features.
        pixel_values: the input, float32, [A, patch_values] or [I, 3, height, width].
        grid: the rows and columns of patches, for packages whose `ImageShape.patch_values` is not
            0.
        rows: [n] int64, the row of vision.onnx's result for each of the n placeholders, in order.
        size: the rows and columns of placeholders, for packages with `ImageShape.axial`: n is their
            product.
        text: the image in the text of a prompt: placeholders, and the texts around them.
        features: [n, C], the features of the placeholders, if they are computed already.
    """

    key: bytes
    pixel_values: Array
    grid: tuple[int, int] | None
    rows: Array
    size: tuple[int, int] | None = None
    text: str = ""
    features: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """The images of a prompt of n tokens, placeholders included.

    Attributes:
        images: the images in the order of the prompt.
        rows: [n] int32, the number of each placeholder among all placeholders, from 0; -1 for text.
            This is the contract's `image_rows` if `image_features` has the features of the whole
            prompt.
        offsets: [n + 1, 3] int32, the contract's `position_offsets`; None without
            `ImageShape.axial`. The last entry is for all tokens after the prompt.
        identities: [n] int64, the id of a text token, or a negative number for a placeholder. The
            number depends on the image and on the place in the image. Prompts share a beginning if
            their identities do.
    """

    images: tuple[ProcessedImage, ...]
    rows: Array
    offsets: Array | None
    identities: Array
