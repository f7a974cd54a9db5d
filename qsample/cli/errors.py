"""What the command line says of an error: a line on stderr that names its options, and JSON where that is asked for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from qsample.errors import QsampleError

DEBUG_VARIABLE: Final = "QSAMPLE_DEBUG"
# Module → the extra that brings it; all others come with "export".
_EXTRAS: Final = {
    "onnxruntime": "cpu' or 'gpu",
    **dict.fromkeys(("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"), "serve"),
    "llguidance": "guided",
    "matplotlib": "plot",
    "ray": "ray",
}
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
# Python's name of what an option of another name sets.
_OTHER_NAMES: Final = {
    "eos_token_id": "stop_id",
    "stop_strings": "stop_string",
    "intra_op_num_threads": "threads",
}
_START, _END = r"(?<![\w/.\\'\"-])", r"(?![\w/\\'\"-]|\.\w)"  # a word of its own: no part of a path or a quotation


class AlreadyPrintedError(QsampleError):
    """What went wrong stands in the JSON that was printed, too; stdout gets no second document."""


def report(error: Exception, arguments: Sequence[str], commands: Mapping[str, Any]) -> int:
    """Say it, and return the exit status: 2 for wrong usage, otherwise 1.

    commands: the parser's, by name. With --json stdout gets {"error": {"type": ..., "message": ..., "status": ...}}.
    """
    usage = getattr(error, "exit_code", 1) == 2  # the parser's errors carry their own status
    status = 2 if usage else 1
    text = in_options(_message(error), options_of(arguments, commands))
    if text or not usage:  # without a command, the help was printed
        running = _running(arguments, commands)
        where = f"; see qsample {f'{running} ' if running else ''}--help" if usage else ""
        print(f"qsample: {text}{where}", file=sys.stderr)
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in ours and not isinstance(error, AlreadyPrintedError):
        kind = "UsageError" if usage else type(error).__name__
        print(json.dumps({"error": {"type": kind, "message": text, "status": status}}, ensure_ascii=False, indent=2))
    return status


def options_of(arguments: Sequence[str], commands: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Python's name → the option that switches it on or takes its value, and the one that switches it off.

    The running command's come first; those of the others are there too, where their name cannot be a plain word.
    """
    running = _running(arguments, commands)
    names: dict[str, tuple[str, str | None]] = {}
    for name, command in sorted(commands.items(), key=lambda item: item[0] == running):
        for parameter in command.params:
            if parameter.param_type_name == "option" and (name == running or "_" in parameter.name):
                longest = max(parameter.opts, key=len)
                names[parameter.name] = longest, (parameter.secondary_opts or [None])[0]
    return names | {name: names[option] for name, option in _OTHER_NAMES.items() if option in names}


def _running(arguments: Sequence[str], commands: Mapping[str, Any]) -> str | None:
    return next((name for name in arguments if name in commands), None)


def in_options(text: str, options: Mapping[str, tuple[str, str | None]]) -> str:
    """A message of the Python API with the options' names in place of Python's."""
    if "greedy" in options:
        text = re.sub(rf"{_START}do_sample=False", "--greedy", text)
    for name, (option, off) in options.items():
        text = re.sub(rf"{_START}{name}=True\b", option, text)
        text = re.sub(rf"{_START}{name}=False\b", off or f"no {option}", text)
        text = re.sub(rf"{_START}{name}=None\b", f"{option} none", text)
        text = re.sub(rf"{_START}{name}=(['\"]?)([\w.+-]+)\1", rf"{option} \2", text)
        text = re.sub(rf"{_START}{name}=(?=[\s,;)]|$)", option, text)
        if "_" in name:
            text = re.sub(rf"{_START}{name}{_END}", option, text)
        else:
            text = re.sub(rf"{_START}{name}(?= (?:is|must|was|goes|needs) )", option, text)
    return text


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        extra = _EXTRAS.get(error.name.partition(".")[0], "export")
        return f"this needs {error.name}, which is not installed; install qsample with its extra '{extra}'"
    parsed = getattr(error, "format_message", None)  # of the command line's parser
    text = " ".join(_COLOUR.sub("", str(parsed() if parsed else error)).split())
    if parsed:  # whose sentences end with a stop, and begin with what our own do without
        text = text.removeprefix("Invalid value: ").removesuffix(".")
    if parsed or isinstance(error, QsampleError | ValueError | OSError | ImportError):
        return text
    return f"{type(error).__name__}: {text:.300} ({DEBUG_VARIABLE}=1 shows where)"
