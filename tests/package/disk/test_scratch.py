"""Scratch folders: gone with their process, or removed by the next process; and nothing else is touched."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest

from qsample.errors import PackageError
from qsample.package.disk import locks
from qsample.package.disk import scratch as module
from qsample.package.disk.scratch import (
    NEW_NAME,
    OWNER_NAME,
    REPLACED_NAME,
    Destination,
    ScratchFolder,
    remove_abandoned,
    scratch_for,
    scratch_near,
)
from tests.helpers.writers import fork, status

ROOT = Path(__file__).resolve().parents[2]
OWNER_PROCESS = """
import sys, time
from pathlib import Path
from qsample.package.disk.scratch import ScratchFolder
folder = ScratchFolder(Path(sys.argv[1]), Path(sys.argv[1]) / "target")
(folder.path / "deep" / "er").mkdir(parents=True)
(folder.path / "deep" / "weights").write_bytes(b"x" * 1000)
(folder.path / "link").symlink_to(sys.argv[1])
print(folder.path, flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
if sys.argv[2] == "fail":
    raise SystemExit(3)
"""


def owner_process(parent: Path, then: str = "wait") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", OWNER_PROCESS, str(parent), then]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)


@contextmanager
def living(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a scratch folder in `parent`, until the `with` block ends or kills it."""
    process = owner_process(parent)
    assert process.stdout
    try:
        yield process, Path(process.stdout.readline().rstrip())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """The remains of a killed process, in a folder of its own."""
    with living(tmp_path) as (process, folder):
        kill(process)
    assert folder.is_dir()
    return folder


def by_another_machine(folder: Path) -> None:
    (folder / OWNER_NAME).write_text("qsample scratch folder of another machine")


def test_a_scratch_folder_is_deleted_when_it_is_left_or_with_the_last_reference(
    tmp_path: Path,
) -> None:
    with ScratchFolder(tmp_path) as scratch:
        (scratch.path / "a").mkdir()
        assert scratch.path.parent == tmp_path
        assert scratch.path.stat().st_mode & 0o077 == 0
        assert sorted(os.listdir(scratch.path)) == ["a", "new", "owner", "replaced"], (
            "the names that others look for"
        )
    assert os.listdir(tmp_path) == []
    scratch.cleanup()
    scratch = ScratchFolder(tmp_path)
    assert os.listdir(tmp_path) == [scratch.path.name]
    del scratch
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_deleted_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process then waits for nobody: the lock is free, and the next one tries again."""

    def refuse(path: object, **options: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        with ScratchFolder(tmp_path, tmp_path / "target") as scratch:
            (scratch.new / "weights").touch()
            (scratch.path / "more").touch()
            lock = scratch._finalizer.peek()[2][1]  # type: ignore[index]
    assert lock.closed
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["owner"]
    remove_abandoned(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("then", ["end", "fail"])
def test_and_when_the_process_ends(then: str, tmp_path: Path) -> None:
    process = owner_process(tmp_path, then)
    process.communicate()
    assert process.returncode == (3 if then == "fail" else 0)
    assert os.listdir(tmp_path) == []


def test_that_of_a_living_process_stays_and_that_of_a_killed_one_goes(tmp_path: Path) -> None:
    with living(tmp_path) as (process, folder), living(tmp_path) as (other, _):
        remove_abandoned(tmp_path)
        assert (folder / "deep" / "weights").is_file()
        kill(other)
        ScratchFolder(tmp_path).cleanup()
        assert os.listdir(tmp_path) == [folder.name]
        kill(process)
        ScratchFolder(tmp_path).cleanup()
        assert os.listdir(tmp_path) == []


def test_a_stopped_process_lives(tmp_path: Path) -> None:
    with living(tmp_path) as (process, folder):
        process.send_signal(signal.SIGSTOP)
        remove_abandoned(tmp_path)
        assert folder.is_dir()


def test_folders_of_this_process_stay(tmp_path: Path) -> None:
    """Also when they are seen through another name of the place, and when a fork of the process ends."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with ScratchFolder(tmp_path / "real") as first, ScratchFolder(tmp_path / "real") as second:
        remove_abandoned(tmp_path / "link")
        assert status(fork(first.cleanup)) == 0
        assert first.path.is_dir()
        assert second.path.is_dir()


def test_links_are_deleted_and_not_followed(abandoned: Path) -> None:
    (abandoned.parent / "mine").write_text("mine")
    assert (abandoned / "link").is_symlink()
    remove_abandoned(abandoned.parent)
    assert os.listdir(abandoned.parent) == ["mine"]


# Folders of unknown owners, or of processes that may live.


def linked_owner(folder: Path) -> None:
    (folder / OWNER_NAME).rename(folder / "elsewhere.json")
    (folder / OWNER_NAME).symlink_to("elsewhere.json")


def piped_owner(folder: Path) -> None:
    (folder / OWNER_NAME).unlink()
    os.mkfifo(folder / OWNER_NAME)


def a_link(folder: Path) -> None:
    folder.rename(folder.with_name("mine"))
    folder.symlink_to("mine")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: folder.rename(folder.with_name(".qsample-0123456789abcdeg")),
        lambda folder: folder.rename(
            folder.with_name(".model.0a1b2c3d.tmp")
        ),  # of an older version
        lambda folder: (folder / OWNER_NAME).unlink(),
        lambda folder: (folder / OWNER_NAME).write_text('{"name": "Anna"}'),
        by_another_machine,
        linked_owner,
        piped_owner,
        a_link,
    ],
)
def test_what_only_looks_like_one_stays(change: Callable[[Path], object], abandoned: Path) -> None:
    change(abandoned)
    (abandoned.parent / ".qsample-0123456789abcdef").write_text("a file")
    before = sorted(path.relative_to(abandoned.parent) for path in abandoned.parent.rglob("*"))
    remove_abandoned(abandoned.parent)
    assert (
        sorted(path.relative_to(abandoned.parent) for path in abandoned.parent.rglob("*")) == before
    )
    assert len(before) > 4


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give folders away"
)
def test_that_of_another_user_stays(abandoned: Path) -> None:
    os.chown(abandoned, 12345, -1)
    remove_abandoned(abandoned.parent)
    assert abandoned.is_dir()


def test_that_of_another_machine_goes_after_a_week(abandoned: Path) -> None:
    by_another_machine(abandoned)
    for days, stays in ((6.9, True), (7.1, False)):
        then = time.time() - days * 24 * 3600
        os.utime(abandoned / OWNER_NAME, (then, then))
        remove_abandoned(abandoned.parent)
        assert abandoned.exists() is stays


def test_a_clock_that_is_ahead_removes_nothing(
    abandoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_another_machine(abandoned)
    ahead = time.time() + 1000 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: ahead)
    remove_abandoned(abandoned.parent)
    assert abandoned.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may live whose lock cannot be seen, whether its own machine had locks or not."""
    if sys.platform == "win32":
        pytest.skip("another call there")

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(locks.fcntl, "flock", unsupported)
        scratch = ScratchFolder(tmp_path)
        monkeypatch.setattr(module, "_own_folders", set())
        remove_abandoned(tmp_path)
    remove_abandoned(tmp_path)
    assert scratch.path.is_dir()
    scratch.cleanup()
    assert os.listdir(tmp_path) == []


# Killed between two calls.


@pytest.mark.parametrize("content", [None, b"", b"qsample scr"])
def test_killed_before_it_had_said_whose_it_is(content: bytes | None, tmp_path: Path) -> None:
    folder = tmp_path / ".qsample-0123456789abcdef"
    folder.mkdir()
    if content is not None:
        (folder / OWNER_NAME).write_bytes(content)
    remove_abandoned(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_taken_away_while_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process that takes it for abandoned, at each of the steps."""
    real, taken = module.lock, []

    def file_later(path: Path, mode: str) -> FileIO:
        if mode == "x+" and len(taken) < 1:
            taken.append(path.parent)
            remove_abandoned(tmp_path)
        return FileIO(path, mode)

    def lock_later(descriptor: int) -> bool | None:
        if len(taken) == 1:
            taken.append(tmp_path)
            remove_abandoned(tmp_path)
        return real(descriptor)

    monkeypatch.setattr(module, "FileIO", file_later)
    monkeypatch.setattr(module, "lock", lock_later)
    with ScratchFolder(tmp_path) as scratch:
        assert len(taken) == 2
        assert os.listdir(tmp_path) == [scratch.path.name]
        assert (scratch.path / OWNER_NAME).is_file()
    assert os.listdir(tmp_path) == []


# The package that was being replaced goes back.


def replaced(folder: Path) -> Path:
    old = folder / REPLACED_NAME / "target"
    old.mkdir()
    (old / "old").write_text("old")
    return old


def test_a_replaced_package_goes_back_to_its_place(abandoned: Path) -> None:
    replaced(abandoned)
    remove_abandoned(abandoned.parent)
    assert os.listdir(abandoned.parent) == ["target"]
    assert (abandoned.parent / "target" / "old").read_text() == "old"


def test_it_goes_beside_its_place_if_that_is_taken_and_is_deleted_if_the_new_package_arrived(
    abandoned: Path,
) -> None:
    replaced(abandoned)
    (abandoned.parent / "target").mkdir()
    (abandoned / NEW_NAME).rmdir()
    remove_abandoned(abandoned.parent)
    assert os.listdir(abandoned.parent) == ["target"]
    for name in ("target.old1", "target.old2"):
        with ScratchFolder(abandoned.parent, abandoned.parent / "target") as scratch:
            replaced(scratch.path)
        assert (abandoned.parent / name / "old").read_text() == "old"


def test_a_folder_that_cannot_be_listed_or_written(tmp_path: Path) -> None:
    remove_abandoned(tmp_path / "missing")
    with pytest.raises(PackageError, match=r"cannot write to .*missing: No such file"):
        ScratchFolder(tmp_path / "missing")


def test_a_folder_that_takes_no_other_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PackageError) as told:
        scratch_near(tmp_path / "no" / "package")
    assert (
        str(told.value) == f"cannot write to {tmp_path}: Permission denied; choose another folder"
    )


def test_a_scratch_folder_for_a_place_makes_its_parents_and_takes_them_back(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "package"
    with pytest.raises(KeyboardInterrupt), scratch_for(target, 100, "the package"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with (
        pytest.raises(PackageError, match=r"er has .* free and the package needs"),
        scratch_for(target, 10**18, "the package"),
    ):
        pytest.fail("the body ran")
    assert os.listdir(tmp_path) == []
    with scratch_for(target, 100, "the package") as scratch:
        assert (scratch.path.parent, scratch.replaced.name) == (target.parent, "package")
    assert os.listdir(target.parent) == []


def test_a_temporary_destination_is_kept_or_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    with Destination(None) as destination:
        destination.path.mkdir()
    assert not any(tmp_path.iterdir())
    with Destination(None) as destination:
        destination.path.mkdir()
        folder = destination.keep()
    assert destination.path.is_dir()
    assert folder is not None
    folder.cleanup()
    assert not any(tmp_path.iterdir())
