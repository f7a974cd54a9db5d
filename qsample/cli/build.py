"""`qsample export`, `qsample compile` and `qsample bake`: their options, and the calls that they make."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from qsample.cli.common import (
    FEATURE_FLAGS,
    Json,
    Overwrite,
    feature_options,
    flags_of,
    given_of,
    is_package,
    open_model,
    quieten,
    read_text,
    with_flags,
)
from qsample.cli.inspect import figures_in_words, quantization_in_words
from qsample.cli.terminal import console, format_size, note, progress, table
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Features
from qsample.package.package import Package
from qsample.progress import Meter, Stage, StageCost, metered, total

EXPORT_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample export Qwen/Qwen3-0.6B qwen3\n\n"
    "qsample export ./my-checkpoint out --dtype float16 --for-serving\n\n"
    "qsample export ./my-checkpoint out --filter xtc --filter dry --filter-order llama.cpp"
)
COMPILE_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample compile qwen3 qwen3-cpu --provider cpu --ctx-len 2048\n\n"
    "qsample compile qwen3 qwen3-cpu --batch-size 1 --overwrite"
)

BAKE_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample bake onnx-community/Qwen3-0.6B-ONNX qwen3 --file onnx/model_q4.onnx\n\n"
    "qsample bake ./genai-folder out --logprobs"
)

Timing = Annotated[bool, typer.Option("--timing", help="Show the cost of each stage, on stderr.")]

_WIDTH_OF_A_FILE: Final = 120


@with_flags(FEATURE_FLAGS)
def export(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or checkpoint folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the package to.")],
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32 or float16.")] = "float32",
    tokenizer: Annotated[
        str, typer.Option(metavar="FOLDER|ID|none", help="Replaces the model's own; none takes token ids only.")
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter to merge: a folder or hub id.")] = None,
    overwrite: Overwrite = False,
    timing: Timing = False,
    as_json: Json = False,
) -> None:
    """Export a Hugging Face model to a portable package: an ONNX graph with the sampler in it."""
    from qsample.models.auto_model import AutoModelForCausalLM, is_decoder
    from qsample.models.model import SourceModel

    if is_package(model):
        raise typer.BadParameter(f"{model} is a package already; `qsample compile` takes it from here")
    if is_decoder(Path(model)):
        raise typer.BadParameter(
            f"{model} holds a decoder that is exported already; `qsample bake` gives it the sampler"
        )
    _check_revision(model, revision)
    quieten(model)
    features = feature_options(ctx.params)
    with _metered_progress() as meter:
        source = AutoModelForCausalLM.from_pretrained(
            model,
            **features,
            dtype=dtype,
            tokenizer=None if tokenizer == "none" else tokenizer,
            revision=revision,
            adapter=adapter,
        )
        assert isinstance(source, SourceModel)
        exported = source.export(out, overwrite=overwrite, progress=meter)
    _written(exported.package, out, meter.costs, timing, as_json)


@with_flags(flags_of(CompileOptions))
def compile(
    ctx: typer.Context,
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="A portable package, or a model to export first.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the device package to.")],
    overwrite: Overwrite = False,
    timing: Timing = False,
    as_json: Json = False,
) -> None:
    """Compile a package for a device: fused, its shapes bounded, tested there."""
    given = given_of(CompileOptions, ctx.params)
    texts = [read_text(Path(path), "--calibration-text") for path in given["calibration_text"] or ()]
    options = CompileOptions(**{**given, "calibration_text": texts or None})
    with _metered_progress() as meter:
        compiled = open_model(package).compile(out, options=options, overwrite=overwrite, progress=meter)
    if options.debug_dump is not None:
        _show_phases(Path(options.debug_dump))
    _written(compiled.package, out, meter.costs, timing, as_json)


@with_flags(FEATURE_FLAGS)
def bake(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An .onnx file, its folder, or a hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the package to.")],
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chooses from several: onnx/model_q4.onnx, for instance.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(metavar="FOLDER|none", help="Replaces the file's own; none takes token ids only.")
    ] = "auto",
    rope: Annotated[
        str | None, typer.Option(metavar="short|long", help="Rotary table to keep, of a file that has two.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="ID|FOLDER", help="Compare with this checkpoint in transformers, too.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    overwrite: Overwrite = False,
    timing: Timing = False,
    as_json: Json = False,
) -> None:
    """Give the sampler to a decoder file of another exporter (onnxruntime-genai, onnx-community, optimum)."""
    from qsample.models.auto_model import bake as bake_file

    if is_package(model):
        raise typer.BadParameter(f"{model} is a package already; `qsample compile` takes it from here")
    _check_revision(model, revision)
    quieten(model)
    features = Features(**given_of(Features, feature_options(ctx.params)))
    with _metered_progress() as meter:
        baked = bake_file(
            model,
            out,
            file=file,
            features=features.for_serving() if ctx.params["for_serving"] else features,
            tokenizer=None if tokenizer == "none" else tokenizer,
            rope=rope,
            reference=reference,
            revision=revision,
            overwrite=overwrite,
            progress=meter,
        )
    _written(baked.package, out, meter.costs, timing, as_json)


def _check_revision(model: str, revision: str | None) -> None:
    if revision is not None and os.path.exists(model):
        raise typer.BadParameter(f"--revision belongs to a hub id, and {model} is on this machine; leave it out")


@contextmanager
def _metered_progress() -> Iterator[Meter]:
    """A progress bar or a line a stage, and the costs of the stages; the first has the imports of the libraries."""
    with progress(logged=True) as report, metered(report) as meter:
        report(Stage.STARTING, 0.0)
        yield meter


def _written(package: Package, out: Path, costs: Sequence[StageCost], timing: bool, as_json: bool) -> None:
    """Print remarks about a new package on stderr, and on stdout its path as the user gave it, or a JSON document."""
    size = sum(entry.bytes for entry in package.manifest.files.values())
    compilation = package.manifest.compilation
    if compilation is not None and compilation.quantization is not None:
        note(quantization_in_words(compilation.quantization))
        note(f"divergence from the float model: {figures_in_words(compilation.quantization['divergence'])}")
    if timing:
        console(stderr=True, width_of_a_file=_WIDTH_OF_A_FILE).print(_timing_table(costs))
    name = f"{package.manifest.kind} package of {package.manifest.source.model_id}"
    if not as_json:
        note(f"{name}, {format_size(size)}, written to")
        print(out)
        return
    document = {
        "path": str(package.path),
        "kind": package.manifest.kind,
        "model": package.manifest.source.model_id,
        "bytes": size,
        "timing": [asdict(cost) for cost in costs],
        "total": asdict(total(costs)),
    }
    print(json.dumps(document, indent=2))


def _timing_table(costs: Sequence[StageCost]) -> Table:
    shown = table("Timing", "stage")
    for column in ("seconds", "CPU seconds", "read", "written", "memory", "anonymous"):
        shown.add_column(column, justify="right", no_wrap=True)
    for cost in (*costs, total(costs)):
        figures = cost.bytes_read, cost.bytes_written, cost.peak_resident_bytes, cost.peak_anonymous_bytes
        sizes = ("?" if figure is None else format_size(figure) for figure in figures)
        shown.add_row(
            cost.stage, f"{cost.seconds:.1f}", f"{cost.cpu_seconds:.1f}", *sizes, end_section=cost is costs[-1]
        )
    return shown


def _show_phases(folder: Path) -> None:
    """Print on stderr the nodes of the graph after each phase that is dumped in `folder`, and the changes of each."""
    from qsample.compiler.debug_dump import read_counts

    shown = table(f"Phases, in {folder}", "file", "nodes", "operators")
    before: Counter[str] = Counter()
    for entry in read_counts(folder):
        operators = Counter(entry["operators"])
        changes = {name: operators[name] - before[name] for name in operators | before}
        listed = ", ".join(f"{name} {change:+}" for name, change in sorted(changes.items()) if change and before)
        shown.add_row(escape(entry["file"]), str(entry["nodes"]), escape(listed))
        before = operators
    console(stderr=True).print(shown)
