"""An image as a caller gives it → an upright RGB image of Pillow, held to limits before anything is unfolded: first the
bytes, then the size in the header, then the pixels.

Transparent pixels come onto white, as in transformers' image processors; rotations of cameras (EXIF) are undone, as in
its `load_image`. Of an animation, the first frame counts.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from qsample.checks import check_fields, integer
from qsample.disk.untrusted import open_plain
from qsample.errors import ArgumentError, QsampleError, install_hint, shown

if TYPE_CHECKING:
    from PIL.Image import Image

    from qsample.contract.arrays import Array

ImageLike: TypeAlias = "str | Path | bytes | Image | Array"
FORMATS: Final = "PNG, JPEG, WebP or GIF"
ACCEPTED: Final = (
    f"give a path or the bytes of a {FORMATS} file, an image of Pillow, or uint8 [height, width, 3]"
)
_MOST_PIXELS: Final = 89_478_485  # Pillow warns of more
_STARTS: Final = {
    "Png": (b"\x89PNG\r\n\x1a\n",),
    "Jpeg": (b"\xff\xd8\xff",),
    "Gif": (b"GIF87a", b"GIF89a"),
    "WebP": (b"RIFF",),
}


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The largest image that is read. most_bytes: of its file. most_pixels: its width times its height."""

    most_bytes: int = integer(
        20 << 20, 1, 1 << 31, "the most bytes of an image file, up to 2^31", help="Of a file."
    )
    most_pixels: int = integer(
        40_000_000,
        1,
        _MOST_PIXELS,
        f"the most pixels of an image, up to {_MOST_PIXELS}",
        help="Width times height.",
    )

    def __post_init__(self) -> None:
        check_fields(self)


def read_image(
    image: ImageLike, limits: ImageLimits | None = None, name: str = "the image"
) -> Image:
    """The image in mode RGB.

    name: of the image in messages; a path is named besides. Raises ValueError for anything but an image within the
    limits, QsampleError without Pillow.
    """
    import numpy as np  # here, because the command line has the limits

    pillow, limits = _pillow(), limits or ImageLimits()
    if isinstance(image, str | Path):
        name = f"{name} {shown(str(image), 200)}"
        image = _content(image, limits, name)
    if isinstance(image, bytes):
        return _upright(_opened(image, limits, name), limits, name)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            _refuse(f"{name} is an array {list(image.shape)} of {image.dtype}; {ACCEPTED}")
        _check_size(image.shape[1], image.shape[0], limits, name)
        made: Image = pillow.fromarray(np.ascontiguousarray(image))
        return made
    if isinstance(image, pillow.Image):
        return _upright(image, limits, name)
    return _refuse(f"{name} is {shown(image)}, a {type(image).__name__}; {ACCEPTED}")


def read_size(
    file: bytes, limits: ImageLimits | None = None, name: str = "the image"
) -> tuple[int, int]:
    """Width and height in the header of an image file, before any rotation; nothing is unfolded. Raises as `read_image`
    does."""
    limits = limits or ImageLimits()
    width, height = _opened(file, limits, name).size
    _check_size(width, height, limits, name)
    return width, height


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise QsampleError(
            f"images need Pillow, which is not installed: `{install_hint('images')}`"
        ) from None
    return PIL.Image


def _refuse(message: str, cause: BaseException | None = None) -> NoReturn:
    raise ArgumentError(message, "images") from cause


def _check_size(width: int, height: int, limits: ImageLimits, name: str) -> None:
    if width < 1 or height < 1:
        _refuse(f"{name} has {width} x {height} pixels; it must have at least one")
    if width * height > limits.most_pixels:
        _refuse(
            f"{name} has {width} x {height} = {width * height} pixels, and at most {limits.most_pixels} are read; "
            "make it smaller"
        )


def _content(path: str | Path, limits: ImageLimits, name: str) -> bytes:
    if str(path).startswith(("http://", "https://", "data:")):
        _refuse(f"{name} is an address; {ACCEPTED}")
    try:
        with open_plain(path) as file:
            return file.read(limits.most_bytes + 1)
    except (OSError, ValueError) as error:
        _refuse(f"{name} cannot be read: {error}", error)


def _opened(data: bytes, limits: ImageLimits, name: str) -> Image:
    """A file of which the header was read. By its format's plugin: `Image.open` has a limit of its own, and warns."""
    if len(data) > limits.most_bytes:
        _refuse(
            f"{name} has more than {limits.most_bytes} bytes, which are the most that are read; make it smaller"
        )
    kind = next((kind for kind, starts in _STARTS.items() if data.startswith(starts)), None)
    if kind is None or (kind == "WebP" and data[8:12] != b"WEBP"):
        _refuse(f"{name} begins with {data[:8]!r}; give a {FORMATS} file")
    import_module(f"PIL.{kind}ImagePlugin")  # registers the format
    try:
        if (
            kind in _SIZES
        ):  # of formats whose plugins make room for all pixels when they open a file
            _check_size(*_SIZES[kind](data), limits, name)
        file: Image = _pillow().OPEN[kind.upper()][0](io.BytesIO(data), "")
    except ArgumentError:
        raise
    except Exception as error:  # of many kinds
        _refuse(
            f"{name} is a damaged {kind.upper()} file ({_said(error)}); give a whole one", error
        )
    return file


def _upright(image: Image, limits: ImageLimits, name: str) -> Image:
    from PIL import ImageOps

    _check_size(*image.size, limits, name)
    pillow = _pillow()
    try:
        image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = pillow.alpha_composite(
                pillow.new("RGBA", image.size, (255, 255, 255, 255)), image
            )
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # of many kinds
        _refuse(
            f"{name} cannot be decoded ({_said(error)}); give a whole file, or another format",
            error,
        )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}".removesuffix(": ")


def _gif_size(data: bytes) -> tuple[int, int]:
    """The canvas, grown to hold the first frame: https://www.w3.org/Graphics/GIF/spec-gif89a.txt."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    while data[at] == 0x21:  # an extension: its label, then blocks up to an empty one
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    left, top, columns, rows = struct.unpack_from("<4H", data, at + 1)
    return max(width, left + columns), max(height, top + rows)


def _webp_size(data: bytes) -> tuple[int, int]:
    """The canvas: https://developers.google.com/speed/webp/docs/riff_container."""
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


_SIZES: Final[dict[str, Callable[[bytes], tuple[int, int]]]] = {
    "Gif": _gif_size,
    "WebP": _webp_size,
}
