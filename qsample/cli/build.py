"""The commands that write files: `qsample export`, `compile`, `bundle` and `prefix`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    CHAT_FLAGS,
    FEATURE_FLAGS,
    Flag,
    Json,
    Lora,
    Overwrite,
    Provider,
    TextOnly,
    Threads,
    chat_options,
    check_jinja,
    feature_options,
    flags_of,
    given_of,
    is_package,
    open_exported,
    open_model,
    quieten,
    read_loras,
    read_text,
    with_flags,
)
from qsample.cli.quantized import note_divergence, quantization_in_words
from qsample.cli.terminal import console, format_size, note, progress, table
from qsample.compiler.options import CompileOptions
from qsample.progress import Stage, StageCost, metered, total

if TYPE_CHECKING:
    from qsample.models.model import PackagedModel

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

BUNDLE_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample bundle qwen3-all qwen3-cpu qwen3-cuda\n\n"
    "qsample generate qwen3-all -p 'In the beginning'"
)
PREFIX_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample prefix qwen3-cpu rules.prefix --system-file rules.txt\n\n"
    "qsample prefix qwen3-cpu book.prefix --prompt-text book.txt\n\n"
    "qsample serve qwen3-cpu --prefix rules.prefix"
)

_WIDTH_OF_A_FILE: Final = 120
WRITING_FLAGS: Final = {
    "overwrite": Flag(Overwrite, False),
    "timing": Flag(
        Annotated[bool, typer.Option("--timing", help="Show the cost of each stage, on stderr.")],
        False,
    ),
    "as_json": Flag(Json, False),
}


@with_flags({**FEATURE_FLAGS, **WRITING_FLAGS})
def export(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, checkpoint folder or GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the package to.")],
    dtype: Annotated[
        str, typer.Option(help="Of weights and cache: float32 or float16.")
    ] = "float32",
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|ID|none", help="Replaces the model's own; none takes token ids only."
        ),
    ] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="LoRA adapter to merge: a folder or hub id.")
    ] = None,
    text_only: TextOnly = False,
) -> None:
    """Export a Hugging Face model to a portable package: an ONNX graph with the sampler in it."""
    from qsample.models.auto_model import AutoModel
    from qsample.models.model import SourceModel
    from qsample.models.sources import holds_graph

    check_source(model, revision)
    if holds_graph(Path(model)):
        raise typer.BadParameter(
            f"{model} holds a decoder that is exported already; `qsample bake` gives it the sampler"
        )
    features = feature_options(ctx.params)

    def make(**writing: Any) -> PackagedModel:
        source = AutoModel.from_pretrained(
            model,
            **features,
            dtype=dtype,
            tokenizer=None if tokenizer == "none" else tokenizer,
            revision=revision,
            adapter=adapter,
            text_only=text_only,
        )
        assert isinstance(source, SourceModel)
        return source.export(out, **writing)

    write_package(make, out, ctx.params)


@with_flags({**flags_of(CompileOptions), **WRITING_FLAGS})
def compile(
    ctx: typer.Context,
    package: Annotated[
        str,
        typer.Argument(metavar="PACKAGE", help="A portable package, or a model to export first."),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write the device package to.")
    ],
    text_only: TextOnly = False,
) -> None:
    """Compile a package for a device: fused, its shapes bounded, tested there."""
    given = given_of(CompileOptions, ctx.params)
    texts = [
        read_text(Path(path), "--calibration-text") for path in given["calibration_text"] or ()
    ]
    options = CompileOptions(**{**given, "calibration_text": texts or None})
    opened = open_model(package, text_only=text_only)
    write_package(
        lambda **writing: opened.compile(out, options=options, **writing), out, ctx.params
    )
    if options.debug_dump is not None:
        _show_phases(Path(options.debug_dump))


def check_source(model: str, revision: str | None) -> None:
    """Raise typer.BadParameter if `model` is a package, or a local path with a `revision`."""
    if is_package(model):
        raise typer.BadParameter(
            f"{model} is a package already; `qsample compile` takes it from here"
        )
    if revision is not None and os.path.exists(model):
        raise typer.BadParameter(
            f"--revision belongs to a hub id, and {model} is on this machine; leave it out"
        )
    quieten(model)


def write_package(make: Callable[..., PackagedModel], out: Path, given: Mapping[str, Any]) -> None:
    """Make a package in `out` by `make(overwrite=..., progress=...)`. Stages and remarks go to stderr, its path or a
    JSON document to stdout. `given`: all parameters of the command, by name."""
    with progress(logged=True) as report, metered(report) as meter:
        report(Stage.STARTING, 0.0)  # the imports of the libraries
        package = make(overwrite=given["overwrite"], progress=meter).package
    size = sum(entry.bytes for entry in package.manifest.files.values())
    compilation = package.manifest.compilation
    if compilation is not None and compilation.quantization is not None:
        note(quantization_in_words(compilation.quantization))
        note_divergence(package)
    if given["timing"]:
        console(stderr=True, width_of_a_file=_WIDTH_OF_A_FILE).print(_timing_table(meter.costs))
    if not given["as_json"]:
        note(
            f"{package.manifest.kind} package of {package.manifest.source.model_id}, {format_size(size)}, written to"
        )
        print(out)
        return
    document = {
        "path": str(package.path),
        "kind": package.manifest.kind,
        "model": package.manifest.source.model_id,
        "bytes": size,
        "timing": [asdict(cost) for cost in meter.costs],
        "total": asdict(total(meter.costs)),
    }
    print(json.dumps(document, indent=2))


def _timing_table(costs: Sequence[StageCost]) -> Table:
    shown = table("Timing", "stage")
    for column in ("seconds", "CPU seconds", "read", "written", "memory", "anonymous"):
        shown.add_column(column, justify="right", no_wrap=True)
    for cost in (*costs, total(costs)):
        figures = (
            cost.bytes_read,
            cost.bytes_written,
            cost.peak_resident_bytes,
            cost.peak_anonymous_bytes,
        )
        sizes = ("?" if figure is None else format_size(figure) for figure in figures)
        shown.add_row(
            cost.stage,
            f"{cost.seconds:.1f}",
            f"{cost.cpu_seconds:.1f}",
            *sizes,
            end_section=cost is costs[-1],
        )
    return shown


def _show_phases(folder: Path) -> None:
    """Print on stderr the graph's nodes after each phase that is dumped in `folder`, and each phase's changes."""
    from qsample.compiler.debug_dump import read_counts

    shown = table(f"Phases, in {folder}", "file", "nodes", "operators")
    before: Counter[str] = Counter()
    for entry in read_counts(folder):
        operators = Counter(entry["operators"])
        changes = {name: operators[name] - before[name] for name in operators | before}
        listed = ", ".join(
            f"{name} {change:+}" for name, change in sorted(changes.items()) if change and before
        )
        shown.add_row(escape(entry["file"]), str(entry["nodes"]), escape(listed))
        before = operators
    console(stderr=True).print(shown)


def bundle(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the bundle.")],
    packages: Annotated[
        list[str], typer.Argument(metavar="PACKAGE...", help="A package for each target.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a bundle.")
    ] = False,
) -> None:
    """Put packages of a model for several devices into a folder; a program loads the variant for its device."""
    from qsample.ort.model_package import bundle as make

    variants = make(out, packages, overwrite=overwrite)
    typer.echo(str(out))
    note(f"variants: {', '.join(variants)}")


@with_flags(CHAT_FLAGS)
def prefix(
    ctx: typer.Context,
    package: Annotated[
        str, typer.Argument(metavar="PACKAGE", help="Package that is to use the file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file, in safetensors' format.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text that prompts begin with.")
    ] = None,
    prompt_text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with that text.")
    ] = None,
    system_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the system prompt.")
    ] = None,
    lora: Lora = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a file.")
    ] = False,
    provider: Provider = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Read the beginning of prompts, and save its keys and values: prompts that begin with it continue from there."""
    from qsample.runtime import load

    system: str | None = ctx.params["system"]
    given = {
        "--prompt": prompt,
        "--prompt-text": prompt_text,
        "--system": system,
        "--system-file": system_file,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise typer.BadParameter(
            f"{' and '.join(named) or 'no text'} given; give one of {', '.join(given)}"
        )
    options = chat_options(ctx.params)
    if options and named[0] in ("--prompt", "--prompt-text"):
        raise typer.BadParameter(
            f"the options of chat templates go with --system, and {named[0]} was given"
        )
    loras = read_loras(lora)
    if len(loras) > 1:
        raise typer.BadParameter(
            f"--lora was given {len(loras)} times; a prefix is of one adapter, or of none"
        )
    if out.exists() and not overwrite:
        raise typer.BadParameter(f"{out} exists; give --overwrite to replace it, or another name")
    if prompt_text is not None:
        prompt = read_text(prompt_text, "--prompt-text")
    if system_file is not None:
        system = read_text(system_file, "--system-file")
    inputs: Any = prompt
    if system is not None:
        check_jinja()
        inputs = [{"role": "system", "content": system}]
    opened = open_exported(package, provider)
    model = load(opened.package.path, provider, intra_op_num_threads=threads)
    adapter = None
    for adapter, folder in loras.items():
        model.load_adapter(adapter, folder)
    with progress() as report:
        tokens = model.save_prefix(inputs, out, adapter=adapter, progress=report, **options)
    size = out.stat().st_size
    if as_json:
        print(json.dumps({"prefix": str(out), "tokens": tokens, "bytes": size}))
    else:
        typer.echo(str(out))
    note(f"{tokens} tokens, {format_size(size)}")


EXPORT: Final = CliCommand(export, Panel.BUILD, EXPORT_EXAMPLES)
COMPILE: Final = CliCommand(compile, Panel.BUILD, COMPILE_EXAMPLES)
BUNDLE: Final = CliCommand(bundle, Panel.BUILD, BUNDLE_EXAMPLES)
PREFIX: Final = CliCommand(prefix, Panel.BUILD, PREFIX_EXAMPLES)
