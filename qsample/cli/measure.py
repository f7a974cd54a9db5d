"""`qsample bench`: the speed of a package."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    LOAD_FLAGS,
    SAMPLING_FLAGS,
    Json,
    load_given,
    open_given,
    with_flags,
)
from qsample.cli.terminal import console, format_size, progress, table
from qsample.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from qsample.runtime import CausalLM
    from qsample.runtime.bench import Measurement

BENCH_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample bench qwen3-cpu --batch 1 --batch 8 --prompt-tokens 512\n\n"
    "qsample bench qwen3-cpu --temperature 0.8 --top-p 0.9 --json\n\n"
    "qsample bench qwen-vl-cpu --image 1024x768"
)
_SAMPLING: Final = {  # with their defaults
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "prompt_lookup_num_tokens": 0,
}


@with_flags(
    {
        **{name: SAMPLING_FLAGS[name]._replace(default=value) for name, value in _SAMPLING.items()},
        **LOAD_FLAGS,
    }
)
def bench(
    ctx: typer.Context,
    package: Annotated[
        str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")
    ],
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows; may be repeated. (default: 1)")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps to time.")] = 64,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Generations to time, after a warm-up.")
    ] = 3,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTHxHEIGHT", help="Put a random image before every prompt, and time it."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time a package: first token, prefill, decode steps, memory."""
    from qsample.runtime.bench import measure

    size = None
    if image is not None:
        found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", image)
        if found is None:
            raise typer.BadParameter(
                f"--image is {image}; give a width and a height in pixels, such as 640x480"
            )
        size = int(found[1]), int(found[2])
    try:
        params = SamplingParams(**{name: ctx.params[name] for name in _SAMPLING})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = open_given(package, ctx.params)  # stays in the cache as long as this
    start = time.perf_counter()
    model = load_given(opened, ctx.params)
    load_seconds = time.perf_counter() - start
    measurements = []
    with progress() as report:
        for index, rows in enumerate(batches := batch or [1]):
            report(f"{rows} rows", index / len(batches))
            measurements.append(
                measure(
                    model,
                    rows,
                    prompt_tokens,
                    new_tokens,
                    params,
                    repetitions,
                    [*model.adapters.values()],
                    size,
                )
            )
    if as_json:
        typer.echo(json.dumps(_describe_bench(model, measurements, load_seconds), indent=2))
    else:
        _show_bench(model, measurements, load_seconds)


def _describe_bench(
    model: CausalLM, measurements: Sequence[Measurement], load_seconds: float
) -> dict[str, Any]:
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


def _show_bench(model: CausalLM, measurements: Sequence[Measurement], load_seconds: float) -> None:
    """Print a benchmark on stdout."""
    facts = _describe_bench(model, measurements, load_seconds)
    prompt, new = measurements[0].prompt_tokens, measurements[0].new_tokens
    images = measurements[0].image_tokens
    of_image = f", {images} of an image" if images else ""
    guesses = any(row.tokens_per_step > 1 for row in measurements)
    shown = table(
        f"{model.package.path}: {prompt} prompt tokens{of_image}, {new} decode steps",
        "rows",
        "TTFT, ms",
        "prefill, tok/s",
        "step, ms",
        "p90, ms",
        "decode, tok/s",
        *(["tok/step"] if guesses else []),
        *(["vision, ms"] if images else []),
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
            *([f"{row.vision_ms:.1f}"] if images else []),
        )
    screen = console()
    screen.print(shown)
    screen.print(
        f"loaded in {load_seconds:.2f} s; {format_size(facts['package_bytes'])} on disk, "
        f"{format_size(facts['peak_memory_bytes'])} of memory at the peak"
    )
    if facts["rounding"] is not None:
        screen.print(facts["rounding"])


BENCH: Final = CliCommand(bench, Panel.MEASURE, BENCH_EXAMPLES)
