"""Publishing under a name that others want too, with real processes: a single process wins, and nothing is lost."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.errors import PackageError
from qsample.package.disk import replace as module
from qsample.package.disk.replace import exchange, file_aside, put_in_place
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.package import MANIFEST_NAME, read_package, use_package, write_package
from tests.helpers.small_packages import FILES, manifest, write
from tests.helpers.writers import REFUSED, files, version_of

ROOT = Path(__file__).resolve().parents[2]
both_ways = pytest.mark.parametrize("atomic", [True, False], ids=["exchange", "two renames"])


@pytest.fixture
def file_system(atomic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that can exchange two names, or answers as NFS does."""
    if not atomic:
        monkeypatch.setattr(module, "exchange", lambda first, second: False)


def run(command: str, folder: Path, *numbers: int, atomic: bool = True) -> Any:
    arguments = [
        sys.executable,
        "-m",
        "tests.helpers.writers",
        command,
        str(folder),
        *map(str, numbers),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | (
        {} if atomic else {"WITHOUT_EXCHANGE": "1"}
    )
    done = subprocess.run(
        arguments, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    ("rounds", "writers"), [(10, 3), pytest.param(100, 4, marks=pytest.mark.slow)]
)
def test_of_several_writers_one_succeeds(rounds: int, writers: int, tmp_path: Path) -> None:
    results, errors = run("race", tmp_path, rounds, writers, 0)
    for statuses in results:
        assert sorted(statuses) == [0] + [REFUSED] * (writers - 1)
    assert errors.count("already holds a package; pass overwrite=True to replace it") == rounds * (
        writers - 1
    )
    assert sorted(os.listdir(tmp_path)) == sorted(f"race{number}" for number in range(rounds))


def test_writers_that_overwrite_all_succeed(tmp_path: Path) -> None:
    results, _ = run("race", tmp_path, 10, 3, 1)
    assert results == [[0, 0, 0]] * 10
    assert len(os.listdir(tmp_path)) == 10


@both_ways
@pytest.mark.parametrize("overwrite", [0, 1])
@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_steps(atomic: bool, overwrite: int, stride: int, tmp_path: Path) -> None:
    """Old or new is there, or will be; and the next writer finds the remains. The first step differs in each case."""
    seen, _ = run(
        "kill", tmp_path, (13 * overwrite + 7 * atomic) % stride, stride, overwrite, atomic=atomic
    )
    assert seen["old" if overwrite else "new"] > 0
    if atomic or stride == 1:
        assert (seen["none"] == 0) == (atomic or not overwrite)


@pytest.mark.parametrize(
    ("times", "readers"), [(60, 2), pytest.param(400, 3, marks=pytest.mark.slow)]
)
def test_readers_while_a_package_is_replaced(times: int, readers: int, tmp_path: Path) -> None:
    result, errors = run("read", tmp_path, times, readers, 0)
    assert result == [0] * readers, errors


# Files and folders that appear while a package is being made.


def a_file(target: Path) -> None:
    target.write_text("mine", encoding="utf-8")


def a_folder(target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("mine")


def a_dangling_link(target: Path) -> None:
    target.symlink_to(target.with_name("nowhere"))


def a_link_to_a_folder(target: Path) -> None:
    a_folder(target.with_name("elsewhere"))
    target.symlink_to(target.with_name("elsewhere"))


def a_package_and_more(target: Path) -> None:
    write(target)
    (target / "notes.txt").write_text("mine")


def state(folder: Path) -> dict[str, Any]:
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.stat().st_ino
        for path in folder.rglob("*")
    }


@both_ways
@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (a_file, "is a file; give a folder"),
        (a_folder, "is not empty and not a qsample package, so it is not replaced"),
        (a_dangling_link, "is a file; give a folder"),
        (a_link_to_a_folder, "is a file; give a folder"),
        (
            a_package_and_more,
            r"already holds a package|holds files that are not its package's \(notes.txt\)",
        ),
    ],
)
def test_what_appeared_meanwhile_stays(
    make: Callable[[Path], None], message: str, overwrite: bool, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def appear(_: Path) -> None:
        make(tmp_path / "package")
        seen.update(state(tmp_path))

    with pytest.raises(PackageError, match=message):
        write(tmp_path / "package", then=appear, overwrite=overwrite)
    assert state(tmp_path) == {
        name: value for name, value in seen.items() if not name.startswith(".")
    }


@both_ways
@pytest.mark.usefixtures("file_system")
@pytest.mark.parametrize("make", [a_file, a_folder, a_dangling_link])
def test_what_appears_in_the_very_moment_of_the_swap_goes_back(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look at a package and its replacement, something else takes its place."""
    target = write(tmp_path / "package").path
    real, done = module.exchange, []

    def exchange(first: Path, second: Path) -> bool:
        if not done:
            target.rename(tmp_path / "moved")
            make(target)
            done.append(state(tmp_path))
        return real(first, second)

    monkeypatch.setattr(module, "exchange", exchange)
    with pytest.raises(PackageError):
        write(target, files(1), overwrite=True)
    assert state(tmp_path) == {
        name: value for name, value in done[0].items() if not name.startswith(".")
    }
    read_package(tmp_path / "moved")


def test_a_package_that_cannot_go_back_is_kept_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without exchange: somebody takes the name while it is missing, and the new package is refused."""
    target, real = write(tmp_path / "package").path, Path.rename

    def rename(self: Path, to: Path) -> Path:
        result = real(self, to)
        if self == target:
            a_folder(target)
        return result

    monkeypatch.setattr(module, "exchange", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(PackageError, match=r"cannot move the package to .*package: "):
        write(target, files(1), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["package", "package.old1"]
    assert os.listdir(target) == ["mine"]
    assert (
        read_package(tmp_path / "package.old1").file("decoder.onnx").read_bytes()
        == FILES["decoder.onnx"]
    )


@both_ways
@pytest.mark.usefixtures("file_system")
def test_interrupted_right_after_the_swap(atomic: bool, tmp_path: Path) -> None:
    target, looks = write(tmp_path / "package", files(1)).path, []

    def look(path: Path) -> None:
        looks.append(path)
        if len(looks) == 2:
            raise KeyboardInterrupt

    with ScratchFolder(tmp_path, target) as scratch:
        write(scratch.new, files(2))
        with pytest.raises(KeyboardInterrupt):
            put_in_place(scratch, target, look)
        assert version_of(scratch.new) == 2
    assert version_of(target) == 1
    assert looks == [target, scratch.new if atomic else scratch.replaced]
    assert os.listdir(tmp_path) == ["package"]


def test_interrupted_right_before_the_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, real, calls = write(tmp_path / "package", files(1)).path, module.exchange, []

    def exchange(first: Path, second: Path) -> bool:
        calls.append(first)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(first, second)

    monkeypatch.setattr(module, "exchange", exchange)
    with pytest.raises(KeyboardInterrupt):
        write(target, files(2), overwrite=True)
    assert version_of(target) == 1


def test_a_mount_point_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (_ for _ in ()).throw(OSError(errno.EBUSY, "Device busy"))
    )
    with pytest.raises(
        PackageError,
        match=r"cannot move the package to .*volume: Device busy; choose another folder",
    ):
        write(tmp_path / "volume")
    assert os.listdir(tmp_path) == ["volume"]


# Through links, and over folders that are almost a package.


@both_ways
@pytest.mark.usefixtures("file_system")
def test_overwriting_through_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", files(1), overwrite=True)
    assert os.readlink(tmp_path / "link") == "real"
    assert version_of(tmp_path / "real") == 1
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_link_that_leads_nowhere_yet_and_one_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("deep/real")
    write(tmp_path / "link", files(1))
    assert version_of(tmp_path / "deep" / "real") == 1
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(PackageError):
        write(tmp_path / "circle", files(1))
    assert (tmp_path / "circle").is_symlink()


def test_a_package_with_files_of_others_is_not_replaced(tmp_path: Path) -> None:
    target = write(tmp_path / "package").path
    (target / "tokenizer" / "notes.txt").write_text("mine")
    with (
        pytest.raises(
            PackageError, match=r"not its package's \(tokenizer/notes.txt\), so it is not replaced"
        ),
        write_package(target, overwrite=True),
    ):
        pytest.fail("the body ran")
    (target / "tokenizer" / "notes.txt").rename(target / ".DS_Store")
    assert version_of(write(target, files(2), overwrite=True).path) == 2


def test_a_damaged_package_can_be_replaced_but_not_with_files_of_other_kinds(
    tmp_path: Path,
) -> None:
    target = write(tmp_path / "package").path
    for content in (b"", b"{}", b"[1]", b'{"files": 3}', b"\xff", b"[" * 100_000):
        (target / MANIFEST_NAME).write_bytes(content)
        assert version_of(write(target, files(2), overwrite=True).path) == 2
        (target / MANIFEST_NAME).write_bytes(content)
        (target / "thesis.odt").write_bytes(b"mine")
        with pytest.raises(PackageError, match=r"\(thesis.odt\)"):
            write(target, files(2), overwrite=True)
        (target / "thesis.odt").unlink()


# A package that is replaced while it is open.


@pytest.mark.parametrize("fails", [False, True], ids=["replaced", "replaced, and so it failed"])
def test_use_starts_anew(fails: bool, tmp_path: Path) -> None:
    target, seen = write(tmp_path / "package", files(1)).path, []

    def use(package: Any) -> int:
        seen.append(package.manifest)
        if len(seen) == 1:
            write(target, files(2), overwrite=True)
            if fails:
                raise PackageError("a size does not fit")
        return version_of(package.path)

    assert use_package(target, use) == 2
    assert len(seen) == 2


def test_use_passes_on_what_has_another_cause(tmp_path: Path) -> None:
    calls: list[Any] = []

    def fail(package: Any) -> None:
        calls.append(package)
        raise PackageError("really damaged")

    with pytest.raises(PackageError, match="really damaged"):
        use_package(write(tmp_path / "package").path, fail)
    assert len(calls) == 1


def test_a_package_that_never_stays(tmp_path: Path) -> None:
    target = write(tmp_path / "package", files(1)).path
    with pytest.raises(PackageError, match="is replaced over and over while it is read"):
        use_package(target, lambda package: write(target, files(2), overwrite=True))


def test_an_open_package_knows_that_it_was_replaced(tmp_path: Path) -> None:
    package = write(tmp_path / "package", files(1))
    package.check_not_replaced()
    write(package.path, files(1), overwrite=True)
    with pytest.raises(PackageError, match="was replaced while it was in use; open it again"):
        package.check_not_replaced()


def test_manifests_are_equal_whenever_they_were_read(tmp_path: Path) -> None:
    first = write(tmp_path / "package", files(1))
    assert write(first.path, files(1), overwrite=True) == first
    assert first.manifest.kind == manifest().kind


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    made = (tmp_path / "\udcff", tmp_path / "ü b")  # names that are no text
    for number, folder in enumerate(made):
        folder.mkdir()
        (folder / "number").write_text(str(number))
    return made


def numbers(*folders: Path) -> list[str]:
    return [(folder / "number").read_text() for folder in folders]


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="no such call here")
def test_names_are_swapped(folders: tuple[Path, Path], tmp_path: Path) -> None:
    if not exchange(*folders):
        pytest.skip("this file system cannot")
    assert numbers(*folders) == ["1", "0"]
    with pytest.raises(FileNotFoundError, match="missing"):
        exchange(folders[0], tmp_path / "missing")


def refuses(code: int) -> SimpleNamespace:
    """A library whose call fails."""
    return SimpleNamespace(renameat2=lambda *_: (ctypes.set_errno(code), -1)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the call of Linux")
@pytest.mark.parametrize(
    ("library", "platform"),
    [
        *(
            (refuses(code), "linux")
            for code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)
        ),
        (object(), "linux"),
        (object(), "win32"),
    ],
)
def test_systems_without_the_call(
    library: object, platform: str, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    monkeypatch.setattr(sys, "platform", platform)
    assert exchange(*folders) is False
    assert numbers(*folders) == ["0", "1"]


def test_windows_moves_no_folder_with_an_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write(tmp_path / "package").path
    move = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if self == target:
            raise PermissionError(errno.EACCES, "Access is denied")
        return move(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(module, "os", SimpleNamespace(**{**vars(os), "name": "nt"}))
    monkeypatch.setattr(module, "exchange", lambda first, second: False)
    with pytest.raises(PackageError, match=r"Access is denied; .*end the program that has a file"):
        write(target, overwrite=True)
    assert os.listdir(tmp_path) == ["package"]
    assert read_package(target).path == target


def test_a_file_arrives_whole_or_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "talk.json"
    target.write_text("old")

    def interrupted() -> None:
        with file_aside(target) as aside:
            aside.write_text("hal")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    assert target.read_text() == "old"
    with file_aside(target) as aside:
        aside.write_text("new")
        assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]
    assert target.read_text() == "new"
