"""A package's images: a picture → the inputs of vision.onnx; text with images → token ids, rows and positions.

`Manifest.images` has all that it needs: no file of transformers. Its keys are the fields of `ImageSettings`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Final

import numpy as np

from qsample.checks import check_fields, choice, instance, integer
from qsample.contract.arrays import Array
from qsample.errors import ArgumentError, PackageError, shown
from qsample.images.decode import ImageLike, ImageLimits, read_image
from qsample.images.families import FAMILIES, Family, Layout
from qsample.images.positions import position_offsets
from qsample.images.prompt import ImagePrompt, ProcessedImage
from qsample.package.manifest import MANIFEST_NAME
from qsample.package.package import Package

_MOST_PLACEHOLDERS: Final = 1 << 20  # of an image
_SIGN: Final = np.int64(-(1 << 63))


def _text(accepted: str = "a text") -> Any:
    return instance(str, accepted, "")


@dataclass(frozen=True, slots=True)
class ImageTexts:
    """The texts around the placeholders of an image. That of a tile may contain {row}, {column} and {number}, counted
    from 1.

    Attributes:
        single: before the placeholders of an image without tiles.
        before: before the first tile.
        tile: before each tile.
        line: between two rows of tiles.
        whole: before the placeholders of the whole image, after the tiles.
        after: after the image.
    """

    single: str = _text()
    before: str = _text()
    tile: str = _text()
    line: str = _text()
    whole: str = _text()
    after: str = _text()

    def __post_init__(self) -> None:
        check_fields(self)

    def of_tile(self, row: int, column: int, columns: int) -> str:
        """The text before a tile; rows and columns count from 0."""
        values = {"{row}": row + 1, "{column}": column + 1, "{number}": row * columns + column + 1}
        text = self.tile
        for name, value in values.items():
            text = text.replace(name, str(value))
        return text

    def written(self, layout: Layout, token: str) -> str:
        """An image in the text of a prompt; `token`: the text of a placeholder."""
        (rows, columns), run = layout.tiles, token * layout.count
        if rows * columns == 0:
            return self.single + run + self.after
        lines = [
            "".join(self.of_tile(row, at, columns) + run for at in range(columns))
            for row in range(rows)
        ]
        return (
            self.before
            + self.line.join(lines)
            + (self.whole + run if layout.whole else "")
            + self.after
        )


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """The content of `Manifest.images`.

    Attributes:
        family: a name from FAMILIES.
        settings: of the family, by name.
        placeholder: the text for an image in a prompt, or in the output of a chat template.
        token: the text of each of the image's placeholders.
        token_id: the id of `token`.
        texts: around these; see `ImageTexts`.
    """

    family: str = choice(MISSING, FAMILIES)
    settings: Mapping[str, Any] = instance(Mapping, "the settings of the family, by name")
    placeholder: str = instance(str, "a text")
    token: str = instance(str, "a text")
    token_id: int = integer(MISSING, 0, 2**31 - 1, "a token id")
    texts: Mapping[str, str] = instance(Mapping, "texts by name")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.placeholder or not self.token:
            raise ArgumentError("placeholder and token are texts of at least a character")


def _read(kind: type[Any], data: Mapping[str, Any], where: str) -> Any:
    """A dataclass from its JSON. Raises PackageError for unknown, missing and wrong values."""
    try:
        known = {entry.name for entry in fields(kind)}
        needed = {entry.name for entry in fields(kind) if entry.default is MISSING}
        if wrong := [*(data.keys() - known), *(needed - data.keys())]:
            raise ArgumentError(f"{', '.join(sorted(map(str, wrong)))[:200]} is unknown or missing")
        return kind(**data)
    except (ArgumentError, TypeError) as error:
        raise PackageError(
            f"{where} in {MANIFEST_NAME}: {error!s:.300}; export the package again"
        ) from error


class ImageProcessor:
    """The images of a package.

    >>> processor = ImageProcessor.of(package)
    >>> image = processor.process("cat.jpg")
    >>> ids = tokenizer.encode(processor.expand(f"{processor.placeholder} What is this?", [image]))
    >>> prompt = processor.prompt(ids, [image])
    """

    def __init__(
        self, images: Mapping[str, Any], *, axial: bool = False, identity: bytes = b""
    ) -> None:
        """images: `Manifest.images`. axial: as in `ImageShape`. identity: of the package's vision part.

        Raises PackageError for images that are not as an export writes them."""
        settings: ImageSettings = _read(ImageSettings, images, "images")
        self.family: Family = _read(FAMILIES[settings.family], settings.settings, "images.settings")
        self.texts: ImageTexts = _read(ImageTexts, settings.texts, "images.texts")
        self.placeholder, self.token, self.token_id = (
            settings.placeholder,
            settings.token,
            settings.token_id,
        )
        self._axial = axial
        self._identity = identity + json.dumps(asdict(self.family), sort_keys=True).encode()

    @classmethod
    def of(cls, package: Package) -> ImageProcessor | None:
        """The processor of a package, or None if it reads text only. Raises PackageError for a damaged manifest."""
        manifest, image = package.manifest, package.interface.image
        if manifest.images is None or image is None:
            return None
        vision = sorted(
            (name, entry.sha256)
            for name, entry in manifest.files.items()
            if name.startswith("vision.onnx")
        )
        processor = cls(manifest.images, axial=image.axial, identity=repr(vision).encode())
        if processor.token_id >= package.interface.vocab_size:
            raise PackageError(
                f"images.token_id in {MANIFEST_NAME} is {processor.token_id}, and the model has "
                f"{package.interface.vocab_size} tokens; export the package again"
            )
        if image.axial and processor.layout(64, 64).size is None:
            raise PackageError(
                f"images in {MANIFEST_NAME} give no sizes for M-RoPE; export the package again"
            )
        return processor

    def process(
        self, image: ImageLike, limits: ImageLimits | None = None, name: str = "the image"
    ) -> ProcessedImage:
        """The inputs of vision.onnx for an image, and its placeholders.

        name: of the image in messages. Raises ValueError for anything but an image within the limits, QsampleError
        without Pillow.
        """
        upright = read_image(image, limits, name)
        layout = self.layout(*upright.size, name)
        values, grid = self.family.pixels(upright, layout)
        digest = hashlib.sha256(self._identity + repr(upright.size).encode())
        digest.update(upright.tobytes())
        rows = np.arange(layout.placeholders) if layout.rows is None else layout.rows
        text = self.texts.written(layout, self.token)
        return ProcessedImage(digest.digest(), values, grid, rows, layout.size, text)

    def layout(self, width: int, height: int, name: str = "the image") -> Layout:
        """The layout of an image of this size, in pixels. Raises ValueError as `process` does."""
        try:
            layout = self.family.layout(width, height)
        except ArgumentError as error:
            raise ArgumentError(str(error).replace("the image", name, 1), error.argument) from None
        if layout.placeholders > _MOST_PLACEHOLDERS:
            raise ArgumentError(
                f"{name} has {width} x {height} pixels: too many placeholders; make it smaller",
                "images",
            )
        return layout

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """`text` with the placeholders of each image in place of `placeholder`. Raises ValueError if their numbers
        differ."""
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(images):
            raise ArgumentError(
                f"the text has {len(parts) - 1} times {self.placeholder!r} (an image), and "
                f"{len(images)} images were given; give one for each",
                "images",
            )
        return parts[0] + "".join(
            image.text + part for image, part in zip(images, parts[1:], strict=True)
        )

    def prompt(self, ids: Sequence[int] | Array, images: Sequence[ProcessedImage]) -> ImagePrompt:
        """The decoder's inputs for the images of a prompt. ids: with all placeholders, as `expand` writes them. Raises
        ValueError if there are more or fewer placeholders than these images have."""
        tokens = np.asarray(ids, np.int64).reshape(-1)
        is_image = tokens == self.token_id
        places = np.flatnonzero(is_image)
        counts = [len(image.rows) for image in images]
        if len(places) != sum(counts):
            raise ArgumentError(
                f"the prompt has {len(places)} placeholders (id {self.token_id}, {shown(self.token)}) and its "
                f"{len(images)} images take {sum(counts)}; write them as transformers' processor does, or give text",
                "images",
            )
        rows = np.full(len(tokens), -1, np.int32)
        rows[places] = np.arange(len(places))
        identities = tokens.copy()
        if images:
            identities[places] = np.concatenate([_identities(image) for image in images])
        offsets = (
            position_offsets(is_image, [image.size or (0, 0) for image in images])
            if self._axial
            else None
        )
        return ImagePrompt(tuple(images), rows, offsets, identities)


def _identities(image: ProcessedImage) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[n] negative int64, of 63 bits that depend on the image and on the place of the placeholder."""
    stream = hashlib.shake_256(image.key).digest(8 * len(image.rows))
    return np.frombuffer(stream, "<i8").astype(np.int64) | _SIGN
