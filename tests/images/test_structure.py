"""The parts of image files: ordinary files pass, also large ones, and floods do not."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest
from PIL import Image

from qsample.images import structure
from qsample.images.structure import check_structure, size_in_header
from tests.helpers import hostile_images
from tests.helpers.hostile_images import encoded

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 600, 3), dtype=np.uint8))
EXIF = Image.Exif()
EXIF[0x112] = 6


def webp() -> bytes:
    return encoded(NOISE, "WEBP", exif=EXIF, save_all=True, append_images=[NOISE.rotate(90)])


ORDINARY = {
    "Jpeg": [
        encoded(NOISE, "JPEG", progressive=True, exif=EXIF, icc_profile=bytes(200_000)),
        encoded(
            NOISE, "JPEG", quality=100, restart_marker_rows=1, comment=b"\xff\xda\xff\xda" * 99
        ),
        encoded(NOISE.convert("CMYK"), "JPEG"),
    ],
    "Png": [
        encoded(NOISE, "PNG", exif=EXIF, icc_profile=bytes(2000)),
        encoded(NOISE.quantize(7), "PNG", transparency=0),
        encoded(NOISE, "PNG", save_all=True, append_images=[NOISE.rotate(90)] * 40),
    ],
    "Gif": [
        encoded(NOISE, "GIF", comment=b"," * 2000),
        encoded(NOISE, "GIF", save_all=True, append_images=[NOISE.rotate(90)] * 3),
    ],
    "WebP": [webp(), encoded(NOISE, "WEBP", lossless=True)],
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_files_pass_whole_and_cut(kind: str) -> None:
    lot = random.Random(kind)
    for file in ORDINARY[kind]:
        check_structure(kind, file)
        for end in [*range(40), *(lot.randrange(len(file)) for _ in range(30))]:
            check_structure(kind, file[:end])


def passes(kind: str, file: bytes) -> bool:
    try:
        check_structure(kind, file)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "limit", "parts", "make"),
    [
        ("Jpeg", "_MAX_JPEG_SCANS", "scans", lambda n: hostile_images.jpeg_of_scans(1100, 1000, n)),
        ("Jpeg", "_MAX_JPEG_SEGMENTS", "segments", hostile_images.jpeg_of_comments),
        ("Png", "_MAX_PNG_CHUNKS_BESIDE_PIXELS", "chunks beside", hostile_images.png_of_texts),
        ("Png", "_MAX_PNG_CHUNKS", "chunks", hostile_images.png_of_pieces),
        ("Gif", "_MAX_GIF_BLOCKS", "blocks", hostile_images.gif_of_blocks),
        ("Gif", "_MAX_GIF_BLOCKS", "blocks", hostile_images.gif_of_frame_blocks),
        ("WebP", "_MAX_WEBP_CHUNKS", "chunks", hostile_images.webp_of_chunks),
    ],
)  # fmt: skip
def test_the_limits(
    kind: str, limit: str, parts: str, make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has as many parts as the smallest limit that it passes, and a part more with each that is added."""

    def smallest(file: bytes) -> int:
        for most in range(200):
            monkeypatch.setattr(structure, limit, most)
            if passes(kind, file):
                return most
            with pytest.raises(ValueError, match=f"more than {most} {parts}"):
                check_structure(kind, file)
        raise AssertionError("it has no limit")

    assert callable(make)
    counts = [smallest(make(count)) for count in (0, 1, 2, 50)]
    assert counts[1] - counts[0] in (0, 1)  # Without any part, there may be no place for them.
    assert counts[2] - counts[1] == 1
    assert counts[3] - counts[2] == 48


def test_scans_of_pillow_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """libjpeg writes ten for a progressive picture in colour, and one for others."""
    for options, count in (({"progressive": True}, 10), ({}, 1)):
        file = encoded(NOISE, "JPEG", **options)
        monkeypatch.setattr(structure, "_MAX_JPEG_SCANS", count)
        check_structure("Jpeg", file)
        monkeypatch.setattr(structure, "_MAX_JPEG_SCANS", count - 1)
        with pytest.raises(ValueError, match="scans"):
            check_structure("Jpeg", file)


def test_what_follows_the_end_of_a_jpeg_does_not_count() -> None:
    check_structure("Jpeg", encoded(NOISE, "JPEG") + b"\xff\xda\0\2" * 5000)


def test_hostile_files_are_pictures_to_pillow() -> None:
    """So the tests above and those of the server count what a library would read."""
    for file in (
        hostile_images.jpeg_of_scans(1100, 1000, 3),
        hostile_images.jpeg_of_comments(3),
        hostile_images.png_of_profiles(3),
        hostile_images.png_of_texts(3),
        hostile_images.png_of_pieces(3),
        hostile_images.gif_of_blocks(3),
        hostile_images.webp_of_chunks(3),
    ):
        with Image.open(io.BytesIO(file)) as image:
            image.load()
            assert image.width in (8, 1100)


@pytest.mark.parametrize("size", [(1, 1), (300, 7), (16383, 3)])
def test_sizes_that_headers_state(size: tuple[int, int]) -> None:
    """Of formats whose library takes memory for all pixels when it opens a file; Pillow wrote these."""
    picture = Image.new("RGB", size)
    for kind, files in {
        "Gif": [encoded(picture, "GIF"), encoded(picture, "GIF", comment=b"x" * 600)],
        "WebP": [
            encoded(picture, "WEBP"),
            encoded(picture, "WEBP", lossless=True),
            encoded(picture, "WEBP", exif=EXIF),
        ],
    }.items():
        for file in files:
            assert size_in_header(kind, file) == size
    assert size_in_header("Png", encoded(picture, "PNG")) is None
    assert size_in_header("Jpeg", encoded(picture, "JPEG")) is None


def gif(canvas: tuple[int, int], frame: tuple[int, int, int, int], table: int | None) -> bytes:
    """A file up to its first frame, by the specification. table: the size of the table of colours, as a power of two;
    after the tables come an extension and the frame."""
    flags = 0 if table is None else 0x80 | table - 1
    head = b"GIF89a" + struct.pack("<HHBBB", *canvas, flags, 0, 0)
    colours = b"" if table is None else bytes(3 * 2**table)
    extension = b"\x21\xfe" + b"\x02ab" + b"\x01c" + b"\x00"
    return head + colours + extension + b"\x2c" + struct.pack("<HHHHB", *frame, 0)


@pytest.mark.parametrize("table", [None, 1, 2, 8])
@pytest.mark.parametrize(
    ("canvas", "frame", "size"),
    [
        ((100, 50), (0, 0, 100, 50), (100, 50)),
        ((100, 50), (10, 5, 20, 30), (100, 50)),
        ((100, 50), (95, 0, 10, 10), (105, 50)),
        ((100, 50), (0, 45, 10, 10), (100, 55)),
        ((0, 0), (1, 2, 3, 4), (4, 6)),
    ],
)
def test_a_frame_enlarges_the_canvas_of_a_gif(
    canvas: tuple[int, int],
    frame: tuple[int, int, int, int],
    size: tuple[int, int],
    table: int | None,
) -> None:
    file = gif(canvas, frame, table)
    assert size_in_header("Gif", file) == size
    with pytest.raises((IndexError, struct.error)):
        size_in_header("Gif", file[:-2])


def test_a_gif_is_counted_up_to_the_end_of_its_first_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of extensions and of the frame, with a table of its own or not."""
    monkeypatch.setattr(structure, "_MAX_GIF_BLOCKS", 5)
    for flags, colours in ((0, b""), (0x81, bytes(12))):
        start = gif((9, 9), (0, 0, 9, 9), 1)[:-1] + bytes([flags]) + colours + b"\x02"
        for blocks, fits in ((3, True), (4, False)):
            file = start + b"\x01x" * blocks + b"\x00" + b"\x21\xfe" + b"\x01x" * 9 + b"\x00"
            if fits:
                check_structure("Gif", file)
            else:
                with pytest.raises(ValueError, match="it has more than 5 blocks, the limit"):
                    check_structure("Gif", file)


@pytest.mark.parametrize(
    ("kind", "start", "part", "most"),
    [
        ("Jpeg", b"\xff\xd8", b"\xff\xfe\0\x04ab", 2000),
        ("Jpeg", b"\xff\xd8", b"\xff\xda\0\2", 100),
        ("Png", b"\x89PNG\r\n\x1a\n", b"\0\0\0\0tEXt1234", 64),
        ("Png", b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IDAT1234", 65536),
        ("Gif", b"GIF89a\1\0\1\0\0\0\0\x21\xfe", b"\1a", 131072),
        ("WebP", b"RIFF....WEBP", b"VP8 \0\0\0\0", 65536),
    ],
)
def test_the_most_parts_of_a_file(kind: str, start: bytes, part: bytes, most: int) -> None:
    check_structure(kind, start + part * most)
    with pytest.raises(ValueError, match=f"it has more than {most} "):
        check_structure(kind, start + part * (most + 1))
