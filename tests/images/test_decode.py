"""Images of every kind, whole and hostile, beside transformers' conversions."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qsample.errors import QsampleError
from qsample.images.decode import ImageLimits, read_image, read_size, strips

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
RED, GREEN = (Image.new("RGB", (8, 8), color) for color in ("red", "green"))
BOTH = {"save_all": True, "append_images": [GREEN]}


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_chunk(kind: bytes, content: bytes) -> bytes:
    """A PNG with a further chunk after its header."""
    data, check = encoded(RGB, "PNG"), zlib.crc32(kind + content)
    return (
        data[:33]
        + struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", check)
        + data[33:]
    )


def patched(data: bytes, mark: bytes, at: int, kind: str, *numbers: int, start: int = 0) -> bytes:
    changed = bytearray(data)
    struct.pack_into(kind, changed, changed.index(mark, start) + at, *numbers)
    return bytes(changed)


def moded(mode: str) -> Image.Image:
    """The picture in a mode, with every degree of transparency if it has any."""
    image = RGB.convert("RGBA" if "A" in mode else "RGB")
    if "A" in mode:
        image.putalpha(RGB.getchannel("G"))
    return image.convert(mode)


@pytest.mark.parametrize(
    "mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "I;16", "I", "F"]
)
def test_every_mode_is_converted_as_transformers_converts_it(mode: str) -> None:
    from transformers.image_transforms import convert_to_rgb

    image = moded("L").convert("I").convert(mode) if mode in ("I;16", "I", "F") else moded(mode)
    want = convert_to_rgb(image, return_numpy=True)
    np.testing.assert_array_equal(np.asarray(read_image(image)), want)
    if mode not in ("I", "F"):
        data = encoded(image, "JPEG" if mode in ("CMYK", "YCbCr") else "PNG")
        want = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
        np.testing.assert_array_equal(np.asarray(read_image(data)), want)


@pytest.mark.parametrize("transparent", [0, 1])
@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_palette_with_a_transparent_color_comes_onto_white(form: str, transparent: int) -> None:
    """Color 0 as well; in GIF files, it often is the transparent one."""
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0] + [0] * 762)
    image.putpixel((1, 0), 1)
    want = [[255, 0, 0], [0, 255, 0]]
    want[transparent] = [255, 255, 255]
    assert np.asarray(read_image(encoded(image, form, transparency=transparent))).tolist() == [want]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_photo_is_upright_as_in_load_image(tmp_path: Path, orientation: int) -> None:
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x112] = orientation
    path = tmp_path / "photo.png"
    RGB.save(path, exif=exif)
    want = np.asarray(load_image(str(path)))
    for given in (path, str(path), path.read_bytes(), Image.open(path)):
        np.testing.assert_array_equal(np.asarray(read_image(given)), want)


@pytest.mark.parametrize("lossless", [False, True])
def test_webp_is_read_as_pillow_reads_it(lossless: bool) -> None:
    data = encoded(RGB, "WEBP", lossless=lossless)
    np.testing.assert_array_equal(
        np.asarray(read_image(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    )


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    lossless = {"lossless": True} if kind == "WEBP" else {}
    assert (
        np.asarray(read_image(encoded(RED, kind, **BOTH, **lossless))).tolist()
        == np.asarray(RED).tolist()
    )


def test_arrays_are_taken_as_they_are() -> None:
    pixels = np.asarray(RGB)
    np.testing.assert_array_equal(np.asarray(read_image(pixels[::-1, ::2])), pixels[::-1, ::2])


GIF = encoded(RED, "GIF")
BOMBS = {
    "12000 x 12000 = 144000000 pixels": encoded(Image.new("1", (12000, 12000)), "PNG"),
    "65000 x 65000 = 4225000000 pixels": patched(
        encoded(RED, "JPEG"), b"\xff\xc0", 5, ">HH", 65000, 65000
    ),
    "16383 x 16383 = 268402689 pixels": b"RIFF\x64\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0"
    + b"\xfe\x3f\0" * 2
    + bytes(60),
    "16383 x 16384 = 268419072 pixels": b"RIFF\x64\0\0\0WEBPVP8L\x0a\0\0\0\x2f\xfe\xff\xff\x0f"
    + bytes(60),
    # Without a palette of its own, and with a comment.
    "50000 x 2000 = 100000000 pixels": b"GIF89a\x01\0\x01\0\0\0\0!\xfe\x03abc\x02de\0,"
    + struct.pack("<4H", 0, 0, 50000, 2000)
    + bytes(60),
    "60000 x 2000 = 120000000 pixels": patched(GIF, b",", 1, "<4H", 0, 0, 60000, 2000, start=13),
}


@pytest.mark.parametrize("said", BOMBS)
@pytest.mark.filterwarnings("error")
def test_a_bomb_is_refused_by_its_header(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unfolds(*_: Any) -> None:
        raise AssertionError("it was unfolded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", unfolds)
    with pytest.raises(ValueError, match=f"the image has {said}, and at most 40000000 are read"):
        read_image(BOMBS[said])


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1)])
def test_the_smallest_images_are_read(size: tuple[int, int]) -> None:
    image = RGB.crop((0, 0, *size))
    for given in (image, encoded(image, "PNG"), np.asarray(image)):
        np.testing.assert_array_equal(np.asarray(read_image(given)), np.asarray(image))


@pytest.mark.parametrize("size", [(3000, 700), (1, 40_000), (40_000, 1), (1 << 20, 2)])
def test_large_transparent_images_are_over_white_to_their_last_row(size: tuple[int, int]) -> None:
    width, height = size
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    white = Image.new("RGBA", size, (255, 255, 255, 255))
    whole = Image.alpha_composite(white, image).convert("RGB")
    np.testing.assert_array_equal(np.asarray(read_image(image)), np.asarray(whole))
    rows = np.concatenate([np.asarray(strip) for strip in strips(image)])
    np.testing.assert_array_equal(rows, pixels)


def test_the_limits_are_the_callers() -> None:
    data = encoded(RGB, "PNG")
    assert read_image(data, ImageLimits(len(data), 1200)).size == (40, 30)
    with pytest.raises(ValueError, match=f"photo has more than {len(data) - 1} bytes"):
        read_image(data, ImageLimits(len(data) - 1, 1200), "photo")
    for image in (data, RGB, np.asarray(RGB)):
        with pytest.raises(
            ValueError, match="40 x 30 = 1200 pixels, and at most 1199 are read; make it smaller"
        ):
            read_image(image, ImageLimits(len(data), 1199))
    with pytest.raises(ValueError, match="most_pixels is 0; give the most pixels"):
        ImageLimits(most_pixels=0)
    assert read_size(data, ImageLimits(len(data), 1200)) == (40, 30)
    assert read_size(data) == (40, 30)
    with pytest.raises(ValueError, match="photo has 40 x 30 = 1200 pixels"):
        read_size(data, ImageLimits(len(data), 1199), "photo")
    with pytest.raises(ValueError, match="photo has more than"):
        read_size(data, ImageLimits(len(data) - 1, 1200), "photo")


JPEG, PNG = encoded(RGB, "JPEG"), encoded(RGB, "PNG")
DAMAGED = [
    (JPEG[: len(JPEG) // 2], "truncated"),
    (JPEG[:20], "damaged JPEG"),
    (PNG[:200], "truncated"),
    (PNG[:20], "damaged PNG"),
    (GIF[:40], "damaged GIF|decoded"),
    (encoded(RGB, "WEBP")[:20], "damaged WEBP"),
    (encoded(RGB, "WEBP")[:60], "damaged WEBP"),
    (with_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(4 << 20), 9)), "too large"),
    (with_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(4 << 20), 9)), "too large"),
    (b"", "begins with b''; give a PNG, JPEG, WebP or GIF"),
    (b"%PDF-1.4 ...", "begins with b'%PDF-1.4'"),
    (b"RIFF....WAVE", "begins with b'RIFF"),
    (encoded(RGB, "BMP"), "begins with b'BM"),
    (np.zeros((4, 5), np.uint8), r"an array \[4, 5\] of uint8; give .*uint8 \[height, width, 3\]"),
    (np.zeros((3, 4, 5), np.uint8), r"an array \[3, 4, 5\]"),
    (np.full((4, 5, 3), np.nan), "of float64"),
    (np.zeros((0, 5, 3), np.uint8), "has 5 x 0 pixels"),
    (Image.new("La", (2, 2)), "cannot be decoded"),
    (7, "is 7, a int; give a path"),
    ([PNG], "a list; give a path"),
    ("https://example.org/a.png", "is an address"),
    ("data:image/png;base64,iVBORw", "is an address"),
    ("/no/such/cat.jpg", "'/no/such/cat.jpg' cannot be read"),
    (Path("/"), "cannot be read: it is not a plain file"),
]


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_anything_else_is_refused_by_name(number: int) -> None:
    image, said = DAMAGED[number]
    with pytest.raises(ValueError, match=rf"^images\[1\].*({said})"):
        read_image(image, name="images[1]")  # type: ignore[arg-type]


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(QsampleError, match=r"pip install .*\[images\]"):
        read_image(PNG)


@pytest.mark.parametrize(
    ("name", "default", "most"),
    [("most_bytes", 20 * 1024 * 1024, 2**31), ("most_pixels", 40_000_000, 89_478_485)],
)
def test_limits_by_default_and_at_most(name: str, default: int, most: int) -> None:
    """Pillow warns of images of more pixels."""
    assert getattr(ImageLimits(), name) == default
    assert Image.MAX_IMAGE_PIXELS == 89_478_485
    for value in (1, most):
        assert getattr(ImageLimits(**{name: value}), name) == value
    wrong: tuple[Any, ...] = (0, most + 1, 1.5, None)
    for given in wrong:
        with pytest.raises(ValueError, match=rf"{name} is .*; give the most .* up to "):
            ImageLimits(**{name: given})
