"""Packages as archives, whatever is in them."""

from __future__ import annotations

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from qsample.errors import PackageError
from qsample.package.package import MANIFEST_NAME, read_package
from qsample.ray.archives import CACHE_VARIABLE, open_archive, pack
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
def test_what_lost_files_is_unpacked_again(tmp_path: Path, cache: Path, lost: list[str], in_a_folder: bool) -> None:
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


def test_a_damaged_package_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    package = write(tmp_path / "package")
    (package.path / sorted(FILES)[0]).unlink()
    archive = tmp_path / "package.tar"
    with tarfile.open(archive, "w") as file:
        file.add(package.path, ".")
    with pytest.raises(PackageError, match="damaged package.*" + sorted(FILES)[0]):
        open_archive(archive)
    assert list(cache.iterdir()) == []


def test_what_is_no_package_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("other.txt"))
    with pytest.raises(PackageError, match="does not hold a package"):
        open_archive(buffer.getvalue())
    with pytest.raises(PackageError, match="not a tar archive"):
        open_archive(b"x" * 3000)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_a_damaged_compressed_archive_is_told(mode: str, tmp_path: Path, cache: Path) -> None:
    package = write(tmp_path / "package")
    (package.path / "more.bin").write_bytes(np.random.default_rng(0).bytes(200_000))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as file:  # type: ignore[call-overload]
        file.add(package.path, ".")
    damaged = bytearray(buffer.getvalue())
    for at in range(len(damaged) // 3, len(damaged), 1000):
        damaged[at] ^= 255
    with pytest.raises(
        PackageError, match=r"not a tar archive|does not hold a package|holds a damaged package"
    ):  # parts may be read
        open_archive(bytes(damaged))
    assert list(cache.iterdir()) == []


def test_an_archive_cannot_write_elsewhere(tmp_path: Path, cache: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        member = tarfile.TarInfo("../../outside.txt")
        member.size = 1
        file.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(PackageError, match="not a tar archive"):
        open_archive(buffer.getvalue())
    assert not (tmp_path / "outside.txt").exists()
    assert list(cache.iterdir()) == []
