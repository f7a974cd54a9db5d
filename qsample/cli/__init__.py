"""The command line: `qsample export | compile | bake | generate | chat | serve | evaluate | bench | inspect`. It
parses and calls.

build.py (export, compile and bake), generate/ (with its files of prompts), chat/, serve.py, evaluate/, bench.py and
inspect.py have the commands, common.py and options.py what they share, output.py and terminal.py what they print,
errors.py what they say when something is wrong. Heavy modules are imported inside the commands, so that `qsample
--help` answers at once. Results go to stdout; progress, figures and errors to stderr; with --json an error goes to
stdout, too, as {"error": {"type": ..., "message": ..., "status": ...}}. Exit status: 0 done, 1 error, 2 wrong usage,
130 interrupted, 143 terminated (signals.py).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

import qsample
from qsample.cli import bench, build, inspect, serve
from qsample.cli.chat import command as chat
from qsample.cli.common import no_escapes
from qsample.cli.errors import DEBUG_VARIABLE, report
from qsample.cli.evaluate import command as evaluate
from qsample.cli.generate import command as generate
from qsample.cli.signals import Terminated, end_on_signals

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


def _version(value: bool) -> None:
    if value:
        typer.echo(f"qsample {qsample.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks ({DEBUG_VARIABLE}=1 does too).")] = False,
) -> None:
    """Bake the sampler into a language model's ONNX graph, and run it."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


app.command(epilog=build.EXPORT_EXAMPLES)(build.export)
app.command(epilog=build.COMPILE_EXAMPLES)(build.compile)
app.command(epilog=build.BAKE_EXAMPLES)(build.bake)
app.command(epilog=generate.EXAMPLES)(generate.generate)
app.command(epilog=chat.EXAMPLES)(chat.chat)
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.command(epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command(epilog=bench.EXAMPLES)(bench.bench)
app.command(epilog=inspect.EXAMPLES)(inspect.inspect)


def commands() -> dict[str, Any]:
    """The parser's commands, by name."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status; errors are one line on stderr."""
    if no_escapes():
        import typer.rich_utils

        typer.rich_utils.COLOR_SYSTEM = None  # of the help
    try:
        status = app(arguments, standalone_mode=False, prog_name="qsample")
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        return report(error, arguments, commands())
    return status if isinstance(status, int) else 0


def main() -> None:
    """The `qsample` command."""
    end_on_signals()
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except Terminated as end:
        with suppress(OSError):  # the terminal may be gone
            print(f"qsample: ended by {end.name}; nothing half-written is left", file=sys.stderr)
        raise
    sys.exit(status)
