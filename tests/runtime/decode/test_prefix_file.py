"""Prefixes on disk: readable by the safetensors library, refused if they are damaged or another package's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from qsample.errors import PackageError
from qsample.runtime import CausalLM, load
from qsample.runtime.decode.prefix_file import PrefixFile, signature_of

PROMPT = [3 + index * 7 % 200 for index in range(70)]


class Saved(NamedTuple):
    model: CausalLM
    path: Path

    def open(self) -> PrefixFile:
        return PrefixFile.open(self.path, signature_of(self.model.package, self.model.sessions), self.model.interface)


@pytest.fixture(scope="module")
def original(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    model = load(llama_package, ctx_len=128)
    path = tmp_path_factory.mktemp("prefix") / "a.prefix"
    assert model.save_prefix(PROMPT, path) == 64, "whole pieces"
    return Saved(model, path)


@pytest.fixture
def saved(original: Saved, tmp_path: Path) -> Saved:
    return Saved(original.model, Path(shutil.copy(original.path, tmp_path)))


def test_the_file_is_what_the_library_reads(original: Saved) -> None:
    prefix = original.open()
    prefix.verify()
    with safe_open(original.path, "np") as file:
        assert sorted(file.keys()) == sorted(["tokens", *(spec.name for spec in original.model.interface.cache_states)])
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


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "damaged, or not a prefix"),
    "another format": (lambda data: b"PK\3\4" * 100, "damaged, or not a prefix"),
    "cut off": (lambda data: data[:-1], "damaged, or not a prefix"),
    "too long": (lambda data: data + b"0", "damaged, or not a prefix"),
    "header cut off": (lambda data: data[:40], "damaged, or not a prefix"),
    "a number": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "damaged: its sha256"),
    "a token": (lambda data: header_token_changed(data), "damaged: its sha256"),
    "another format version": (lambda data: with_metadata(data, format="qsample.prefix.2"), "its format is"),
    "a part": (lambda data: with_metadata(data, start="16"), "damaged: its tensors"),
    "another package": (lambda data: with_metadata(data, package="0" * 64), "another package.*qsample prefix"),
    "another ONNX Runtime": (lambda data: with_metadata(data, onnxruntime="1.0.0"), "another version of ONNX Runtime"),
    "other pieces": (lambda data: with_metadata(data, pieces="512 None"), "other pieces"),
    "another provider": (lambda data: with_metadata(data, execution_provider="X"), "another execution provider"),
}


def header_token_changed(data: bytes) -> bytes:
    _, numbers = header_of(data)
    return data[: -len(numbers)] + bytes([numbers[0] ^ 1]) + numbers[1:]


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_and_one_of_another_package_are_refused(saved: Saved, case: str) -> None:
    change, message = DAMAGED[case]
    saved.path.write_bytes(change(saved.path.read_bytes()))
    with pytest.raises(PackageError, match=message):
        saved.open().verify()


def test_what_cannot_be_saved_leaves_nothing(original: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
