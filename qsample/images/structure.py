"""What an image file consists of, read before a library opens it: its parts, which are counted, and
for some formats its size.

A library reads every part of a file, and some parts cost it far more than their bytes: 20 MB hold
300,000 scans of a JPEG, each of which visits every pixel. Cameras and programs write few parts, so
a file with many is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Final

# Programs write up to some 20 scans of a progressive JPEG.
_MAX_JPEG_SCANS: Final = 100
# Profiles, previews and tables; a segment has up to 64 KiB.
_MAX_JPEG_SEGMENTS: Final = 2000
# A chunk of pixels has a few KiB at least. Others are profiles, texts and dates.
_MAX_PNG_CHUNKS: Final = 2**16
_MAX_PNG_CHUNKS_BESIDE_PIXELS: Final = 64
# A block has up to 255 bytes.
_MAX_GIF_BLOCKS: Final = 2**17
_MAX_WEBP_CHUNKS: Final = 2**16

_JPEG_START_OF_SCAN: Final = 0xDA
_JPEG_END: Final = 0xD9
# Among the data of a scan, FF 00 is a byte, FF FF a filler, and FF D0 to FF D7 a restart.
_JPEG_MARKER: Final = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
_JPEG_MARKERS_WITHOUT_CONTENT: Final = frozenset((0x01, 0xD8))
_PNG_PIXELS: Final = frozenset((b"IDAT", b"fdAT", b"fcTL"))  # The last two are of animations.
_GIF_EXTENSION: Final = 0x21


def check_structure(kind: str, data: bytes) -> None:
    """Raise ValueError for a file with too many parts. A damaged file passes.

    Args:
        kind: the format, "Png", "Jpeg", "Gif" or "WebP".
        data: the file.
    """
    _CHECKS[kind](data)


def size_in_header(kind: str, data: bytes) -> tuple[int, int] | None:
    """The width and height of an image of a format whose library takes memory for all pixels when
    it opens a file; None for others. Raises IndexError or struct.error for a damaged file.

    Args:
        kind: the format, as for `check_structure`.
        data: the file.
    """
    if kind == "Gif":
        return _gif_size(data)
    if kind == "WebP":
        return _webp_size(data)
    return None


def _check_count(count: int, most: int, parts: str) -> None:
    if count > most:
        raise ValueError(f"it has more than {most} {parts}, the limit")


def _check_jpeg(data: bytes) -> None:
    """ITU-T T.81, appendix B."""
    num_scans = 0
    num_segments = 0
    position = 0
    while (marker := _JPEG_MARKER.search(data, position)) is not None:
        code = marker[1][0]
        position = marker.end()
        if code == _JPEG_END:
            return
        if code in _JPEG_MARKERS_WITHOUT_CONTENT:
            continue
        num_segments += 1
        num_scans += code == _JPEG_START_OF_SCAN
        _check_count(num_scans, _MAX_JPEG_SCANS, "scans")
        _check_count(num_segments, _MAX_JPEG_SEGMENTS, "segments")
        # Two bytes have the length of the content, themselves included.
        position += int.from_bytes(data[position : position + 2], "big")


def _check_png(data: bytes) -> None:
    """https://www.w3.org/TR/png-3/#5Chunk-layout."""
    num_chunks = 0
    num_beside_pixels = 0
    position = 8
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        position += length + 12
        num_chunks += 1
        num_beside_pixels += name not in _PNG_PIXELS
        _check_count(num_chunks, _MAX_PNG_CHUNKS, "chunks")
        _check_count(num_beside_pixels, _MAX_PNG_CHUNKS_BESIDE_PIXELS, "chunks beside its pixels")


def _check_gif(data: bytes) -> None:
    num_blocks = 0
    position = _after_gif_tables(data)
    while position < len(data):
        is_extension = data[position] == _GIF_EXTENSION
        # The label of an extension; or the size of a frame, perhaps a table, and a byte.
        position += 2 if is_extension else _length_of_gif_frame_head(data, position)
        while position < len(data) and data[position] != 0:
            position += 1 + data[position]
            num_blocks += 1
            _check_count(num_blocks, _MAX_GIF_BLOCKS, "blocks")
        position += 1
        if not is_extension:  # Only the first frame is read.
            return


def _check_webp(data: bytes) -> None:
    num_chunks = 0
    position = 12
    while position + 8 <= len(data):
        length = int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8 + length + length % 2
        num_chunks += 1
        _check_count(num_chunks, _MAX_WEBP_CHUNKS, "chunks")


_CHECKS: Final[dict[str, Callable[[bytes], None]]] = {
    "Png": _check_png,
    "Jpeg": _check_jpeg,
    "Gif": _check_gif,
    "WebP": _check_webp,
}


def _after_gif_tables(data: bytes) -> int:
    """The place of the first block of a GIF, after its header and its table of colours."""
    flags = data[10] if len(data) > 10 else 0
    return 13 + _gif_table_bytes(flags)


def _gif_table_bytes(flags: int) -> int:
    has_table = flags & 0x80 != 0
    return 3 << (flags & 7) + 1 if has_table else 0


def _length_of_gif_frame_head(data: bytes, position: int) -> int:
    """The length of what is before the blocks of a frame that begins at `position`."""
    flags = data[position + 9] if position + 9 < len(data) else 0
    return 11 + _gif_table_bytes(flags)


def _gif_size(data: bytes) -> tuple[int, int]:
    """Width and height of the canvas, enlarged to hold the first frame:
    https://www.w3.org/Graphics/GIF/spec-gif89a.txt."""
    width, height = struct.unpack_from("<HH", data, 6)
    offset = _after_gif_tables(data)
    # An extension has a label, then blocks up to an empty block.
    while data[offset] == _GIF_EXTENSION:
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
