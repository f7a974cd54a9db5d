"""Signals end a command as ctrl-C does: its status says which, and nothing half-written is left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import qsample
from qsample.package.package import MANIFEST_NAME, read_package
from tests.helpers.command_line import COMMAND, ROOT
from tests.helpers.small_packages import write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
# The command, with an export in place of the real one that says when its files are there.
WORKS = """
import signal, sys, time
from pathlib import Path
from qsample import cli
from qsample.cli import inspect
from qsample.package.package import write_package
def work(package, **_):
    with write_package(Path(package) / "out") as writer:
        (writer.directory / "decoder.onnx").write_bytes(b"half of it")
        try:
            print("working", flush=True)
            time.sleep(600)
        finally:
            if "twice" in sys.argv[-1]:
                signal.raise_signal(signal.SIGTERM)
inspect.read_package = work
if "ignored" in sys.argv[-1]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
cli.main()
"""


def not_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    folder.mkdir()
    command = [sys.executable, "-c", WORKS, "inspect", str(folder)]
    # Under nohup, SIGHUP is ignored from the start, and by commands that are started there.
    process = subprocess.Popen(command, env=environment, preexec_fn=not_ignored, **pipes)  # type: ignore[call-overload]
    assert process.stdout.readline() == "working\n"
    assert any(path.name == "decoder.onnx" for path in folder.rglob("*"))
    return process  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("name", ["work", "twice"])
def test_a_signal_ends_the_command_and_nothing_is_left(
    number: int, status: int, name: str, tmp_path: Path
) -> None:
    process = start(tmp_path / name)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if (
        name == "twice" and number == signal.SIGINT
    ):  # the second one is the first that is asked to end by
        status = 143
    assert process.returncode == status
    assert os.listdir(tmp_path / name) == []
    assert "Traceback" not in errors
    assert errors.count("\n") <= 1
    if status != 130:
        assert re.fullmatch(
            r"qsample: ended by SIG(TERM|HUP); nothing half-written is left\n", errors
        )


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As `nohup` starts a command."""
    process = start(tmp_path / "ignored")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_the_library_leaves_signals_alone() -> None:
    code = (
        "import signal, pkgutil, importlib, qsample\n"
        "before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]\n"
        "import qsample.cli, qsample.models.auto_model, qsample.runtime, qsample.models.bundled\n"
        "assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0


def test_the_advice_of_the_documents_for_python_programs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "security.md").read_text("utf-8")
    (handler,) = re.findall(r"```python\n(import signal.*?)```", text, re.DOTALL)
    work = WORKS.replace("cli.main()", handler + "work(sys.argv[-1])")
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", work, "inspect", str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert os.listdir(folder) == []


# The script `qsample`, in which ctrl-C is pressed while a module is imported, or the parser is made.
PRESSED = """
import os, signal, sys
moment = sys.argv.pop(1)
def press(*_):
    print("pressed", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
class Presser:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            press()
sys.meta_path.insert(0, Presser())
import qsample.__main__
if moment == "the parser":
    import typer
    typer.main.get_command = press
qsample.__main__.main()
"""


@pytest.mark.parametrize(
    ("moment", "status"),
    [
        ("qsample.cli", -signal.SIGINT),
        ("typer", -signal.SIGINT),
        ("qsample.addons.trust.commands", -signal.SIGINT),
        ("the parser", 130),
    ],
)
def test_ctrl_c_while_the_command_starts(moment: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, moment, "inspect", "x"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("pressed\n", "", status)


def test_python_m_qsample_and_the_script_are_the_same() -> None:
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    assert scripts == {"qsample": "qsample.__main__:main"}
    done = subprocess.run(
        [sys.executable, "-m", "qsample", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"qsample {qsample.__version__}\n"


# A real export, ended at any moment.


def export(checkpoint: Path, out: Path) -> subprocess.Popen[bytes]:
    arguments = [*COMMAND, "export", str(checkpoint), str(out), "--overwrite"]
    return subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_a_real_export_that_is_ended_or_killed_at_any_moment(
    checkpoint: object, tmp_path: Path
) -> None:
    """What is at the place is the old package or the new one; and the next writer finds what a kill
    left."""
    source, out = checkpoint("llama"), tmp_path / "package"  # type: ignore[operator]
    start_time = time.monotonic()
    assert export(source, out).wait() == 0
    seconds = time.monotonic() - start_time
    old = read_package(out)
    moments = random.Random(1)
    for number in [signal.SIGTERM, signal.SIGKILL] * 8:
        process = export(source, out)
        try:
            process.wait(moments.uniform(0.3, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        assert process.wait() in (0, -number, 128 + number)
        assert read_package(out).manifest.source == old.manifest.source
        if number == signal.SIGTERM:
            # Before the handler is there, a signal ends the command as the system does, and nothing
            # was begun.
            assert os.listdir(tmp_path) == ["package"]
        else:
            write(tmp_path / "beside", overwrite=True)
            assert sorted(os.listdir(tmp_path)) == ["beside", "package"]
            for path in sorted((tmp_path / "beside").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            (tmp_path / "beside").rmdir()
    assert (out / MANIFEST_NAME).is_file()


def test_a_signal_before_the_command_begins(tmp_path: Path) -> None:
    """While the commands are imported, which takes a second."""
    code = (
        "import time\nfrom qsample import cli\n"
        "def register(app):\n    print('working', flush=True)\n    time.sleep(600)\n"
        "cli.register_commands = register\ncli.main()\n"
    )
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = subprocess.Popen(
            [sys.executable, "-c", code, "inspect", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        assert process.stdout.readline() == "working\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in errors) == (status, False)
