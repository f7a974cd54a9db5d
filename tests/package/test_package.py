"""Packages on disk: written whole or not at all, read back verified, and every way in which they can be wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample.disk import replace as replace_module
from qsample.disk.scratch import NEW
from qsample.errors import QsampleError
from qsample.package import package as package_module
from qsample.package.manifest import MODEL_PACKAGE_NAME
from qsample.package.package import (
    MANIFEST_NAME,
    Package,
    PackageError,
    check_not_source,
    copy_package,
    read_package,
    write_package,
)
from tests.helpers.small_packages import FILES, INTERFACE, LARGE, manifest, throw, write


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write(tmp_path / "package")


def test_what_is_written_is_read_back(package: Package, tmp_path: Path) -> None:
    assert replace(package.manifest, files={}) == manifest()
    sizes = {name: entry.bytes for name, entry in package.manifest.files.items()}
    assert sizes.pop(MODEL_PACKAGE_NAME) > 0
    assert sizes == {name: len(content) for name, content in FILES.items()}
    assert package.interface == INTERFACE
    assert package.file("decoder.onnx").read_bytes() == FILES["decoder.onnx"]
    assert os.listdir(tmp_path) == ["package"]
    names = {path.name for path in package.path.iterdir()} - {MODEL_PACKAGE_NAME}
    assert names == {*(name.split("/")[0] for name in FILES), MANIFEST_NAME}


def test_hashes_are_those_of_another_program(package: Package) -> None:
    for name, entry in package.manifest.files.items():
        result = subprocess.run(["sha256sum", package.path / name], capture_output=True, text=True, check=True)
        assert result.stdout.split()[0] == entry.sha256


def test_a_hash_from_the_writer_is_taken_unless_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    own = package_module.sha256_of
    monkeypatch.setattr(package_module, "sha256_of", lambda path: read.append(path.name) or own(path))
    with write_package(tmp_path / "package") as writer:
        for name, content in FILES.items():
            (writer.directory / name).parent.mkdir(exist_ok=True)
            (writer.directory / name).write_bytes(content)
            writer.hashed(name, hashlib.sha256(content).hexdigest())
        (writer.directory / "decoder.onnx").write_bytes(FILES["decoder.onnx"] + b" ")
        writer.finish(manifest())
    assert read == ["decoder.onnx", "manifest.json"]
    assert read_package(tmp_path / "package").manifest.files.keys() == {*FILES, MODEL_PACKAGE_NAME}


def test_only_files_of_the_manifest_are_part_of_the_package(package: Package) -> None:
    (package.path / "chat_template.jinja").write_text("planted")
    again = read_package(package.path)
    assert not again.has("chat_template.jinja")
    with pytest.raises(PackageError, match=r"has no file chat_template.jinja"):
        again.file("chat_template.jinja")
    assert again.read_json("chat_template.jinja") == {}


def test_read_json(package: Package, tmp_path: Path) -> None:
    assert package.read_json("tokenizer/extra.json") == {}
    bad = write(tmp_path / "bad", FILES | {"list.json": b"[1]", "broken.json": b"{", "good.json": b'{"a": 1}'})
    assert bad.read_json("good.json") == {"a": 1}
    with pytest.raises(PackageError, match=r"list.json is not a JSON object"):
        bad.read_json("list.json")
    with pytest.raises(PackageError, match=r"cannot read .*broken.json"):
        bad.read_json("broken.json")


# Reading: every way in which a package can be wrong.


@pytest.mark.parametrize("offset", [0, len(LARGE) // 2, -1])
def test_altered_file(offset: int, package: Package) -> None:
    path = package.path / "decoder.onnx.data"
    content = bytearray(LARGE)
    content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(PackageError, match=r"decoder.onnx.data was altered: .*sha256.*export or download"):
        read_package(package.path)
    assert read_package(package.path, verify=False).manifest == package.manifest


@pytest.mark.parametrize(("cut", "word"), [(-1, "truncated"), (0, "truncated"), (None, "altered")])
def test_truncated_or_longer_file(cut: int | None, word: str, package: Package) -> None:
    path = package.path / "decoder.onnx"
    path.write_bytes(FILES["decoder.onnx"][:cut] if cut is not None else FILES["decoder.onnx"] + b"x")
    for verify in (True, False):
        with pytest.raises(PackageError, match=rf"decoder.onnx is {word}: it has \d+ bytes and the manifest says 5000"):
            read_package(package.path, verify=verify)


def test_missing_file(package: Package) -> None:
    (package.path / "initial_state.onnx").unlink()
    with pytest.raises(PackageError, match=r"initial_state.onnx is missing; export or download"):
        read_package(package.path, verify=False)


def test_missing_folder_and_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="nothing is missing"):
        read_package(tmp_path / "nothing")
    with pytest.raises(PackageError, match=r"is not a qsample package: it has no qsample.json"):
        read_package(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(PackageError, match="is not a folder"):
        read_package(tmp_path / "file")
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(PackageError, match=r"cannot read .*qsample.json"):
        read_package(tmp_path)


def test_manifest_that_is_not_text(package: Package) -> None:
    (package.path / MANIFEST_NAME).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PackageError, match="cannot read"):
        read_package(package.path)


def test_a_package_error_is_a_qsample_error() -> None:
    assert issubclass(PackageError, QsampleError)


# Writing: all or nothing.


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failed_or_interrupted_write_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        write(tmp_path / "deep" / "er" / "package", then=lambda folder: throw(error))
    assert os.listdir(tmp_path) == []


def test_interrupted_while_hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qsample.package.package.sha256_of", lambda path: throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "package")
    assert os.listdir(tmp_path) == []


def test_a_write_without_finish_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="finish"), write_package(tmp_path / "package"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_manifest_that_could_not_be_read_back_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"lists no initial_state.onnx"):
        write(tmp_path / "package", {"decoder.onnx": b""})
    assert os.listdir(tmp_path) == []


def test_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="link is not a plain file"):
        write(tmp_path / "package", then=lambda folder: (folder / "link").symlink_to("/etc/hostname"))


def test_overwrite(package: Package, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"already holds a package; pass overwrite=True"):
        write(package.path)
    changed = write(package.path, FILES | {"decoder.onnx": b"new"}, overwrite=True)
    assert changed.file("decoder.onnx").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["package"]


def test_a_failed_overwrite_keeps_the_old_package(package: Package, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), write_package(package.path, overwrite=True):
        raise RuntimeError
    assert read_package(package.path).manifest == package.manifest
    assert os.listdir(tmp_path) == ["package"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EACCES, "Permission denied")])
def test_a_swap_that_fails_half_way_puts_the_old_package_back(
    error: BaseException, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if target == package.path and self.name == NEW:
            raise error
        return real(self, target)

    monkeypatch.setattr(replace_module, "exchange", lambda *paths: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(PackageError if isinstance(error, OSError) else KeyboardInterrupt):
        write(package.path, FILES | {"decoder.onnx": b"new"}, overwrite=True)
    assert read_package(package.path).manifest == package.manifest
    assert os.listdir(tmp_path) == ["package"]


def test_the_manifest_is_written_last_and_everything_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), real(fd))[1]
    )
    write(tmp_path / "package")
    assert {Path(name).name for name in FILES} | {MANIFEST_NAME, "tokenizer"} <= set(flushed)
    assert flushed.index("decoder.onnx") < flushed.index(MANIFEST_NAME)


def test_never_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    for overwrite in (False, True):
        with pytest.raises(PackageError, match="is not empty and not a qsample package, so it is not replaced"):
            write(tmp_path / "photos", overwrite=overwrite)
    with pytest.raises(PackageError, match="is a file"):
        write(tmp_path / "photos" / "cat.jpg")
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty").has("decoder.onnx")
    assert os.listdir(tmp_path) == ["empty"]


def test_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / MANIFEST_NAME).is_file()


def test_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PackageError, match=r"cannot create .*file: .*; choose another folder"):
        write(tmp_path / "file" / "package")


def test_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(self: Path, *args: Any, **options: Any) -> None:
        if self.name.startswith(".qsample-"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(PackageError, match=rf"cannot write to {tmp_path}: Permission denied; choose another folder"):
        write(tmp_path / "package")


def test_too_little_space_is_refused_before_any_work(tmp_path: Path) -> None:
    with (
        pytest.raises(PackageError, match=r"GB free and the package needs about 1000000000\.0 GB"),
        write_package(tmp_path / "package", required_bytes=10**18),
    ):
        pytest.fail("the body ran")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("where", ["body", "seal"])
def test_disk_that_fills_up(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    if where == "seal":
        monkeypatch.setattr(Path, "write_text", lambda *_, **__: throw(full))
    with pytest.raises(PackageError, match=r"is full; nothing was written. Free some space") as caught:
        write(tmp_path / "package", then=lambda folder: throw(full) if where == "body" else None)
    assert caught.value.__cause__ is full
    assert os.listdir(tmp_path) == []


def test_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount a small disk here")
    try:
        with pytest.raises(PackageError, match="is full; nothing was written"):
            write(disk / "package", FILES)
        assert os.listdir(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


# Copying.


def test_copy(package: Package, tmp_path: Path) -> None:
    copy = copy_package(package, tmp_path / "copy")
    assert copy.path == tmp_path / "copy"
    assert copy.manifest == package.manifest == read_package(copy.path).manifest
    shutil.rmtree(package.path)
    assert read_package(copy.path).has("tokenizer/extra.json")


def test_a_copy_is_verified(package: Package, tmp_path: Path) -> None:
    (package.path / "decoder.onnx").write_bytes(b"GRAPH" * 1000)
    with pytest.raises(PackageError, match=r"decoder.onnx was altered"):
        copy_package(package, tmp_path / "copy")
    (package.path / "decoder.onnx").unlink()
    with pytest.raises(PackageError, match=r"decoder.onnx is missing"):
        copy_package(package, tmp_path / "copy")
    assert os.listdir(tmp_path) == ["package"]


def test_copy_onto_itself(package: Package) -> None:
    with pytest.raises(PackageError, match="overwrite"):
        copy_package(package, package.path)
    assert copy_package(package, package.path, overwrite=True).manifest == package.manifest
    assert package_module.read_package(package.path).manifest == package.manifest


def test_a_package_is_never_written_over_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write(tmp_path / "a" / "source")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    for path in (package.path, "source", "../a/./source", tmp_path / "link" / "source", tmp_path / "a", ".."):
        with pytest.raises(PackageError, match=r"is what the package is made from; choose another folder"):
            check_not_source(path, "a/hub-id", package.path)
    for path in (package.path / "inside", "sourc", "source2", tmp_path / "b"):
        check_not_source(path, "a/hub-id", package.path)
    assert read_package(package.path).manifest == package.manifest


def test_a_name_that_no_folder_can_have(tmp_path: Path) -> None:
    """It is refused before the work, not when hours of it are to be published."""
    with (
        pytest.raises(PackageError, match="the name is too long; choose another"),
        write_package(tmp_path / ("x" * 256)),
    ):
        pytest.fail("the work began")
