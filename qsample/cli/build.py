"""The commands that write files: `qsample export`, `compile`, `bundle` and `prefix`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer
from rich.markup import escape
from rich.table import Table

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    FeatureOptions,
    Json,
    Lora,
    Overwrite,
    Provider,
    TemplateOptions,
    TextOnly,
    Threads,
    check_jinja,
    read_loras,
    read_text,
    system_message,
)
from qsample.cli.opening import CompileChoices, is_package, open_exported, open_model, quieten
from qsample.cli.option_groups import FieldFlags, with_option_groups
from qsample.cli.quantized import note_divergence, quantization_in_words
from qsample.cli.terminal import console, format_size, note, progress, table
from qsample.compiler.options import CompileOptions
from qsample.progress import Progress, Stage, StageCost, metered, total

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a package is written, and how the result is printed."""

    overwrite: Overwrite = False
    timing: Annotated[
        bool, typer.Option("--timing", help="Show the cost of each stage, on stderr.")
    ] = False
    as_json: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """The parts of a checkpoint to read, and how they are read."""

    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32 or float16.")] = (
        "float32"
    )
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|ID|none", help="Replaces the model's own; none takes token ids only."
        ),
    ] = "auto"
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None
    adapter: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|ID", help="LoRA adapter to merge: a folder or hub id."),
    ] = None
    text_only: TextOnly = False


@with_option_groups
def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, checkpoint folder or GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the package to.")],
    *,
    checkpoint: CheckpointOptions,
    features: FeatureOptions,
    writing: WriteOptions,
) -> None:
    """Export a Hugging Face model to a portable package: an ONNX graph with the sampler in it."""
    from qsample.models.auto_model import AutoModel
    from qsample.models.model import SourceModel
    from qsample.models.sources import holds_graph

    check_source(model, checkpoint.revision)
    if holds_graph(Path(model)):
        raise typer.BadParameter(
            f"{model} holds a decoder that is exported already; `qsample bake` gives it the sampler"
        )
    wanted_features = features.features()

    def make(*, overwrite: bool, progress: Progress) -> PackagedModel:
        source = AutoModel.from_pretrained(
            model,
            dtype=checkpoint.dtype,
            tokenizer=None if checkpoint.tokenizer == "none" else checkpoint.tokenizer,
            revision=checkpoint.revision,
            adapter=checkpoint.adapter,
            text_only=checkpoint.text_only,
        )
        assert isinstance(source, SourceModel)
        source.features = wanted_features
        return source.export(out, overwrite=overwrite, progress=progress)

    write_package(make, out, writing)


@with_option_groups
def compile(
    package: Annotated[
        str,
        typer.Argument(metavar="PACKAGE", help="A portable package, or a model to export first."),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to write the device package to.")
    ],
    text_only: TextOnly = False,
    *,
    values: Annotated[dict[str, Any], FieldFlags(CompileOptions)],
    writing: WriteOptions,
) -> None:
    """Compile a package for a device: fused, its shapes bounded, tested there."""
    paths = values["calibration_text"] or ()
    texts = [read_text(Path(path), "--calibration-text") for path in paths]
    options = CompileOptions(**{**values, "calibration_text": texts or None})
    opened = open_model(package, text_only=text_only)

    def make(*, overwrite: bool, progress: Progress) -> PackagedModel:
        return opened.compile(out, options=options, overwrite=overwrite, progress=progress)

    write_package(make, out, writing)
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


class MakePackage(Protocol):
    """A function that writes a package, and returns its model."""

    def __call__(self, *, overwrite: bool, progress: Progress) -> PackagedModel: ...


def write_package(make: MakePackage, out: Path, writing: WriteOptions) -> None:
    """Make a package. Stages and remarks go to stderr, its path or a JSON document to stdout.

    Args:
        make: writes the package into `out`, with the progress that is shown.
        out: the folder of the package.
    """
    with progress(logged=True) as report, metered(report) as meter:
        # The first stage is the import of the libraries.
        report(Stage.STARTING, 0.0)
        package = make(overwrite=writing.overwrite, progress=meter).package
    size = sum(entry.bytes for entry in package.manifest.files.values())
    compilation = package.manifest.compilation
    if compilation is not None and compilation.quantization is not None:
        note(quantization_in_words(compilation.quantization))
        note_divergence(package)
    if writing.timing:
        console(stderr=True, width_of_a_file=_WIDTH_OF_A_FILE).print(_timing_table(meter.costs))
    if not writing.as_json:
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
    """The costs of the stages, and their total."""
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
    """Print on stderr the number of nodes after each phase of a compilation, and its changes.

    Args:
        folder: the folder of --debug-dump.
    """
    from qsample.compiler.debug_dump import read_counts

    shown = table(f"Phases, in {folder}", "file", "nodes", "operators")
    before: Counter[str] = Counter()
    for entry in read_counts(folder):
        operators = Counter(entry["operators"])
        changes: list[str] = []
        if before:
            for name in sorted(operators | before):
                change = operators[name] - before[name]
                if change != 0:
                    changes.append(f"{name} {change:+}")
        shown.add_row(escape(entry["file"]), str(entry["nodes"]), escape(", ".join(changes)))
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
    """Put packages of a model for several devices into a folder; a program loads the variant for
    its device."""
    from qsample.ort.model_package import bundle as make

    variants = make(out, packages, overwrite=overwrite)
    typer.echo(str(out))
    note(f"variants: {', '.join(variants)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """The text of a prefix, or the file with it."""

    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text that prompts begin with.")
    ] = None
    prompt_text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with that text.")
    ] = None
    system_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the system prompt.")
    ] = None

    def inputs(self, template: TemplateOptions) -> str | list[dict[str, Any]]:
        """The inputs of `save_prefix`: a text, or a conversation that is only a system prompt.

        Args:
            template: the options of chat templates, which have --system.

        Raises:
            typer.BadParameter: there is no text, or more than one, or a text that is not a system
                prompt has options of chat templates.
        """
        self._check(template)
        if self.prompt is not None:
            return self.prompt
        if self.prompt_text is not None:
            return read_text(self.prompt_text, "--prompt-text")
        system = template.system
        if self.system_file is not None:
            system = read_text(self.system_file, "--system-file")
        check_jinja()
        return system_message(system)

    def _check(self, template: TemplateOptions) -> None:
        given = {
            "--prompt": self.prompt,
            "--prompt-text": self.prompt_text,
            "--system": template.system,
            "--system-file": self.system_file,
        }
        flags = [flag for flag, value in given.items() if value is not None]
        if len(flags) != 1:
            raise typer.BadParameter(
                f"{' and '.join(flags) or 'no text'} given; give one of {', '.join(given)}"
            )
        if flags[0] in ("--prompt", "--prompt-text") and template.arguments():
            raise typer.BadParameter(
                f"the options of chat templates go with --system, and {flags[0]} was given"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRunOptions:
    """How the package runs that reads a prefix."""

    provider: Provider = None
    threads: Threads = None


@with_option_groups
def prefix(
    package: Annotated[
        str, typer.Argument(metavar="PACKAGE", help="Package that is to use the file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file, in safetensors' format.")],
    *,
    text: PrefixOptions,
    lora: Lora = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT if it is a file.")
    ] = False,
    running: PrefixRunOptions,
    as_json: Json = False,
    template: TemplateOptions,
) -> None:
    """Read the beginning of prompts, and save its keys and values: prompts that begin with it
    continue from there."""
    from qsample.runtime import load

    loras = read_loras(lora)
    if len(loras) > 1:
        raise typer.BadParameter(
            f"--lora was given {len(loras)} times; a prefix is of one adapter, or of none"
        )
    if out.exists() and not overwrite:
        raise typer.BadParameter(f"{out} exists; give --overwrite to replace it, or another name")
    inputs = text.inputs(template)
    opened = open_exported(package, CompileChoices(provider=running.provider))
    model = load(opened.package.path, running.provider, intra_op_num_threads=running.threads)
    adapter = None
    for adapter, folder in loras.items():
        model.load_adapter(adapter, folder)
    with progress() as report:
        tokens = model.save_prefix(
            inputs, out, adapter=adapter, progress=report, **template.arguments()
        )
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
