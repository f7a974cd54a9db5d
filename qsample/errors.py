"""The exceptions that qsample raises on purpose, and the parts of their messages.

    QsampleError ├── UnsupportedModelError    the model cannot become a decode graph ├── ParityError
    an exported graph differs from its model ├── CompileError             a package cannot be
    compiled, or the result failed its self-test ├── PackageError             a package is missing,
    damaged, of another version, or cannot be written ├── QueueFullError           an engine takes
    no more requests ├── EngineClosedError        an engine is closed └── RequestFailedError       a
    function that came with a request raised

Wrong arguments raise ValueError (ArgumentError, which names the argument) or TypeError. A message
says what was given, what is accepted and what to do.
"""

from __future__ import annotations

import difflib
import json
import re
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The name on PyPI and npm, where `qsample` belongs to another project.
DISTRIBUTION: Final = "qsample-onnx"

_CONTROL_CHARACTER: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` with escaped control characters, except for line feeds: a stranger's names must not
    command a terminal."""
    return _CONTROL_CHARACTER.sub(
        lambda match: match[0].encode("unicode_escape").decode("ascii"), text
    )


class QsampleError(Exception):
    """Base of all exceptions that qsample raises on purpose, except for wrong arguments."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(printable(item) if isinstance(item, str) else item for item in arguments)
        )


class UnsupportedModelError(QsampleError):
    """The model does something that the decode graph cannot express. Raised before any long
    work."""


class ParityError(QsampleError):
    """The results of the exported graph differ from the Hugging Face model's; nothing was
    published."""


class CompileError(QsampleError):
    """A package cannot be compiled as asked, or the compiled graph failed its self-test."""


class PackageError(QsampleError):
    """A package on disk is missing, damaged, of another version, or cannot be written."""


class QueueFullError(QsampleError):
    """The engine has no free slot, and its queue is full."""


class EngineClosedError(QsampleError):
    """The engine was closed, its graph failed, or this is a fork of the process that it runs in."""


class RequestFailedError(QsampleError):
    """A function that came with the request raised (the cause), or its text could not be
    decoded."""


class ArgumentError(ValueError):
    """An argument does not accept a value.

    Args:
        message: The sentence that names the value, the accepted values and the remedy.
        argument: The name of the argument, for callers that have another name for it; None if
            unknown.
    """

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why something ended.

    Attributes:
        kind: The type of the exceptions that report it.
        message: The message of these exceptions.
        cause: The original exception.
        details: The traceback of the cause, as text.
    """

    kind: type[QsampleError]
    message: str
    cause: BaseException | None = None
    details: str = ""

    @classmethod
    def of(cls, kind: type[QsampleError], message: str, cause: BaseException) -> Failure:
        """Describe a failure.

        Args:
            kind: The type of the exceptions that report it.
            message: The message of these exceptions, in which "{}" stands for the cause.
            cause: The original exception.
        """
        try:
            text = f"{type(cause).__name__}: {cause!s:.500}".removesuffix(": ")
            details = "".join(traceback.format_exception(cause)).rstrip()
            # The frames of a traceback would keep their objects alive, including the memory of the
            # whole batch.
            for error in causes_of(cause):
                BaseException.with_traceback(error, None)
        except BaseException:  # The methods of the exception may raise anything.
            return cls(kind, message.format(type(cause).__name__))
        return cls(kind, message.format(text), cause, details)

    def error(self) -> QsampleError:
        """A new exception to raise: an exception that is raised again keeps the frames of every
        time."""
        error = self.kind(self.message)
        error.__cause__ = self.cause
        if self.details:
            error.add_note(self.details)
        return error


def causes_of(error: BaseException) -> list[BaseException]:
    """An error, its causes, and their causes."""
    seen: list[BaseException] = []
    unseen: list[BaseException | None] = [error]
    while unseen:
        link = unseen.pop()
        if link is not None and all(link is not other for other in seen):
            seen.append(link)
            unseen += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]
    return seen


def install_hint(extra: str) -> str:
    """The command that adds a pip extra to this installation: to its checkout, or by the name of
    the distribution."""
    # This module is slow to import.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
        folder = {} if origin in (None, "") else json.loads(origin).get("dir_info", {})
        is_checkout = folder.get("editable", False)
    except PackageNotFoundError:
        # A checkout is on the path without being installed.
        is_checkout = True
    if is_checkout:
        return f'pip install -e "{Path(__file__).parents[1]}[{extra}]"'
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def shown(value: object, most: int = 80) -> str:
    """A value in an error message: its repr, cut off at `most` characters, or its type if repr
    fails."""
    try:
        text = repr(value)
    except Exception:  # A repr may raise anything, for example if the value is nested too deeply.
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(names: Collection[str]) -> str:
    """The first three names in alphabetical order, and the number of the rest."""
    first = sorted(names)[:3]
    text = ", ".join(first)
    return f"{text} and {len(names) - len(first)} more" if len(names) > len(first) else text


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name.

    Args:
        what: The kind of the name.
        name: The name that was given.
        known: The accepted names; the message has the closest.
    """
    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(sorted(known))}"
    return f"{what} {name!r}; {hint}"
