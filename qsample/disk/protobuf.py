"""Protobuf messages (https://protobuf.dev/programming-guides/encoding) without the packages protobuf and onnx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types


def fields(data: Any, start: int, end: int) -> Iterator[tuple[int, int | range]]:
    """The fields of the message in `data[start:end]`, in order: the number of each with an integer, or with the range
    of its bytes. data: bytes, or a map of a file. Raises ValueError if it is cut off or no protobuf."""
    position = start
    while position < end:
        tag = data[position]
        position += 1
        if tag > 0x7F:
            tag, position = _varint(data, position - 1, end, 5)
        wire = tag & 7
        if wire == _NUMBER:
            value, position = _varint(data, position, end, 10)
            yield tag >> 3, value
            continue
        if wire == _BYTES:
            size, position = _varint(data, position, end, 5)
        elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if wire == _EIGHT_BYTES else 4
        else:  # groups: nothing writes them
            raise ValueError("it is not a protobuf that ONNX knows")
        if position + size > end:
            raise ValueError("it is cut off")
        yield tag >> 3, range(position, position + size)
        position += size


def field(number: int, content: int | bytes) -> bytes:
    """A field of a message: a number of 0 or more, or bytes after their length."""
    if isinstance(content, int):
        return _encoded(number << 3) + _encoded(content)
    return _encoded(number << 3 | _BYTES) + _encoded(len(content)) + content


def _varint(data: Any, position: int, end: int, longest: int) -> tuple[int, int]:
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
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _encoded(rest) if rest else bytes([low])
