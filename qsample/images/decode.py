"""An image as a caller gives it → an upright RGB image of Pillow. Limits are checked before
anything is decompressed: first the bytes, then the size in the header, then the pixels.

Transparent pixels become white, as in transformers' image processors. Rotations of cameras (EXIF)
are undone, as in its `load_image`. Only the first frame of an animation is read.
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
from qsample.errors import ArgumentError, QsampleError, install_hint, shown
from qsample.package.disk.untrusted import open_plain

if TYPE_CHECKING:
    from PIL.Image import Image

    from qsample.contract.arrays import Array

ImageLike: TypeAlias = "str | Path | bytes | Image | Array"
FORMATS: Final = "PNG, JPEG, WebP or GIF"
ACCEPTED_IMAGES: Final = (
    f"give a path or the bytes of a {FORMATS} file, an image of Pillow, or uint8 [height, width, 3]"
)
_MAX_PIXELS: Final = 89_478_485  # Pillow warns about larger images.
# Format, by the name of Pillow's plugin → the first bytes of its files.
_SIGNATURES: Final = {
    "Png": (b"\x89PNG\r\n\x1a\n",),
    "Jpeg": (b"\xff\xd8\xff",),
    "Gif": (b"GIF87a", b"GIF89a"),
    "WebP": (b"RIFF",),
}


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The largest image that is read.

    Attributes:
        most_bytes: the most bytes of its file.
        most_pixels: the most pixels, its width times its height.
    """

    most_bytes: int = integer(
        20 << 20, 1, 1 << 31, "the most bytes of an image file, up to 2^31", help="Of a file."
    )
    most_pixels: int = integer(
        40_000_000,
        1,
        _MAX_PIXELS,
        f"the most pixels of an image, up to {_MAX_PIXELS}",
        help="Width times height.",
    )

    def __post_init__(self) -> None:
        check_fields(self)


def read_image(
    image: ImageLike, limits: ImageLimits | None = None, name: str = "the image"
) -> Image:
    """The image in mode RGB.

    Args:
        image: the image.
        limits: the largest image to read; by default `ImageLimits()`.
        name: the name of the image in messages. If the image is a path, the path follows the name.

    Raises ValueError for anything but an image within the limits, QsampleError without Pillow.
    """
    # The command line imports this module for its limits, and starts without NumPy.
    import numpy as np

    pillow = _pillow()
    if limits is None:
        limits = ImageLimits()
    if isinstance(image, str | Path):
        name = f"{name} {shown(str(image), 200)}"
        image = _content(image, limits, name)
    if isinstance(image, bytes):
        return _upright(_opened(image, limits, name), limits, name)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            _refuse(f"{name} is an array {list(image.shape)} of {image.dtype}; {ACCEPTED_IMAGES}")
        _check_size(image.shape[1], image.shape[0], limits, name)
        made: Image = pillow.fromarray(np.ascontiguousarray(image))
        return made
    if isinstance(image, pillow.Image):
        return _upright(image, limits, name)
    return _refuse(f"{name} is {shown(image)}, a {type(image).__name__}; {ACCEPTED_IMAGES}")


def read_size(
    file: bytes, limits: ImageLimits | None = None, name: str = "the image"
) -> tuple[int, int]:
    """Width and height in the header of an image file, before any rotation; nothing is
    decompressed. Raises as `read_image` does."""
    if limits is None:
        limits = ImageLimits()
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
        _refuse(f"{name} has {width} x {height} pixels; it must have at least one pixel")
    if width * height > limits.most_pixels:
        _refuse(
            f"{name} has {width} x {height} = {width * height} pixels, and at most {limits.most_pixels} are read; "
            "make it smaller"
        )


def _content(path: str | Path, limits: ImageLimits, name: str) -> bytes:
    """The bytes of a file, at most one byte beyond the limit."""
    if str(path).startswith(("http://", "https://", "data:")):
        _refuse(f"{name} is an address; {ACCEPTED_IMAGES}")
    try:
        with open_plain(path) as file:
            return file.read(limits.most_bytes + 1)
    except (OSError, ValueError) as error:
        _refuse(f"{name} cannot be read: {error}", error)


def _opened(data: bytes, limits: ImageLimits, name: str) -> Image:
    """An image whose header was read. The format's plugin reads it, because `Image.open` has
    another limit, and warns."""
    if len(data) > limits.most_bytes:
        _refuse(f"{name} has more than {limits.most_bytes} bytes, the limit; make it smaller")
    kind = _format_of(data)
    if kind is None:
        _refuse(f"{name} begins with {data[:8]!r}; give a {FORMATS} file")
    import_module(f"PIL.{kind}ImagePlugin")  # This registers the format.
    try:
        if kind in _SIZE_READERS:
            width, height = _SIZE_READERS[kind](data)
            _check_size(width, height, limits, name)
        plugin, _ = _pillow().OPEN[kind.upper()]
        file: Image = plugin(io.BytesIO(data), "")
    except ArgumentError:
        raise
    except Exception as error:  # Pillow raises many kinds.
        _refuse(
            f"{name} is a damaged {kind.upper()} file ({_brief(error)}); give a whole file", error
        )
    return file


def _format_of(data: bytes) -> str | None:
    """The format of a file, by the name of Pillow's plugin; None for other formats."""
    for kind, signatures in _SIGNATURES.items():
        if data.startswith(signatures):
            if kind == "WebP" and data[8:12] != b"WEBP":  # Other files begin with RIFF, too.
                return None
            return kind
    return None


def _upright(image: Image, limits: ImageLimits, name: str) -> Image:
    """The image in mode RGB, rotated as its EXIF data say, over white."""
    from PIL import ImageOps

    _check_size(*image.size, limits, name)
    pillow = _pillow()
    try:
        image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
            image = pillow.alpha_composite(white, image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # Pillow raises many kinds.
        _refuse(
            f"{name} cannot be decoded ({_brief(error)}); give a whole file, or another format",
            error,
        )


def _brief(error: Exception) -> str:
    """The kind of an exception and the beginning of its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}".removesuffix(": ")


def _gif_size(data: bytes) -> tuple[int, int]:
    """Width and height of the canvas, enlarged to hold the first frame:
    https://www.w3.org/Graphics/GIF/spec-gif89a.txt."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13
    if flags & 128:  # A table of colours follows.
        offset += 3 << (flags & 7) + 1
    while data[offset] == 0x21:  # An extension has a label, then blocks up to an empty block.
        offset += 2
        while data[offset] != 0:
            offset += 1 + data[offset]
        offset += 1
    left, top, columns, rows = struct.unpack_from("<4H", data, offset + 1)
    return max(width, left + columns), max(height, top + rows)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height of the canvas:
    https://developers.google.com/speed/webp/docs/riff_container."""
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


# Format → a function that reads width and height of a file. The plugins of these formats allocate
# all pixels when they open a file.
_SIZE_READERS: Final[dict[str, Callable[[bytes], tuple[int, int]]]] = {
    "Gif": _gif_size,
    "WebP": _webp_size,
}
