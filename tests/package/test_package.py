"""Packages on disk: written whole or not at all, read back verified, and every way in which they can be wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample.package import package as package_module
from qsample.package.disk import replace as replace_module
from qsample.package.disk.scratch import NEW_NAME
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

FULL = OSError(errno.ENOSPC, "No space left on device")


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
        result = subprocess.run(
            ["sha256sum", package.path / name], capture_output=True, text=True, check=True
        )
        assert result.stdout.split()[0] == entry.sha256


def test_a_hash_from_the_writer_is_taken_unless_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    own = package_module.sha256_of
    monkeypatch.setattr(
        package_module, "sha256_of", lambda path: read.append(path.name) or own(path)
    )
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
    bad = write(
        tmp_path / "bad",
        FILES | {"list.json": b"[1]", "broken.json": b"{", "good.json": b'{"a": 1}'},
    )
    assert bad.read_json("good.json") == {"a": 1}
    with pytest.raises(PackageError, match=r"list.json is not a JSON object"):
        bad.read_json("list.json")
    with pytest.raises(PackageError, match=r"cannot read .*broken.json"):
        bad.read_json("broken.json")


# Reading: every way in which a package can be wrong.


def puts(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def removes(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def flipped(offset: int) -> bytes:
    content = bytearray(LARGE)
    content[offset] ^= 1
    return bytes(content)


GRAPH = FILES["decoder.onnx"]
SIZE = r": it has \d+ bytes and the manifest says 5000"


@pytest.mark.parametrize(
    ("change", "words", "needs_hash"),
    [
        *(
            (puts("decoder.onnx.data", flipped(offset)), "data was altered: .*sha256", True)
            for offset in (0, 9999, -1)
        ),
        (puts("decoder.onnx", GRAPH[:-1]), "decoder.onnx is truncated" + SIZE, False),
        (puts("decoder.onnx", b""), "decoder.onnx is truncated" + SIZE, False),
        (puts("decoder.onnx", GRAPH + b"x"), "decoder.onnx is altered" + SIZE, False),
        (
            removes("initial_state.onnx"),
            r"initial_state.onnx is missing; export or download",
            False,
        ),
        (removes(MANIFEST_NAME), r"it has no qsample.json; .*from_pretrained opens other", False),
        (
            lambda folder: (removes(MANIFEST_NAME)(folder), (folder / MANIFEST_NAME).mkdir()),
            "cannot read .*json",
            False,
        ),
        (puts(MANIFEST_NAME, b"\xff\xfe\x00"), "cannot read .*qsample.json", False),
        (lambda folder: shutil.rmtree(folder), "package is missing", False),
        (
            lambda folder: (shutil.rmtree(folder), folder.write_text("")),
            r"is not a folder; .*from_pretrained opens other models",
            False,
        ),
    ],
)
def test_what_can_be_wrong(
    change: Callable[[Path], object], words: str, needs_hash: bool, package: Package
) -> None:
    change(package.path)
    with pytest.raises(PackageError, match=words):
        read_package(package.path)
    if needs_hash:
        assert read_package(package.path, verify=False).manifest == package.manifest
    else:
        with pytest.raises(PackageError, match=words):
            read_package(package.path, verify=False)


# Writing: all or nothing.


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failed_or_interrupted_write_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        write(tmp_path / "deep" / "er" / "package", then=lambda folder: throw(error))
    assert os.listdir(tmp_path) == []


def test_interrupted_while_hashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "qsample.package.package.sha256_of", lambda path: throw(KeyboardInterrupt())
    )
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "package")
    assert os.listdir(tmp_path) == []


def unfinished(path: Path) -> None:
    with write_package(path):
        pass


def too_large(path: Path) -> None:
    with write_package(path, required_bytes=10**18):
        pytest.fail("the body ran")


def too_long(path: Path) -> None:
    """It is refused before the work, not when hours of it are to be published."""
    with write_package(path.with_name("x" * 256)):
        pytest.fail("the body ran")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (unfinished, r"finish\(manifest\) was not called"),
        (too_large, r"GB free and the package needs about 1000000000\.0 GB"),
        (too_long, "the name is too long; choose another"),
        (lambda path: write(path, {"decoder.onnx": b""}), r"lists no initial_state.onnx"),
        (
            lambda path: write(
                path, then=lambda folder: (folder / "l").symlink_to("/etc/hostname")
            ),
            "l is not a plain",
        ),
        (
            lambda path: write(path, then=lambda folder: throw(FULL)),
            "is full; nothing was written. Free some space",
        ),
    ],
)
def test_what_is_not_published_leaves_nothing(
    call: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(PackageError, match=words):
        call(tmp_path / "package")
    assert os.listdir(tmp_path) == []


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
        if target == package.path and self.name == NEW_NAME:
            raise error
        return real(self, target)

    monkeypatch.setattr(replace_module, "exchange", lambda *paths: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(PackageError if isinstance(error, OSError) else KeyboardInterrupt):
        write(package.path, FILES | {"decoder.onnx": b"new"}, overwrite=True)
    assert read_package(package.path).manifest == package.manifest
    assert os.listdir(tmp_path) == ["package"]


def test_the_manifest_is_written_last_and_everything_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), real(fd))[1],
    )
    write(tmp_path / "package")
    assert {Path(name).name for name in FILES} | {MANIFEST_NAME, "tokenizer"} <= set(flushed)
    assert flushed.index("decoder.onnx") < flushed.index(MANIFEST_NAME)


def test_never_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    for overwrite in (False, True):
        with pytest.raises(
            PackageError, match="is not empty and not a qsample package, so it is not replaced"
        ):
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
    with pytest.raises(
        PackageError, match=rf"cannot write to {tmp_path}: Permission denied; choose another folder"
    ):
        write(tmp_path / "package")


def test_a_disk_that_fills_up_while_the_manifest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: throw(FULL))
    with pytest.raises(PackageError, match=r"is full; nothing was written") as caught:
        write(tmp_path / "package")
    assert caught.value.__cause__ is FULL
    assert os.listdir(tmp_path) == []


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


def test_a_package_is_never_written_over_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write(tmp_path / "a" / "source")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")
    for path in (
        package.path,
        "source",
        "../a/./source",
        tmp_path / "link" / "source",
        tmp_path / "a",
        "..",
    ):
        with pytest.raises(
            PackageError, match=r"is what the package is made from; choose another folder"
        ):
            check_not_source(path, "a/hub-id", package.path)
    for path in (package.path / "inside", "sourc", "source2", tmp_path / "b"):
        check_not_source(path, "a/hub-id", package.path)
    assert read_package(package.path).manifest == package.manifest
