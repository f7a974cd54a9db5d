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
from qsample.errors import install_hint
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
        known = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for line in (command.epilog or "").splitlines():
            if line.startswith(f"qsample {name} ") or f"| qsample {name} " in line:
                assert set(re.findall(r" (--[a-z-]+)", line)) <= known


def test_version(run: Any) -> None:
    assert run("--version")[:2] == (0, f"qsample {__version__}\n")


def test_version_names_another_distribution_with_the_same_module(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qsample-0.0.2.dist-info").mkdir()
    (tmp_path / "qsample-0.0.2.dist-info" / "METADATA").write_text(
        "Name: qsample\nVersion: 0.0.2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = run("--version")
    assert (status, out) == (0, f"qsample {__version__}\n")
    assert "the distribution qsample 0.0.2 is here, too" in err


def test_without_a_command_only_the_help_is_printed(run: Any) -> None:
    status, out, err = run()
    assert (status, err) == (2, "")
    assert "generate" in out


@pytest.mark.parametrize("arguments", [["--debug"], []], ids=["option", "variable"])
def test_debug_shows_the_traceback(tmp_path: Path, arguments: list[str]) -> None:
    done = qsample(*arguments, "inspect", tmp_path, QSAMPLE_DEBUG="" if arguments else "1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "PackageError" in done.stderr


def test_an_unexpected_error_names_its_type(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("qsample.cli.inspect.read_package", broken)
    status, _, err = run("inspect", tmp_path)
    assert status == 1
    assert err == "qsample: ZeroDivisionError: a bug (QSAMPLE_DEBUG=1 shows the traceback)\n"


def test_a_missing_dependency_says_what_to_install(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in [
        name for name in sys.modules if name.split(".")[0] == "transformers" or "exporters" in name
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    status, _, err = run("export", tmp_path, tmp_path / "out")
    assert status == 1
    assert install_hint("export") in err


def test_an_interrupt_ends_with_130(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qsample.cli.inspect.read_package", interrupted)
    assert run("inspect", tmp_path)[0] == 130


def test_a_reader_that_ends_early_is_not_an_error(llama_package: Path) -> None:
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
