"""Prefixes on disk: the safetensors library reads them, and damaged files and files of other packages
are refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from qsample.errors import PackageError
from qsample.package.disk.tensor_file import TensorFile
from qsample.runtime import CausalLM, load
from qsample.runtime.decode.prefix_file import PrefixFile, signature_of, write_prefix

PROMPT = [3 + index * 7 % 200 for index in range(70)]


class Saved(NamedTuple):
    model: CausalLM
    path: Path

    def open(self) -> PrefixFile:
        return PrefixFile.open(
            self.path, signature_of(self.model.package, self.model.sessions), self.model.interface
        )


@pytest.fixture(scope="module")
def original(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model = load(llama_package, ctx_len=128)
    path = tmp_path_factory.mktemp("prefix") / "a.prefix"
    assert model.save_prefix(PROMPT, path) == 64, "whole pieces"
    return Saved(model, path)


@pytest.fixture
def saved(original: Saved, tmp_path: Path) -> Saved:
    return Saved(original.model, Path(shutil.copy(original.path, tmp_path)))


def test_the_safetensors_library_reads_the_file(original: Saved) -> None:
    prefix = original.open()
    with safe_open(original.path, "np") as file:
        assert sorted(file.keys()) == sorted(
            ["tokens", *(spec.name for spec in original.model.interface.cache_states)]
        )
        assert file.get_tensor("tokens").tolist() == PROMPT[:64]
        for name, values in prefix.states.items():
            np.testing.assert_array_equal(values, file.get_tensor(name))
    assert original.path.stat().st_mode & 0o777 == 0o600, "it has private texts"


def header_of(data: bytes) -> tuple[dict[str, dict[str, str]], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_metadata(data: bytes, **changes: str) -> bytes:
    header, numbers = header_of(data)
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def with_entry(data: bytes, number: int, **changes: object) -> bytes:
    """With another description of a tensor."""
    header, numbers = header_of(data)
    header[list(header)[1 + number]] |= changes  # type: ignore[arg-type]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def data_offsets(data: bytes, number: int) -> list[int]:
    header, _ = header_of(data)
    return list(header.values())[1 + number]["data_offsets"]  # type: ignore[return-value]


def with_tokens(data: bytes, tokens: np.ndarray) -> bytes:
    """With other tokens, and everything else in its place."""
    header, numbers = header_of(data)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    shift = tokens.nbytes - tensors[0]["data_offsets"][1]  # type: ignore[operator]
    for entry in tensors:
        entry["data_offsets"] = [one + shift if one else 0 for one in entry["data_offsets"]]  # type: ignore
    tensors[0] |= {"dtype": {8: "I64", 1: "I8"}[tokens.itemsize], "shape": list(tokens.shape)}  # type: ignore
    text = json.dumps(header).encode()
    return (
        len(text).to_bytes(8, "little") + text + tokens.tobytes() + numbers[tokens.nbytes - shift :]
    )


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "damaged, or not a prefix"),
    "another format": (lambda data: b"PK\3\4" * 100, "damaged, or not a prefix"),
    "cut off": (lambda data: data[:-1], "damaged, or not a prefix.*it is cut off"),
    "too long": (lambda data: data + b"0", "damaged, or not a prefix.*it is too long"),
    "a long header": (
        lambda data: ((1 << 24) + 1).to_bytes(8, "little") + b"{}" * 9,
        "its header is too long",
    ),
    "a header as long as it may be": (
        lambda data: (1 << 24).to_bytes(8, "little") + b"{} " * 9,
        "Extra data",
    ),
    "a tensor over another": (
        lambda data: with_entry(data, 2, data_offsets=data_offsets(data, 1)),
        "is not where it should be",
    ),
    "a tensor that ends before it begins": (
        lambda data: with_entry(data, 1, data_offsets=[data_offsets(data, 1)[0], 0], shape=[0]),
        "is not where it should be",
    ),
    "no tokens": (
        lambda data: with_entry(data, 0, dtype="F32", shape=[64, 2]),
        "its tokens are not",
    ),
    "tokens in a table": (lambda data: with_entry(data, 0, shape=[64, 1]), "its tokens are not"),
    "a single token": (
        lambda data: with_metadata(with_tokens(data, np.array(5)), start="0"),
        "its tokens are not",
    ),
    "tokens of one byte": (
        lambda data: with_tokens(data, np.full(64, 5, np.int8)),
        "its tokens are not",
    ),
    "a part after its end": (lambda data: with_metadata(data, start="64"), "its tokens are not"),
    "a part before its start": (lambda data: with_metadata(data, start="-1"), "its tokens are not"),
    "another number of tokens": (
        lambda data: with_tokens(data, np.arange(63)),
        "damaged: its tensors",
    ),
    "header cut off": (lambda data: data[:40], "damaged, or not a prefix"),
    "a number": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "damaged: its sha256"),
    "a token": (lambda data: header_token_changed(data), "damaged: its sha256"),
    "another format version": (
        lambda data: with_metadata(data, format="qsample.prefix.3"),
        "its format is",
    ),
    "a part": (lambda data: with_metadata(data, start="16"), "damaged: its tensors"),
    "another package": (
        lambda data: with_metadata(data, package="0" * 64),
        "another package.*qsample prefix",
    ),
    "another processor": (
        lambda data: with_metadata(data, kernels="0" * 16),
        "a processor that rounds otherwise",
    ),
    "another ONNX Runtime": (
        lambda data: with_metadata(data, onnxruntime="1.0.0"),
        "another version of ONNX Runtime",
    ),
    "other pieces": (lambda data: with_metadata(data, pieces="512 None"), "other pieces"),
    "another provider": (
        lambda data: with_metadata(data, execution_provider="X"),
        "another execution provider",
    ),
}


def header_token_changed(data: bytes) -> bytes:
    _, numbers = header_of(data)
    return data[: -len(numbers)] + bytes([numbers[0] ^ 1]) + numbers[1:]


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_and_one_of_another_package_are_refused(saved: Saved, case: str) -> None:
    change, message = DAMAGES[case]
    saved.path.write_bytes(change(saved.path.read_bytes()))
    with pytest.raises(PackageError, match=message):
        saved.open()


def test_a_failed_save_leaves_no_file(
    original: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="64 are the least"):
        original.model.save_prefix(PROMPT[:60], tmp_path / "short")
    with pytest.raises(ValueError, match="a row of this package holds 128"):
        original.model.save_prefix(PROMPT * 2, tmp_path / "long")
    with pytest.raises(ValueError, match="2 prompts were given"):
        original.model.save_prefix([PROMPT, PROMPT], tmp_path / "two")
    for path in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(PackageError, match="existing folder"):
            original.model.save_prefix(PROMPT, path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(PackageError, match="free and the prefix needs"):
        original.model.save_prefix(PROMPT, tmp_path / "full")
    assert list(tmp_path.iterdir()) == []


def test_every_dtype_is_aligned_and_read_by_the_safetensors_library(tmp_path: Path) -> None:
    states = {
        "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "float16": np.arange(3, dtype=np.float16),
        "bfloat16": np.arange(5, dtype=np.uint16),
        "int8": np.arange(3, dtype=np.int8)[::-1],
        "int64": np.arange(2) - 1,
    }
    for length in range(8):
        path = tmp_path / "a.prefix"
        write_prefix(path, {"package": "p" * length}, np.array([5, 6, 7]), states, 2)
        header, numbers = header_of(path.read_bytes())
        assert (path.stat().st_size - len(numbers)) % 8 == 0
        metadata = header["__metadata__"]
        assert {**metadata, "sha256": ""} == {
            "format": "qsample.prefix.1", "package": "p" * length, "start": "2", "sha256": "",
        }  # fmt: skip
        each = [np.array([5, 6, 7]), *states.values()]
        digests = [hashlib.sha256(array.tobytes()).digest() for array in each]
        assert metadata["sha256"] == hashlib.sha256(b"".join(digests)).hexdigest()
    with safe_open(path, "np") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in states}
        for name in states.keys() - {"bfloat16"}:
            np.testing.assert_array_equal(file.get_tensor(name), states[name])
    assert dtypes == {
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int8": "I8",
        "int64": "I64",
    }
    with TensorFile(path) as read:
        for name, values in states.items():
            np.testing.assert_array_equal(read.read(name), values, strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.prefix"]


def test_a_prefix_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        assert path.read_bytes() == b"old"

    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fsync)
    write_prefix(path, {}, np.array([5]), {"key": np.zeros(3, np.float32)})
    assert synced == [path.stat().st_size]

    errors: list[int] = []

    def fail_to_sync(descriptor: int) -> None:
        raise OSError(errors[-1], os.strerror(errors[-1]))

    monkeypatch.setattr(os, "fsync", fail_to_sync)
    written = path.read_bytes()
    for number, message in (
        (errno.EIO, r"cannot write .*a: .*; choose another path"),
        (errno.ENOSPC, "is full; .*the prefix needs about"),
    ):
        errors.append(number)
        with pytest.raises(PackageError, match=message):
            write_prefix(path, {}, np.array([6]), {"key": np.zeros(3, np.float32)})
        assert path.read_bytes() == written
        assert list(tmp_path.iterdir()) == [path]


def test_the_signature_tells_processors_apart(model: CausalLM) -> None:
    assert model.sessions.rounding is not None
    assert (
        signature_of(model.package, model.sessions)["kernels"]
        == model.sessions.rounding.digest
        != ""
    )
    elsewhere = replace(model.sessions, rounding=None)
    assert signature_of(model.package, elsewhere)["kernels"] == "", "as in earlier files"
