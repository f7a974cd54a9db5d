"""`qsample grammar`: the tables by which the graph of a package keeps answers to a form, as a file for
any host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import Json
from qsample.cli.forms import FormOptions, checked_form
from qsample.cli.opening import CompileChoices, FeatureNeeds, open_exported
from qsample.cli.option_groups import with_option_groups
from qsample.cli.terminal import counted, format_size, note
from qsample.errors import QsampleError

_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample grammar schema.json --package qwen3-cpu -o schema.safetensors\n\n"
    "qsample grammar --regex '[0-9]{4}-[0-9]{2}' --package qwen3-cpu -o month.safetensors\n\n"
    "qsample grammar --choice yes --choice no --package qwen3-cpu -o choice.safetensors"
)


@with_option_groups
def grammar(
    schema: Annotated[
        str | None,
        typer.Argument(metavar="[SCHEMA]", help="JSON schema, or its file; or give an option."),
    ] = None,
    *,
    package: Annotated[
        str | None,
        typer.Option(
            "--package",
            metavar="PACKAGE_OR_MODEL",
            help="Package that is to use the file. (default: the bundled model)",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file, of safetensors.")
    ],
    form: FormOptions,
    thoughts: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--thoughts",
            metavar="START END",
            help="Texts around the thoughts that an answer may begin with, such as <think> </think>; "
            "an empty START if the prompt has begun them.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace FILE if it is a file.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the tables of a form, by which the graph of a package keeps its answers to that form."""
    from qsample.request.structured.automaton import Thoughts
    from qsample.request.structured.grammars import Grammars, Wish
    from qsample.request.text.tokenizer import Tokenizer

    if output.exists() and not overwrite:
        raise typer.BadParameter(
            f"{output} exists; give --overwrite to replace it, or another name"
        )
    given = form.form()
    if schema is not None:
        if given is not None:
            raise typer.BadParameter("SCHEMA and an option were given; give one form")
        given = checked_form("json_schema", schema, "SCHEMA")
    if given is None and thoughts is None:
        raise typer.BadParameter("no form was given; give SCHEMA, --regex, --choice or --grammar")
    opened = open_exported(package, CompileChoices(), FeatureNeeds(has_form=True)).package
    if not opened.interface.features.grammars:
        raise QsampleError(
            f"{opened.path} was exported without --grammars, and its graph takes no tables; export "
            "the model again with --grammars or --for-serving"
        )
    marks = None if thoughts is None else Thoughts.between(*thoughts)
    grammars = Grammars(opened.interface, Tokenizer.of(opened))
    tables = grammars.tables(Wish(given, marks))
    tables.save(output)
    states, classes = tables.transitions.shape
    size = output.stat().st_size
    if as_json:
        facts = {
            "grammar": str(output),
            "shortest": tables.shortest,
            "states": states,
            "classes": classes,
            "bytes": size,
        }
        print(json.dumps(facts))
    else:
        typer.echo(str(output))
    ending = ""
    if tables.shortest > 0:
        tokens = counted(tables.shortest, "token")
        ending = f"; the shortest answer has {tokens}, its stop token included"
    note(f"{counted(states, 'state')}, {classes} classes of tokens, {format_size(size)}{ending}")


GRAMMAR: Final = CliCommand(grammar, Panel.BUILD, _EXAMPLES)
