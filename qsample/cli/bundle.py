"""`qsample bundle`: variants of a model in a folder that ONNX Runtime opens as a model package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.cli.terminal import note

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample bundle qwen3-all qwen3-cpu qwen3-cuda\n\n"
    "qsample generate qwen3-all -p 'In the beginning'"
)


def bundle(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the bundle.")],
    packages: Annotated[list[str], typer.Argument(metavar="PACKAGE...", help="A package for each target.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a bundle.")] = False,
) -> None:
    """Put packages of a model for several devices into a folder; a program loads the variant for its device."""
    from qsample.ort.model_package import bundle as make

    variants = make(out, packages, overwrite=overwrite)
    typer.echo(str(out))
    note(f"variants: {', '.join(variants)}")
