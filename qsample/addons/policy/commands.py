"""`qsample policy`: the sampler as a component of ONNX workflows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.cli.commands import CliCommand, Panel

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample policy components --vocab-size 151936\n\n"
    "qsample policy --into qwen3-workflow --provider cuda"
)
_CONTRACT: Final = "onnx-genai.token-sampler@2"


def policy(
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="Folder for the components.")
    ] = None,
    contract: Annotated[str, typer.Option(help="Of the sampler.")] = _CONTRACT,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Tokens of the logits.")] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="PACKAGE", help="Replace the sampler of this workflow package, if it allows."
        ),
    ] = None,
    provider: Annotated[
        str, typer.Option(help="cpu; with others, the sampler has no control flow.")
    ] = "cpu",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of the same names.")
    ] = False,
) -> None:
    """Write the sampler as a component of ONNX workflows, with termination and state update."""
    from qsample.addons.policy.files import replace_sampler, write_policy

    if (out is None) == (into is None):
        raise typer.BadParameter("give either OUT or --into")
    if out is not None and vocab_size is None:
        raise typer.BadParameter("give --vocab-size, the number of tokens of the model's logits")
    try:
        if into is not None:
            options = {
                "contract": contract,
                "vocab_size": vocab_size,
                "provider": provider,
                "overwrite": overwrite,
            }
            typer.echo(str(replace_sampler(into, **options)))  # type: ignore[arg-type]
        elif out is not None and vocab_size is not None:
            for path in write_policy(
                out, vocab_size, contract=contract, provider=provider, overwrite=overwrite
            ):
                typer.echo(str(path))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


POLICY: Final = CliCommand(policy, Panel.BUILD, EXAMPLES)
