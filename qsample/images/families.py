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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from qsample.checks import check_fields, checked, flag, integer, is_integer, is_number, refuse
from qsample.contract.arrays import Array
from qsample.errors import ArgumentError

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_RESIZED: Final = 1 << 26  # pixels; of a long and thin image, whose shorter side is enlarged
_LARGEST_SIDE: Final = 1 << 16
_MOST_SPLIT: Final = 4096  # pixels of a side, in `Split`
_FURTHEST: Final = 200  # longer side : shorter side, in `Grid`
_ROUNDS_OVER: Final = 1.1  # above, LLaVA-OneVision computes its rows anew, in fewer


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What becomes of an image of some width and height.

    width, height: in pixels, after resizing. tiles: rows and columns of tiles, or of lines, that have placeholders;
    (0, 0): the image is a single one. whole: the whole image follows them. count: placeholders of a tile. rows: of
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
        rows, columns = self.tiles
        return self.count * (max(rows * columns, 1) + self.whole)


class Pixels(NamedTuple):
    """Inputs of vision.onnx: pixel_values float32, and rows and columns of patches."""

    values: Array
    grid: tuple[int, int] | None = None


def _sides(name: str, value: Any) -> Mapping[str, int]:
    """A size as transformers writes it: names → pixels."""
    if not isinstance(value, Mapping) or not value or not all(is_integer(v, 1, 1 << 31) for v in value.values()):
        refuse(name, value, 'sizes in pixels, such as {"height": 224, "width": 224}')
    return dict(value)


def _channels(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(is_number(v, -1e30, 1e30) for v in value):
        refuse(name, value, "a number for each of the channels red, green and blue, or None")
    return tuple(float(number) for number in value)


def _factor(name: str, value: Any) -> float | None:
    return value if value is None or is_number(value, 0, 1e30) else refuse(name, value, "a number, or None")


def _resolutions(name: str, value: Any) -> tuple[tuple[int, int], ...]:
    pairs = value if isinstance(value, list | tuple) else ()
    if not 0 < len(pairs) < 1000 or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(is_integer(side, 1, _LARGEST_SIDE) for side in pair)
        for pair in pairs
    ):
        refuse(name, value, "pairs of height and width in pixels")
    return tuple((int(height), int(width)) for height, width in pairs)


def _pixels() -> Any:
    """A field for a side, or a number of placeholders."""
    return integer(MISSING, 1, _LARGEST_SIDE, f"an integer from 1 to {_LARGEST_SIDE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The settings that all families have. resample: Pillow's number of a filter. rescale_factor, image_mean,
    image_std: None leaves the step out."""

    resample: int = integer(MISSING, 0, 5, "a filter of Pillow, from 0 to 5")
    rescale_factor: float | None = checked(check=_factor)
    image_mean: tuple[float, ...] | None = checked(None, _channels)
    image_std: tuple[float, ...] | None = checked(None, _channels)

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.image_mean is None) != (self.image_std is None) or 0 in (self.image_std or ()):
            raise ArgumentError("image_mean and image_std are numbers, those of image_std not 0, or both are None")

    def layout(self, width: int, height: int) -> Layout:
        """Raises ValueError for an image that the family cannot take."""
        raise NotImplementedError

    def pixels(self, image: Image, layout: Layout) -> Pixels:
        """The numbers of an RGB image with this layout."""
        return Pixels(self._numbers(_resized(image, layout.width, layout.height, self.resample))[None])

    @property
    def _table(self) -> Array:
        """float32 [3, 256]: the number of each value of each channel."""
        values = np.arange(256, dtype=np.float64)
        if self.rescale_factor is not None:
            values = values * self.rescale_factor
        table = np.tile(values.astype(np.float32), (3, 1))
        if self.image_mean is not None and self.image_std is not None:
            mean, std = (np.array(each, np.float32)[:, None] for each in (self.image_mean, self.image_std))
            table = (table - mean) / std
        return table

    def _numbers(self, values: Array) -> Array:
        """uint8 [height, width, 3] → float32 [3, height, width]."""
        out = np.empty((3, *values.shape[:2]), np.float32)
        for channel, numbers in enumerate(self._table):
            np.take(numbers, values[..., channel], out=out[channel], mode="clip")
        return out


def _resized(image: Image, width: int, height: int, resample: int) -> Array:
    """uint8 [height, width, 3]."""
    from PIL.Image import Resampling

    return np.asarray(image.resize((width, height), Resampling(resample)))


def _check_thin(width: int, height: int, *resized: int) -> None:
    if not all(resized) or math.prod(resized) > _MOST_RESIZED:
        raise ArgumentError(
            f"the image has {width} x {height} pixels, and the model would read it with "
            f"{' x '.join(map(str, resized))}; give one that is less long and thin",
            "images",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Square(Family):
    """A fixed size (SigLIP, Gemma 3), or the shorter edge brought to a length and the centre cut out (CLIP, LLaVA).
    tokens: placeholders."""

    size: Mapping[str, int] = checked(check=_sides)
    crop_size: Mapping[str, int] | None = checked(None, _sides)
    tokens: int = _pixels()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        size, crop = self.size, self.crop_size
        edge = size.get("shortest_edge", 0)
        if set(size) not in ({"height", "width"}, {"shortest_edge"}) or max(size.values()) > _LARGEST_SIDE:
            refuse("size", dict(size), "height and width, or shortest_edge")
        if crop is None:
            if edge:
                raise ArgumentError("size has a shortest_edge and crop_size is None: images would have many sizes")
        elif set(crop) != {"height", "width"} or not (
            crop["height"] <= size.get("height", edge) and crop["width"] <= size.get("width", edge)
        ):
            refuse("crop_size", dict(crop), "height and width, at most those of size")

    def layout(self, width: int, height: int) -> Layout:
        if edge := self.size.get("shortest_edge"):
            long = int(edge * max(width, height) / min(width, height))
            columns, rows = (edge, long) if width <= height else (long, edge)
        else:
            columns, rows = self.size["width"], self.size["height"]
        _check_thin(width, height, columns, rows)
        return Layout(columns, rows, self.tokens)

    def pixels(self, image: Image, layout: Layout) -> Pixels:
        values = _resized(image, layout.width, layout.height, self.resample)
        if self.crop_size is not None:
            height, width = self.crop_size["height"], self.crop_size["width"]
            top, left = (layout.height - height) // 2, (layout.width - width) // 2
            values = values[top : top + height, left : left + width]
        return Pixels(self._numbers(values)[None])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Family):
    """Patches of an image whose sides are multiples of a block of merge_size x merge_size patches, which has a
    placeholder (Qwen2-VL to Qwen3.5, GLM-4V).

    size: `shortest_edge` and `longest_edge`, the least and the most pixels. frames: these count the image
    temporal_patch_size times, and one smaller than a block is enlarged first, as GLM-4V does.
    """

    size: Mapping[str, int] = checked(check=_sides)
    patch_size: int = _pixels()
    merge_size: int = _pixels()
    temporal_patch_size: int = integer(MISSING, 1, 64, "an integer from 1 to 64")
    frames: bool = flag(False)

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if set(self.size) != {"shortest_edge", "longest_edge"}:
            refuse("size", dict(self.size), "shortest_edge and longest_edge")

    def layout(self, width: int, height: int) -> Layout:
        block, frames = self.patch_size * self.merge_size, self.temporal_patch_size if self.frames else 1
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
        least, most, pixels = self.size["shortest_edge"], self.size["longest_edge"], frames * rows * columns * block**2
        if pixels > most:
            scale = math.sqrt(frames * h * w / most)
            rows, columns = (max(1, math.floor(side / scale / block)) for side in (h, w))
        elif pixels < least:
            scale = math.sqrt(least / (frames * h * w))
            rows, columns = (math.ceil(side * scale / block) for side in (h, w))
        _check_thin(width, height, columns * block, rows * block)
        return Layout(columns * block, rows * block, rows * columns, size=(rows, columns))

    def pixels(self, image: Image, layout: Layout) -> Pixels:
        patch, merge, times = self.patch_size, self.merge_size, self.temporal_patch_size
        rows, columns = layout.height // patch, layout.width // patch
        values = _resized(image, layout.width, layout.height, self.resample)
        values = values.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        values = values.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, patch * patch, 3)
        out = np.empty((rows * columns, 3, times, patch * patch), np.float32)
        for channel, numbers in enumerate(self._table):
            out[:, channel] = np.take(numbers, values[..., channel])[:, None]
        return Pixels(out.reshape(rows * columns, -1), (rows, columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledGrid(Family):
    """Patches, channels last, of as many pixels as a number of patches allows; a square of pooling_kernel_size x
    pooling_kernel_size patches has a placeholder (Gemma 4)."""

    patch_size: int = _pixels()
    pooling_kernel_size: int = _pixels()
    max_soft_tokens: int = _pixels()

    def layout(self, width: int, height: int) -> Layout:
        block, patches = self.pooling_kernel_size * self.patch_size, self.max_soft_tokens * self.pooling_kernel_size**2
        scale = math.sqrt(patches * self.patch_size**2 / (width * height))
        rows, columns = math.floor(scale * height / block), math.floor(scale * width / block)
        if rows == 0:  # and then columns is not: their squares' product is the number of patches
            rows, columns = 1, min(width // height, self.max_soft_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_soft_tokens), 1
        _check_thin(width, height, columns * block, rows * block)
        return Layout(columns * block, rows * block, rows * columns, size=(rows, columns))

    def pixels(self, image: Image, layout: Layout) -> Pixels:
        patch = self.patch_size
        rows, columns = layout.height // patch, layout.width // patch
        values = _resized(image, layout.width, layout.height, self.resample).reshape(rows, patch, columns, patch, 3)
        values = values.transpose(0, 2, 1, 3, 4).reshape(rows * columns, patch * patch, 3)
        out = np.empty(values.shape, np.float32)
        for channel, numbers in enumerate(self._table):
            out[..., channel] = np.take(numbers, values[..., channel])
        return Pixels(out.reshape(rows * columns, -1), (rows, columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiled(Family):
    """An image that is cut into tiles of `_tile` pixels (height, width), before or after a view of the whole."""

    whole_first = False

    @property
    def _tile(self) -> tuple[int, int]:
        raise NotImplementedError

    def _cut(self, values: Array, whole: Array | None) -> Pixels:
        height, width = self._tile
        rows, columns = values.shape[0] // height, values.shape[1] // width
        tiles = [
            values[r * height : (r + 1) * height, c * width : (c + 1) * width]
            for r, c in product(range(rows), range(columns))
        ]
        if whole is not None:
            tiles.insert(0 if self.whole_first else len(tiles), whole)
        return Pixels(np.stack([self._numbers(tile) for tile in tiles]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(_Tiled):
    """The longer edge brought to a length, both sides to multiples of a tile, and the whole image after the tiles
    (Idefics 3, SmolVLM). tokens: placeholders of a tile."""

    size: Mapping[str, int] = checked(check=_sides)
    max_image_size: Mapping[str, int] = checked(check=_sides)
    do_image_splitting: bool = flag(True)
    tokens: int = _pixels()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        for name in ("size", "max_image_size"):
            sides = getattr(self, name)
            if set(sides) != {"longest_edge"} or sides["longest_edge"] > _MOST_SPLIT:
                refuse(name, dict(sides), f"a longest_edge of at most {_MOST_SPLIT}")

    @property
    def _tile(self) -> tuple[int, int]:
        side = self.max_image_size["longest_edge"]
        return side, side

    def layout(self, width: int, height: int) -> Layout:
        side = self._tile[0]
        w, h = self._fitted(width, height)
        ratio = w / h
        if w >= h:
            w = math.ceil(w / side) * side
            h = math.ceil(int(w / ratio) / side) * side
        else:
            h = math.ceil(h / side) * side
            w = math.ceil(int(h * ratio) / side) * side
        _check_thin(width, height, w, h)
        if not self.do_image_splitting or (w <= side and h <= side):
            return Layout(side, side, self.tokens)
        return Layout(w, h, self.tokens, (h // side, w // side), whole=True)

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """The longer edge at its length, the shorter one even."""
        longest, ratio = self.size["longest_edge"], width / height
        if width >= height:
            short = int(longest / ratio)
            return longest, max(short + short % 2, 1)
        short = int(longest * ratio)
        return max(short + short % 2, 1), longest

    def pixels(self, image: Image, layout: Layout) -> Pixels:
        from PIL.Image import Resampling

        # Each of transformers' steps rounds to 8 bits, so none may be left out.
        resample = Resampling(self.resample)
        image = image.resize(self._fitted(*image.size), resample)
        image = image.resize((layout.width, layout.height), resample)
        whole = _resized(image, *self._tile, self.resample) if layout.whole else None
        return self._cut(np.asarray(image), whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles(_Tiled):
    """As many tiles as come closest to the image's aspect ratio, and the whole image after them (InternVL, Aya Vision).
    size: of a tile. tokens: its placeholders."""

    size: Mapping[str, int] = checked(check=_sides)
    min_patches: int = integer(MISSING, 1, 1000, "an integer from 1 to 1000")
    max_patches: int = integer(MISSING, 1, 1000, "an integer from 1 to 1000")
    tokens: int = _pixels()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if set(self.size) != {"height", "width"}:
            refuse("size", dict(self.size), "height and width")
        if self.min_patches > self.max_patches:
            refuse("min_patches", self.min_patches, f"at most max_patches ({self.max_patches})")

    @property
    def _tile(self) -> tuple[int, int]:
        return self.size["height"], self.size["width"]

    def layout(self, width: int, height: int) -> Layout:
        tile_height, tile_width = self._tile
        best, rows, columns = math.inf, 1, 1
        most = range(1, self.max_patches + 1)
        shapes = [(c, r) for c, r in product(most, most) if self.min_patches <= r * c <= self.max_patches]
        for c, r in sorted(shapes, key=math.prod):
            difference = abs(width / height - c / r)
            # Of shapes that are equally close, the one with more tiles, as long as the image has half of their pixels.
            large = width * height > 0.5 * tile_height * tile_width * c * r
            if difference < best or (difference == best and large):
                best, rows, columns = difference, r, c
        _check_thin(width, height, columns * tile_width, rows * tile_height)
        if rows * columns == 1:
            return Layout(tile_width, tile_height, self.tokens)
        return Layout(columns * tile_width, rows * tile_height, self.tokens, (rows, columns), whole=True)

    def pixels(self, image: Image, layout: Layout) -> Pixels:
        height, width = self._tile
        whole = _resized(image, width, height, self.resample) if layout.whole else None
        return self._cut(_resized(image, layout.width, layout.height, self.resample), whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyResolution(_Tiled):
    """The image in the middle of the resolution that wastes least, cut into tiles, after the whole image (LLaVA-NeXT,
    LLaVA-OneVision). The rows of its tiles are put together and those of the padding left out; a learned row ends each
    line, the last one of vision.onnx's result.

    size: of a tile, which is square. image_grid_pinpoints: height and width of each resolution. side: placeholders
    along a side of a tile. most_tiles: rows of more tiles than this (by 1.1 squared) are computed anew, in fewer.
    """

    whole_first = True
    size: int = _pixels()
    image_grid_pinpoints: tuple[tuple[int, int], ...] = checked(check=_resolutions)
    side: int = _pixels()
    most_tiles: int | None = integer(None, 1, 1000, "an integer from 1 to 1000, or None", optional=True)

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if any(length % self.size for pair in self.image_grid_pinpoints for length in pair):
            refuse("image_grid_pinpoints", self.image_grid_pinpoints, f"multiples of size ({self.size})")
        if self.side > self.size:
            refuse("side", self.side, f"at most size ({self.size})")

    @property
    def _tile(self) -> tuple[int, int]:
        return self.size, self.size

    def _resolution(self, width: int, height: int) -> tuple[int, int]:
        """Height and width of the resolution that keeps most pixels, and of those of the smallest."""

        def kept(pair: tuple[int, int]) -> tuple[int, int]:
            scale = min(pair[1] / width, pair[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - pair[0] * pair[1]

        return max(self.image_grid_pinpoints, key=kept)

    def layout(self, width: int, height: int) -> Layout:
        high, wide = self._resolution(width, height)
        _check_thin(width, height, wide, high)
        side = self.side
        lines, columns = high // self.size * side, wide // self.size * side
        top = left = 0
        if width / height > columns / lines:
            top = (lines - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (lines / height), 7))) // 2
        y, x = np.arange(top, lines - top), np.arange(left, columns - left)
        if self.most_tiles and math.sqrt(len(y) * len(x) / (self.most_tiles * side**2)) > _ROUNDS_OVER:
            raise ArgumentError(
                f"the image has {width} x {height} pixels, which the model reads in tiles of {self.size} pixels; "
                f"packages take about {self.most_tiles} tiles at most: make it smaller",
                "images",
            )
        tiles = 1 + (y // side)[:, None] * (wide // self.size) + x // side
        inside = (y % side)[:, None] * side + x % side
        newline = np.full((len(y), 1), (1 + high // self.size * (wide // self.size)) * side**2)
        grid = np.concatenate([tiles * side**2 + inside, newline], axis=1)
        rows = np.concatenate([np.arange(side**2), grid.reshape(-1)])
        return Layout(wide, high, len(rows), rows=rows)

    def pixels(self, image: Image, layout: Layout) -> Pixels:
        scale_x, scale_y = layout.width / image.width, layout.height / image.height
        width, height = layout.width, layout.height
        if scale_x < scale_y:
            height = min(math.ceil(image.height * scale_x), height)
        else:
            width = min(math.ceil(image.width * scale_y), width)
        canvas = np.zeros((layout.height, layout.width, 3), np.uint8)
        top, left = (layout.height - height) // 2, (layout.width - width) // 2
        canvas[top : top + height, left : left + width] = _resized(image, width, height, self.resample)
        return self._cut(canvas, _resized(image, self.size, self.size, self.resample))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(Family):
    """Any size up to a longest edge, in whole patches, each with a placeholder; lines of placeholders (Pixtral,
    Mistral 3). patch_size: of a patch with a placeholder."""

    size: Mapping[str, int] = checked(check=_sides)
    patch_size: int = _pixels()

    def __post_init__(self) -> None:
        Family.__post_init__(self)
        if set(self.size) != {"longest_edge"} or self.size["longest_edge"] > _LARGEST_SIDE:
            refuse("size", dict(self.size), f"a longest_edge of at most {_LARGEST_SIDE}")

    def layout(self, width: int, height: int) -> Layout:
        w, h = width, height
        scale = max(h / self.size["longest_edge"], w / self.size["longest_edge"])
        if scale > 1:
            w, h = math.floor(w / scale), math.floor(h / scale)
        rows, columns = (-(-side // self.patch_size) for side in (h, w))
        _check_thin(width, height, columns * self.patch_size, rows * self.patch_size)
        return Layout(columns * self.patch_size, rows * self.patch_size, columns, (rows, 1))


FAMILIES: Final[dict[str, type[Family]]] = {
    "square": Square,
    "grid": Grid,
    "pooled_grid": PooledGrid,
    "split": Split,
    "tiles": Tiles,
    "any_resolution": AnyResolution,
    "lines": Lines,
}
