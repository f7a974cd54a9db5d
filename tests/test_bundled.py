"""The bundled model: made once, found again, and never half-made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsample import bundled
from qsample.errors import QsampleError
from qsample.package import read_package
from tests.conftest import made_once
from tests.helpers.command_line import qsample

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def cache(shared_folder: Path) -> Path:
    """A cache folder that README.md's first command, without its installation, has filled."""

    def fill(folder: Path) -> None:
        arguments = ["generate", "-p", "And the LORD spake unto", "--max-new-tokens", "60", "--seed", "7"]
        done = qsample(*arguments, QSAMPLE_CACHE=str(folder))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("And the LORD spake unto ")

    return made_once(shared_folder / "cache", fill)


def test_the_first_command_makes_one_entry_and_leaves_nothing_else(cache: Path) -> None:
    (entry,) = cache.iterdir()
    manifest = read_package(entry).manifest
    assert manifest.kind == "device"
    assert manifest.compilation is not None
    assert manifest.compilation.provider == "cpu"


def test_another_process_may_be_faster(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(bundled.CACHE_VARIABLE, str(tmp_path))
    (entry,) = cache.iterdir()

    def compile_while_another_publishes(self: Any, path: Path, **_: Any) -> None:
        shutil.copytree(entry, path)
        shutil.copytree(entry, tmp_path / entry.name)

    monkeypatch.setattr("qsample.models.CheckpointModel.compile", compile_while_another_publishes)
    assert bundled.bundled_model().package.path == tmp_path / entry.name
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_the_next_command_needs_no_export(cache: Path) -> None:
    # Without torch, an export would fail.
    code = "import sys; sys.modules['torch'] = None; from qsample.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "-p", "In the beginning", "--max-new-tokens", "24", "--seed", "1"],
        env={"QSAMPLE_CACHE": str(cache), "PATH": ""},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("In the beginning")
    words = done.stdout.split()
    assert len([word for word in words if word.strip(".,;:").isalpha()]) >= 8, "readable words"


def test_a_damaged_entry_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(bundled.CACHE_VARIABLE, str(tmp_path))
    (entry,) = cache.iterdir()
    (shutil.copytree(entry, tmp_path / entry.name) / "decoder.onnx").write_bytes(b"")
    made: list[Any] = []

    def compile_instead(self: Any, path: Path, **_: Any) -> None:
        made.append(shutil.copytree(entry, path))

    monkeypatch.setattr("qsample.models.CheckpointModel.compile", compile_instead)
    assert read_package(bundled.bundled_model().package.path).manifest == read_package(entry).manifest
    assert len(made) == 1
    bundled.bundled_model()
    assert len(made) == 1


def test_a_failed_export_leaves_the_cache_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Any, path: Path, **_: Any) -> None:
        path.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setenv(bundled.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("qsample.models.CheckpointModel.compile", broken)
    with pytest.raises(KeyboardInterrupt):
        bundled.bundled_model()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("provider", ["abacus", "no/such", "../no"])
def test_an_unknown_provider_leaves_no_folder(provider: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(bundled.CACHE_VARIABLE, str(tmp_path / "cache"))
    with pytest.raises(QsampleError, match="choose"):
        bundled.bundled_model(provider)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(bundled.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(QsampleError, match=r"cannot write to .*file, .*set QSAMPLE_CACHE to another folder"):
        bundled.bundled_model()


def test_the_name_of_an_entry_follows_its_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = bundled._content_hash("cpu")
    assert before != bundled._content_hash("cuda")
    root = shutil.copytree(bundled.PACKAGE_ROOT, tmp_path / "qsample")
    monkeypatch.setattr(bundled, "PACKAGE_ROOT", root)
    monkeypatch.setattr(bundled, "TINY_LM", root / "assets" / "tiny_lm")
    assert bundled._content_hash("cpu") == before
    with (root / "assets" / "tiny_lm" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)[0]
        weights.seek(-1, 2)
        weights.write(bytes([last ^ 1]))
    assert bundled._content_hash("cpu") != before


def test_old_entries_are_forgotten(tmp_path: Path) -> None:
    for age in range(6):
        (tmp_path / f"tiny_lm-cpu-{age}").mkdir()
        os.utime(tmp_path / f"tiny_lm-cpu-{age}", (1000 - age, 1000 - age))
    (tmp_path / "something-else").mkdir()
    bundled._forget_old_entries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "something-else",
        *[f"tiny_lm-cpu-{age}" for age in range(bundled.KEPT_ENTRIES)],
    ]
