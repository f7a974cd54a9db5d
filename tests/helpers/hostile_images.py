"""Image files within the limits of bytes and pixels that cost a reader far more than a picture of that size."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photo(width: int = 640, height: int = 480, seed: int = 0) -> bytes:
    """A picture like any other."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG")


def jpeg_of_scans(width: int, height: int, count: int) -> bytes:
    """A progressive JPEG with `count` further scans that change nothing, of some 60 bytes each."""
    whole = encoded(Image.new("L", (width, height)), "JPEG", progressive=True)
    assert whole.endswith(b"\xff\xd9")
    # A table with one code, 0: the next 16384 blocks, and as many more as the next 14 bits say, are empty.
    table = b"\x10" + bytes([1] + [0] * 15) + b"\xe0"
    blocks = -(-width // 8) * -(-height // 8)
    bits = ""
    while blocks >= 16384:
        run = min(blocks, 32767)
        bits += "0" + format(run - 16384, "014b")
        blocks -= run
    bits += "1" * (-len(bits) % 8)
    data = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    scan = b"\xff\xda" + struct.pack(">H", 8) + b"\x01\x01\x00\x01\x3f\x00" + data
    start = b"\xff\xc4" + struct.pack(">H", 2 + len(table)) + table
    return whole[:-2] + start + scan * count + b"\xff\xd9"


def png_chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


def png_with(chunk: bytes, count: int, image: Image.Image | None = None) -> bytes:
    """A PNG with `count` times a chunk after its header."""
    whole = encoded(image or Image.new("RGB", (8, 8)), "PNG")
    return whole[:33] + chunk * count + whole[33:]


def png_of_profiles(count: int) -> bytes:
    """Each chunk unfolds to a megabyte."""
    return png_with(png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20), 9)), count)


def png_of_texts(count: int) -> bytes:
    return png_with(png_chunk(b"tEXt", b"a\0b"), count)


def jpeg_of_comments(count: int) -> bytes:
    whole = photo(8, 8)
    return whole[:2] + b"\xff\xfe\0\3a" * count + whole[2:]


def png_of_pieces(count: int) -> bytes:
    """A PNG whose pixels are in `count` chunks, most of them empty."""
    return png_with(png_chunk(b"IDAT", b""), count)


def png_of_shared_tags(size: int) -> bytes:
    """A PNG of one pixel whose EXIF tags all lead to the same bytes."""
    tags = size // 12
    values = b"MM\0*\0\0\0\x08"
    start = 8 + 2 + tags * 12 + 4
    entries = b"".join(struct.pack(">HHII", 0x100 + n, 7, size, start) for n in range(tags))
    values += struct.pack(">H", tags) + entries + bytes(4) + bytes(size)
    return png_with(png_chunk(b"eXIf", values), 1)


def gif_of_blocks(count: int) -> bytes:
    """A GIF with a comment of `count` blocks."""
    whole = encoded(Image.new("P", (8, 8)), "GIF")
    place = 13 + (3 << (whole[10] & 7) + 1)
    return whole[:place] + b"!\xfe" + b"\1a" * count + b"\0" + whole[place:]


def gif_of_frame_blocks(count: int) -> bytes:
    """A GIF whose pixels are in blocks of a byte."""
    whole = encoded(Image.new("P", (8, 8)), "GIF")
    frame = whole.index(b",", 13 + (3 << (whole[10] & 7) + 1))
    return whole[: frame + 11] + b"\1a" * count + b"\0;"


def webp_of_chunks(count: int) -> bytes:
    whole = encoded(Image.new("RGB", (8, 8)), "WEBP")
    body = whole[8:] + b"none\0\0\0\0" * count
    return b"RIFF" + struct.pack("<I", len(body)) + body


def large_png(width: int, height: int, mode: str = "RGB") -> bytes:
    """One colour: a small file of many pixels."""
    return encoded(Image.new(mode, (width, height)), "PNG", compress_level=9)
