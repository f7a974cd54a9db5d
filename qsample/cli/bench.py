"""`qsample bench`: times of a package under a load, as a table or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.common import BatchInvariant, Json, Lora, Provider, Threads, Weights, open_exported, read_loras
from qsample.cli.terminal import console, format_size, progress, table

if TYPE_CHECKING:
    from qsample.runtime import CausalLM
    from qsample.runtime.bench import Measurement

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
    repetitions: Annotated[int, typer.Option(min=1, help="Generations to time, after a warm-up.")] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    prompt_lookup_num_tokens: Annotated[
        int, typer.Option(min=0, help="Guess up to this many tokens a step from the text so far; 0 is off.")
    ] = 0,
    lora: Lora = None,
    weights: Weights = None,
    provider: Provider = None,
    threads: Threads = None,
    batch_invariant: BatchInvariant = True,
    as_json: Json = False,
) -> None:
    """Time a package: first token, prefill, decode steps, memory."""
    from qsample.request.sampling_params import SamplingParams
    from qsample.runtime import load
    from qsample.runtime.bench import measure

    try:
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    loras = read_loras(lora)
    opened = open_exported(package, provider, weights=weights, loras=loras)  # stays in the cache as long as this
    start = time.perf_counter()
    model = load(
        opened.package.path, provider, intra_op_num_threads=threads, batch_invariant=batch_invariant, verify=False
    )
    load_seconds = time.perf_counter() - start
    adapters = [model.load_adapter(name, folder) for name, folder in loras.items()]
    measurements = []
    with progress() as report:
        for index, rows in enumerate(batches := batch or [1]):
            report(f"{rows} rows", index / len(batches))
            measurements.append(measure(model, rows, prompt_tokens, new_tokens, params, repetitions, adapters))
    if as_json:
        typer.echo(json.dumps(_describe(model, measurements, load_seconds), indent=2))
    else:
        _show(model, measurements, load_seconds)


def _describe(model: CausalLM, measurements: Sequence[Measurement], load_seconds: float) -> dict[str, Any]:
    """A benchmark as a JSON-ready dict; see `runtime.bench`."""
    from qsample.runtime.bench import peak_memory_bytes

    package, rounding = model.package, model.sessions.rounding
    return {
        "package": str(package.path),
        "package_bytes": sum(entry.bytes for entry in package.manifest.files.values()),
        "load_seconds": load_seconds,
        "rounding": None if rounding is None else rounding.described(),
        "peak_memory_bytes": peak_memory_bytes(),
        "measurements": [asdict(measurement) for measurement in measurements],
    }


def _show(model: CausalLM, measurements: Sequence[Measurement], load_seconds: float) -> None:
    """Print a benchmark on stdout."""
    facts = _describe(model, measurements, load_seconds)
    prompt, new = measurements[0].prompt_tokens, measurements[0].new_tokens
    guesses = any(row.tokens_per_step > 1 for row in measurements)
    shown = table(
        f"{model.package.path}: {prompt} prompt tokens, {new} decode steps",
        "rows",
        "TTFT, ms",
        "prefill, tok/s",
        "step, ms",
        "p90, ms",
        "decode, tok/s",
        *(["tok/step"] if guesses else []),
    )
    for row in measurements:
        shown.add_row(
            str(row.rows),
            f"{row.first_token_ms:.1f}",
            f"{row.prefill_tokens_per_second:.0f}",
            f"{row.decode_ms:.2f}",
            f"{row.decode_ms_p90:.2f}",
            f"{row.tokens_per_second:.1f}",
            *([f"{row.tokens_per_step:.2f}"] if guesses else []),
        )
    screen = console()
    screen.print(shown)
    screen.print(
        f"loaded in {load_seconds:.2f} s; {format_size(facts['package_bytes'])} on disk, "
        f"{format_size(facts['peak_memory_bytes'])} of memory at the peak"
    )
    if facts["rounding"] is not None:
        screen.print(facts["rounding"])
