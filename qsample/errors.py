"""The exceptions that qsample raises on purpose, and the parts of their messages.

    QsampleError
    ├── UnsupportedModelError    the model cannot become a decode graph
    ├── ParityError              an exported graph differs from its model
    ├── CompileError             a package cannot be compiled, or the result failed its self-test
    ├── PackageError             a package is missing, damaged, of another version, or cannot be written
    ├── QueueFullError           an engine takes no more requests
    ├── EngineClosedError        an engine is closed
    └── RequestFailedError       a function that came with a request raised

Wrong arguments raise ValueError (ArgumentError, which names the argument) or TypeError. A message says what was given,
what is accepted and what to do.
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

DISTRIBUTION: Final = (
    "qsample-onnx"  # its name on PyPI and npm; `qsample` there is another project's
)

_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` with control characters but line feeds escaped: a stranger's names must not command a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class QsampleError(Exception):
    """Base of all exceptions that qsample raises on purpose, except for wrong arguments."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(printable(item) if isinstance(item, str) else item for item in arguments)
        )


class UnsupportedModelError(QsampleError):
    """The model does something that the decode graph cannot express. Raised before any long work."""


class ParityError(QsampleError):
    """The exported graph does not compute what the Hugging Face model computes; nothing was published."""


class CompileError(QsampleError):
    """A package cannot be compiled as asked, or the compiled graph failed its self-test."""


class PackageError(QsampleError):
    """A package on disk is missing, damaged, of another version, or cannot be written."""


class QueueFullError(QsampleError):
    """The engine has no free slot, and its queue is full."""


class EngineClosedError(QsampleError):
    """The engine was closed, its graph failed, or this is a fork of the process that it runs in."""


class RequestFailedError(QsampleError):
    """A function that came with the request raised (the cause), or its text could not be decoded."""


class ArgumentError(ValueError):
    """A value that an argument does not accept. message: with the value and the remedy. argument: the name, for doors
    that have another name for it."""

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something ended: the `kind` and `message` of exceptions that report it, the original `cause` and its
    traceback `details`."""

    kind: type[QsampleError]
    message: str
    cause: BaseException | None = None
    details: str = ""

    @classmethod
    def of(cls, kind: type[QsampleError], message: str, cause: BaseException) -> Failure:
        """A failure by `cause`; "{}" in the message stands for it."""
        try:
            text = f"{type(cause).__name__}: {cause!s:.500}".removesuffix(": ")
            details = "".join(traceback.format_exception(cause)).rstrip()
            # As text: its frames would keep alive what they used, the memory of the whole batch included.
            for error in causes_of(cause):
                BaseException.with_traceback(error, None)
        except BaseException:  # raised by the exception's own methods
            return cls(kind, message.format(type(cause).__name__))
        return cls(kind, message.format(text), cause, details)

    def error(self) -> QsampleError:
        """A new exception to raise: one that is raised again keeps the frames of every time."""
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
    """The command that adds `extra` to this installation: to the checkout that it runs from, otherwise by name."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

    try:
        origin = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
        checkout = origin.get("dir_info", {}).get("editable", False)
    except PackageNotFoundError:  # a checkout on the path
        checkout = True
    target = (
        f'-e "{Path(__file__).parents[1]}[{extra}]"' if checkout else f'"{DISTRIBUTION}[{extra}]"'
    )
    return f"pip install {target}"


def shown(value: object, most: int = 80) -> str:
    """`value` in an error message: its repr, cut off at `most` characters; its type if repr fails."""
    try:
        text = repr(value)
    except Exception:  # its own, or it is nested too deep
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(names: Collection[str]) -> str:
    """The first three of `names`, in order, and the number of the rest."""
    first = sorted(names)[:3]
    return ", ".join(first) + (
        f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    )


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: `what` it was given as, the name and the closest of the `known`."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(sorted(known))}"
    return f"{what} {name!r}; {hint}"
