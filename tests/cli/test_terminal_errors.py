"""What a command prints of an error: a line, a document, and the names that other programs' words have here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from qsample import cli
from qsample.cli import terminal
from qsample.cli.terminal import (
    AlreadyPrintedError,
    OptionNames,
    console,
    counted,
    finite,
    options_of,
    progress,
    report,
    table,
)
from qsample.errors import ArgumentError, QsampleError, install_hint
from qsample.progress import Stage


class UsageError(Exception):
    """An error as the parser raises it."""

    exit_code = 2

    def format_message(self) -> str:
        return str(self)


def printed(
    capsys: pytest.CaptureFixture[str], error: Exception, *line: str
) -> tuple[int, str, str]:
    status = report(error, line, cli.commands())
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("error", "line", "status", "kind", "message", "hint"),
    [
        (QsampleError("gone"), ["inspect", "x"], 1, "QsampleError", "gone", ""),
        (ValueError("a\n  b"), ["inspect", "x"], 1, "ValueError", "a b", ""),
        (OSError(2, "gone", "f"), ["inspect"], 1, "FileNotFoundError", "[Errno 2] gone: 'f'", ""),
        (MemoryError("much"), ["inspect"], 1, "MemoryError", "much", ""),
        (ImportError("no x"), ["inspect"], 1, "ImportError", "no x", ""),
        (KeyError("k"), ["inspect"], 1, "KeyError",
         "KeyError: 'k' (QSAMPLE_DEBUG=1 shows the traceback)", ""),
        (ValueError(), ["inspect"], 1, "ValueError", "ValueError:  (QSAMPLE_DEBUG=1 shows the traceback)", ""),
        (typer.BadParameter("wrong."), ["inspect", "x"], 2, "UsageError", "wrong", "; see qsample inspect --help"),
        (typer.BadParameter("wrong"), ["x"], 2, "UsageError", "wrong", "; see qsample --help"),
        (ArgumentError("slots exceeds 4", "slots"), ["generate"], 1, "ArgumentError", "--slots exceeds 4", ""),
    ],
)  # fmt: skip
def test_an_error_is_a_line_and_a_document(
    error: Exception,
    line: list[str],
    status: int,
    kind: str,
    message: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = f"qsample: {message}{hint}\n"
    assert printed(capsys, error, *line) == (status, "", said)
    got, out, err = printed(capsys, error, *line, "--json")
    assert (got, err) == (status, said)
    assert json.loads(out) == {"error": {"type": kind, "message": message, "status": status}}
    assert printed(capsys, error, *line, "--", "--json")[1] == ""


def test_a_document_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = printed(capsys, QsampleError("日本"), "inspect", "--json")
    assert '\n  "error": {' in out
    assert "日本" in out


def test_an_error_in_the_printed_document_is_not_printed_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, AlreadyPrintedError("gone"), "x", "--json") == (1, "", "qsample: gone\n")


def test_long_unexpected_errors_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = printed(capsys, RuntimeError("x" * 400), "inspect")
    assert err.count("x") == 300


@pytest.mark.parametrize(
    ("line", "word", "said"),
    [
        (["generate", "--n-predict", "5"], "--n-predict", "here it is --max-new-tokens"),
        (
            ["generate", "-n", "5"],
            "-n",
            "here it is --max-new-tokens 5 or --num-return-sequences 5",
        ),
        (["generate", "-n"], "-n", "here it is --max-new-tokens or --num-return-sequences"),
        (["generate", "--nonsense"], "--nonsense", None),
    ],
)
def test_options_of_other_programs(
    line: list[str], word: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = printed(capsys, UsageError(f"No such option: {word}"), *line)
    assert err.startswith(f"qsample: No such option: {word}; ")
    assert (said or "; see qsample generate --help") in err
    assert ("here it is" in err) == (said is not None)


def test_a_short_option_that_the_parser_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of "-ngl 5", the parser's message names "-n"."""
    names = {"-ngl": ["--provider"], "-n": ["--max-new-tokens"]}
    monkeypatch.setattr(terminal, "names_here", lambda word, known: names.get(word, []))
    _, _, err = printed(capsys, UsageError("No such option: -n"), "generate", "-ngl", "5")
    assert "No such option: -ngl; here it is --provider" in err
    _, _, err = printed(capsys, UsageError("No such option: -n"), "generate", "-nx", "5")
    assert "No such option: -n; here it is --max-new-tokens" in err


def test_commands_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = printed(capsys, UsageError("No such command 'run'."), "run", "m")
    names = "`qsample chat MODEL` or `qsample generate MODEL -p TEXT`"
    assert err == f"qsample: No such command 'run'; here it is {names}; see qsample --help\n"


def test_a_prompt_without_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    error = UsageError("Got unexpected extra argument (hi)")
    assert "; a prompt comes after -p; see" in printed(capsys, error, "generate", "m", "hi")[2]
    assert "a prompt comes after" not in printed(capsys, error, "chat", "m", "hi")[2]


@pytest.mark.parametrize(
    ("module", "extra", "more"),
    [
        ("onnxruntime", "cpu", ", or with gpu in place of cpu"),
        ("llguidance", "guided", ""),
        ("outlines_core", "guided", ""),
        ("matplotlib.pyplot", "plot", ""),
        ("ray", "ray", ""),
        ("prometheus_client", "serve", ""),
        ("transformers", "export", ""),
    ],
)
def test_the_extra_of_a_module(
    module: str, extra: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = printed(capsys, ModuleNotFoundError("x", name=module), "inspect")
    wanted = f"this needs {module}, which is not installed: `{install_hint(extra)}`{more}"
    assert err == f"qsample: {wanted}\n"


def test_options_of_the_running_command_and_certain_names_of_others() -> None:
    found = options_of(["generate"], cli.commands())
    assert found["max_new_tokens"] == OptionNames("--max-new-tokens", None)
    assert found["prompt"].on == "--prompt"  # the long name
    assert found["batch_invariant"] == OptionNames("--batch-invariant", "--no-batch-invariant")
    assert "kv_cache_dtype" in found  # of compile alone: no plain word
    assert "weights" in options_of(["compile"], cli.commands())
    assert "host" not in found
    assert "host" in options_of(["serve"], cli.commands())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (float("inf"), None),
        (float("-inf"), None),
        (float("nan"), None),
        (0.0, 0.0),
        (7, 7),
        ("nan", "nan"),
        ({"a": [1.5, (float("nan"), {"b": float("inf")})]}, {"a": [1.5, [None, {"b": None}]]}),
    ],
)
def test_numbers_that_json_lacks(given: Any, wanted: Any) -> None:
    assert finite(given) == wanted


def test_numbers_with_their_nouns() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_stages_are_logged_once_to_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([10.0, 10.0, 12.5])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    with progress(logged=True) as show:
        for stage, fraction in (("a", 0.0), ("a", 0.4), ("b", 0.5), (Stage.DONE, 1.0)):
            show(stage, fraction)
    assert capsys.readouterr() == ("", "   0.0 s  a\n   2.5 s  b\n")
    for options in ({"logged": True, "hidden": True}, {"hidden": True}, {}):
        with progress(**options) as show:
            show("a", 0.0)
        assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(
        terminal, "console", lambda **_: Console(stderr=True, force_terminal=True, width=80)
    )
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress() as show:
        show("tracing", 0.5)
        print("result")
    shown = capsys.readouterr()
    assert shown.out == "result\n"
    assert "tracing" in shown.err
    assert "50%" in shown.err
    with progress(hidden=True) as show:
        show("tracing", 0.5)
    assert "tracing" not in capsys.readouterr().err


def test_the_width_of_a_file() -> None:
    assert console(width_of_a_file=120).width == 120
    assert console(stderr=True).stderr
    assert not console().stderr


def test_the_style_of_tables(capsys: pytest.CaptureFixture[str]) -> None:
    shown = table("Title", "a", "b")
    shown.add_row("1", "2")
    console(width_of_a_file=40).print(shown)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    title, head, rule, row = lines
    assert (title, head.split(), row.split()) == ("Title", ["a", "b"], ["1", "2"])
    assert set(rule) == {"─"}  # below the head alone
