"""The command line, `qsample COMMAND`.

Each command is an entry point in the group `qsample.commands`; commands.py registers them. The
commands of the core are in build.py (those that write packages and prefixes), generate.py, chat.py,
measure.py (bench) and inspect.py (also pull and cache). Each add-on has commands of its own.

common.py has the options that commands share, option_groups.py makes flags of dataclasses, and
opening.py opens models. prompt_file.py runs the prompt files of generate. help.py prints the help
of a command, spellings.py suggests names for the words of other programs, and terminal.py prints
results, progress and errors. Commands import heavy modules when they run, so `qsample --help`
answers at once.

Results go to stdout; progress, figures and errors go to stderr. With --json an error also goes to
stdout, as {"error": {"type": ..., "message": ..., "status": ...}}. The exit status is 0 if the
command is done, 1 after an error, 2 for wrong usage, 130 if it was interrupted, and 143 if it was
terminated.
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

# SIGTERM comes from `kill`, a batch system or `docker stop`; SIGHUP from a terminal that was
# closed, and does not exist on Windows.
_TERMINATION_SIGNALS: Final = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Terminated(SystemExit):
    """A signal terminated the command.

    Attributes:
        code: 128 plus the number of the signal, as shells report it.
        name: the name of the signal.
    """

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

        # Without a colour system, the help has no escapes.
        typer.rich_utils.COLOR_SYSTEM = None
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: note(
            name_options(str(message), options_of(arguments, commands()))
        )
        try:
            status = application()(arguments, standalone_mode=False, prog_name="qsample")
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE, "") != "":
                raise
            return report(error, arguments, commands())
    return status if isinstance(status, int) else 0


def main() -> None:
    """The `qsample` command."""
    for number in _TERMINATION_SIGNALS:
        # A signal that `nohup` ignores stays ignored.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _terminate)
    use_utf_8()
    try:
        # This imports the commands. From then on, there is something to tidy up after ctrl-C.
        application()
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe, such as `head`, has ended.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except KeyboardInterrupt:
        # The parser was not yet, or is no longer, at work.
        status = 128 + signal.SIGINT
    except Terminated as termination:
        with suppress(OSError):  # The terminal may be closed.
            print(
                f"qsample: ended by {termination.name}; nothing half-written is left",
                file=sys.stderr,
            )
        raise
    # Otherwise the interpreter looks at every object when it ends, which takes seconds after an
    # export.
    gc.freeze()
    sys.exit(status)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End the command as ctrl-C does, so half-made files are removed.

    Further signals are ignored meanwhile.
    """
    for ignored in _TERMINATION_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    raise Terminated(number)
