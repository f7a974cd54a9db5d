"""The command itself: help, version, errors, and the status that it ends with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsample import __version__, cli
from tests.helpers.command_line import COMMAND, ROOT, qsample


def test_help_lists_the_commands(run: Any) -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    for command in ("export", "compile", "generate", "chat", "bench", "inspect"):
        assert re.search(rf"\b{command}\b", out)


@pytest.mark.parametrize("command", ["export", "compile", "generate", "chat", "bench", "inspect"])
def test_help_of_a_command_has_examples(run: Any, command: str) -> None:
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert "Examples" in out
    assert f"qsample {command} " in out.split("Examples")[1]


def test_the_examples_in_the_help_use_options_that_exist() -> None:
    for name, command in cli.commands().items():
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for line in (command.epilog or "").splitlines():
            if line.startswith(f"qsample {name} ") or f"| qsample {name} " in line:
                assert set(re.findall(r" (--[a-z-]+)", line)) <= known


def test_version(run: Any) -> None:
    assert run("--version")[:2] == (0, f"qsample {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command"),
        (["export", "only-a-model"], "Missing argument"),
        (["compile", "a", "b", "--batch-size", "0"], "--batch-size"),
        (["generate", "--no-such-option"], "--no-such-option"),
        (["generate", "-p", "x", "--temperature", "warm"], "valid number"),
        (["generate", "-p", "x", "--top-p", "1.5"], "--top-p is 1.5"),
        (["generate", "-p", "x", "--top-p", "0"], "--top-p is 0"),
        (["generate", "-p", "x", "--temperature", "-1"], "--temperature is -1"),
        (["generate", "-p", "x", "--temperature", "nan"], "--temperature is nan"),
        (["generate", "-p", "x", "--greedy", "--top-k", "5"], "--greedy chooses greedily, yet --top-k 5 is given"),
        (["generate", "-p", "x", "--chat", "--chat-template", "{{ x }}" + " " * 300], "is not a file; give a file"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(run: Any, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("qsample: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["export", "a"], "qsample: Missing argument 'OUT'; see qsample export --help\n"),
        (
            ["generate", "-p", "x", "--top-p", "7"],
            "--top-p is 7.0; give a number > 0 and <= 1 (1 = off); see qsample generate",
        ),
        (["nonsense"], "qsample: No such command 'nonsense'; see qsample --help\n"),
    ],
)
def test_wrong_usage_names_the_help_that_helps(run: Any, arguments: list[str], line: str) -> None:
    assert line in run(*arguments)[2]


def test_without_a_command_the_help_is_all(run: Any) -> None:
    status, out, err = run()
    assert (status, err) == (2, "")
    assert "generate" in out


def test_a_name_that_no_file_can_have(run: Any) -> None:
    status, out, err = run("generate", "x" * 300, "-p", "x")
    assert (status, out) == (1, "")
    assert err.startswith("qsample: xxx")
    assert err.endswith("does not exist; give a checkpoint folder, a package folder or a hub id\n")


def test_an_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    done = qsample("inspect", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    told = f"{tmp_path} is not a qsample package: it has no qsample.json; give a folder that export or compile wrote"
    assert done.stderr == f"qsample: {told}\n"


@pytest.mark.parametrize("arguments", [["--debug"], []], ids=["option", "variable"])
def test_debug_shows_the_traceback(tmp_path: Path, arguments: list[str]) -> None:
    done = qsample(*arguments, "inspect", tmp_path, QSAMPLE_DEBUG="" if arguments else "1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "PackageError" in done.stderr


def test_an_unexpected_error_names_its_type(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("qsample.cli.inspect.read_package", broken)
    status, _, err = run("inspect", tmp_path)
    assert status == 1
    assert err == "qsample: ZeroDivisionError: a bug (QSAMPLE_DEBUG=1 shows the traceback)\n"


def test_a_missing_dependency_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "transformers" or "exporters" in name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = run("export", tmp_path, tmp_path / "out")
    assert status == 1
    assert "install qsample with its extra 'export'" in err


def test_an_interrupt_ends_with_130(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qsample.cli.inspect.read_package", interrupted)
    assert run("inspect", tmp_path)[0] == 130


def test_a_reader_that_leaves_early_is_no_error(llama_package: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "generate", str(llama_package), "-p", "x", "--max-new-tokens", "8"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
