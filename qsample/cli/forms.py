"""Options for the form that answers have to follow."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from qsample.cli.common import read_text
from qsample.errors import ArgumentError

if TYPE_CHECKING:
    from qsample.request.grammar import Form

_FORM_PANEL: Final = "Form of the answers, for packages exported with --grammars or --for-serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    """The form that the answers have to follow."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE",
            help="Answers are JSON of this schema; {} is any JSON.",
            rich_help_panel=_FORM_PANEL,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Answers match this expression.", rich_help_panel=_FORM_PANEL
        ),
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Answers are one of these texts; repeat it.",
            rich_help_panel=_FORM_PANEL,
        ),
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE",
            help="Answers follow this grammar, Lark's or GBNF.",
            rich_help_panel=_FORM_PANEL,
        ),
    ] = None

    def form(self) -> Form | None:
        """The form; None if no option was given.

        Raises:
            typer.BadParameter: several options were given, a file cannot be read, or no answer can
                follow the form.
        """
        values: dict[_FormKind, str | list[str] | None] = {
            "json_schema": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
        }
        given = {kind: value for kind, value in values.items() if value is not None}
        if not given:
            return None
        if len(given) > 1:
            flags = " and ".join(_form_flag(kind) for kind in given)
            raise typer.BadParameter(f"{flags} were given; give one of them")
        kind = next(iter(given))
        return checked_form(kind, given[kind], _form_flag(kind))


_FormKind = Literal["json_schema", "regex", "choice", "grammar"]


def _form_flag(kind: _FormKind) -> str:
    return f"--{kind.replace('_', '-')}"


def checked_form(kind: _FormKind, value: str | list[str], name: str) -> Form:
    """The form that an option or an argument gives. Raises typer.BadParameter if no answer can follow
    it.

    Args:
        kind: the kind of the form.
        value: the form itself, or the name of its file.
        name: the name of the option or argument, for messages.
    """
    from qsample.request.grammar import Form

    if isinstance(value, str) and kind != "regex" and not _is_schema_or_grammar(value):
        value = read_text(Path(value), name)
    form = Form(kind, value)
    try:
        _check_form(form)
    except ArgumentError as error:
        raise typer.BadParameter(f"{name}: {error}") from None
    return form


def _check_form(form: Form) -> None:
    """Raise ArgumentError for an invalid form, and ImportError without the libraries of forms. A form
    is valid if it has tables or masks."""
    from qsample.request.grammar import check_form
    from qsample.request.structured.expression import expression_of
    from qsample.request.structured.not_regular import NotRegularError

    # A missing library is an error before a model is opened, because that takes long.
    for library in ("llguidance", "outlines_core"):
        importlib.import_module(library)
    try:
        expression_of(form)
    except NotRegularError:
        check_form(form)


def _is_schema_or_grammar(value: str) -> bool:
    """Whether a value is a schema or grammar itself, not the name of a file."""
    return value.lstrip().startswith("{") or "start:" in value or "::=" in value
