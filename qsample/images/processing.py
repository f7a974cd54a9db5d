"""A package's images: a picture → the inputs of vision.onnx; text with images → token ids, rows and
positions.

`Manifest.images` has all settings, so no file of transformers is needed. Its keys are the fields of
`ImageSettings`.
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
from qsample.images.decode import ImageLike, ImageLimits, read_image, strips
from qsample.images.families import FAMILIES, Family, Layout
from qsample.images.positions import position_offsets
from qsample.images.prompt import ImagePrompt, ProcessedImage
from qsample.package.manifest import MANIFEST_NAME
from qsample.package.package import Package

_MAX_PLACEHOLDERS: Final = 1 << 20  # An image has at most this number.
_SIGN_BIT: Final = np.int64(-(1 << 63))


def _text(accepted: str = "a text") -> Any:
    return instance(str, accepted, "")


@dataclass(frozen=True, slots=True)
class ImageTexts:
    """The texts around the placeholders of an image.

    Attributes:
        single: the text before the placeholders of an image without tiles.
        before: the text before the first tile.
        tile: the text before each tile; it may contain {row}, {column} and {number}, counted from
            1.
        line: the text between two rows of tiles.
        whole: the text before the placeholders of the whole image, after the tiles.
        after: the text after the image.
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
        """The text of an image in a prompt. token: the text of a placeholder."""
        rows, columns = layout.tiles
        placeholders = token * layout.count
        if rows * columns == 0:
            return self.single + placeholders + self.after
        lines = []
        for row in range(rows):
            tiles = [self.of_tile(row, column, columns) + placeholders for column in range(columns)]
            lines.append("".join(tiles))
        whole = self.whole + placeholders if layout.whole else ""
        return self.before + self.line.join(lines) + whole + self.after


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """The content of `Manifest.images`.

    Attributes:
        family: a name from FAMILIES.
        settings: the settings of the family, by name.
        placeholder: the text for an image in a prompt, or in the output of a chat template.
        token: the text of each of the image's placeholders.
        token_id: the id of `token`.
        texts: the texts around the placeholders; see `ImageTexts`.
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
        wrong = (data.keys() - known) | (needed - data.keys())
        if wrong:
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
        """Read the settings of a package's images.

        Args:
            images: the content of `Manifest.images`.
            axial: whether positions have three axes, as in `ImageShape`.
            identity: bytes that identify the package's vision part.

        Raises PackageError for settings that no export writes.
        """
        # What another process needs to make the same processor.
        self.arguments: dict[str, Any] = {
            "images": images,
            "axial": axial,
            "identity": identity.hex(),
        }
        settings: ImageSettings = _read(ImageSettings, images, "images")
        self.family: Family = _read(FAMILIES[settings.family], settings.settings, "images.settings")
        self.texts: ImageTexts = _read(ImageTexts, settings.texts, "images.texts")
        self.placeholder = settings.placeholder
        self.token = settings.token
        self.token_id = settings.token_id
        self._axial = axial
        self._identity = identity + json.dumps(asdict(self.family), sort_keys=True).encode()

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> ImageProcessor:
        """A processor as it was made in another process, from its `arguments`."""
        identity = bytes.fromhex(arguments["identity"])
        return cls(arguments["images"], axial=arguments["axial"], identity=identity)

    @classmethod
    def of(cls, package: Package) -> ImageProcessor | None:
        """The processor of a package, or None if it reads text only. Raises PackageError for a
        damaged manifest."""
        manifest = package.manifest
        image = package.interface.image
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

        Args:
            image: the image.
            limits: the largest image to read; by default `ImageLimits()`.
            name: the name of the image in messages.

        Raises ValueError for anything but an image within the limits, QsampleError without Pillow.
        """
        upright = read_image(image, limits, name)
        layout = self.layout(*upright.size, name)
        values, grid = self.family.pixels(upright, layout)
        digest = hashlib.sha256(self._identity + repr(upright.size).encode())
        for strip in strips(upright):
            digest.update(strip.tobytes())
        rows = np.arange(layout.placeholders) if layout.rows is None else layout.rows
        text = self.texts.written(layout, self.token)
        return ProcessedImage(digest.digest(), values, grid, rows, layout.size, text)

    def layout(self, width: int, height: int, name: str = "the image") -> Layout:
        """The layout of an image of this size, in pixels. Raises ValueError as `process` does."""
        try:
            layout = self.family.layout(width, height)
        except ArgumentError as error:
            raise ArgumentError(str(error).replace("the image", name, 1), error.argument) from None
        if layout.placeholders > _MAX_PLACEHOLDERS:
            raise ArgumentError(
                f"{name} has {width} x {height} pixels: too many placeholders; make it smaller",
                "images",
            )
        return layout

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """`text` with the placeholders of each image in place of `placeholder`. Raises ValueError
        if the numbers of images and of `placeholder` differ."""
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(images):
            raise ArgumentError(
                f"the text has {len(parts) - 1} times {self.placeholder!r} (an image), and "
                f"{len(images)} images were given; give an image for each",
                "images",
            )
        expanded = [parts[0]]
        for image, part in zip(images, parts[1:], strict=True):
            expanded += [image.text, part]
        return "".join(expanded)

    def prompt(self, ids: Sequence[int] | Array, images: Sequence[ProcessedImage]) -> ImagePrompt:
        """The decoder's inputs for the images of a prompt.

        Args:
            ids: the token ids of the prompt with all placeholders, as `expand` writes them.
            images: the images in the order of the prompt.

        Raises ValueError if there are more or fewer placeholders than these images have.
        """
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
        offsets = None
        if self._axial:
            offsets = position_offsets(is_image, [image.size or (0, 0) for image in images])
        return ImagePrompt(tuple(images), rows, offsets, identities)


def _identities(image: ProcessedImage) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A number for each placeholder, [n] int64: negative, with 63 bits that depend on the image and
    on the place of the placeholder."""
    stream = hashlib.shake_256(image.key).digest(8 * len(image.rows))
    return np.frombuffer(stream, "<i8").astype(np.int64) | _SIGN_BIT
