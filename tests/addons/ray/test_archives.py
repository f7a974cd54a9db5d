"""Packages as archives, whatever is in them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.addons.ray.archives import CACHE_VARIABLE, open_archive, pack
from qsample.errors import PackageError
from qsample.package.package import MANIFEST_NAME, read_package
from tests.helpers.small_packages import FILES, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
@pytest.mark.parametrize("in_a_folder", [False, True])
def test_an_archive_is_the_package(tmp_path: Path, mode: str, in_a_folder: bool) -> None:
    package = write(tmp_path / "package")
    archive = tmp_path / "package.tar"
    with tarfile.open(archive, mode) as file:
        file.add(package.path, "package" if in_a_folder else ".")
    opened = open_archive(archive)
    assert contents(opened) == FILES
    assert read_package(opened).manifest == package.manifest
    assert open_archive(archive) == opened  # unpacked once


def test_what_is_sent_is_the_package(tmp_path: Path) -> None:
    package = write(tmp_path / "package")
    (package.path / "notes.txt").write_text("not of the package")
    opened = open_archive(pack(package.path))
    assert contents(opened) == FILES
    assert not (opened / "notes.txt").exists()


def test_many_processes_unpack_it_once(tmp_path: Path, cache: Path) -> None:
    sent = pack(write(tmp_path / "package").path)
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(open_archive, [sent] * 8))
    assert len(folders) == 1
    assert contents(folders.pop()) == FILES
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("lost", [[MANIFEST_NAME], sorted(FILES)[:1], [MANIFEST_NAME, *FILES]])
@pytest.mark.parametrize("in_a_folder", [False, True])
def test_what_lost_files_is_unpacked_again(
    tmp_path: Path, cache: Path, lost: list[str], in_a_folder: bool
) -> None:
    """Systems remove old files from temporary folders, one by one."""
    package = write(tmp_path / "package")
    archive = tmp_path / "package.tar"
    with tarfile.open(archive, "w") as file:
        file.add(package.path, "package" if in_a_folder else ".")
    opened = open_archive(archive)
    for name in lost:
        (opened / name).unlink()
    assert open_archive(archive) == opened
    assert contents(opened) == FILES
    assert len(list(cache.iterdir())) == 1


def archive_of(path: Path | None, *members: tuple[str, bytes], mode: str = "w") -> bytes:
    """An archive of a folder's files, if one is given, and of further members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as file:  # type: ignore[call-overload]
        if path is not None:
            file.add(path, ".")
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def damaged(mode: str) -> Any:
    def make(package: Path) -> bytes:
        (package / "more.bin").write_bytes(np.random.default_rng(0).bytes(200_000))
        content = bytearray(archive_of(package, mode=mode))
        for at in range(len(content) // 3, len(content), 1000):
            content[at] ^= 255
        return bytes(content)

    return make


def without_a_file(package: Path) -> bytes:
    (package / sorted(FILES)[0]).unlink()
    return archive_of(package)


DAMAGED = r"not a tar archive|does not hold a package|holds a damaged package"  # parts may be read


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_a_file, "damaged package.*" + sorted(FILES)[0]),
        (lambda package: archive_of(None, ("other.txt", b"")), "does not hold a package"),
        (lambda package: archive_of(None, ("../../outside.txt", b"x")), "not a tar archive"),
        (lambda package: b"x" * 3000, "not a tar archive"),
        *((damaged(mode), DAMAGED) for mode in ("w:gz", "w:xz", "w:bz2")),
    ],
)
def test_what_is_no_whole_package_is_refused_and_leaves_nothing(
    make: Callable[[Path], bytes], message: str, tmp_path: Path, cache: Path
) -> None:
    content = make(write(tmp_path / "package").path)
    with pytest.raises(PackageError, match=message):
        open_archive(content)
    assert list(cache.iterdir()) == []
    assert not (tmp_path / "outside.txt").exists()
