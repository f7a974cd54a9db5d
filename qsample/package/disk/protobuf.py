"""Protobuf messages (https://protobuf.dev/programming-guides/encoding) without the packages
protobuf and onnx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

# Wire types.
_VARINT: Final = 0
_EIGHT_BYTES: Final = 1
_LENGTH_DELIMITED: Final = 2
_FOUR_BYTES: Final = 5


def fields(data: Any, start: int, end: int) -> Iterator[tuple[int, int | range]]:
    """Iterate over the fields of the message in `data[start:end]`.

    Args:
        data: Bytes, or a map of a file.
        start: The index of the first byte.
        end: The index after the last byte.

    Yields:
        The number of the field, and an integer or the range of its bytes.

    Raises:
        ValueError: The message is cut off, or not a protobuf.
    """
    position = start
    while position < end:
        tag = data[position]
        position += 1
        if tag > 0x7F:
            tag, position = _varint(data, position - 1, end, 5)
        wire = tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position, end, 10)
            yield tag >> 3, value
            continue
        if wire == _LENGTH_DELIMITED:
            size, position = _varint(data, position, end, 5)
        elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if wire == _EIGHT_BYTES else 4
        else:
            # Nothing writes groups.
            raise ValueError("it is not a protobuf that ONNX knows")
        if position + size > end:
            raise ValueError("it is cut off")
        yield tag >> 3, range(position, position + size)
        position += size


def field(number: int, content: int | bytes) -> bytes:
    """Encode a field of a message. content: An integer of at least 0, or bytes."""
    if isinstance(content, int):
        return _encoded(number << 3 | _VARINT) + _encoded(content)
    return _encoded(number << 3 | _LENGTH_DELIMITED) + _encoded(len(content)) + content


def _varint(data: Any, position: int, end: int, longest: int) -> tuple[int, int]:
    """Decode a varint of at most `longest` bytes; returns the number and the position after it."""
    value = shift = 0
    for index in range(position, min(end, position + longest)):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if longest == 5 and value >= 1 << 32:
                break
            return value, index + 1
        shift += 7
    raise ValueError("it is cut off, or not a protobuf")


def _encoded(number: int) -> bytes:
    """Encode an integer as a varint."""
    low = number & 0x7F
    rest = number >> 7
    return bytes([low | 0x80]) + _encoded(rest) if rest != 0 else bytes([low])
