"""Commands that are killed at any moment: what they leave is recognised, breaks nothing, and is removed by the next."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from qsample.cli import run
from qsample.package.disk.space import SCRATCH_NAME
from qsample.package.package import Package, foreign_files, read_package

pytest.importorskip("model_signing")
from tests.helpers.signing_keys import key_pair

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks, to be killed at once")
_KILLS: Final = 12
# Commands that write a new file, and replace none.
NEW_FILES: Final = ("sbom", "grammar")


def forked(arguments: list[str]) -> int:
    """Run a command in a fork; returns its process id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            status = run(arguments)
        finally:
            os._exit(status)
    return process


def killed(arguments: list[str], after: float) -> None:
    process = forked(arguments)
    time.sleep(after)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def duration(arguments: list[str]) -> float:
    """The seconds of a command that succeeds."""
    began = time.monotonic()
    assert os.waitpid(forked(arguments), 0)[1] == 0
    return time.monotonic() - began


def remains(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if SCRATCH_NAME.fullmatch(path.name)]


def others(folder: Path) -> set[str]:
    """What is in a folder, apart from scratch folders and what is in them."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not any(SCRATCH_NAME.fullmatch(part) for part in path.relative_to(folder).parts)
    }


@pytest.fixture
def package(fake: Callable[..., Package], tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "package"
    shutil.copytree(fake(grammars=True).path, folder)
    (folder.parent / "mine.txt").write_text("a file of the user")
    (folder.parent / ".qsample-0123456789abcdef").mkdir()
    (folder.parent / ".qsample-0123456789abcdef" / "mine.txt").write_text("and another")
    return folder


def command(name: str, package: Path, keys: tuple[Path, Path]) -> list[str]:
    """A command that may be repeated."""
    out = package.parent / "out"
    return {
        "sign": ["sign", str(package), "--private-key", str(keys[0]), "--overwrite"],
        "bundle": ["bundle", str(out), str(package), "--overwrite"],
        "sbom": ["sbom", str(package), "-o", str(out)],
        "grammar": ["grammar", "--choice", "ab", "--package", str(package), "-o", str(out)],
        "bundled sign": [
            "sign",
            str(out / "portable"),
            "--private-key",
            str(keys[0]),
            "--overwrite",
        ],
    }[name]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["sign", "bundle", "sbom", "grammar", "bundled sign"])
def test_a_killed_command(name: str, package: Path, tmp_path: Path) -> None:
    keys = key_pair(tmp_path / "keys")
    work = package.parent
    out = work / "out"
    arguments = command(name, package, keys)
    if name == "bundled sign":
        assert run(command("bundle", package, keys)) == 0
    seconds = duration(arguments)
    if name in NEW_FILES:
        out.unlink()
    before = others(work)
    generator = random.Random(5)
    most = 0
    for _ in range(_KILLS):
        killed(arguments, generator.uniform(0, seconds))
        most = max(most, len(remains(work)) - 1)
        new = others(work) - before
        assert not new or (name in NEW_FILES and new == {"out"})
        read_package(package)
        if name == "sign":
            # The old or the new signature is there, whole, and nothing that it does not cover.
            assert read_package(package, trusted_keys=keys[1]).signer is not None
            assert not list(foreign_files(package))
        if new:
            out.unlink()
    print(f"{name}: {seconds:.2f} s, at most {most} remains")
    assert most <= 1
    assert os.waitpid(forked(arguments), 0)[1] == 0
    assert remains(work) == [".qsample-0123456789abcdef"], "the user's stays"
    assert (work / ".qsample-0123456789abcdef" / "mine.txt").read_text() == "and another"
    assert (work / "mine.txt").read_text() == "a file of the user"
    if name == "bundled sign":
        assert os.waitpid(forked(command("bundle", package, keys)), 0)[1] == 0
