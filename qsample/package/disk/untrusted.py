"""Input from strangers: names of files, links, JSON, and the files that an ONNX file refers to.

Names must mean the same on every system, and nothing outside of their folder on any. JSON that RFC
8259 leaves open is refused, and so is JSON that would take too much memory or stack. Of an ONNX
file, only the lengths and types of fields are read, so that weights inside the file cost nothing
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

from qsample.package.disk.protobuf import fields

# Most file systems have this limit.
_MAX_NAME_BYTES: Final = 255
_FORBIDDEN_CHARACTER: Final = re.compile(r'[\x00-\x1f\x7f-\x9f<>:"|?*\\]')
# Devices of Windows, with or without an extension:
# https://learn.microsoft.com/windows/win32/fileio/naming-a-file
_DEVICE_NAME: Final = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(\..*)?", re.IGNORECASE
)


def problem_of_name(name: str) -> str | None:
    """The fault of a relative name whose parts are separated by `/`; None if it has none.

    On every system, these are refused: absolute names, `..`, drive letters, network shares,
    backslashes, empty parts, control characters, and names that Windows forbids or takes for a
    device.
    """
    parts = name.split("/")
    if name.startswith("/") or re.match(r"[A-Za-z]:", name) or "\\" in name or ".." in parts:
        return "which lies outside the package, or would on another system"
    if "" in parts or "." in parts:
        return "which has an empty part"
    if _FORBIDDEN_CHARACTER.search(name):
        return "which has a character that file names must not have"
    for part in parts:
        if _DEVICE_NAME.fullmatch(part):
            return "which is a device on Windows"
        if part[-1] in ". ":
            return "which ends with a dot or a space, and Windows drops that"
        try:
            length = len(part.encode("utf-8"))
        except UnicodeEncodeError:
            return "which is not Unicode text"
        if length > _MAX_NAME_BYTES:
            return f"which is longer than {_MAX_NAME_BYTES} bytes"
    return None


def colliding_name(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that are the same file on some system; None if there are none.

    The names differ only in case or composition, or the first is the folder of the second.
    """
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        for other in (seen.get(folded), folders.get(folded)):
            if other is not None:
                return other, name
        seen[folded] = name
        parts = folded.split("/")
        for count in range(1, len(parts)):
            folder = "/".join(parts[:count])
            if folder in seen:
                return seen[folder], name
            folders.setdefault(folder, name)
    return None


def leads_out(path: Path, folders: Iterable[Path]) -> bool:
    """Whether links lead from `path` to something outside of `folders`. The Hugging Face hub's
    cache, whose snapshots are links to `models--NAME/blobs`, counts as inside."""
    real = Path(os.path.realpath(path))
    if real.parent.name == "blobs" and real.parent.parent.name.startswith("models--"):
        return False
    return not any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)


def path_below(folder: str | Path, name: str) -> Path | None:
    """The path `name`, absolute or relative to `folder`, if it lies below `folder`; otherwise None.

    The text of `name` decides first, then each link on the way, and nothing beyond a link that
    leads out is looked at. So the answer does not tell what exists elsewhere, as a way out of the
    folder and back would (`../secret/../adapters`, `/proc/self/cwd/adapters`).

    Raises:
        OSError: a link cannot be read.
        ValueError: `name` is no path at all.
    """
    root = Path(os.path.realpath(folder))
    path = root / name
    for base in (root, Path(os.path.abspath(folder))):
        if path.is_relative_to(base) and ".." not in path.parts:
            parts = path.relative_to(base).parts
            break
    else:
        return None
    path = root
    for part in parts:
        path /= part
        if leads_out(path, [root]):
            return None
    return path


# A tokenizer's configuration with 100,000 added tokens has a quarter of this size.
MAX_FILE_BYTES: Final = 1 << 26
_MAX_JSON_DEPTH: Final = 64
# The reading of more arrays and objects takes seconds, in which no other thread runs.
_MAX_JSON_CONTAINERS: Final = 1 << 20
# The largest float has fewer digits. Python's own limit can be changed by a setting.
_MAX_INTEGER_DIGITS: Final = 400


def parse_json(text: str, *, infinities: bool = False) -> Any:
    """Parse a JSON document.

    Args:
        text: The document.
        infinities: Whether `Infinity` and `-Infinity` are accepted; some configurations have them.

    Raises:
        ValueError: The document has a wrong syntax, a key that comes twice, NaN, other infinities,
            a number that no float can hold, or too many or too deeply nested arrays and objects.
            The message is one line.
    """
    # Some of these characters may be in texts.
    if text.count("[") + text.count("{") > _MAX_JSON_CONTAINERS:
        raise ValueError(f"it has more than {_MAX_JSON_CONTAINERS} arrays and objects")
    constant = _infinity if infinities else _no_constant
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_key_twice,
            parse_constant=constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_JSON_DEPTH} deep") from None
    _check_depth(value)
    return value


def read_json(path: Path, largest: int = MAX_FILE_BYTES, *, infinities: bool = False) -> Any:
    """`parse_json` of a UTF-8 file; raises as `read_text` does, too."""
    return parse_json(read_text(path, largest), infinities=infinities)


def read_text(path: Path, largest: int = MAX_FILE_BYTES) -> str:
    """Read the text of a UTF-8 file.

    Args:
        path: The path of the file.
        largest: The largest size of the file in bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a plain file, too large, or not UTF-8.
    """
    return read_bytes(path, largest).decode("utf-8")


def read_bytes(path: Path, largest: int) -> bytes:
    """Read a plain file of at most `largest` bytes; raises as `read_text` does."""
    with open_plain(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"it is larger than {largest >> 20} MiB")
    return content


def open_plain(path: str | Path) -> BinaryIO:
    """Open a plain file to be read, without waiting for a pipe or a device.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is not a plain file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a plain file")
    return os.fdopen(descriptor, "rb")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise ValueError(f"{name!r:.80} comes twice in one object")
        value[name] = item
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _infinity(name: str) -> float:
    return _no_constant(name) if name == "NaN" else float(name)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text:.40} is too large for a number")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"{text:.40}… is too large for a number")
    return int(text)


def _check_depth(value: Any) -> None:
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > _MAX_JSON_DEPTH + 1:
            raise ValueError(f"it is nested more than {_MAX_JSON_DEPTH} deep")
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        level = children


# The fields of ONNX messages that lead to names of files: message → field number → the field's
# message, or the name of its value.
_FIELDS: Final[dict[str, dict[int, str]]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {4: "op_type", 5: "Attribute"},
    "Attribute": {
        1: "name",
        3: "i",
        4: "s",
        5: "Tensor",
        6: "Graph",
        10: "Tensor",
        11: "Graph",
        22: "SparseTensor",
        23: "SparseTensor",
    },
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {1: "key", 2: "value"},
}
_INTEGER_FIELD: Final = "i"
# Protobuf itself has this limit.
_MAX_MESSAGE_DEPTH: Final = 100
# The largest known decoders have some 30,000. A million would take minutes to read.
_MAX_NODES: Final = 1 << 17

# The values of a message by name, each as often as its field comes.
_Message = dict[str, list[Any]]


def referenced_files(path: Path) -> set[str]:
    """The files that an ONNX file refers to: the location of every external tensor, which ONNX
    Runtime opens, and the file of every EPContext node whose content is in a file, which ONNX
    Runtime lets providers open.

    Raises:
        OSError: The file at `path` cannot be read.
        ValueError: It is not a protobuf, or has more than 131,072 nodes.
    """
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _ReferenceReader(data)
            reader.read("Model", range(len(data)))
    # A name that is not Unicode becomes unlike every name that a manifest may list.
    return {name.decode("utf-8", "surrogateescape") for name in reader.names}


class _ReferenceReader:
    """Reads the messages of an ONNX file and collects the `names` of files in them."""

    def __init__(self, data: mmap.mmap) -> None:
        self.names = set[bytes]()
        self._data = data
        self._nodes = 0

    def read(self, kind: str, place: range, depth: int = 0) -> _Message:
        """Read the message at a place in the file, and collect the names of files in it.

        Args:
            kind: The kind of the message, a key of `_FIELDS`.
            place: The range of the message's bytes.
            depth: The number of messages around it.

        Returns:
            The values and attributes of the message. A field that comes twice counts both times:
            a parser may take either.
        """
        if depth > _MAX_MESSAGE_DEPTH:
            raise ValueError(f"its messages are more than {_MAX_MESSAGE_DEPTH} deep")
        self._nodes += kind == "Node"
        if self._nodes > _MAX_NODES:
            raise ValueError(f"it has more than {_MAX_NODES} nodes")
        message: _Message = {}
        for number, content in fields(self._data, place.start, place.stop):
            name = _FIELDS[kind].get(number)
            if name is not None:
                self._read_field(name, content, message, depth)
        if kind == "Entry":
            self._collect_location(message)
        elif kind == "Node":
            self._collect_context(message.get("op_type", []), message.get("Attribute", []))
        return message

    def _read_field(self, name: str, content: int | range, message: _Message, depth: int) -> None:
        """Add a field to its message if it is a value or an attribute; other messages are only
        read."""
        value: Any
        if isinstance(content, int) != (name == _INTEGER_FIELD):
            return
        if isinstance(content, int):
            value = content
        elif name in _FIELDS:
            value = self.read(name, content, depth + 1)
            if name != "Attribute":
                return
        else:
            value = self._data[content.start : content.stop]
        message.setdefault(name, []).append(value)

    def _collect_location(self, entry: _Message) -> None:
        """Collect the file of an external tensor."""
        if b"location" in entry.get("key", []):
            self.names.update(entry.get("value", [b""]))

    def _collect_context(self, types: list[Any], attributes: list[_Message]) -> None:
        """Collect the file of an EPContext node."""
        if b"EPContext" not in types:
            return
        modes = list[int]()
        files = list[bytes]()
        for attribute in attributes:
            names = attribute.get("name", [])
            if b"embed_mode" in names:
                modes += attribute.get(_INTEGER_FIELD, [0])
            if b"ep_cache_context" in names:
                files += attribute.get("s", [])
        # In mode 1, and without a mode, the content is in the node.
        if any(mode != 1 for mode in modes):
            self.names.update(files)
