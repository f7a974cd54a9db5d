"""The command line, `qsample COMMAND`: each command is an entry point in the group `qsample.commands` (commands.py).

build.py has the commands that write packages and prefixes; generate.py, chat.py, measure.py (bench) and inspect.py
(pull and cache, too) have the other commands of the core, and each add-on has its own. prompt_file.py has the prompt
files of generate, common.py shared options, help.py the help of a command, spellings.py the suggestions for words of
other programs, terminal.py what is printed, errors included. Heavy modules are imported inside the commands, so that
`qsample --help` answers at once.

Results go to stdout; progress, figures and errors to stderr; with --json an error also goes to stdout, as
{"error": {"type": ..., "message": ..., "status": ...}}. Exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted,
143 terminated.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Annotated, Any, Final

import typer

import qsample
from qsample.cli.commands import register_commands
from qsample.cli.terminal import (
    DEBUG_VARIABLE,
    name_options,
    no_escapes,
    note,
    options_of,
    report,
    use_utf_8,
)
from qsample.errors import DISTRIBUTION

# `kill`, a batch system, `docker stop`; and a terminal that was closed, except on Windows.
_ENDING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Terminated(SystemExit):
    """A signal asked for the end. `code`: 128 and the signal's number, as shells report it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version  # slow to import

        typer.echo(f"qsample {qsample.__version__}")
        with suppress(PackageNotFoundError):
            note(
                f"the distribution qsample {version('qsample')} is here, too: another project, or a checkout under its "
                f"former name. Both bring a module qsample: uninstall both, then install {DISTRIBUTION} again"
            )
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show tracebacks ({DEBUG_VARIABLE}=1 does too).")
    ] = False,
) -> None:
    """Bake the sampler into a language model's ONNX graph, and run it."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


@cache
def application() -> typer.Typer:
    """The command line with all installed commands.

    It is made when it is first used, because the modules of commands import this package.
    """
    app = typer.Typer(
        name="qsample",
        help="Bake the sampler into a language model's ONNX graph, and run it.",
        epilog="Start with: [bold]qsample generate -p 'And the LORD spake unto'[/bold]  (the bundled model)",
        rich_markup_mode="rich",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    register_commands(app)
    return app


def commands() -> dict[str, Any]:
    """The parser's commands, by name."""
    return dict(typer.main.get_command(application()).commands)  # type: ignore[attr-defined]


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit status; an error is a line on stderr."""
    if no_escapes():
        import typer.rich_utils

        typer.rich_utils.COLOR_SYSTEM = None  # of the help
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: note(
            name_options(str(message), options_of(arguments, commands()))
        )
        try:
            status = application()(arguments, standalone_mode=False, prog_name="qsample")
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            return report(error, arguments, commands())
    return status if isinstance(status, int) else 0


def main() -> None:
    """The `qsample` command."""
    for number in _ENDING:
        if (
            signal.getsignal(number) == signal.SIG_DFL
        ):  # a signal that `nohup` ignores stays ignored
            signal.signal(number, _terminate)
    use_utf_8()
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except Terminated as end:
        with suppress(OSError):  # the terminal may be closed
            print(f"qsample: ended by {end.name}; nothing half-written is left", file=sys.stderr)
        raise
    gc.freeze()  # the interpreter's end would look at every object; that takes seconds after an export
    sys.exit(status)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End the command as ctrl-C does, so that half-made files are removed; further signals are ignored meanwhile."""
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise Terminated(number)
