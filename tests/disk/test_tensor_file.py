"""Tensor files, next to the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from qsample.disk import tensor_file
from qsample.disk.tensor_file import map_tensors, memory_of, write_tensors

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
    assert list(map_tensors(tmp_path / "f")[1]) == [*ARRAYS, "bfloat16"]


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "f", {"key": "value"})
    metadata, tensors = map_tensors(tmp_path / "f")
    assert metadata == {"key": "value"}
    assert set(tensors) == set(TENSORS)
    for name, array in tensors.items():
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
    ("damage", "error", "words"),
    [
        (lambda content: content[:-1], ValueError, "cut off"),
        (lambda content: content + b"\0", ValueError, "too long"),
        (change(lambda header: header["a"].update(data_offsets=[0, 16])), ValueError, "cut off"),  # overlaps "b"
        (change(lambda header: header["b"].update(data_offsets=[24, 0])), ValueError, "cut off"),
        (change(lambda header: header.pop("b")), ValueError, "cut off"),  # a hole
        (change(lambda header: header["b"].update(shape=[2, 4])), ValueError, "reshape"),
        (change(lambda header: header["b"].update(dtype="F8_E4M3")), KeyError, "F8_E4M3"),
        (change(lambda header: header["b"].pop("dtype")), KeyError, "dtype"),
        (lambda content: b"\xff" * 8 + content[8:], ValueError, "header is too long"),
        (lambda content: content[:8] + b"[" + content[9:], ValueError, "Expecting"),
    ],
)
def test_damaged_files(damage: Callable[[bytes], bytes], error: type[Exception], words: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("wb") as file:
        write_tensors(file, {}, ARRAYS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(error, match=words):
        map_tensors(path)


def test_a_header_of_the_largest_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "f").open("wb") as file:
        write_tensors(file, {}, ARRAYS)
    length = int.from_bytes((tmp_path / "f").read_bytes()[:8], "little")
    monkeypatch.setattr(tensor_file, "_LARGEST_HEADER", length)
    assert len(map_tensors(tmp_path / "f")[1]) == len(ARRAYS)


def test_memory_of_an_array_is_its_memory() -> None:
    array = np.arange(3, dtype=np.int32)
    memory_of(array)[0] = 9
    assert array[0] == 9
    assert len(memory_of(array)) == 12
