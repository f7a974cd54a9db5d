"""`python -m qsample` and the script `qsample`: the command line, and ctrl-C before it is imported."""

from __future__ import annotations

import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qsample.__main__ as program
from qsample import cli

Handler = Any


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Handler]]:
    """The handlers of ctrl-C that the command line found at its starts, of which nothing else runs."""
    found: list[Handler] = []
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(cli, "main", lambda: found.append(signal.getsignal(signal.SIGINT)))
    yield found
    signal.signal(signal.SIGINT, before)


def own(number: int, frame: object) -> None:
    """A handler of a caller's own."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (signal.default_int_handler, signal.SIG_DFL),
        (signal.SIG_IGN, signal.SIG_IGN),
        (signal.SIG_DFL, signal.SIG_DFL),
        (own, own),
    ],
)
def test_python_s_own_handler_of_ctrl_c_is_left_out_and_any_other_stays(
    before: Handler, after: Handler, handlers: list[Handler]
) -> None:
    signal.signal(signal.SIGINT, before)
    program.main()
    assert handlers == [after]


def test_the_module_runs_the_command_line_once_as_a_program_and_not_as_an_import(
    handlers: list[Handler],
) -> None:
    path = str(Path(program.__file__))
    runpy.run_path(path, run_name="qsample.__main__")
    assert handlers == []
    runpy.run_path(path, run_name="__main__")
    assert len(handlers) == 1
