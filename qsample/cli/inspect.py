"""`qsample inspect`, and `qsample pull` and `qsample cache` for the packages of models that were given directly."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from qsample.cli.commands import CliCommand, Panel
from qsample.cli.common import (
    CtxLen,
    Json,
    Preset,
    Provider,
    TextOnly,
    Weights,
)
from qsample.cli.help import Command
from qsample.cli.opening import CompileChoices, FeatureNeeds, is_package, open_exported
from qsample.cli.quantized import divergence_in_words, quantization_in_words, table_of_bits
from qsample.cli.terminal import console, counted, format_size, note, table
from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import AXIS_MEANINGS, CAPACITY, TensorSpec
from qsample.disk.protobuf import fields
from qsample.errors import QsampleError
from qsample.package.manifest import GraphPart, Manifest
from qsample.package.package import Package, read_package
from qsample.package.signature import signer_of

if TYPE_CHECKING:
    from qsample.models.cache import Entry
    from qsample.models.sources import SourceDescription

INSPECT_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample inspect qwen3-cpu\n\n"
    "qsample inspect qwen3-cpu --json | jq .graphs"
)
PULL_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "qsample pull Qwen/Qwen3-0.6B --weights int4\n\n"
    "qsample chat Qwen/Qwen3-0.6B --weights int4"
)
_INPUTS_SHOWN: Final = 6
_GRAPH, _NODE, _TYPE = 7, 1, 4  # fields of onnx.proto: a model's graph, its nodes, their operators
_SIZES: Final = ((640, 480), (1920, 1080))  # of images, for the number of their tokens
_WIDTH_OF_A_FILE: Final = 120
_WIDTH_OF_A_LIST: Final = 160

cache_app = typer.Typer(
    help="The models that were given directly, compiled: list them, or free their space."
)


def inspect(
    package: Annotated[
        Path,
        typer.Argument(
            metavar="PACKAGE",
            help="Folder of a package or a bundle; a GGUF file; or decoder files of another exporter.",
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare every file with its sha256.")
    ] = True,
    bits: Annotated[
        bool,
        typer.Option(
            "--bits", help="Print the bits of each matrix, as a table that compile --weights takes."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a package: its graphs' inputs, states and outputs, its source, and the devices of its operators.

    Of a bundle, it shows the packages; of a GGUF file and of decoder files of another exporter, what they are and
    whether they can become a package.
    """
    from qsample.models.sources import describe_source
    from qsample.ort.model_package import variants_in

    if variants := variants_in(package):
        _show_bundle(
            package,
            {name: read_package(path, verify=verify) for name, path in variants.items()},
            as_json,
        )
        return
    if not is_package(package):
        description = describe_source(package)
        if description is not None:
            _show_source(description, as_json)
            return
    opened = read_package(package, verify=verify)
    if bits:
        typer.echo(json.dumps(table_of_bits(opened), indent=2))
    elif as_json:
        typer.echo(json.dumps(describe(opened), indent=2))
    else:
        show(opened)


def _show_bundle(path: Path, variants: Mapping[str, Package], as_json: bool) -> None:
    if as_json:
        described = {name: describe(package) for name, package in variants.items()}
        typer.echo(json.dumps({"path": str(path.resolve()), "variants": described}, indent=2))
        return
    shown = table(f"{escape(str(path))}, a bundle", "variant", "package", "model", "size")
    for name, package in variants.items():
        size = format_size(sum(entry.bytes for entry in package.manifest.files.values()))
        place = package.path.relative_to(path.resolve()).as_posix()
        shown.add_row(name, escape(place), escape(package.manifest.source.model_id), size)
    console(width_of_a_file=_WIDTH_OF_A_FILE).print(shown)
    note(
        f"`qsample inspect {path}/NAME` shows a package; commands load the variant of this machine, or of --provider"
    )


def _show_source(description: SourceDescription, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(description.document, indent=2))
        return
    screen = console(width_of_a_file=_WIDTH_OF_A_FILE)
    for title, facts in description.tables.items():
        rows = {name: _in_words(fact) for name, fact in facts.items()}
        screen.print(_facts_table(title, rows))


def _in_words(fact: str | Sequence[str] | Mapping[str, int]) -> str:
    """A fact of a `SourceDescription` as text."""
    if isinstance(fact, str):
        return fact
    return _counts(fact) if isinstance(fact, Mapping) else _some(fact)


def _some(names: Sequence[str]) -> str:
    """The first names, and the number of the rest."""
    rest = len(names) - _INPUTS_SHOWN
    return ", ".join(names[:_INPUTS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _facts_table(title: str, rows: Mapping[str, str]) -> Table:
    """A line for each row that has a text."""
    facts = Table(
        title=escape(title), show_header=False, box=None, title_justify="left", title_style="bold"
    )
    for name, value in rows.items():
        if value:
            facts.add_row(name, escape(value))
    return facts


def describe(package: Package) -> dict[str, Any]:
    """The package as a JSON-ready dict: the manifest, and every graph's tensors with dtype, axes and meaning."""
    return {
        "path": str(package.path),
        "graphs": {
            name: _describe_graph(graph) for name, graph in package.interface.graphs.items()
        },
        "axes": {**AXIS_MEANINGS, **_fixed_axes(package)},
        "rounding": _rounding(package),
        **json.loads(package.manifest.to_json()),
    }


def _describe_graph(graph: GraphSpec) -> dict[str, Any]:
    """Inputs, states (each with the output that holds its next value) and outputs of a graph."""

    def entry(spec: TensorSpec) -> dict[str, Any]:
        off = {} if spec.off is None else {"off": spec.off}
        return {
            "name": spec.name,
            "dtype": spec.dtype,
            "axes": list(spec.axes),
            "meaning": spec.meaning,
            **off,
        }

    return {
        "inputs": [entry(spec) for spec in graph.inputs],
        "states": [{**entry(spec), "next": graph.retained.get(spec.name)} for spec in graph.states],
        "outputs": [entry(spec) for spec in graph.outputs],
    }


def _fixed_axes(package: Package) -> dict[str, int]:
    """The named axes whose size this package fixes."""
    sizes = {name: size for name, size in package.interface.sizes.items() if size}
    if package.manifest.compilation:
        sizes[CAPACITY] = package.manifest.compilation.ctx_len
    return sizes


def show(package: Package) -> None:
    """Print a package on stdout: facts, graphs, placement, files."""
    screen = console(width_of_a_file=_WIDTH_OF_A_FILE)
    screen.print(_facts_table(str(package.path), _facts(package)))
    for name, graph in package.interface.graphs.items():
        screen.print(_graph_table(name, graph))
    sizes = _fixed_axes(package)
    axes = (f"{axis} = {sizes.get(axis, meaning)}" for axis, meaning in AXIS_MEANINGS.items())
    screen.print("[bold]Axes[/bold]\n" + "; ".join(axes) + "\n")
    if compilation := package.manifest.compilation:
        placement = table("Placement", "execution provider", "nodes", "operators")
        for provider, operators in compilation.placement.items():
            placement.add_row(
                escape(provider), str(sum(operators.values())), escape(_counts(operators))
            )
        screen.print(placement)
    files = table("Files", "file", "size", "sha256")
    for name, entry in sorted(package.manifest.files.items()):
        files.add_row(escape(name), format_size(entry.bytes), escape(f"{entry.sha256[:16]}…"))
    screen.print(files)


def _counts(operators: Mapping[str, int]) -> str:
    """The number of each operator, the most frequent first."""
    ordered = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered)


def _facts(package: Package) -> dict[str, str]:
    manifest, interface, compilation = (
        package.manifest,
        package.interface,
        package.manifest.compilation,
    )
    source, layers = manifest.source, len(interface.key_values)
    facts = {
        "kind": manifest.kind,
        "source": source.model_id + (f" @ {source.revision}" if source.revision else ""),
        "architecture": f"{source.architecture} ({source.model_type}), {layers} layers, vocabulary "
        f"{interface.vocab_size}",
        "made from": ", ".join(
            f"{name} (sha256 {digest[:16]}…)" for name, digest in sorted(source.files.items())
        ),
        "dtype": interface.dtype,
        "contract": manifest.contract_version,
        "features": ", ".join(
            _feature(name, value) for name, value in asdict(interface.features).items() if value
        ),
        "end tokens": ", ".join(map(str, manifest.token_ids.eos)) or "none",
        "longest context": str(manifest.max_position_embeddings or "unlimited"),
        "made with": _pairs(manifest.versions),
        "parity": figures_in_words(manifest.parity or {}),
        "signature": str(signer_of(package.path) or "none"),
    }
    if interface.image is not None:
        facts["images"] = _images(package)
    if packed := manifest.packed_weights:
        facts["packed"] = _or_raw(_packed, packed)
    if compilation:
        rows = compilation.batch_size or "any number of"
        facts["compiled for"] = (
            f"{compilation.provider} ({', '.join(compilation.execution_providers)})"
        )
        facts["compiled with"] = ", ".join(
            filter(None, (_pairs(compilation.versions), _pairs(compilation.options)))
        )
        facts["rows, context"] = f"{rows} rows, {compilation.ctx_len} tokens"
        facts["devices"] = "; ".join(
            _part(number, part) for number, part in enumerate(compilation.parts)
        )
        facts["self-test"] = figures_in_words(compilation.self_test)
        if quantization := compilation.quantization:
            facts["quantized"] = _or_raw(quantization_in_words, quantization)
            facts["divergence"] = divergence_in_words(package)
    return {**facts, "rows here": _rounding(package)}


def _images(package: Package) -> str:
    """The family of image processing, what stands for an image in a prompt, tokens, and vision.onnx's operators."""
    from qsample.images.processing import ImageProcessor

    try:
        processor, found = ImageProcessor.of(package), package.manifest.images
        if processor is None or found is None:
            return "missing in the manifest; export the package again"
        tokens = [
            f"{processor.layout(*size).placeholders} for {size[0]} x {size[1]} pixels"
            for size in _SIZES
        ]
        operators = _counts(_operators(package.path / "vision.onnx"))
    except (
        OSError,
        QsampleError,
        ValueError,
    ) as error:  # a damaged package is shown as far as it can be read
        return str(error)
    return f"{found['family']}, {processor.placeholder}; tokens: {', '.join(tokens)}; vision: {operators}"


def _operators(path: Path) -> Mapping[str, int]:
    """The number of each operator of an ONNX file, without the package onnx. Raises ValueError if it is none."""
    data = path.read_bytes()

    def parts(place: range, number: int) -> Iterator[range]:
        return (
            part
            for name, part in fields(data, place.start, place.stop)
            if name == number and isinstance(part, range)
        )

    nodes = (node for graph in parts(range(len(data)), _GRAPH) for node in parts(graph, _NODE))
    return Counter(
        str(data[name.start : name.stop], "utf-8", "replace")
        for node in nodes
        for name in parts(node, _TYPE)
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items()))


def _part(number: int, part: GraphPart) -> str:
    first, end = (*part.layers, 0, 0)[:2]
    return f"{number}: layers {first} to {end - 1}, {format_size(part.weight_bytes)} of weights"


def _rounding(package: Package) -> str:
    """How this machine's kernels round the rows of a package for the CPU, in words; empty for another device."""
    from qsample.ort.providers import CPU
    from qsample.ort.rounding import measured

    compilation = package.manifest.compilation
    if compilation is not None and compilation.execution_providers[0] != CPU:
        return ""
    try:
        return measured(package.path / "decoder.onnx").described()
    except QsampleError:  # a damaged graph is shown as far as it can be read
        return ""


def _feature(name: str, value: Any) -> str:
    return (
        name
        if value is True
        else f"{name} {value if isinstance(value, str | int) else ' '.join(value)}"
    )


def _or_raw(describe: Callable[[Any], str], figures: Any) -> str:
    """Figures in words; unexpected figures of a manifest as they are."""
    try:
        return describe(figures)
    except (LookupError, TypeError, ValueError, AttributeError):
        return f"{figures!r:.200}"


def _packed(figures: Any) -> str:
    bits, sizes = (" and ".join(map(str, figures[name])) for name in ("bits", "block_sizes"))
    kind = f"{figures['type']}, " if "type" in figures else ""
    return f"{figures['matrices']} matrices of the checkpoint, {kind}{bits} bits, blocks of {sizes}"


def figures_in_words(figures: Any) -> str:
    """Named figures of the manifest, such as "kl 0.0123, tokens 4096"."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
        if not isinstance(value, list)  # the sizes of the images that were compared
    )


def _graph_table(name: str, graph: GraphSpec) -> Table:
    shown_graph = table(name)
    shown_graph.add_column("name", no_wrap=True)
    shown_graph.add_column("type", no_wrap=True)
    shown_graph.add_column("meaning")
    for role, specs in (
        ("inputs", graph.inputs),
        ("retained states", graph.states),
        ("outputs", graph.outputs),
    ):
        if specs:
            shown_graph.add_section()
            shown_graph.add_row(f"[dim]{role}[/dim]")
        shown = {_in_any_layer(spec): spec for spec in reversed(specs)}
        for spec in reversed(shown.values()):
            shown_graph.add_row(
                escape(spec.name), escape(_type(spec)), escape(_meaning(spec, graph))
            )
        if len(shown) < len(specs):
            shown_graph.add_row(f"… {len(specs) - len(shown)} more", "", "of each further layer")
    return shown_graph


def _in_any_layer(spec: TensorSpec) -> str:
    """The tensor's name, without the number of its layer."""
    return re.sub(r"\.\d+\.", ".*.", spec.name)


def _type(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.axes))}]" if spec.axes else spec.dtype


def _meaning(spec: TensorSpec, graph: GraphSpec) -> str:
    known = spec.off is None or "= off" in spec.meaning
    off = "" if known else f" (off: {spec.off if spec.dtype == 'float32' else int(spec.off or 0)})"
    after = f" → {graph.retained[spec.name]}" if spec.name in graph.retained else ""
    return spec.meaning + off + after


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Hub id, checkpoint folder, GGUF or decoder file."),
    ],
    weights: Weights = None,
    preset: Preset = None,
    ctx_len: CtxLen = None,
    provider: Provider = None,
    text_only: TextOnly = False,
    for_serving: Annotated[
        bool,
        typer.Option("--for-serving", help="For `qsample serve`, whose requests may ask for more."),
    ] = False,
) -> None:
    """Download the newest version of a model and compile it into the cache, for commands that name the same model and
    options. Prints the package's folder."""
    from qsample.models.sources import SourceRequest, find_source

    if is_package(model):
        raise typer.BadParameter(f"{model} is a package already; commands take it as it is")
    if not os.path.exists(model):
        find_source(SourceRequest(name=model)).download_newest()
    choices = CompileChoices(
        provider=provider, weights=weights, preset=preset, ctx_len=ctx_len, text_only=text_only
    )
    opened = open_exported(model, choices, FeatureNeeds(for_serving=for_serving))
    print(opened.package.path)


@cache_app.command("list", cls=Command)
def list_entries(as_json: Json = False) -> None:
    """List the cache, the last used first."""
    from qsample.models.cache import cache_folder, entries, size_limit

    limit, found = size_limit(), entries()
    total = sum(entry.bytes for entry in found)
    if as_json:
        document = {"folder": str(cache_folder()), "bytes": total, "limit_bytes": limit}
        print(
            json.dumps(
                {**document, "entries": [_described(entry) for entry in found]},
                indent=2,
                ensure_ascii=False,
            )
        )
        return
    screen = console(width_of_a_file=_WIDTH_OF_A_LIST)
    if found:
        shown = table(None, "model", "options", "size", "last used")
        for entry in found:
            facts = _described(entry)
            used = (
                "in use"
                if entry.in_use
                else datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
            )
            shown.add_row(
                escape(facts["model"]),
                escape(", ".join(facts["options"])),
                format_size(entry.bytes),
                used,
            )
        screen.print(shown)
    screen.print(
        f"{counted(len(found), 'model') if found else 'no model'}, {format_size(total)} of at most "
        f"{format_size(limit)}, in {cache_folder()}",
        markup=False,
        soft_wrap=True,
    )


@cache_app.command("clear", cls=Command)
def clear_entries(
    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="As `list` names them. (default: all)"),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Remove all without a question.")
    ] = False,
) -> None:
    """Remove models from the cache, except those that a process has open. Downloads and checkpoints stay."""
    from qsample.models.cache import cache_folder, clear, entries, remove

    if not model:
        if not yes and (found := entries()):
            what = f"{counted(len(found), 'model')}, {format_size(sum(entry.bytes for entry in found))}"
            if not sys.stdin.isatty():
                raise typer.BadParameter(f"this removes {what}; give --yes, or name the models")
            if not typer.confirm(f"Remove {what}, from {cache_folder()}?", err=True):
                return
        removed, kept = clear()
    else:
        found = entries()
        named = [os.path.abspath(name) if os.path.exists(name) else name for name in model]
        for name in named:
            if not any(entry.model == name for entry in found):
                raise typer.BadParameter(
                    f"{name} is not in the cache; `qsample cache list` has the names"
                )
        done = [remove(entry.path) for entry in found if entry.model in named]
        removed, kept = sum(done), len(done) - sum(done)
    note(f"{removed} removed" + (f", {kept} kept: a process has them open" if kept else ""))


def _weights(manifest: Manifest) -> str:
    """The type of the weights: what compile made of them, or what the model's file has, or the graph."""
    quantization = manifest.compilation and manifest.compilation.quantization
    if quantization and "dtype" in quantization:
        return str(quantization["dtype"])
    if packed := manifest.packed_weights:
        return str(packed.get("type") or f"{' and '.join(map(str, packed['bits']))} bits")
    return manifest.interface.dtype


def _described(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON-ready dict."""
    manifest, compilation = entry.manifest, entry.manifest.compilation
    options = [_weights(manifest)]
    if compilation is not None:
        options = [compilation.provider, *options, f"{compilation.ctx_len} tokens"]
    features = manifest.interface.features
    names = ("logit_bias", "allowed_tokens", "logprobs", "top_logprobs", "probs")
    options += [name for name in names if getattr(features, name)] + list(features.filters)
    options += [] if features.sampler else ["no sampler"]
    return {
        "model": entry.model,
        "revision": manifest.source.revision,
        "options": options,
        "bytes": entry.bytes,
        "last_used": datetime.fromtimestamp(entry.last_used)
        .astimezone()
        .isoformat(timespec="seconds"),
        "in_use": entry.in_use,
        "path": str(entry.path),
    }


INSPECT: Final = CliCommand(inspect, Panel.MEASURE, INSPECT_EXAMPLES)
PULL: Final = CliCommand(pull, Panel.CACHE, PULL_EXAMPLES)
CACHE: Final = CliCommand(cache_app, Panel.CACHE)
