"""`qsample inspect`: what a package holds, as tables or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.cli.common import Json

EXAMPLES: Final = "[bold]Examples[/bold]\n\nqsample inspect qwen3-cpu\n\nqsample inspect qwen3-cpu --json | jq .graphs"


def inspect(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Folder of a package.")],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every file with its sha256.")] = True,
    as_json: Json = False,
) -> None:
    """Show a package: its graphs' inputs, states and outputs, where it came from, and what runs where."""
    from qsample.cli import output as cli_output
    from qsample.package import read_package

    opened = read_package(package, verify=verify)
    if as_json:
        typer.echo(json.dumps(cli_output.describe(opened), indent=2))
    else:
        cli_output.show(opened)
