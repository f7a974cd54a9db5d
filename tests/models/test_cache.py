"""The cache of models given directly: made once by any number of processes, whole after any end, within its limit."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qsample.errors import PackageError, QsampleError
from qsample.models import cache
from qsample.models.cache import LIMIT_VARIABLE, Recipe, entries, open_cached
from qsample.package import package as package_module

ROOT = Path(__file__).resolve().parents[2]
# Opens an entry that is copied from argv[1]. It says where it is, and goes on after each line that it reads.
PROCESS = """
import shutil, sys
from pathlib import Path
from qsample.models.cache import Recipe, open_cached

def reached(place):
    print(place, flush=True)
    sys.stdin.readline()

def make(path):
    reached("locked")
    path.mkdir()
    files = sorted(Path(sys.argv[1]).iterdir())
    for number, file in enumerate(files):
        if number == len(files) // 2:
            reached("half")
        shutil.copy(file, path)
    reached("whole")

package, holding = open_cached(Recipe(sys.argv[2], {}), make, lambda stage, fraction: print(stage, flush=True))
print(package.path, flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(source: Path, name: str = "model") -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(source), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def until(running: subprocess.Popen[str], place: str) -> list[str]:
    """Let a process run until it says `place`; all that it said."""
    assert running.stdin
    assert running.stdout
    said: list[str] = []
    for line in running.stdout:
        said.append(line.rstrip())
        if said[-1].endswith(place):
            return said
        if said[-1] in ("locked", "half", "whole"):
            running.stdin.write("\n")
            running.stdin.flush()
    raise AssertionError(said)


def started_after(first: subprocess.Popen[str], place: str, source: Path) -> Any:
    """Another process for the same entry, when the first has said `place`."""
    until(first, place)
    return process(source)


def go_on(running: subprocess.Popen[str]) -> None:
    assert running.stdin
    running.stdin.write("\n")
    running.stdin.flush()


def opened(source: Path, name: str = "model", **parts: Any) -> tuple[Path, bool]:
    """The path of an entry, which nobody holds any more, and whether it was made."""
    made: list[Path] = []

    def make(path: Path) -> None:
        shutil.copytree(source, path)
        made.append(path)

    package, holding = open_cached(Recipe(name, parts), make)
    holding.close()
    return package.path, bool(made)


def names(folder: Path) -> list[str]:
    """What is in the cache, besides the lock files."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


def test_two_processes_make_one_entry_and_the_second_says_that_it_waits(
    folder: Path, source: Path
) -> None:
    with process(source) as first, started_after(first, "locked", source) as second:
        assert until(second, "same package") == [
            "waiting for another process that makes the same package"
        ]
        go_on(first)
        path = until(first, Recipe("model", {}).entry)[-1]
        assert until(second, Recipe("model", {}).entry) == [path]
        assert names(folder) == [Recipe("model", {}).entry]
        # Both hold it.
        assert [entry.in_use for entry in entries()] == [True]
        assert cache.clear() == (0, 1)
    assert cache.clear() == (1, 0)
    assert names(folder) == []


@pytest.mark.parametrize("place", ["locked", "half", "whole"])
def test_a_killed_process_leaves_nothing_that_the_next_does_not_mend(
    place: str, folder: Path, source: Path
) -> None:
    with process(source) as first, started_after(first, place, source) as second:
        until(second, "same package")
        first.kill()
        assert "locked" in until(second, Recipe("model", {}).entry), "the one that waited makes it"
    assert names(folder) == [Recipe("model", {}).entry]
    assert opened(source) == (folder / Recipe("model", {}).entry, False)


def test_a_damaged_entry_is_made_again(folder: Path, source: Path) -> None:
    path, _ = opened(source)
    written = sorted(file.name for file in path.iterdir())
    assert "qsample.json" in written
    for name in written:
        for damage in (lambda data: data[:-1], lambda data: bytes([data[0] ^ 1]) + data[1:], None):
            if damage is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(damage((path / name).read_bytes()))
            assert opened(source) == (path, True), name
            assert opened(source) == (path, False)
    assert names(folder) == [path.name]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone may give files away"
)
@pytest.mark.parametrize("name", ["", "decoder.onnx", cache._SEAL_FILE])
def test_a_strangers_entry_is_not_taken(name: str, folder: Path, source: Path) -> None:
    """In a folder to which others write, too, a seal proves nothing."""
    path, _ = opened(source)
    os.chown(path / name, 54321, -1)
    assert opened(source) == (path, True)
    assert (path / name).stat().st_uid == os.geteuid()
    os.chown(path / name, 54321, -1)
    os.chown(folder, 54321, -1)
    assert opened(source) == (path, False), "the owner of the whole cache"


def test_an_entry_under_the_name_of_another_is_not_taken(folder: Path, source: Path) -> None:
    path, other = opened(source)[0], opened(source, "another")[0]
    shutil.rmtree(other)
    path.rename(other)
    assert opened(source, "another") == (other, True)


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
@pytest.mark.parametrize("damage", ["nested", "pipe", "link"])
@pytest.mark.parametrize("name", ["qsample.json", cache._SEAL_FILE])
def test_hostile_files_of_an_entry(damage: str, name: str, folder: Path, source: Path) -> None:
    """They are another process's problem: a pipe must not hold this one up, nor nested JSON end it."""
    path, _ = opened(source)
    whole = (path / name).read_bytes()
    (path / name).unlink()
    if damage == "nested":
        (path / name).write_text('{"manifest":' + "[" * 100_000)
    elif damage == "pipe":
        os.mkfifo(path / name)
    else:
        (folder / "elsewhere").write_bytes(whole)
        (path / name).symlink_to(folder / "elsewhere")
    with process(source) as running:
        assert "locked" in until(running, "locked")
        running.kill()
    assert opened(source) == (path, True)


def test_only_files_that_were_touched_are_hashed_again(
    folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = opened(source)
    hashed: list[str] = []
    real = package_module.sha256_of
    monkeypatch.setattr(
        package_module, "sha256_of", lambda file: hashed.append(file.name) or real(file)
    )
    assert opened(source) == (path, False)
    assert hashed == []
    weights, times = path / "decoder.onnx", (path / "decoder.onnx").stat()
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert opened(source) == (path, False)
    assert "decoder.onnx" in hashed, "its time was set back"


def test_a_process_keeps_the_damaged_entry_that_it_has_open(folder: Path, source: Path) -> None:
    with process(source) as first:
        path = Path(until(first, Recipe("model", {}).entry)[-1])
        (path / "decoder.onnx").write_bytes(b"")
        assert opened(source) == (path, True)
        assert first.poll() is None


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(28, "No space left on device"), PackageError("no")]
)
def test_a_failed_export_leaves_the_cache_empty(error: Any, folder: Path) -> None:
    def broken(path: Path) -> None:
        path.mkdir()
        (path / "decoder.onnx").write_bytes(b"half")
        raise error

    expected = (
        KeyboardInterrupt if error is KeyboardInterrupt else PackageError
    )  # that says that the disk is full
    with pytest.raises(expected):
        open_cached(Recipe("model", {}), broken)
    assert names(folder) == []


def test_the_least_recently_used_entries_go_except_those_in_use(
    folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(file.stat().st_size for file in source.iterdir())
    monkeypatch.setenv(LIMIT_VARIABLE, f"{4.5 * size / 1000:.3f} kB")
    (folder / "mine-0123456789abcdef").mkdir(parents=True)  # no package: somebody else's
    with process(source, "held") as running:
        until(running, Recipe("held", {}).entry)
        for number, name in enumerate(("a", "b", "c")):
            path, _ = opened(source, name)
            os.utime(path, (1000 + number, 1000 + number))
        os.utime(folder / Recipe("held", {}).entry, (1, 1))
        assert opened(source, "a") == (folder / Recipe("a", {}).entry, False)  # used again
        opened(source, "d")
        assert {name.split("-")[0] for name in names(folder)} == {"mine", "held", "a", "c", "d"}
    # A limit that no model fits: the newest stays, and is found again.
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    assert opened(source, "e") == (folder / Recipe("e", {}).entry, True)
    assert opened(source, "e") == (folder / Recipe("e", {}).entry, False)
    assert {name.split("-")[0] for name in names(folder)} == {"mine", "e"}


@pytest.mark.parametrize("given", ["much", "-1", "5 bananas", "GB"])
def test_a_limit_that_is_no_size(
    given: str, folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, given)
    with pytest.raises(
        QsampleError, match=f"QSAMPLE_CACHE_LIMIT is '{given}'; give a size, such as 50GB"
    ):
        opened(source)
    assert not folder.exists()


def test_a_cache_that_cannot_be_written(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(
        QsampleError, match=r"cannot write to .*file, .*set QSAMPLE_CACHE to another folder"
    ):
        opened(source)


@pytest.mark.skipif(
    hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_cache_that_is_only_read(folder: Path, source: Path) -> None:
    path, _ = opened(source)
    folder.chmod(0o500)
    try:
        assert opened(source) == (path, False)
        with pytest.raises(QsampleError, match=r"cannot write to .*set QSAMPLE_CACHE"):
            opened(source, "another")
    finally:
        folder.chmod(0o700)


def test_an_entry_follows_code_parts_and_onnxruntime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {
        Recipe(name, parts).entry
        for name in ("a", "b")
        for parts in ({}, {"x": 1}, {"x": 2}, {"x": "1"})
    }
    assert len(names) == 8
    assert Recipe("../a b/é", {}).entry.startswith("a-b-é-")
    before = Recipe("a", {}).entry
    with monkeypatch.context() as another:
        another.setattr(cache, "version", lambda distribution: "9.9.9")
        assert Recipe("a", {}).entry != before
    root = shutil.copytree(
        cache.PACKAGE_ROOT, tmp_path / "qsample", ignore=shutil.ignore_patterns("assets")
    )
    monkeypatch.setattr(cache, "PACKAGE_ROOT", root)
    assert Recipe("a", {}).entry == before
    with (root / "cache.py").open("a") as code:
        code.write("\n")
    assert Recipe("a", {}).entry != before


# A cache that several users write to. Root is needed, to become them.
ALICE, BOB = 12345, 65534
only_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone may become other users"
)


def as_user(user: int, work: Callable[[], Any]) -> None:
    """Run a function in a fork, as another user."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(process, 0)[1] == 0


@pytest.fixture
def shared_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """A cache of root in which every user may make entries, and a package that every user may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    if not all(one.stat().st_mode & stat.S_IXOTH for one in folder.parents):
        folder.rmdir()
        pytest.skip(f"other users cannot reach {folder.parent}")
    shutil.copytree(source, folder / "source")
    (folder / "cache").mkdir()
    (folder / "cache").chmod(0o1777)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(folder / "cache"))
    # Other users may read neither where the tests are nor what is installed for them.
    monkeypatch.setattr(cache, "_code", lambda: "code")
    monkeypatch.setattr(cache, "_runtime", lambda: "onnxruntime")
    yield folder / "cache", folder / "source"
    shutil.rmtree(folder)


@only_root
def test_another_users_entries_neither_count_nor_go(
    shared_cache: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, source = shared_cache
    monkeypatch.setenv(LIMIT_VARIABLE, "1GB")

    def huge() -> None:
        entry = folder / "huge-0123456789abcdef"
        shutil.copytree(source, entry)
        with (entry / "sparse").open("wb") as file:
            file.truncate(1 << 40)

    as_user(ALICE, lambda: opened(source, "old"))
    as_user(BOB, huge)
    as_user(ALICE, lambda: opened(source, "new"))
    assert [name.partition("-")[0] for name in names(folder)] == ["huge", "new", "old"]
    as_user(ALICE, cache.clear)
    assert [name.partition("-")[0] for name in names(folder)] == ["huge"]
    # The owner of the cache may remove all.
    cache.clear()
    assert names(folder) == []


@only_root
@pytest.mark.parametrize("attack", ["a lock", "a link", "a folder", "an entry", "no sticky bit"])
def test_another_user_is_named_and_nothing_of_it_is_used(
    attack: str, shared_cache: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    folder, source = shared_cache
    monkeypatch.setattr(cache, "_MAX_LOCK_WAIT_S", 0.3)
    entry = folder / Recipe("model", {}).entry
    message = {
        "a lock": "another user's, has locked",
        "a link": r"\.locks is a link, or another user's",
        "a folder": r"\.locks is a link, or another user's",
        "an entry": "in use, or another user's",
        "no sticky bit": "every user may replace the files in",
    }[attack]
    victim = folder.parent / "victim"
    victim.mkdir()
    os.chown(victim, ALICE, ALICE)
    holding = None
    if attack == "a lock":
        as_user(ALICE, lambda: opened(source))
        holding = (entry / "qsample.json").open("rb")
        fcntl.flock(holding, fcntl.LOCK_EX)
    elif attack == "a link":
        as_user(BOB, lambda: (folder / ".locks").symlink_to(victim))
    elif attack == "a folder":
        as_user(BOB, lambda: (folder / ".locks").mkdir(mode=0o777))
    elif attack == "an entry":
        as_user(BOB, lambda: shutil.copytree(source, entry))
    else:
        folder.chmod(0o777)

    def refused() -> None:
        with pytest.raises(QsampleError, match=message):
            opened(source)

    as_user(ALICE, refused)
    assert not any(victim.iterdir())
    if holding is not None:
        holding.close()
        as_user(ALICE, lambda: opened(source))
