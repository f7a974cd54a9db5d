"""The command line: `qsample export | compile | generate | bench | inspect`. It parses and calls, nothing else.

build.py (export and compile), generate.py, bench.py and inspect.py have the commands, common.py what they share,
output.py what they print. Heavy modules are imported inside the commands, so that `qsample --help` answers at once.
Results go to stdout; progress, figures and errors to stderr. Exit status: 0 done, 1 error, 2 wrong usage, 130
interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Final

import typer

import qsample
from qsample.cli import bench, build, generate, inspect
from qsample.errors import QsampleError

DEBUG_VARIABLE: Final = "QSAMPLE_DEBUG"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

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
app.command(epilog=generate.EXAMPLES)(generate.generate)
app.command(epilog=bench.EXAMPLES)(bench.bench)
app.command(epilog=inspect.EXAMPLES)(inspect.inspect)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status; errors are one line on stderr."""
    try:
        status = app(arguments, standalone_mode=False, prog_name="qsample")
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        usage = getattr(error, "exit_code", 1) == 2  # the parser's errors carry their own status
        hint = "; see qsample --help" if usage else ""
        print(f"qsample: {_message(error)}{hint}", file=sys.stderr)
        return 2 if usage else 1
    return status if isinstance(status, int) else 0


def main() -> None:
    """The `qsample` command."""
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        extra = "cpu' or 'gpu" if error.name == "onnxruntime" else "export"
        return f"this needs {error.name}, which is not installed; install qsample with its extra '{extra}'"
    parsed = getattr(error, "format_message", None)  # of the command line's parser
    text = " ".join(_COLOUR.sub("", str(parsed() if parsed else error)).split())
    if parsed or isinstance(error, QsampleError | ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text:.300} ({DEBUG_VARIABLE}=1 shows where)"
