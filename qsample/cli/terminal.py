"""Printing on a terminal: tables, notes, a progress bar, valid JSON, and errors.

An error is a line on stderr that names the options of the command, and with --json also a document
on stdout. Nothing has escapes if the user does not want them.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

# Module → the extra that installs it. The extra "export" installs all other modules.
_EXTRA_OF_MODULE: Final = {
    "onnxruntime": "cpu",
    **dict.fromkeys(
        ("fastapi", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client"), "serve"
    ),
    "llguidance": "guided",
    "outlines_core": "guided",
    "matplotlib": "plot",
    "ray": "ray",
}
_UNKNOWN_WORD: Final = re.compile(r"No such (command|option:?) '?(?P<word>-*\w[\w-]*)'?")
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
# Either an argument in front of its option, "slots=4 (--slots)", or the name of an argument, with
# or without a value, that is not a part of a path or a quotation.
_ARGUMENT: Final = re.compile(
    r"""(?P<python>\w+)(?P<given>=(?:\[[^\]]*\]|[\w.+-]+)?)? \((?P<option>--[a-z-]+)\)|"""
    r"""(?<![\w/.\\'"-])(?P<name>[a-z]\w*)"""
    r"""(?:=(?P<quote>['"]?)(?P<value>[\w.+-]+)(?P=quote)|(?P<equals>=)(?=[\s,;)]|$)|(?![\w/\\'"-]|\.\w))"""
)


@dataclass(frozen=True, slots=True)
class OptionNames:
    """The names of an option.

    Attributes:
        on: the long name.
        off: the name that switches the option off; None for an option without such a name.
    """

    on: str
    off: str | None


def no_escapes() -> bool:
    """Whether the terminal is given plain text.

    The reason is the variable NO_COLOR (no-color.org), or a terminal that does not know escapes.
    """
    return os.environ.get("NO_COLOR", "") != "" or os.environ.get("TERM") in (
        "dumb",
        "unknown",
    )


def use_utf_8() -> None:
    """Make every text printable.

    Pipes and files on Windows are written as UTF-8, because its code pages lack most characters. In
    an encoding that the user chose, by PYTHONIOENCODING or the locale, "?" replaces the characters
    that the encoding lacks.
    """
    is_code_page = os.name == "nt" and "PYTHONIOENCODING" not in os.environ
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(encoding="utf-8" if is_code_page else None, errors="replace")


def console(*, stderr: bool = False, width_of_a_file: int | None = None) -> Console:
    """A console on stdout or stderr.

    Args:
        width_of_a_file: the number of columns, if the output is not a terminal.
    """
    # Without a colour system, Rich writes no escapes. With NO_COLOR only, it writes bold and dim.
    screen = Console(stderr=stderr, highlight=False, color_system=None if no_escapes() else "auto")
    if width_of_a_file is not None and not screen.is_terminal:
        screen.width = width_of_a_file
    return screen


def note(text: str) -> None:
    """Print a remark on stderr, apart from the result on stdout."""
    console(stderr=True).print(printable(text), style="dim", markup=False, soft_wrap=True)


@contextmanager
def progress(*, hidden: bool = False, logged: bool = False) -> Iterator[Progress]:
    """A progress bar on stderr, as a callback of the stage and the fraction that is done.

    Args:
        hidden: show nothing.
        logged: print a line for each stage if stderr is not a terminal, in place of nothing.
    """
    screen = console(stderr=True)
    if not screen.is_terminal or screen.is_dumb_terminal:
        yield _log(screen) if logged and not hidden else unreported
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    # By default Rich sends stdout to the terminal of the bar, even if stdout is a file.
    with ProgressBar(
        *columns, console=screen, transient=True, disable=hidden, redirect_stdout=False
    ) as bar:
        task = bar.add_task(Stage.STARTING, total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)


def _log(screen: Console) -> Progress:
    """A callback that prints each stage when it begins, with the seconds since the first."""
    start = time.monotonic()
    current = ""

    def report(stage: str, fraction: float) -> None:
        nonlocal current
        if stage not in (current, Stage.DONE):
            current = stage
            seconds = time.monotonic() - start
            line = f"{seconds:6.1f} s  {stage}"
            screen.print(line, style="dim", markup=False, soft_wrap=True)

    return report


def table(title: str | None, *columns: str) -> Table:
    """A table in the style of all commands."""
    return Table(
        *columns,
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )


def finite(value: Any) -> Any:
    """JSON-ready lists and dicts with null in place of infinities and NaN, because JSON lacks
    them."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_size(count: int) -> str:
    """A number of bytes in the largest unit below it: "12.3 MB"."""
    for unit_bytes, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit_bytes:
            return f"{count / unit_bytes:.1f} {unit}"
    return f"{count} B"


class AlreadyPrintedError(QsampleError):
    """An error that the printed JSON contains, so stdout is not given a second document."""


def report(error: Exception, arguments: Sequence[str], commands: Mapping[str, Any]) -> int:
    """Print an error, with --json also as {"error": {"type": ..., "message": ..., "status": ...}}
    on stdout.

    Args:
        arguments: the command line.
        commands: the commands of the parser, by name.

    Returns:
        The exit status: 2 for wrong usage, otherwise 1.
    """
    is_usage = getattr(error, "exit_code", 1) == 2  # The errors of the parser have this attribute.
    status = 2 if is_usage else 1
    running = _running_command(arguments, commands)
    options = options_of(arguments, commands)
    text = name_options(_message(error), options, getattr(error, "argument", None))
    hint = ""
    if is_usage:
        text = _with_advice(text, arguments, running, commands)
        command_line = "qsample" if running is None else f"qsample {running}"
        hint = f"; see {command_line} --help"
    if (
        text or not is_usage
    ):  # Without a command, the parser has printed the help, and has no message.
        print(f"qsample: {text}{hint}", file=sys.stderr)
    if _asks_for_json(arguments) and not isinstance(error, AlreadyPrintedError):
        kind = "UsageError" if is_usage else type(error).__name__
        document = {"error": {"type": kind, "message": text, "status": status}}
        print(json.dumps(document, ensure_ascii=False, indent=2))
    return status


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether a command line has --json as an option: after "--", it is an argument."""
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    return "--json" in arguments


def _with_advice(
    text: str, arguments: Sequence[str], running: str | None, commands: Mapping[str, Any]
) -> str:
    """A message of the parser about an unknown word, with the name that qsample has for it."""
    found = _UNKNOWN_WORD.match(text)
    if found:
        word = _whole_word(found["word"], arguments, running, commands)
        suggestions = _suggestions(word, arguments, running, commands)
        if suggestions:
            message = found[0].replace(found["word"], word)
            return f"{message}; here it is {' or '.join(suggestions)}"
    if running == "generate" and text.startswith("Got unexpected extra argument"):
        return f"{text}; a prompt comes after -p"
    return text


def _whole_word(
    word: str, arguments: Sequence[str], running: str | None, commands: Mapping[str, Any]
) -> str:
    """The option as the user typed it: of "-ngl", the message of the parser names only "-n"."""
    if len(word) != 2:
        return word
    typed = next((argument for argument in arguments if argument.startswith(word)), word)
    return typed if names_here(typed, _flags(running, commands)) else word


def _suggestions(
    word: str, arguments: Sequence[str], running: str | None, commands: Mapping[str, Any]
) -> list[str]:
    """The names that qsample has for a word of another program."""
    names = names_here(word, _flags(running, commands))
    suggestions = [name if name.startswith("-") else f"`{name}`" for name in names]
    if len(suggestions) > 1 and word in arguments:
        # The user has to choose, so each option is shown with the value that was typed.
        place = arguments.index(word)
        value = " ".join(arguments[place + 1 : place + 2])
        suggestions = [f"{name} {value}".rstrip() for name in suggestions]
    return suggestions


def _flags(running: str | None, commands: Mapping[str, Any]) -> set[str]:
    """All names of the options of the running command."""
    command = commands.get(running or "")
    return {flag for parameter in getattr(command, "params", ()) for flag in parameter.opts}


def options_of(arguments: Sequence[str], commands: Mapping[str, Any]) -> dict[str, OptionNames]:
    """The options by the names of their arguments in Python, for `name_options`.

    They are the options of the running command, and those options of other commands whose argument
    cannot be a plain word.

    Args:
        arguments: the command line.
        commands: the commands of the parser, by name.
    """
    running = _running_command(arguments, commands)
    options: dict[str, OptionNames] = {}
    # The running command is the last, so its names replace those of other commands.
    for name, command in sorted(commands.items(), key=lambda item: item[0] == running):
        for parameter in command.params:
            is_certain = name == running or "_" in parameter.name
            if parameter.param_type_name == "option" and is_certain:
                off = parameter.secondary_opts[0] if parameter.secondary_opts else None
                options[parameter.name] = OptionNames(max(parameter.opts, key=len), off)
    return options


def _running_command(arguments: Sequence[str], commands: Mapping[str, Any]) -> str | None:
    return next((name for name in arguments if name in commands), None)


def name_options(text: str, options: Mapping[str, OptionNames], argument: str | None = None) -> str:
    """A message of the Python API, with options in place of Python's arguments.

    A plain word, such as temperature, counts as an argument only if it is `argument`, if it stands
    in front of "is", or if it has a value.

    Args:
        options: the options by the names of their arguments, from `options_of`.
        argument: the argument that the error is about, if the error says so.
    """

    def replacement(match: re.Match[str]) -> str:
        if match["option"]:
            return _option_after_argument(match)
        name = match["name"]
        value = match["value"]
        if name == "do_sample" and value == "False" and "greedy" in options:
            return "--greedy"
        is_certain = (
            name == argument
            or value
            or match["equals"]
            or "_" in name
            or text.startswith(" is ", match.end())
        )
        if name not in options or not is_certain:
            return match[0]
        return _option_with_value(options[name], value)

    return _ARGUMENT.sub(replacement, text)


def _option_after_argument(match: re.Match[str]) -> str:
    """The option of "argument=value (--option)", once for each value."""
    option = match["option"]
    if match["given"] is None and match["python"] != option[2:].replace("-", "_"):
        return match[0]
    values = re.findall(r"[\w.+-]+", match["given"] or "")
    return " ".join(f"{option} {value}" for value in values) or option


def _option_with_value(names: OptionNames, value: str | None) -> str:
    """An option with the value of its argument in Python; None if there is no value."""
    if value is None or value == "True":
        return names.on
    if value == "False":
        return f"no {names.on}" if names.off is None else names.off
    return f"{names.on} {'none' if value == 'None' else value}"


def _message(error: Exception) -> str:
    """The text of an error, in a line; with the type of an error that was not raised on purpose."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return _missing_module(error.name)
    format_message = getattr(
        error, "format_message", None
    )  # Errors of the parser have this method.
    original = str(error) if format_message is None else str(format_message())
    text = printable(" ".join(_ESCAPE.sub("", original).split()))
    if format_message is not None:
        # The sentences of the parser have a beginning and a full stop; those of qsample have
        # neither.
        return text.removeprefix("Invalid value: ").removesuffix(".")
    if text and isinstance(error, QsampleError | ValueError | OSError | ImportError | MemoryError):
        return text
    return f"{type(error).__name__}: {text:.300} ({DEBUG_VARIABLE}=1 shows the traceback)"


def _missing_module(name: str) -> str:
    """The message about a module that is not installed, with the extra that installs it."""
    extra = _EXTRA_OF_MODULE.get(name.partition(".")[0], "export")
    alternative = ", or with gpu in place of cpu" if extra == "cpu" else ""
    return f"this needs {name}, which is not installed: `{install_hint(extra)}`{alternative}"
