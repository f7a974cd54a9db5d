"""What commands print: tables, notes and a progress bar, without escapes if the user wants none; JSON that is valid;
and errors, a line on stderr that names the command's options, and JSON on stdout with --json."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from qsample.cli.spellings import names_here
from qsample.errors import QsampleError, install_hint, printable
from qsample.progress import Progress, Stage, unreported

DEBUG_VARIABLE: Final = "QSAMPLE_DEBUG"
Options = Mapping[
    str, tuple[str, str | None]
]  # Python's name → the option, and the option that switches it off

# Module → the extra that brings it; "export" brings all the rest.
_EXTRAS: Final = {
    "onnxruntime": "cpu",
    **dict.fromkeys(
        ("fastapi", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client"), "serve"
    ),
    "llguidance": "guided",
    "matplotlib": "plot",
    "ray": "ray",
}
_UNKNOWN: Final = re.compile(r"No such (command|option:?) '?(?P<word>-*\w[\w-]*)'?")
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
# The name of an argument, perhaps with a value; not a part of a path or a quotation. Or one in front of its option.
_ARGUMENT: Final = re.compile(
    r"""(?P<python>\w+)(?P<given>=(?:\[[^\]]*\]|[\w.+-]+)?)? \((?P<option>--[a-z-]+)\)|"""
    r"""(?<![\w/.\\'"-])(?P<name>[a-z]\w*)"""
    r"""(?:=(?P<quote>['"]?)(?P<value>[\w.+-]+)(?P=quote)|(?P<equals>=)(?=[\s,;)]|$)|(?![\w/\\'"-]|\.\w))"""
)


def no_escapes() -> bool:
    """Whether the terminal gets plain text: NO_COLOR (no-color.org) or a terminal that does not know escapes."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")


def use_utf_8() -> None:
    """Let every text be printed: as UTF-8 in a pipe or file on Windows, whose code pages lack most characters; in an
    encoding that the user chose (PYTHONIOENCODING, the locale), "?" stands for characters that it lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            ours = os.name == "nt" and "PYTHONIOENCODING" not in os.environ
            stream.reconfigure(encoding="utf-8" if ours else None, errors="replace")


def console(*, stderr: bool = False, width_of_a_file: int | None = None) -> Console:
    """A console on stdout or stderr; `width_of_a_file` applies if that is not a terminal. Without a colour system Rich
    writes no escapes at all; NO_COLOR alone keeps bold and dim."""
    made = Console(stderr=stderr, highlight=False, color_system=None if no_escapes() else "auto")
    if width_of_a_file is not None and not made.is_terminal:
        made.width = width_of_a_file
    return made


def note(text: str) -> None:
    """A remark on stderr, a line apart from the result."""
    console(stderr=True).print(printable(text), style="dim", markup=False, soft_wrap=True)


@contextmanager
def progress(*, hidden: bool = False, logged: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr, unless it is `hidden`, as a callback of stage and fraction done. If stderr is not a
    terminal, nothing is shown, or a line for each stage if they are `logged`."""
    shown = console(stderr=True)
    if not shown.is_terminal or shown.is_dumb_terminal:
        yield _log(shown) if logged and not hidden else unreported
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    # Rich would redirect stdout to the bar's terminal, although it may be a file.
    with ProgressBar(
        *columns, console=shown, transient=True, disable=hidden, redirect_stdout=False
    ) as bar:
        task = bar.add_task(Stage.STARTING, total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)


def _log(screen: Console) -> Progress:
    """A callback that prints each stage when it begins, with the seconds since the first."""
    began, current = time.monotonic(), ""

    def report(stage: str, fraction: float) -> None:
        nonlocal current
        if stage not in (current, Stage.DONE):
            current = stage
            screen.print(
                f"{time.monotonic() - began:6.1f} s  {stage}",
                style="dim",
                markup=False,
                soft_wrap=True,
            )

    return report


def table(title: str | None, *columns: str) -> Table:
    """A table as all commands show them."""
    return Table(
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )


def finite(value: Any) -> Any:
    """JSON-ready lists and dicts with null in place of infinities and NaN, because JSON lacks them."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_size(count: int) -> str:
    """A number of bytes, such as `12.3 MB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"


class AlreadyPrintedError(QsampleError):
    """An error that the printed JSON contains: stdout gets no second document."""


def report(error: Exception, arguments: Sequence[str], commands: Mapping[str, Any]) -> int:
    """Print an error, with --json also as {"error": {"type": ..., "message": ..., "status": ...}} on stdout.
    `arguments`: the command line. `commands`: the parser's, by name. Returns the exit status: 2 for wrong usage, or 1.
    """
    usage = getattr(error, "exit_code", 1) == 2  # the parser's errors have a separate status
    status = 2 if usage else 1
    running = _running(arguments, commands)
    text = name_options(
        _message(error), options_of(arguments, commands), getattr(error, "argument", None)
    )
    if usage:
        text = _with_advice(text, arguments, running, commands)
    if text or not usage:  # without a command, the help was printed
        hint = f"; see qsample {f'{running} ' if running else ''}--help" if usage else ""
        print(f"qsample: {text}{hint}", file=sys.stderr)
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in ours and not isinstance(error, AlreadyPrintedError):
        kind = "UsageError" if usage else type(error).__name__
        print(
            json.dumps(
                {"error": {"type": kind, "message": text, "status": status}},
                ensure_ascii=False,
                indent=2,
            )
        )
    return status


def _with_advice(
    text: str, arguments: Sequence[str], running: str | None, commands: Mapping[str, Any]
) -> str:
    """A message of the parser with what to give in place of what it does not know."""
    options = {
        name
        for parameter in getattr(commands.get(running or ""), "params", ())
        for name in parameter.opts
    }
    if found := _UNKNOWN.match(text):
        word = found["word"]
        if len(word) == 2:  # of "-ngl", the parser names "-n"
            whole = next((argument for argument in arguments if argument.startswith(word)), word)
            word = whole if names_here(whole, options) else word
        ours = [name if name.startswith("-") else f"`{name}`" for name in names_here(word, options)]
        if len(ours) > 1 and word in arguments:  # the choice as it would be typed
            value = " ".join(arguments[arguments.index(word) + 1 :][:1])
            ours = [f"{name} {value}".rstrip() for name in ours]
        if ours:
            return f"{found[0].replace(found['word'], word)}; here it is {' or '.join(ours)}"
    if running == "generate" and text.startswith("Got unexpected extra argument"):
        return f"{text}; a prompt comes after -p"
    return text


def options_of(arguments: Sequence[str], commands: Mapping[str, Any]) -> Options:
    """The options of the running command, and the options of other commands whose names cannot be plain words."""
    running = _running(arguments, commands)
    options: dict[str, tuple[str, str | None]] = {}
    for name, command in sorted(commands.items(), key=lambda item: item[0] == running):
        for parameter in command.params:
            if parameter.param_type_name == "option" and (name == running or "_" in parameter.name):
                options[parameter.name] = (
                    max(parameter.opts, key=len),
                    (parameter.secondary_opts or [None])[0],
                )
    return options


def _running(arguments: Sequence[str], commands: Mapping[str, Any]) -> str | None:
    return next((name for name in arguments if name in commands), None)


def name_options(text: str, options: Options, argument: str | None = None) -> str:
    """A message of the Python API with options in place of Python's arguments. A plain word, such as temperature, names
    an argument if it is `argument`, in front of "is" or with a value."""

    def flag(match: re.Match[str]) -> str:
        if option := match["option"]:
            if match["given"] is None and match["python"] != option[2:].replace("-", "_"):
                return match[0]
            items = re.findall(r"[\w.+-]+", match["given"] or "")
            return " ".join(f"{option} {item}" for item in items) or option
        name, value = match["name"], match["value"]
        if (name, value, "greedy" in options) == ("do_sample", "False", True):
            return "--greedy"
        certain = (
            name == argument
            or value
            or match["equals"]
            or "_" in name
            or text.startswith(" is ", match.end())
        )
        if name not in options or not certain:
            return match[0]
        option, off = options[name]
        if value == "False":
            return off or f"no {option}"
        return (
            option
            if value in (None, "True")
            else f"{option} {'none' if value == 'None' else value}"
        )

    return _ARGUMENT.sub(flag, text)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        extra = _EXTRAS.get(error.name.partition(".")[0], "export")
        either = ", or with gpu in place of cpu" if extra == "cpu" else ""
        return f"this needs {error.name}, which is not installed: `{install_hint(extra)}`{either}"
    parsed = getattr(error, "format_message", None)  # of the command line's parser
    text = printable(" ".join(_ESCAPE.sub("", str(parsed() if parsed else error)).split()))
    if parsed:  # its sentences have a beginning and a stop; ours lack both
        text = text.removeprefix("Invalid value: ").removesuffix(".")
    if parsed or (
        text and isinstance(error, QsampleError | ValueError | OSError | ImportError | MemoryError)
    ):
        return text
    return f"{type(error).__name__}: {text:.300} ({DEBUG_VARIABLE}=1 shows the traceback)"
