"""Errors of a command: a line on stderr that names its options, and JSON on stdout with --json."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from qsample.errors import QsampleError, printable

DEBUG_VARIABLE: Final = "QSAMPLE_DEBUG"
Options = Mapping[str, tuple[str, str | None]]  # Python's name → the option, and the option that switches it off

# Module → the extra that brings it; "export" brings all others.
_EXTRAS: Final = {
    "onnxruntime": "cpu' or 'gpu",
    **dict.fromkeys(("fastapi", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client"), "serve"),
    "llguidance": "guided",
    "matplotlib": "plot",
    "ray": "ray",
}
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
# Python's names of options with another name.
_OTHER_NAMES: Final = {"eos_token_id": "stop_id", "stop_strings": "stop_string", "intra_op_num_threads": "threads"}
# The name of an argument, perhaps with a value; not a part of a path or a quotation.
_ARGUMENT: Final = re.compile(
    r"""(?<![\w/.\\'"-])(?P<name>[a-z]\w*)"""
    r"""(?:=(?P<quote>['"]?)(?P<value>[\w.+-]+)(?P=quote)|(?P<equals>=)(?=[\s,;)]|$)|(?![\w/\\'"-]|\.\w))"""
)


class AlreadyPrintedError(QsampleError):
    """An error that the printed JSON contains: stdout gets no second document."""


def report(error: Exception, arguments: Sequence[str], commands: Mapping[str, Any]) -> int:
    """Print an error, with --json also as {"error": {"type": ..., "message": ..., "status": ...}} on stdout.

    Args:
        error: the error.
        arguments: the command line.
        commands: the parser's commands, by name.

    Returns:
        The exit status: 2 for wrong usage, otherwise 1.
    """
    usage = getattr(error, "exit_code", 1) == 2  # the parser's errors have a status of their own
    status = 2 if usage else 1
    text = name_options(_message(error), options_of(arguments, commands), getattr(error, "argument", None))
    if text or not usage:  # without a command, the help was printed
        running = _running(arguments, commands)
        hint = f"; see qsample {f'{running} ' if running else ''}--help" if usage else ""
        print(f"qsample: {text}{hint}", file=sys.stderr)
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in ours and not isinstance(error, AlreadyPrintedError):
        kind = "UsageError" if usage else type(error).__name__
        print(json.dumps({"error": {"type": kind, "message": text, "status": status}}, ensure_ascii=False, indent=2))
    return status


def options_of(arguments: Sequence[str], commands: Mapping[str, Any]) -> Options:
    """The options of the running command, and those of the others whose names cannot be plain words."""
    running = _running(arguments, commands)
    options: dict[str, tuple[str, str | None]] = {}
    for name, command in sorted(commands.items(), key=lambda item: item[0] == running):
        for parameter in command.params:
            if parameter.param_type_name == "option" and (name == running or "_" in parameter.name):
                options[parameter.name] = max(parameter.opts, key=len), (parameter.secondary_opts or [None])[0]
    return options | {name: options[option] for name, option in _OTHER_NAMES.items() if option in options}


def _running(arguments: Sequence[str], commands: Mapping[str, Any]) -> str | None:
    return next((name for name in arguments if name in commands), None)


def name_options(text: str, options: Options, argument: str | None = None) -> str:
    """A message of the Python API with options in place of Python's arguments.

    A plain word, such as temperature, names an argument if it is `argument`, in front of "is" or with a value.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if (name, value, "greedy" in options) == ("do_sample", "False", True):
            return "--greedy"
        certain = name == argument or value or match["equals"] or "_" in name or text.startswith(" is ", match.end())
        if name not in options or not certain:
            return match[0]
        option, off = options[name]
        if value == "False":
            return off or f"no {option}"
        return option if value in (None, "True") else f"{option} {'none' if value == 'None' else value}"

    return _ARGUMENT.sub(flag, text)


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        extra = _EXTRAS.get(error.name.partition(".")[0], "export")
        return f"this needs {error.name}, which is not installed; install qsample with its extra '{extra}'"
    parsed = getattr(error, "format_message", None)  # of the command line's parser
    text = printable(" ".join(_ESCAPE.sub("", str(parsed() if parsed else error)).split()))
    if parsed:  # its sentences have a beginning and a stop, which ours lack
        text = text.removeprefix("Invalid value: ").removesuffix(".")
    if parsed or (text and isinstance(error, QsampleError | ValueError | OSError | ImportError | MemoryError)):
        return text
    return f"{type(error).__name__}: {text:.300} ({DEBUG_VARIABLE}=1 shows the traceback)"
