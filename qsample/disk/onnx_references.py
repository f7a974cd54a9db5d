"""Which files an ONNX file refers to, read from its protobuf without the package onnx, which a runtime does not have.

ONNX Runtime opens the external data of tensors, and lets providers open what an EPContext node names. Only the lengths
and types of fields are looked at, so that weights inside the file cost nothing
(https://protobuf.dev/programming-guides/encoding, https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Final

# Message → field number → message: those that lead to tensors and nodes.
_FIELDS: Final[dict[str, dict[int, str]]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {4: "op_type", 5: "Attribute"},
    "Attribute": {1: "name", 4: "s", 5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor"}
    | {23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {1: "key", 2: "value"},
}
_EMBEDDED: Final = 3  # the number of an attribute's integer
_DEEPEST: Final = 100  # protobuf's own limit of messages inside of one another
_CONTEXT: Final = b"EPContext"


class _Message:
    """What was read of one message that names a file: the bytes of its short fields."""

    def __init__(self) -> None:
        self.texts: dict[str, list[bytes]] = {}
        self.integers: list[int] = []
        self.attributes: list[_Message] = []


def referenced_files(path: Path) -> set[str]:
    """The location of every external tensor, and the file of every EPContext node that keeps its content in one.

    Raises ValueError where the file is no protobuf, and OSError.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()


class _Reader:
    def __init__(self, data: Any) -> None:
        self._data = data
        self._found: set[str] = set()

    def read(self) -> set[str]:
        self._message("Model", 0, len(self._data), 0)
        return self._found

    def _message(self, kind: str, position: int, end: int, depth: int) -> _Message:
        if depth > _DEEPEST:
            raise ValueError(f"its messages are more than {_DEEPEST} deep")
        data, fields, message = self._data, _FIELDS[kind], _Message()
        while position < end:
            tag = data[position]
            position += 1
            if tag > 0x7F:
                tag, position = self._varint(position - 1, end, 5)
            wire = tag & 7
            if wire == 2:
                size, position = self._varint(position, end, 5)
                start, position = position, position + size
                if position > end:
                    raise ValueError("it is cut off")
                inner = fields.get(tag >> 3)
                if inner is None:
                    continue
                if inner not in _FIELDS:
                    message.texts.setdefault(inner, []).append(data[start:position])
                elif inner == "Attribute":
                    message.attributes.append(self._message(inner, start, position, depth + 1))
                else:
                    self._message(inner, start, position, depth + 1)
            elif wire == 0:
                value, position = self._varint(position, end, 10)
                if kind == "Attribute" and tag >> 3 == _EMBEDDED:
                    message.integers.append(value)
            elif wire in (1, 5):
                position += 8 if wire == 1 else 4
            else:  # groups, which nothing writes
                raise ValueError("it is no ONNX file")
        if position > end:
            raise ValueError("it is cut off")
        self._note(kind, message)
        return message

    def _note(self, kind: str, message: _Message) -> None:
        # A field that comes twice counts for each time: which one a parser takes is not ours to guess.
        if kind == "Entry" and b"location" in message.texts.get("key", []):
            self._found.update(map(_text, message.texts.get("value", [b""])))
        elif kind == "Node" and _CONTEXT in message.texts.get("op_type", []):
            named: dict[bytes, list[_Message]] = {}
            for attribute in message.attributes:
                for name in attribute.texts.get("name", []):
                    named.setdefault(name, []).append(attribute)
            modes = [mode for attribute in named.get(b"embed_mode", []) for mode in attribute.integers or [0]]
            if any(mode != 1 for mode in modes):  # without it, the content is in the node
                for attribute in named.get(b"ep_cache_context", []):
                    self._found.update(map(_text, attribute.texts.get("s", [])))

    def _varint(self, position: int, end: int, longest: int) -> tuple[int, int]:
        value = shift = 0
        for index in range(position, min(end, position + longest)):
            byte = self._data[index]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if longest == 5 and value >= 1 << 32:
                    break
                return value, index + 1
            shift += 7
        raise ValueError("it is cut off, or no protobuf")


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")  # which is then like no name that a manifest may list
