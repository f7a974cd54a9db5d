"""`qsample bake`: a decoder file of another exporter becomes a package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.cli.build import WriteOptions, check_source, write_package
from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import FeatureOptions
from qsample.cli.option_groups import with_option_groups

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample bake onnx-community/Qwen3-0.6B-ONNX qwen3 --file onnx/model_q4.onnx\n\n"
    "qsample bake ./genai-folder out --logprobs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """What is read of a decoder file, and beside it."""

    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Chooses from several: onnx/model_q4.onnx, for instance."
        ),
    ] = None
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|none", help="Replaces the file's own; none takes token ids only."
        ),
    ] = "auto"
    rope: Annotated[
        str | None,
        typer.Option(metavar="short|long", help="Rotary table to keep, of a file that has two."),
    ] = None
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="ID|FOLDER", help="Compare with this checkpoint in transformers, too."
        ),
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None


@with_option_groups
def bake(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An .onnx file, its folder, or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the package to.")],
    *,
    decoder: DecoderOptions,
    features: FeatureOptions,
    writing: WriteOptions,
) -> None:
    """Give the sampler to a decoder file of another exporter (onnxruntime-genai, onnx-community,
    optimum)."""
    from qsample.addons.bake.api import bake as bake_file

    check_source(model, decoder.revision)
    make = partial(
        bake_file,
        model,
        out,
        file=decoder.file,
        features=features.features(),
        tokenizer=None if decoder.tokenizer == "none" else decoder.tokenizer,
        rope=decoder.rope,
        reference=decoder.reference,
        revision=decoder.revision,
    )
    write_package(make, out, writing)


BAKE: Final = CliCommand(bake, Panel.BUILD, EXAMPLES)
