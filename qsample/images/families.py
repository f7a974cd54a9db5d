"""Families of image processing: an RGB image → the numbers that vision.onnx reads, and the layout
of its placeholders.

A family is a dataclass of settings, named as in transformers' processors. Its pixels equal the
pixels of transformers' Pillow classes bit for bit, because it computes in their order: it resizes
in 8 bits (Pillow), multiplies by `rescale_factor` in float64, rounds to float32, subtracts the mean
and divides by the deviation. A pixel has 256 values, so this is computed for 256 numbers of each
channel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qsample.checks import (
    check_fields,
    checked,
    flag,
    integer,
    is_integer,
    is_number,
    number,
    refuse,
)
from qsample.contract.arrays import Array
from qsample.errors import ArgumentError

if TYPE_CHECKING:
    from PIL.Image import Image

# A long and thin image could be enlarged to more pixels.
_MAX_RESIZED_PIXELS: Final = 1 << 26
# The largest side of a tile in pixels, and the largest number of its placeholders.
_MAX_COUNT: Final = 1 << 16
_MAX_ASPECT_RATIO: Final = 200  # The limit of `Grid`.
# If the root of tiles : most_tiles is larger, LLaVA-OneVision reduces the number of its rows.
_REDUCTION_THRESHOLD: Final = 1.1


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The tiles and placeholders of an image of some width and height.

    Attributes:
        width, height: the pixels after resizing.
        count: the number of placeholders of a tile.
        tiles: the rows and columns of tiles, or of lines, that have placeholders; (0, 0) if the
            image is a single tile.
        whole: whether the whole image follows the tiles.
        rows: the rows of vision.onnx's result for the placeholders; None for all rows, in order.
        size: the rows and columns of placeholders.
    """

    width: int
    height: int
    count: int
    tiles: tuple[int, int] = (0, 0)
    whole: bool = False
    rows: Array | None = None
    size: tuple[int, int] | None = None

    @property
    def placeholders(self) -> int:
        """The number of placeholders of the image."""
        tiles = max(math.prod(self.tiles), 1)
        if self.whole:
            tiles += 1
        return self.count * tiles


def _sides(*kinds: set[str], default: Any = MISSING) -> Any:
    """A field for a size as transformers writes it, names → pixels. kinds: the accepted sets of
    names."""
    accepted = ", or ".join(" and ".join(sorted(names)) for names in kinds)

    def check(name: str, value: Any) -> Any:
        is_valid = (
            isinstance(value, Mapping)
            and set(value) in kinds
            and all(_is_size(pixels) for pixels in value.values())
        )
        if not is_valid:
            refuse(name, value, f"{accepted}, in pixels")
        return dict(value)

    return checked(default, check)


def _is_size(value: Any) -> bool:
    return is_integer(value, 1, 1 << 31)


def _channels(name: str, value: Any) -> tuple[float, ...]:
    is_valid = (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(is_number(item, -1e30, 1e30) for item in value)
    )
    if not is_valid:
        refuse(name, value, "a number for each of the channels red, green and blue, or None")
    return tuple(float(number) for number in value)


def _resolutions(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    pairs = value if isinstance(value, list | tuple) else ()
    if not 0 < len(pairs) < 1000 or not all(_is_pair_of_sizes(pair) for pair in pairs):
        refuse(name, value, "pairs of height and width in pixels")
    return tuple(tuple(pair) for pair in pairs)


def _is_pair_of_sizes(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(_is_size(pixels) for pixels in value)
    )


def _count(most: int = _MAX_COUNT) -> Any:
    """A field for a number of pixels, tiles or placeholders."""
    return integer(MISSING, 1, most, f"an integer from 1 to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The settings that all families have.

    Attributes:
        resample: Pillow's number of a filter.
        rescale_factor: the factor of the values; None leaves the step out.
        image_mean, image_std: the mean and deviation of each channel; None leaves the step out.
    """

    resample: int = integer(MISSING, 0, 5, "a filter of Pillow, from 0 to 5")
    rescale_factor: float | None = number(MISSING, 0, 1e30, "a number, or None", optional=True)
    image_mean: tuple[float, ...] | None = checked(None, _channels)
    image_std: tuple[float, ...] | None = checked(None, _channels)

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.image_mean is None) != (self.image_std is None) or 0 in (self.image_std or ()):
            raise ArgumentError(
                "image_mean and image_std are numbers, those of image_std not 0, or both are None"
            )

    def layout(self, width: int, height: int) -> Layout:
        """The layout of an image. Raises ValueError for an image that the family cannot take."""
        raise NotImplementedError

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        """The inputs of vision.onnx for an RGB image with this layout: pixel_values, float32, and
        the rows and columns of patches."""
        return self._numbers(self._resized(image, layout.width, layout.height))[None], None

    def _resized(self, image: Image, width: int, height: int) -> Array:
        """The resized image, uint8 [height, width, 3]."""
        from PIL.Image import Resampling

        return np.asarray(image.resize((width, height), Resampling(self.resample)))

    def _numbers(self, values: Array) -> Array:
        """The values of pixels, uint8 [..., 3], as the model's numbers, float32 [3, ...]."""
        table = np.arange(256, dtype=np.float64)
        if self.rescale_factor is not None:
            table = table * self.rescale_factor
        rescaled = table.astype(np.float32)
        numbers = np.empty((3, *values.shape[:-1]), np.float32)
        for channel in range(3):
            of_channel = rescaled
            if self.image_mean is not None and self.image_std is not None:
                mean = np.float32(self.image_mean[channel])
                std = np.float32(self.image_std[channel])
                of_channel = (rescaled - mean) / std
            np.take(of_channel, values[..., channel], out=numbers[channel], mode="clip")
        return numbers


def _check_resized(width: int, height: int, layout: Layout) -> Layout:
    """`layout`, the layout of an image of width x height pixels. Raises ArgumentError if the
    resized image is empty or enormous."""
    if not 0 < layout.width * layout.height <= _MAX_RESIZED_PIXELS:
        raise ArgumentError(
            f"the image has {width} x {height} pixels, and the model would read it with {layout.width} x "
            f"{layout.height}; give an image that is less long and thin",
            "images",
        )
    return layout


def _cut(values: Array, height: int, width: int) -> list[Array]:
    """The tiles of an image, row by row."""
    tops = range(0, values.shape[0], height)
    lefts = range(0, values.shape[1], width)
    return [values[top : top + height, left : left + width] for top, left in product(tops, lefts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Square(Family):
    """Images of a fixed size (SigLIP, Gemma 3), or with a fixed shorter edge, of which the centre
    is cut out (CLIP, LLaVA).

    Attributes:
        size: the size, or the length of the shorter edge.
        crop_size: the size of the centre; None to keep the whole image.
        tokens: the number of placeholders.
    """

    size: Mapping[str, int] = _sides({"height", "width"}, {"shortest_edge"})
    crop_size: Mapping[str, int] | None = _sides({"height", "width"}, default=None)
    tokens: int = _count()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        edge = self.size.get("shortest_edge")
        crop = self.crop_size
        if crop is None and edge is not None:
            raise ArgumentError(
                "size has a shortest_edge and crop_size is None: images would have many sizes"
            )
        if crop is not None and any(crop[side] > self.size.get(side, edge or 0) for side in crop):
            refuse("crop_size", dict(crop), "height and width, at most as large as size")

    def layout(self, width: int, height: int) -> Layout:
        edge = self.size.get("shortest_edge")
        if edge is None:
            layout = Layout(self.size["width"], self.size["height"], self.tokens)
        else:
            longer = int(edge * max(width, height) / min(width, height))
            if width <= height:
                layout = Layout(edge, longer, self.tokens)
            else:
                layout = Layout(longer, edge, self.tokens)
        return _check_resized(width, height, layout)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        values = self._resized(image, layout.width, layout.height)
        if self.crop_size is not None:
            height = self.crop_size["height"]
            width = self.crop_size["width"]
            top = (layout.height - height) // 2
            left = (layout.width - width) // 2
            values = values[top : top + height, left : left + width]
        return self._numbers(values)[None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Family):
    """Patches of an image whose sides are multiples of a block of merge_size x merge_size patches.
    Each block has a placeholder (Qwen2-VL to Qwen3.5, GLM-4V).

    Attributes:
        size: the least and the most pixels.
        patch_size: the side of a patch in pixels.
        merge_size: the side of a block in patches.
        temporal_patch_size: the number of times that the image is repeated.
        frames: whether `size` counts the pixels of all repetitions, and an image that is smaller
            than a block is enlarged first, as in GLM-4V.
    """

    size: Mapping[str, int] = _sides({"shortest_edge", "longest_edge"})
    patch_size: int = _count()
    merge_size: int = _count()
    temporal_patch_size: int = _count(8)
    frames: bool = flag(False)

    def layout(self, width: int, height: int) -> Layout:
        block = self.patch_size * self.merge_size
        frames = self.temporal_patch_size if self.frames else 1
        w = width
        h = height
        if self.frames and min(w, h) < block:
            scale = max(block / h, block / w)
            w = int(w * scale)
            h = int(h * scale)
        if max(w, h) > _MAX_ASPECT_RATIO * min(w, h):
            raise ArgumentError(
                f"the image has {width} x {height} pixels; the longer side may be {_MAX_ASPECT_RATIO} times the "
                "shorter side",
                "images",
            )
        rows = round(h / block)
        columns = round(w / block)
        least = self.size["shortest_edge"]
        most = self.size["longest_edge"]
        pixels = frames * rows * columns * block**2
        if pixels > most:
            scale = math.sqrt(frames * h * w / most)
            rows = max(1, math.floor(h / scale / block))
            columns = max(1, math.floor(w / scale / block))
        elif pixels < least:
            scale = math.sqrt(least / (frames * h * w))
            rows = math.ceil(h * scale / block)
            columns = math.ceil(w * scale / block)
        layout = Layout(columns * block, rows * block, rows * columns, size=(rows, columns))
        return _check_resized(width, height, layout)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        patch = self.patch_size
        merge = self.merge_size
        rows = layout.height // patch
        columns = layout.width // patch
        patches = rows * columns
        values = self._resized(image, layout.width, layout.height)
        values = values.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        # The patches of a block are next to each other.
        values = values.transpose(0, 3, 1, 4, 2, 5, 6).reshape(patches, patch * patch, 3)
        numbers = self._numbers(values).transpose(1, 0, 2)
        repeated = np.broadcast_to(
            numbers[:, :, None], (patches, 3, self.temporal_patch_size, patch * patch)
        )
        return repeated.reshape(patches, -1), (rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledGrid(Family):
    """Patches, channels last, of the largest image that a number of patches allows. A square of
    pooling_kernel_size x pooling_kernel_size patches has a placeholder (Gemma 4).

    Attributes:
        patch_size: the side of a patch in pixels.
        pooling_kernel_size: the side of a square in patches.
        max_soft_tokens: the most placeholders.
    """

    patch_size: int = _count()
    pooling_kernel_size: int = _count()
    max_soft_tokens: int = _count()

    def layout(self, width: int, height: int) -> Layout:
        block = self.pooling_kernel_size * self.patch_size
        patches = self.max_soft_tokens * self.pooling_kernel_size**2
        scale = math.sqrt(patches * self.patch_size**2 / (width * height))
        rows = math.floor(scale * height / block)
        columns = math.floor(scale * width / block)
        if rows == 0:
            rows = 1
            columns = min(width // height, self.max_soft_tokens)
        elif columns == 0:
            rows = min(height // width, self.max_soft_tokens)
            columns = 1
        layout = Layout(columns * block, rows * block, rows * columns, size=(rows, columns))
        return _check_resized(width, height, layout)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        patch = self.patch_size
        rows = layout.height // patch
        columns = layout.width // patch
        values = self._resized(image, layout.width, layout.height)
        values = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
        numbers = self._numbers(values.reshape(rows * columns, patch * patch, 3))
        return numbers.transpose(1, 2, 0).reshape(rows * columns, -1), (rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Family):
    """Tiles of an image whose longer edge has a fixed length and whose sides are then multiples of
    a tile, and the whole image after the tiles (Idefics 3, SmolVLM).

    Attributes:
        size: the length of the longer edge.
        max_image_size: the side of a tile.
        do_image_splitting: False reads the whole image only.
        tokens: the number of placeholders of a tile.
    """

    size: Mapping[str, int] = _sides({"longest_edge"})
    max_image_size: Mapping[str, int] = _sides({"longest_edge"})
    do_image_splitting: bool = flag(True)
    tokens: int = _count()

    def layout(self, width: int, height: int) -> Layout:
        side = self.max_image_size["longest_edge"]
        w, h = self._fitted(width, height)
        ratio = w / h
        if w >= h:
            w = math.ceil(w / side) * side
            h = math.ceil(int(w / ratio) / side) * side
        else:
            h = math.ceil(h / side) * side
            w = math.ceil(int(h * ratio) / side) * side
        if not self.do_image_splitting or (w <= side and h <= side):
            layout = Layout(side, side, self.tokens)
        else:
            layout = Layout(w, h, self.tokens, (h // side, w // side), whole=True)
        return _check_resized(width, height, layout)

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """The size of an image whose longer edge has its length, and whose shorter edge is even."""
        longer = self.size["longest_edge"]
        ratio = width / height
        is_wide = width >= height
        shorter = int(longer / ratio) if is_wide else int(longer * ratio)
        shorter = max(shorter + shorter % 2, 1)
        return (longer, shorter) if is_wide else (shorter, longer)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        from PIL.Image import fromarray

        side = self.max_image_size["longest_edge"]
        # Each of transformers' steps rounds to 8 bits, so no step may be left out.
        width, height = self._fitted(*image.size)
        fitted = fromarray(self._resized(image, width, height))
        values = self._resized(fitted, layout.width, layout.height)
        tiles = _cut(values, side, side)
        if layout.whole:
            tiles.append(self._resized(fromarray(values), side, side))
        return np.stack([self._numbers(tile) for tile in tiles]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles(Family):
    """Tiles in the shape that comes closest to the image's aspect ratio, and the whole image after
    them (InternVL, Aya Vision).

    Attributes:
        size: the size of a tile.
        min_patches, max_patches: the least and the most tiles.
        tokens: the number of placeholders of a tile.
    """

    size: Mapping[str, int] = _sides({"height", "width"})
    min_patches: int = _count(128)
    max_patches: int = _count(128)
    tokens: int = _count()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if self.min_patches > self.max_patches:
            refuse("min_patches", self.min_patches, f"at most max_patches ({self.max_patches})")

    def layout(self, width: int, height: int) -> Layout:
        tile_height = self.size["height"]
        tile_width = self.size["width"]
        rows, columns = self._shape(width, height)
        width_of_tiles = columns * tile_width
        height_of_tiles = rows * tile_height
        if rows * columns == 1:
            layout = Layout(width_of_tiles, height_of_tiles, self.tokens)
        else:
            layout = Layout(
                width_of_tiles, height_of_tiles, self.tokens, (rows, columns), whole=True
            )
        return _check_resized(width, height, layout)

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        """The rows and columns of tiles. Among shapes that are equally close to the image's aspect
        ratio, the shape with more tiles is chosen if the image has half of their pixels."""
        tile_pixels = self.size["height"] * self.size["width"]
        counts = range(1, self.max_patches + 1)
        # transformers tries them in this order.
        shapes = [
            (columns, rows)
            for columns, rows in product(counts, counts)
            if self.min_patches <= rows * columns <= self.max_patches
        ]
        shapes.sort(key=math.prod)
        best = (1, 1)
        least_difference = math.inf
        for columns, rows in shapes:
            difference = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * tile_pixels * columns * rows
            if difference < least_difference or (difference == least_difference and is_large):
                least_difference = difference
                best = (rows, columns)
        return best

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        height = self.size["height"]
        width = self.size["width"]
        tiles = _cut(self._resized(image, layout.width, layout.height), height, width)
        if layout.whole:
            tiles.append(self._resized(image, width, height))
        return np.stack([self._numbers(tile) for tile in tiles]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyResolution(Family):
    """The whole image, then tiles of the image in the middle of the resolution that wastes least
    (LLaVA-NeXT, LLaVA-OneVision).

    The rows of the tiles are put together as in the image, without the rows of the padding. A
    learned row, the last row of vision.onnx's result, ends each line.

    Attributes:
        size: the side of a tile.
        image_grid_pinpoints: the height and width of each resolution.
        side: the number of placeholders along a side of a tile.
        most_tiles: the number of tiles from which on (times 1.1 squared) the model reduces the
            number of rows. Packages refuse such images.
    """

    size: int = _count()
    image_grid_pinpoints: tuple[tuple[int, int], ...] = checked(check=_resolutions)
    side: int = _count()
    most_tiles: int | None = integer(None, 1, 1000, "an integer from 1 to 1000, or None")

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if any(length % self.size != 0 for pair in self.image_grid_pinpoints for length in pair):
            refuse(
                "image_grid_pinpoints",
                self.image_grid_pinpoints,
                f"multiples of size ({self.size})",
            )
        if self.side > self.size:
            refuse("side", self.side, f"at most size ({self.size})")

    def layout(self, width: int, height: int) -> Layout:
        high, wide = self._resolution(width, height)
        _check_resized(width, height, Layout(wide, high, 0))
        side = self.side
        tile_rows = high // self.size
        tile_columns = wide // self.size
        y, x = _inner_grid(width, height, tile_rows * side, tile_columns * side)
        if self.most_tiles is not None:
            excess = y.size * x.size / (self.most_tiles * side**2)
            if math.sqrt(excess) > _REDUCTION_THRESHOLD:
                raise ArgumentError(
                    f"the image has {width} x {height} pixels, which the model reads in tiles of {self.size} pixels; "
                    f"packages take about {self.most_tiles} tiles at most: make it smaller",
                    "images",
                )
        # The rows of the whole image are the first of vision.onnx's result, as it is tile 0.
        tile = 1 + y // side * tile_columns + x // side
        grid = tile * side**2 + y % side * side + x % side
        end_of_line = np.full((len(y), 1), (1 + tile_rows * tile_columns) * side**2)
        lines = np.concatenate([grid, end_of_line], axis=1)
        rows = np.concatenate([np.arange(side**2), lines.reshape(-1)])
        return Layout(wide, high, len(rows), rows=rows)

    def _resolution(self, width: int, height: int) -> tuple[int, int]:
        """The height and width of the resolution that keeps most of an image, and wastes least."""

        def kept_and_wasted(pair: tuple[int, int]) -> tuple[int, int]:
            high, wide = pair
            scale = min(wide / width, high / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - high * wide

        return max(self.image_grid_pinpoints, key=kept_and_wasted)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        width = layout.width
        height = layout.height
        if width / image.width < height / image.height:
            height = min(math.ceil(image.height * (width / image.width)), height)
        else:
            width = min(math.ceil(image.width * (height / image.height)), width)
        canvas = np.zeros((layout.height, layout.width, 3), np.uint8)
        top = (layout.height - height) // 2
        left = (layout.width - width) // 2
        canvas[top : top + height, left : left + width] = self._resized(image, width, height)
        tiles = [self._resized(image, self.size, self.size), *_cut(canvas, self.size, self.size)]
        return np.stack([self._numbers(tile) for tile in tiles]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Family):
    """Images of any size up to a longest edge, in whole patches. Each patch has a placeholder, and
    the placeholders are in lines (Pixtral, Mistral 3).

    Attributes:
        size: the length of the longest edge.
        patch_size: the side of a patch in pixels.
    """

    size: Mapping[str, int] = _sides({"longest_edge"})
    patch_size: int = _count()

    def layout(self, width: int, height: int) -> Layout:
        patch = self.patch_size
        w = width
        h = height
        scale = max(h / self.size["longest_edge"], w / self.size["longest_edge"])
        if scale > 1:
            w = math.floor(w / scale)
            h = math.floor(h / scale)
        rows = math.ceil(h / patch)
        columns = math.ceil(w / patch)
        layout = Layout(columns * patch, rows * patch, columns, (rows, 1))
        return _check_resized(width, height, layout)


def _inner_grid(width: int, height: int, lines: int, columns: int) -> tuple[Array, Array]:
    """The lines [n, 1] and columns [m] of a grid of placeholders that an image in its middle
    covers; the others are padding."""
    top = 0
    left = 0
    if width / height > columns / lines:
        top = (lines - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (lines / height), 7))) // 2
    return np.arange(top, lines - top)[:, None], np.arange(left, columns - left)


FAMILIES: Final[dict[str, type[Family]]] = {
    "square": Square,
    "grid": Grid,
    "pooled_grid": PooledGrid,
    "split": Split,
    "tiles": Tiles,
    "any_resolution": AnyResolution,
    "lines": Lines,
}
