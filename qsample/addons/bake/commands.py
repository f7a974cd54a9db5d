"""`qsample bake`: a decoder file of another exporter becomes a package."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.cli.build import WRITING_FLAGS, check_source, write_package
from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import FEATURE_FLAGS, feature_options, given_of, with_flags
from qsample.contract.interface import Features

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample bake onnx-community/Qwen3-0.6B-ONNX qwen3 --file onnx/model_q4.onnx\n\n"
    "qsample bake ./genai-folder out --logprobs"
)


@with_flags({**FEATURE_FLAGS, **WRITING_FLAGS})
def bake(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An .onnx file, its folder, or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the package to.")],
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Chooses from several: onnx/model_q4.onnx, for instance."
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|none", help="Replaces the file's own; none takes token ids only."
        ),
    ] = "auto",
    rope: Annotated[
        str | None,
        typer.Option(metavar="short|long", help="Rotary table to keep, of a file that has two."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="ID|FOLDER", help="Compare with this checkpoint in transformers, too."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Give the sampler to a decoder file of another exporter (onnxruntime-genai, onnx-community, optimum)."""
    from qsample.addons.bake.api import bake as bake_file

    check_source(model, revision)
    features = Features(**given_of(Features, feature_options(ctx.params)))
    make = partial(
        bake_file,
        model,
        out,
        file=file,
        features=features.for_serving() if ctx.params["for_serving"] else features,
        tokenizer=None if tokenizer == "none" else tokenizer,
        rope=rope,
        reference=reference,
        revision=revision,
    )
    write_package(make, out, ctx.params)


BAKE: Final = CliCommand(bake, Panel.BUILD, EXAMPLES)
