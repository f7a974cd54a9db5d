"""Families of image processing: an RGB image → the numbers that vision.onnx reads, and the layout of its placeholders.

A family is a dataclass of settings, named as in transformers' processors. Its pixels equal those of transformers'
Pillow classes bit for bit, because it computes in their order: resize in 8 bits (Pillow), float64 times
`rescale_factor`, to float32, less the mean, divided by the deviation. A pixel has 256 values, so this is done for 256
numbers of each channel.
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

_MOST_RESIZED: Final = 1 << 26  # pixels; a long and thin image may be enlarged to more
_LARGEST: Final = 1 << 16  # side of a tile, number of its placeholders
_FURTHEST: Final = 200  # longer side : shorter side, in `Grid`
_ROUNDS_OVER: Final = 1.1  # above, LLaVA-OneVision computes its rows anew, in fewer


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What becomes of an image of some width and height.

    width, height: in pixels, after resizing. count: placeholders of a tile. tiles: rows and columns of tiles, or of
    lines, that have placeholders; (0, 0): the image is a single one. whole: the whole image follows them. rows: of
    vision.onnx's result for the placeholders; None: all, in order. size: rows and columns of placeholders.
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
        """Placeholders of the image."""
        return self.count * (max(math.prod(self.tiles), 1) + self.whole)


def _sides(*kinds: set[str], default: Any = MISSING) -> Any:
    """A field for a size as transformers writes it, names → pixels, with the names of one of `kinds`."""
    accepted = ", or ".join(" and ".join(sorted(names)) for names in kinds)

    def check(name: str, value: Any) -> Any:
        if (
            not isinstance(value, Mapping)
            or set(value) not in kinds
            or not all(map(_is_size, value.values()))
        ):
            refuse(name, value, f"{accepted}, in pixels")
        return dict(value)

    return checked(default, check)


def _is_size(value: Any) -> bool:
    return is_integer(value, 1, 1 << 31)


def _channels(name: str, value: Any) -> tuple[float, ...]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 3
        or not all(is_number(v, -1e30, 1e30) for v in value)
    ):
        refuse(name, value, "a number for each of the channels red, green and blue, or None")
    return tuple(float(number) for number in value)


def _resolutions(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    pairs = value if isinstance(value, list | tuple) else ()
    if not 0 < len(pairs) < 1000 or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_size, pair))
        for pair in pairs
    ):
        refuse(name, value, "pairs of height and width in pixels")
    return tuple(tuple(pair) for pair in pairs)


def _count(most: int = _LARGEST) -> Any:
    return integer(MISSING, 1, most, f"an integer from 1 to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The settings that all families have. resample: Pillow's number of a filter. rescale_factor, image_mean,
    image_std: None leaves the step out."""

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
        """Raises ValueError for an image that the family cannot take."""
        raise NotImplementedError

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        """Inputs of vision.onnx for an RGB image with this layout: pixel_values float32, and rows and columns of
        patches."""
        return self._numbers(self._resized(image, layout.width, layout.height))[None], None

    def _resized(self, image: Image, width: int, height: int) -> Array:
        """uint8 [height, width, 3]."""
        from PIL.Image import Resampling

        return np.asarray(image.resize((width, height), Resampling(self.resample)))

    def _numbers(self, values: Array) -> Array:
        """uint8 [..., 3] → float32 [3, ...]."""
        table = np.arange(256, dtype=np.float64)
        if self.rescale_factor is not None:
            table = table * self.rescale_factor
        tables = [table.astype(np.float32)] * 3
        if self.image_mean is not None and self.image_std is not None:
            mean, std = (np.array(each, np.float32) for each in (self.image_mean, self.image_std))
            tables = [
                (table - mean[channel]) / std[channel] for channel, table in enumerate(tables)
            ]
        out = np.empty((3, *values.shape[:-1]), np.float32)
        for channel in range(3):
            np.take(tables[channel], values[..., channel], out=out[channel], mode="clip")
        return out


def _fitting(width: int, height: int, layout: Layout) -> Layout:
    """`layout`, of an image of width x height pixels. Raises ArgumentError if that makes it empty or enormous."""
    if not 0 < layout.width * layout.height <= _MOST_RESIZED:
        raise ArgumentError(
            f"the image has {width} x {height} pixels, and the model would read it with {layout.width} x "
            f"{layout.height}; give one that is less long and thin",
            "images",
        )
    return layout


def _cut(values: Array, height: int, width: int) -> list[Array]:
    """Tiles of an image, row by row."""
    tops, lefts = (
        range(0, size, step) for size, step in zip(values.shape, (height, width), strict=False)
    )
    return [values[top : top + height, left : left + width] for top, left in product(tops, lefts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Square(Family):
    """A fixed size (SigLIP, Gemma 3), or the shorter edge brought to a length and the centre cut out (CLIP, LLaVA).
    tokens: placeholders."""

    size: Mapping[str, int] = _sides({"height", "width"}, {"shortest_edge"})
    crop_size: Mapping[str, int] | None = _sides({"height", "width"}, default=None)
    tokens: int = _count()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        edge, crop = self.size.get("shortest_edge"), self.crop_size
        if crop is None and edge:
            raise ArgumentError(
                "size has a shortest_edge and crop_size is None: images would have many sizes"
            )
        if crop is not None and any(crop[side] > self.size.get(side, edge or 0) for side in crop):
            refuse("crop_size", dict(crop), "height and width, at most those of size")

    def layout(self, width: int, height: int) -> Layout:
        if edge := self.size.get("shortest_edge"):
            long = int(edge * max(width, height) / min(width, height))
            columns, rows = (edge, long) if width <= height else (long, edge)
        else:
            columns, rows = self.size["width"], self.size["height"]
        return _fitting(width, height, Layout(columns, rows, self.tokens))

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        values = self._resized(image, layout.width, layout.height)
        if self.crop_size is not None:
            height, width = self.crop_size["height"], self.crop_size["width"]
            top, left = (layout.height - height) // 2, (layout.width - width) // 2
            values = values[top : top + height, left : left + width]
        return self._numbers(values)[None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Family):
    """Patches of an image whose sides are multiples of a block of merge_size x merge_size patches, which has a
    placeholder (Qwen2-VL to Qwen3.5, GLM-4V).

    size: the least and the most pixels. frames: these count the image temporal_patch_size times, and one smaller than
    a block is enlarged first, as GLM-4V does.
    """

    size: Mapping[str, int] = _sides({"shortest_edge", "longest_edge"})
    patch_size: int = _count()
    merge_size: int = _count()
    temporal_patch_size: int = _count(8)
    frames: bool = flag(False)

    def layout(self, width: int, height: int) -> Layout:
        block, frames = (
            self.patch_size * self.merge_size,
            self.temporal_patch_size if self.frames else 1,
        )
        w, h = width, height
        if self.frames and min(w, h) < block:
            scale = max(block / h, block / w)
            w, h = int(w * scale), int(h * scale)
        if max(w, h) > _FURTHEST * min(w, h):
            raise ArgumentError(
                f"the image has {width} x {height} pixels; the longer side may be {_FURTHEST} times the shorter one",
                "images",
            )
        rows, columns = round(h / block), round(w / block)
        least, most, pixels = (
            self.size["shortest_edge"],
            self.size["longest_edge"],
            frames * rows * columns * block**2,
        )
        if pixels > most:
            scale = math.sqrt(frames * h * w / most)
            rows, columns = (max(1, math.floor(side / scale / block)) for side in (h, w))
        elif pixels < least:
            scale = math.sqrt(least / (frames * h * w))
            rows, columns = (math.ceil(side * scale / block) for side in (h, w))
        size = rows, columns
        return _fitting(
            width, height, Layout(columns * block, rows * block, rows * columns, size=size)
        )

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        patch, merge, times = self.patch_size, self.merge_size, self.temporal_patch_size
        rows, columns = layout.height // patch, layout.width // patch
        values = self._resized(image, layout.width, layout.height)
        values = values.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        numbers = self._numbers(
            values.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, patch * patch, 3)
        )
        repeated = np.broadcast_to(
            numbers.transpose(1, 0, 2)[:, :, None], (rows * columns, 3, times, patch * patch)
        )
        return repeated.reshape(rows * columns, -1), (rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledGrid(Family):
    """Patches, channels last, of as many pixels as a number of patches allows; a square of pooling_kernel_size x
    pooling_kernel_size patches has a placeholder (Gemma 4)."""

    patch_size: int = _count()
    pooling_kernel_size: int = _count()
    max_soft_tokens: int = _count()

    def layout(self, width: int, height: int) -> Layout:
        block, patches = (
            self.pooling_kernel_size * self.patch_size,
            self.max_soft_tokens * self.pooling_kernel_size**2,
        )
        scale = math.sqrt(patches * self.patch_size**2 / (width * height))
        rows, columns = math.floor(scale * height / block), math.floor(scale * width / block)
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_soft_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_soft_tokens), 1
        size = rows, columns
        return _fitting(
            width, height, Layout(columns * block, rows * block, rows * columns, size=size)
        )

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        patch = self.patch_size
        rows, columns = layout.height // patch, layout.width // patch
        values = self._resized(image, layout.width, layout.height).reshape(
            rows, patch, columns, patch, 3
        )
        numbers = self._numbers(
            values.transpose(0, 2, 1, 3, 4).reshape(rows * columns, patch * patch, 3)
        )
        return numbers.transpose(1, 2, 0).reshape(rows * columns, -1), (rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Family):
    """The longer edge brought to a length, both sides to multiples of a tile, and the whole image after the tiles
    (Idefics 3, SmolVLM). tokens: placeholders of a tile."""

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
            return _fitting(width, height, Layout(side, side, self.tokens))
        return _fitting(
            width, height, Layout(w, h, self.tokens, (h // side, w // side), whole=True)
        )

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """The longer edge at its length, the shorter one even."""
        longest, ratio = self.size["longest_edge"], width / height
        short = int(longest / ratio) if width >= height else int(longest * ratio)
        short = max(short + short % 2, 1)
        return (longest, short) if width >= height else (short, longest)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        from PIL.Image import fromarray

        side = self.max_image_size["longest_edge"]
        # Each of transformers' steps rounds to 8 bits, so none may be left out.
        values = self._resized(
            fromarray(self._resized(image, *self._fitted(*image.size))), layout.width, layout.height
        )
        tiles = _cut(values, side, side)
        if layout.whole:
            tiles.append(self._resized(fromarray(values), side, side))
        return np.stack([self._numbers(tile) for tile in tiles]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles(Family):
    """As many tiles as come closest to the image's aspect ratio, and the whole image after them (InternVL, Aya Vision).
    size: of a tile. tokens: its placeholders."""

    size: Mapping[str, int] = _sides({"height", "width"})
    min_patches: int = _count(128)
    max_patches: int = _count(128)
    tokens: int = _count()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if self.min_patches > self.max_patches:
            refuse("min_patches", self.min_patches, f"at most max_patches ({self.max_patches})")

    def layout(self, width: int, height: int) -> Layout:
        tile_height, tile_width = self.size["height"], self.size["width"]
        best, rows, columns = math.inf, 1, 1
        most = range(1, self.max_patches + 1)
        shapes = [
            (c, r) for c, r in product(most, most) if self.min_patches <= r * c <= self.max_patches
        ]
        for c, r in sorted(shapes, key=math.prod):
            difference = abs(width / height - c / r)
            # Of shapes that are equally close, the one with more tiles, as long as the image has half of their pixels.
            large = width * height > 0.5 * tile_height * tile_width * c * r
            if difference < best or (difference == best and large):
                best, rows, columns = difference, r, c
        one = rows * columns == 1
        tiles = (0, 0) if one else (rows, columns)
        layout = Layout(columns * tile_width, rows * tile_height, self.tokens, tiles, whole=not one)
        return _fitting(width, height, layout)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        height, width = self.size["height"], self.size["width"]
        tiles = _cut(self._resized(image, layout.width, layout.height), height, width)
        if layout.whole:
            tiles.append(self._resized(image, width, height))
        return np.stack([self._numbers(tile) for tile in tiles]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyResolution(Family):
    """The image in the middle of the resolution that wastes least, cut into tiles, after the whole image (LLaVA-NeXT,
    LLaVA-OneVision). The rows of its tiles are put together and those of the padding left out; a learned row ends each
    line, the last one of vision.onnx's result.

    size: side of a tile. image_grid_pinpoints: height and width of each resolution. side: placeholders along a side of
    a tile. most_tiles: the model computes the rows of more tiles (by 1.1 squared) anew, in fewer, and packages do not.
    """

    size: int = _count()
    image_grid_pinpoints: tuple[tuple[int, int], ...] = checked(check=_resolutions)
    side: int = _count()
    most_tiles: int | None = integer(None, 1, 1000, "an integer from 1 to 1000, or None")

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if any(length % self.size for pair in self.image_grid_pinpoints for length in pair):
            refuse(
                "image_grid_pinpoints",
                self.image_grid_pinpoints,
                f"multiples of size ({self.size})",
            )
        if self.side > self.size:
            refuse("side", self.side, f"at most size ({self.size})")

    def layout(self, width: int, height: int) -> Layout:
        def kept(pair: tuple[int, int]) -> tuple[int, int]:
            scale = min(pair[1] / width, pair[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - math.prod(pair)

        high, wide = max(self.image_grid_pinpoints, key=kept)
        _fitting(width, height, Layout(wide, high, 0))
        side, down, across = self.side, high // self.size, wide // self.size
        lines, columns, top, left = down * side, across * side, 0, 0
        if width / height > columns / lines:
            top = (lines - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (lines / height), 7))) // 2
        y, x = np.arange(top, lines - top)[:, None], np.arange(left, columns - left)
        if (
            self.most_tiles
            and math.sqrt(y.size * x.size / (self.most_tiles * side**2)) > _ROUNDS_OVER
        ):
            raise ArgumentError(
                f"the image has {width} x {height} pixels, which the model reads in tiles of {self.size} pixels; "
                f"packages take about {self.most_tiles} tiles at most: make it smaller",
                "images",
            )
        grid = (1 + y // side * across + x // side) * side**2 + y % side * side + x % side
        newline = np.full((len(y), 1), (1 + down * across) * side**2)
        rows = np.concatenate(
            [np.arange(side**2), np.concatenate([grid, newline], axis=1).reshape(-1)]
        )
        return Layout(wide, high, len(rows), rows=rows)

    def pixels(self, image: Image, layout: Layout) -> tuple[Array, tuple[int, int] | None]:
        width, height = layout.width, layout.height
        if width / image.width < height / image.height:
            height = min(math.ceil(image.height * (width / image.width)), height)
        else:
            width = min(math.ceil(image.width * (height / image.height)), width)
        canvas = np.zeros((layout.height, layout.width, 3), np.uint8)
        top, left = (layout.height - height) // 2, (layout.width - width) // 2
        canvas[top : top + height, left : left + width] = self._resized(image, width, height)
        tiles = [self._resized(image, self.size, self.size), *_cut(canvas, self.size, self.size)]
        return np.stack([self._numbers(tile) for tile in tiles]), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Family):
    """Any size up to a longest edge, in whole patches, each with a placeholder; lines of placeholders (Pixtral,
    Mistral 3). patch_size: of a patch with a placeholder."""

    size: Mapping[str, int] = _sides({"longest_edge"})
    patch_size: int = _count()

    def layout(self, width: int, height: int) -> Layout:
        w, h = width, height
        scale = max(h / self.size["longest_edge"], w / self.size["longest_edge"])
        if scale > 1:
            w, h = math.floor(w / scale), math.floor(h / scale)
        rows, columns = (-(-side // self.patch_size) for side in (h, w))
        layout = Layout(columns * self.patch_size, rows * self.patch_size, columns, (rows, 1))
        return _fitting(width, height, layout)


FAMILIES: Final[dict[str, type[Family]]] = {
    "square": Square,
    "grid": Grid,
    "pooled_grid": PooledGrid,
    "split": Split,
    "tiles": Tiles,
    "any_resolution": AnyResolution,
    "lines": Lines,
}
