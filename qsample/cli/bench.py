"""`qsample bench`: times a package under a load, as a table or as JSON."""

from __future__ import annotations

import json
import time
from typing import Annotated, Final

import typer

from qsample.cli.common import Json, Provider, Threads, open_exported

EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample bench qwen3-cpu --batch 1 --batch 8 --prompt-tokens 512\n\n"
    "qsample bench qwen3-cpu --temperature 0.8 --top-p 0.9 --json"
)


def bench(
    package: Annotated[str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")],
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; may be repeated. (default: 1)")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps to time.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Generations to time, after one to warm up.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    provider: Provider = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time a package: first token, prefill, decode steps, memory."""
    from qsample.cli import output as cli_output
    from qsample.cli import terminal
    from qsample.runtime import load
    from qsample.runtime.bench import measure
    from qsample.sampling_params import SamplingParams

    try:
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = open_exported(package, provider)  # kept: a temporary export lives as long as this
    start = time.perf_counter()
    model = load(opened.package.path, provider, intra_op_num_threads=threads, verify=False)
    load_seconds = time.perf_counter() - start
    measurements = []
    with terminal.progress() as progress:
        for index, rows in enumerate(batches := batch or [1]):
            progress(f"{rows} rows", index / len(batches))
            measurements.append(measure(model, rows, prompt_tokens, new_tokens, params, repetitions))
    if as_json:
        typer.echo(json.dumps(cli_output.describe_bench(opened.package, measurements, load_seconds), indent=2))
    else:
        cli_output.show_bench(opened.package, measurements, load_seconds)
