"""`qsample bake` in a process of its own that is killed, whose files change under it, or whose disk is full: what is at
the destination, and what the next one makes of the rest."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qsample.progress import Stage
from tests.helpers.command_line import ROOT, qsample
from tests.helpers.foreign import unpack

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
# The command, which says when a stage begins, and waits for a line.
PAUSING = """
import sys
from qsample.progress import Stages
begin = Stages.begin
def begin_and_wait(self, stage, *arguments, **options):
    advance = begin(self, stage, *arguments, **options)
    print(stage.name, flush=True)
    sys.stdin.readline()
    return advance
Stages.begin = begin_and_wait
from qsample.cli import main
main()
"""


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def start(decoder: Path, out: Path, stage: Stage) -> subprocess.Popen[str]:
    """Bake until a stage begins."""
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSING, "bake", str(decoder), str(out), "--overwrite"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout
    assert process.stdin
    while process.stdout.readline() != f"{stage.name}\n":
        assert process.poll() is None, process.communicate()
        process.stdin.write("\n")
        process.stdin.flush()
    return process


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    return unpack("optimum_llama", tmp_path / "decoder")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "packages").mkdir()
    return tmp_path / "packages" / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "stage", "status"),
    [
        (signal.SIGKILL, Stage.WRITING_WEIGHTS, -9),
        (signal.SIGKILL, Stage.PUBLISHING, -9),
        (signal.SIGTERM, Stage.COMPARING, 143),
        (signal.SIGINT, Stage.REWRITING, 130),
    ],
)
def test_a_signal_leaves_the_destination_as_it_was(
    number: int, stage: Stage, status: int, decoder: Path, out: Path
) -> None:
    assert qsample("bake", decoder, out).returncode == 0
    before = contents(out)
    process = start(decoder, out, stage)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (status, False)
    assert contents(out) == before
    remains = [path.name for path in out.parent.iterdir() if path != out]
    assert len(remains) == (1 if number == signal.SIGKILL else 0)
    assert qsample("bake", decoder, out, "--overwrite").returncode == 0
    assert contents(out) == before
    assert list(out.parent.iterdir()) == [out]


def written_to(file: Path) -> None:
    """One number of a weight, in place."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\1\2\3\4")


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    os.replace(other, file)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "change", "stage"),
    [
        ("model.onnx", written_to, Stage.RUNNING),
        ("model.onnx", replaced, Stage.COMPARING),
        ("config.json", replaced, Stage.PUBLISHING),
        ("tokenizer.json", Path.unlink, Stage.COMPARING),
    ],
)
def test_a_file_that_changes_while_it_is_baked(
    name: str, change: Callable[[Path], None], stage: Stage, decoder: Path, out: Path
) -> None:
    """The package would name hashes of files that it was not made of."""
    process = start(decoder, out, stage)
    change(decoder / name)
    _, errors = process.communicate("\n" * 20, timeout=120)
    change_word = "deleted" if change is Path.unlink else "replaced or written to"
    assert process.returncode == 1
    assert f"{name} was {change_word} while it was in use, and nothing was published" in errors
    assert list(out.parent.iterdir()) == []


@pytest.mark.slow
def test_two_at_once_leave_a_whole_package(decoder: Path, out: Path) -> None:
    """Both have begun to publish when the first one goes on."""
    processes = [start(decoder, out, Stage.PUBLISHING) for _ in range(2)]
    statuses = []
    for process in processes:
        process.communicate("\n", timeout=120)
        statuses.append(process.returncode)
    assert statuses == [0, 0]  # both were told to overwrite
    assert list(out.parent.iterdir()) == [out]
    whole = contents(out)
    assert qsample("verify", out).returncode == 0
    assert qsample("bake", decoder, out).returncode == 1
    assert contents(out) == whole


@pytest.mark.ci
@pytest.mark.parametrize("size", [0, 1000, 50_000])
def test_a_full_disk(size: int, decoder: Path, out: Path) -> None:
    """As a limit of the size of files shows it: every write fails beyond it."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
        "from qsample.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bake", str(decoder), str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(out.parent) in done.stderr
    assert list(out.parent.iterdir()) == []
