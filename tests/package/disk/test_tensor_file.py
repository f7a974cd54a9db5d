"""Tensor files, next to the safetensors library."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qsample.package.disk.tensor_file import TensorFile, memory_of, read_header, write_tensors

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([-1, 7], np.int64),
    "empty": np.zeros((0, 4), np.int8),
    "half": np.array([[0.5], [-2.0]], np.float16),
}
TENSORS = {name: torch.from_numpy(array) for name, array in ARRAYS.items()} | {
    "bfloat16": torch.tensor([1.5, -3.0], dtype=torch.bfloat16),
    "double": torch.tensor([0.1], dtype=torch.float64),
}


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    bits = np.array([0x3FC0, 0xC040], np.uint16)  # 1.5 and -3.0 in bfloat16
    with (tmp_path / "f").open("wb") as file:
        write_tensors(file, {"key": "value"}, {**ARRAYS, "bfloat16": bits})
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"key": "value"}
        assert set(file.keys()) == {*ARRAYS, "bfloat16"}
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            assert file.get_tensor(name).dtype == TENSORS[name].dtype
            assert torch.equal(file.get_tensor(name), TENSORS[name])
    header = int.from_bytes((tmp_path / "f").read_bytes()[:8], "little")
    assert header % 8 == 0  # so that the tensors are aligned
    with TensorFile(tmp_path / "f") as read:
        assert list(read.tensors) == [*ARRAYS, "bfloat16"]


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "f", {"key": "value"})
    with TensorFile(tmp_path / "f") as read:
        assert read.metadata == {"key": "value"}
        tensors = {name: read.read(name) for name in read.tensors}
    assert set(tensors) == set(TENSORS)
    for name, array in tensors.items():
        assert read.tensors[name] == (array.dtype.name, array.shape)
        wanted = TENSORS[name].view(torch.uint16) if name == "bfloat16" else TENSORS[name]
        assert array.dtype == wanted.numpy().dtype
        assert np.array_equal(array, wanted.numpy())


def change(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Another header of the same file."""

    def changed(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return changed


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[:-1], "cut off"),
        (lambda content: content + b"\0", "too long"),
        (
            change(lambda header: header["a"].update(data_offsets=[0, 16])),
            "b is not where it should be",
        ),  # overlaps "b"
        (
            change(lambda header: header["b"].update(data_offsets=[24, 0])),
            "b is not where it should be",
        ),
        (change(lambda header: header.pop("b")), "a is not where it should be"),  # a hole
        (change(lambda header: header["b"].update(shape=[2, 4])), "b is not where it should be"),
        (change(lambda header: header["b"].update(shape=[-1, 3])), "b has sizes that are none"),
        (
            change(lambda header: header["b"].update(shape=[2**70, 2**70])),
            "b is not where it should be",
        ),
        (change(lambda header: header["b"].update(shape=None)), "header is damaged: TypeError"),
        (
            change(lambda header: header["b"].update(dtype="F8_E4M3")),
            "b is 'F8_E4M3'; it may be F32, ",
        ),
        (change(lambda header: header["b"].pop("dtype")), "header is damaged: KeyError"),
        (lambda content: b"\xff" * 8 + content[8:], "header is too long"),
        (lambda content: content[:8] + b"[" + content[9:], "Expecting"),
        (
            lambda content: (200_012).to_bytes(8, "little") + b'{"a":' + b"[" * 200_000,
            "nested more than 64 deep|Expecting",
        ),
        (lambda content: (9).to_bytes(8, "little") + b'{"a": []}', "not an object of objects"),
        (lambda content: (2).to_bytes(8, "little") + b"\xff\xff", "can't decode"),
    ],
)
def test_damaged_files(damage: Callable[[bytes], bytes], words: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        write_tensors(file, {}, ARRAYS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=words):
        TensorFile(path)
    with pytest.raises(ValueError, match=r"has \d+ bytes, and may have 7"):
        TensorFile(path, 7)


def test_a_file_that_is_cut_off_while_it_is_read_ends_nothing(tmp_path: Path) -> None:
    """A map of it would end the process with SIGBUS."""
    with (tmp_path / "f").open("wb") as file:
        write_tensors(file, {}, {"large": np.arange(100_000)})
    with TensorFile(tmp_path / "f") as read:
        os.truncate(tmp_path / "f", 5000)
        with pytest.raises(ValueError, match="cut off"):
            read.read("large")


def test_a_header_of_the_largest_size_is_read(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file:
        write_tensors(file, {}, ARRAYS)
    length = int.from_bytes((tmp_path / "f").read_bytes()[:8], "little")
    with (tmp_path / "f").open("rb") as file:
        assert read_header(file, length)[1] == 8 + length
    with (tmp_path / "f").open("rb") as file, pytest.raises(ValueError, match="header is too long"):
        read_header(file, length - 1)


def test_memory_of_an_array_is_its_memory() -> None:
    array = np.arange(3, dtype=np.int32)
    memory_of(array)[0] = 9
    assert array[0] == 9
    assert len(memory_of(array)) == 12
