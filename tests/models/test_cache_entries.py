"""The entries of the cache: their names, what is said of them, and how they are removed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from qsample.errors import QsampleError
from qsample.models import cache
from qsample.models.cache import Recipe, entries, open_cached, remove, size_limit
from qsample.progress import Stage


def made(source: Path, name: str, *, used: int, model: str = "") -> Path:
    """An entry that nobody holds, used last at a time."""
    package, holding = open_cached(
        Recipe(name, {}, model), lambda path: shutil.copytree(source, path)
    )
    holding.close()
    os.utime(package.path, (used, used))
    return package.path


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"QSAMPLE_CACHE": "/chosen", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/chosen"),
        ({"QSAMPLE_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/qsample"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/qsample"),
        ({"HOME": "/h"}, "/h/.cache/qsample"),
    ],
)
def test_the_folder(
    variables: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("QSAMPLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_folder() == Path(wanted)
    monkeypatch.setenv("QSAMPLE_CACHE", "here")
    assert cache.cache_folder() == Path.cwd() / "here"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 50_000_000_000),
        ("  ", 50_000_000_000),
        ("0", 0),
        ("7", 7),
        ("7b", 7),
        ("2k", 2_000),
        ("2KB", 2_000),
        (" 800 MB ", 800_000_000),
        ("1.5g", 1_500_000_000),
        ("3 TB", 3_000_000_000_000),
    ],
)
def test_limits(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.LIMIT_VARIABLE, text)
    assert size_limit() == size


def test_names_of_entries() -> None:
    names = {
        "a/b c": "a-b-c",
        "..a.b+c-d_e..": "a.b+c-d_e",
        "../..": "model",
        "": "model",
        "x" * 101: "x" * 100,
    }
    for name, wanted in names.items():
        assert re.fullmatch(rf"{re.escape(wanted)}-[0-9a-f]{{16}}", Recipe(name, {}).entry)
    # The order of the parts says nothing; objects are known by their text.
    assert Recipe("a", {"x": 1, "y": 2}).entry == Recipe("a", {"y": 2, "x": 1}).entry
    assert Recipe("a", {"x": Path("y")}).entry == Recipe("a", {"x": "y"}).entry
    assert Recipe("a", {}, "me/m").entry == Recipe("a", {}, "me/n").entry


def test_the_runtime_by_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"):

        def version(name: str, installed: str = installed) -> str:
            if name != installed:
                raise cache.PackageNotFoundError
            return "1.2"

        monkeypatch.setattr(cache, "version", version)
        assert cache._runtime() == f"{installed} 1.2"

    def none(name: str) -> str:
        raise cache.PackageNotFoundError

    monkeypatch.setattr(cache, "version", none)
    assert cache._runtime() == "no onnxruntime"


def test_the_last_used_entry_is_the_first(folder: Path, source: Path) -> None:
    old = made(source, "old", used=1000)
    new = made(source, "new", used=2000, model="me/m")
    (folder / "broken-0123456789abcdef").mkdir()
    (folder / "broken-0123456789abcdef" / "qsample.json").write_text("{")
    (folder / "mine").mkdir()
    found = entries()
    assert [(entry.path, entry.last_used, entry.in_use) for entry in found] == [
        (new, 2000, False),
        (old, 1000, False),
    ]
    assert [entry.model for entry in found] == ["me/m", "fake"]
    size = sum(file.stat().st_size for file in source.iterdir() if file.name != "qsample.json")
    assert found[0].bytes == size
    assert cache.clear() == (3, 0)
    assert entries() == []
    assert sorted(path.name for path in folder.iterdir()) == [".locks", "mine"]


def test_an_entry_in_use_stays(folder: Path, source: Path) -> None:
    used = made(source, "used", used=1000)
    idle = made(source, "idle", used=2000)
    _, holding = open_cached(Recipe("used", {}), lambda path: pytest.fail("it is there"))
    with holding:
        assert {entry.path: entry.in_use for entry in entries()} == {used: True, idle: False}
        assert remove(used) is False
        assert cache.clear() == (1, 1)
        assert used.exists()
        assert not idle.exists()
    assert remove(used) is True
    assert not used.exists()
    assert remove(used) is True  # it is gone


def test_no_cache(folder: Path) -> None:
    assert entries() == []
    assert cache.clear() == (0, 0)


def test_the_seal_of_an_entry(folder: Path, source: Path) -> None:
    path = made(source, "model", used=1000, model="me/m")
    seal = json.loads((path / "sealed.json").read_text())
    assert (seal["entry"], seal["model"]) == (path.name, "me/m")
    assert seal["manifest"] == cache.sha256_of(path / "qsample.json")
    assert [name for name, *_ in seal["files"]] == sorted(each.name for each in source.iterdir())
    status = (path / "qsample.json").stat()
    times = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    assert ["qsample.json", *times] in seal["files"]


def test_what_is_reported_while_an_entry_is_made(folder: Path, source: Path) -> None:
    said: list[tuple[str, float]] = []

    def report(stage: str, fraction: float) -> None:
        said.append((stage, fraction))

    def open_model() -> Path:
        package, holding = open_cached(
            Recipe("model", {}), lambda path: shutil.copytree(source, path), report
        )
        holding.close()
        return package.path

    path = open_model()
    assert said == [(Stage.STARTING, 0.0)]
    said.clear()
    assert open_model() == path
    assert said == []
    (path / "qsample.json").write_text("{")
    assert open_model() == path
    assert said == [(Stage.MAKING_AGAIN, 0.0), (Stage.STARTING, 0.0)]


def test_an_entry_that_is_used_counts_as_new(folder: Path, source: Path) -> None:
    path = made(source, "model", used=1000)
    _, holding = open_cached(Recipe("model", {}), lambda path: pytest.fail("it is there"))
    holding.close()
    assert path.stat().st_mtime > 1000


def test_an_entry_that_vanishes_at_once_is_an_error(folder: Path, source: Path) -> None:
    def make(path: Path) -> None:
        path.mkdir()
        (path / "qsample.json").write_text("{")

    with pytest.raises(QsampleError, match="was removed or damaged as soon as it was made; start"):
        open_cached(Recipe("model", {}), make)
