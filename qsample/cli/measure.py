"""`qsample bench`: the speed of a package."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import SAMPLING_PANELS, Json
from qsample.cli.opening import LoadOptions
from qsample.cli.option_groups import FieldFlags, with_option_groups
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
# The sampling options of a benchmark. It is greedy by default, and does not read the model's
# generation_config.
_SAMPLING_DEFAULTS: Final = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "prompt_lookup_num_tokens": 0,
}
_IMAGE_SIZE: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The prompts of a benchmark, the tokens to generate, and the number of repetitions."""

    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows; may be repeated. (default: 1)")
    ] = None
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 64
    new_tokens: Annotated[int, typer.Option(min=1, help="Decode steps to time.")] = 64
    repetitions: Annotated[
        int, typer.Option(min=1, help="Generations to time, after a warm-up.")
    ] = 3
    image: Annotated[
        str | None,
        typer.Option(
            metavar="WIDTHxHEIGHT", help="Put a random image before every prompt, and time it."
        ),
    ] = None

    def image_size(self) -> tuple[int, int] | None:
        """Width and height of the image in pixels. Raises typer.BadParameter for anything else."""
        if self.image is None:
            return None
        found = _IMAGE_SIZE.fullmatch(self.image)
        if found is None:
            raise typer.BadParameter(
                f"--image is {self.image}; give a width and a height in pixels, such as 640x480"
            )
        return int(found[1]), int(found[2])


@with_option_groups
def bench(
    package: Annotated[
        str, typer.Argument(metavar="PACKAGE_OR_MODEL", help="Package, checkpoint or hub id.")
    ],
    *,
    workload: WorkloadOptions,
    as_json: Json = False,
    sampling: Annotated[
        dict[str, Any],
        FieldFlags(SamplingParams, panels=SAMPLING_PANELS, unset=True, defaults=_SAMPLING_DEFAULTS),
    ],
    loading: LoadOptions,
) -> None:
    """Time a package: first token, prefill, decode steps, memory."""
    from qsample.runtime.bench import measure

    image_size = workload.image_size()
    try:
        params = SamplingParams(**sampling)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = loading.open(package)
    start = time.perf_counter()
    model = loading.load(opened)
    load_seconds = time.perf_counter() - start
    batches = workload.batch or [1]
    measurements: list[Measurement] = []
    with progress() as report:
        for index, rows in enumerate(batches):
            report(f"{rows} rows", index / len(batches))
            measurement = measure(
                model,
                rows,
                workload.prompt_tokens,
                workload.new_tokens,
                params,
                workload.repetitions,
                list(model.adapters.values()),
                image_size,
            )
            measurements.append(measurement)
    if as_json:
        typer.echo(json.dumps(_describe_bench(model, measurements, load_seconds), indent=2))
    else:
        _show_bench(model, measurements, load_seconds)


def _describe_bench(
    model: CausalLM, measurements: Sequence[Measurement], load_seconds: float
) -> dict[str, Any]:
    """The document for --json; `runtime.bench` has the meaning of the measurements."""
    from qsample.runtime.bench import peak_memory_bytes

    package = model.package
    rounding = model.sessions.rounding
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
    first = measurements[0]
    of_image = f", {first.image_tokens} of an image" if first.image_tokens > 0 else ""
    guesses = any(row.tokens_per_step > 1 for row in measurements)
    columns = ["rows", "TTFT, ms", "prefill, tok/s", "step, ms", "p90, ms", "decode, tok/s"]
    if guesses:
        columns.append("tok/step")
    if first.image_tokens > 0:
        columns.append("vision, ms")
    shown = table(
        f"{model.package.path}: {first.prompt_tokens} prompt tokens{of_image}, "
        f"{first.new_tokens} decode steps",
        *columns,
    )
    for row in measurements:
        cells = [
            str(row.rows),
            f"{row.first_token_ms:.1f}",
            f"{row.prefill_tokens_per_second:.0f}",
            f"{row.decode_ms:.2f}",
            f"{row.decode_ms_p90:.2f}",
            f"{row.tokens_per_second:.1f}",
        ]
        if guesses:
            cells.append(f"{row.tokens_per_step:.2f}")
        if first.image_tokens > 0:
            cells.append(f"{row.vision_ms:.1f}")
        shown.add_row(*cells)
    screen = console()
    screen.print(shown)
    screen.print(
        f"loaded in {load_seconds:.2f} s; {format_size(facts['package_bytes'])} on disk, "
        f"{format_size(facts['peak_memory_bytes'])} of memory at the peak"
    )
    if facts["rounding"] is not None:
        screen.print(facts["rounding"])


BENCH: Final = CliCommand(bench, Panel.MEASURE, BENCH_EXAMPLES)
