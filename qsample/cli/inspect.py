"""`qsample inspect`; `qsample pull` and `qsample cache` for the models that were given directly."""

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
from qsample.contract.tensors import AXIS_MEANINGS, CAPACITY, RAW_LOGPROBS, TensorSpec
from qsample.errors import QsampleError
from qsample.package.disk.protobuf import fields
from qsample.package.manifest import Compilation, GraphPart, Manifest
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
_MAX_INPUTS_SHOWN: Final = 6
# The fields of onnx.proto: the graph of a model, the nodes of a graph, the operator of a node.
_GRAPH_FIELD: Final = 7
_NODE_FIELD: Final = 1
_OPERATOR_FIELD: Final = 4
# The numbers of tokens are shown for images of these widths and heights, in pixels.
_IMAGE_SIZES: Final = ((640, 480), (1920, 1080))
_WIDTH_OF_A_FILE: Final = 120  # columns
_WIDTH_OF_A_LIST: Final = 160  # columns

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
    """Show a package: its graphs' inputs, states and outputs, its source, and the devices of its
    operators.

    Of a bundle, it shows the packages; of a GGUF file and of decoder files of another exporter,
    what they are and whether they can become a package.
    """
    from qsample.models.sources import describe_source
    from qsample.ort.model_package import variants_in

    variants = variants_in(package)
    if variants:
        packages = {name: read_package(path, verify=verify) for name, path in variants.items()}
        _show_bundle(package, packages, as_json)
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
    """Print the packages of a bundle on stdout."""
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
    """Print the facts of a model that is not a package on stdout."""
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
    """The first names, and the number of further names."""
    listed = ", ".join(names[:_MAX_INPUTS_SHOWN])
    num_more = len(names) - _MAX_INPUTS_SHOWN
    return f"{listed} and {num_more} more" if num_more > 0 else listed


def _facts_table(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and texts, without rows whose text is empty."""
    facts = Table(
        title=escape(title), show_header=False, box=None, title_justify="left", title_style="bold"
    )
    for name, value in rows.items():
        if value:
            facts.add_row(name, escape(value))
    return facts


def describe(package: Package) -> dict[str, Any]:
    """A package as a JSON-ready dict.

    It has the manifest, and the dtype, axes and meaning of each tensor of each graph.
    """
    graphs = package.interface.graphs
    return {
        "path": str(package.path),
        "graphs": {name: _describe_graph(graph) for name, graph in graphs.items()},
        "axes": {**AXIS_MEANINGS, **_fixed_axes(package)},
        "rounding": _rounding(package),
        **json.loads(package.manifest.to_json()),
    }


def _describe_graph(graph: GraphSpec) -> dict[str, Any]:
    """The inputs, states and outputs of a graph. "next" is the output with a state's next value."""

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
    """The named axes of fixed size, with their sizes."""
    sizes = {name: size for name, size in package.interface.sizes.items() if size != 0}
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
    axes = [f"{axis} = {sizes.get(axis, meaning)}" for axis, meaning in AXIS_MEANINGS.items()]
    screen.print(f"[bold]Axes[/bold]\n{'; '.join(axes)}\n")
    compilation = package.manifest.compilation
    if compilation is not None:
        placement = table("Placement", "execution provider", "nodes", "operators")
        for provider, operators in compilation.placement.items():
            nodes = str(sum(operators.values()))
            placement.add_row(escape(provider), nodes, escape(_counts(operators)))
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
    """The facts of a package by their titles. A fact that the package lacks is empty."""
    manifest = package.manifest
    interface = package.interface
    source = manifest.source
    digests = [f"{name} (sha256 {digest[:16]}…)" for name, digest in sorted(source.files.items())]
    features = asdict(interface.features)
    if not (interface.features.logprobs or interface.features.top_logprobs > 0):
        del features["logprobs_mode"]
    facts = {
        "kind": manifest.kind,
        "source": f"{source.model_id} @ {source.revision}"
        if source.revision not in (None, "")
        else source.model_id,
        "architecture": f"{source.architecture} ({source.model_type}), {len(interface.key_values)} "
        f"layers, vocabulary {interface.vocab_size}",
        "made from": ", ".join(digests),
        "dtype": interface.dtype,
        "contract": manifest.contract_version,
        "features": ", ".join(_feature(name, value) for name, value in features.items() if value),
        "end tokens": ", ".join(map(str, manifest.token_ids.eos)) or "none",
        "longest context": str(
            "unlimited"
            if manifest.max_position_embeddings is None
            else manifest.max_position_embeddings
        ),
        "made with": _pairs(manifest.versions),
        "parity": figures_in_words(manifest.parity or {}),
        "signature": str(signer_of(package.path) or "none"),
    }
    if interface.image is not None:
        facts["images"] = _images(package)
    if manifest.packed_weights:
        facts["packed"] = _or_raw(_packed, manifest.packed_weights)
    if manifest.compilation is not None:
        facts |= _compilation_facts(package, manifest.compilation)
    facts["rows here"] = _rounding(package)
    return facts


def _compilation_facts(package: Package, compilation: Compilation) -> dict[str, str]:
    """The facts of a device package by their titles."""
    providers = ", ".join(compilation.execution_providers)
    rows = "any number of" if compilation.batch_size is None else compilation.batch_size
    made_with = [_pairs(compilation.versions), _pairs(compilation.options)]
    parts = [_part(number, part) for number, part in enumerate(compilation.parts)]
    facts = {
        "compiled for": f"{compilation.provider} ({providers})",
        "compiled with": ", ".join(text for text in made_with if text),
        "rows, context": f"{rows} rows, {compilation.ctx_len} tokens",
        "devices": "; ".join(parts),
        "self-test": figures_in_words(compilation.self_test),
    }
    if compilation.quantization:
        facts["quantized"] = _or_raw(quantization_in_words, compilation.quantization)
        facts["divergence"] = divergence_in_words(package)
    return facts


def _images(package: Package) -> str:
    """The family of image processing, the placeholder of an image in a prompt, the numbers of
    tokens, and the operators of vision.onnx."""
    from qsample.images.processing import ImageProcessor

    try:
        processor = ImageProcessor.of(package)
        images = package.manifest.images
        if processor is None or images is None:
            return "missing in the manifest; export the package again"
        tokens: list[str] = []
        for width, height in _IMAGE_SIZES:
            placeholders = processor.layout(width, height).placeholders
            tokens.append(f"{placeholders} for {width} x {height} pixels")
        operators = _counts(_operators(package.place / "vision.onnx"))
    except (OSError, QsampleError, ValueError) as error:
        # The readable parts of a damaged package are shown.
        return str(error)
    return f"{images['family']}, {processor.placeholder}; tokens: {', '.join(tokens)}; vision: {operators}"


def _operators(path: Path) -> Mapping[str, int]:
    """The number of each operator of an ONNX file, read without the library onnx.

    Raises:
        ValueError: the file is not an ONNX file.
    """
    data = path.read_bytes()
    operators: Counter[str] = Counter()
    for graph in _parts(data, range(len(data)), _GRAPH_FIELD):
        for node in _parts(data, graph, _NODE_FIELD):
            for name in _parts(data, node, _OPERATOR_FIELD):
                operators[str(data[name.start : name.stop], "utf-8", "replace")] += 1
    return operators


def _parts(data: bytes, message: range, number: int) -> Iterator[range]:
    """The places of a field in a message of protocol buffers.

    Args:
        message: the place of the message.
        number: the number of the field.
    """
    for field_number, value in fields(data, message.start, message.stop):
        if field_number == number and isinstance(value, range):
            yield value


def _pairs(values: Mapping[str, Any]) -> str:
    """Names with their values, in alphabetical order."""
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items()))


def _part(number: int, part: GraphPart) -> str:
    """The layers of a device, and the size of their weights. number: the number of the device."""
    first, end = part.layers if len(part.layers) == 2 else (0, 0)
    return f"{number}: layers {first} to {end - 1}, {format_size(part.weight_bytes)} of weights"


def _rounding(package: Package) -> str:
    """How the kernels of this machine round the rows of a package for the CPU, in words.

    It is empty for another device.
    """
    from qsample.ort.providers import CPU
    from qsample.ort.rounding import measured

    compilation = package.manifest.compilation
    if compilation is not None and compilation.execution_providers[0] != CPU:
        return ""
    try:
        return measured(package.place / "decoder.onnx").described()
    except QsampleError:
        # The readable parts of a damaged package are shown.
        return ""


def _feature(name: str, value: Any) -> str:
    """A feature with its value, if it is not only switched on."""
    if value is True:
        return name
    if isinstance(value, str | int):
        return f"{name} {value}"
    return f"{name} {' '.join(value)}"


def _or_raw(describe: Callable[[Any], str], figures: Any) -> str:
    """Figures of a manifest in words, or as they are if they are unexpected."""
    try:
        return describe(figures)
    except (LookupError, TypeError, ValueError, AttributeError):
        return f"{figures!r:.200}"


def _packed(figures: Any) -> str:
    """The weights that a checkpoint packed, in words."""
    bits = " and ".join(map(str, figures["bits"]))
    block_sizes = " and ".join(map(str, figures["block_sizes"]))
    kind = f"{figures['type']}, " if "type" in figures else ""
    experts = f" and {figures['experts']} experts" if "experts" in figures else ""
    return (
        f"{figures['matrices']} matrices{experts} of the checkpoint, {kind}{bits} bits, "
        f"blocks of {block_sizes}"
    )


def figures_in_words(figures: Any) -> str:
    """Named figures of the manifest, such as "kl 0.0123, tokens 4096"."""
    words: list[str] = []
    for name, value in figures.items():
        if isinstance(value, float):
            words.append(f"{name} {value:.3g}")
        elif not isinstance(value, list):  # Lists are the sizes of the images that were compared.
            words.append(f"{name} {value}")
    return ", ".join(words)


def _graph_table(name: str, graph: GraphSpec) -> Table:
    """The tensors of a graph; the first layer stands for all layers."""
    shown = table(name)
    shown.add_column("name", no_wrap=True)
    shown.add_column("type", no_wrap=True)
    shown.add_column("meaning")
    for role, specs in (
        ("inputs", graph.inputs),
        ("retained states", graph.states),
        ("outputs", graph.outputs),
    ):
        if specs:
            shown.add_section()
            shown.add_row(f"[dim]{role}[/dim]")
        # The last tensor that is stored under a name is the first layer's.
        first_layer = {_in_any_layer(spec): spec for spec in reversed(specs)}
        for spec in reversed(first_layer.values()):
            shown.add_row(escape(spec.name), escape(_type(spec)), escape(_meaning(spec, graph)))
        if len(first_layer) < len(specs):
            num_more = len(specs) - len(first_layer)
            shown.add_row(f"… {num_more} more", "", "of each further layer")
    return shown


def _in_any_layer(spec: TensorSpec) -> str:
    """The name of a tensor without the number of its layer."""
    return re.sub(r"\.\d+\.", ".*.", spec.name)


def _type(spec: TensorSpec) -> str:
    """The dtype and the axes of a tensor."""
    return f"{spec.dtype} [{', '.join(map(str, spec.axes))}]" if spec.axes else spec.dtype


def _meaning(spec: TensorSpec, graph: GraphSpec) -> str:
    """The meaning of a tensor, its off value, and for a state the output with its next value."""
    meaning = spec.meaning
    if spec.off is not None and "= off" not in meaning:
        off_value = spec.off if spec.dtype == "float32" else int(spec.off)
        meaning += f" (off: {off_value})"
    if spec.name in graph.retained:
        meaning += f" → {graph.retained[spec.name]}"
    return meaning


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
    """Download the newest version of a model and compile it into the cache, for commands that name
    the same model and options. Prints the package's folder."""
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

    limit = size_limit()
    found = entries()
    total = sum(entry.bytes for entry in found)
    if as_json:
        document = {
            "folder": str(cache_folder()),
            "bytes": total,
            "limit_bytes": limit,
            "entries": [_described(entry) for entry in found],
        }
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return
    screen = console(width_of_a_file=_WIDTH_OF_A_LIST)
    if found:
        shown = table(None, "model", "options", "size", "last used")
        for entry in found:
            last_used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
            shown.add_row(
                escape(entry.model),
                escape(", ".join(_options(entry))),
                format_size(entry.bytes),
                "in use" if entry.in_use else last_used,
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
    """Remove models from the cache, except those that a process has open. Downloads and checkpoints
    stay."""
    from qsample.models.cache import cache_folder, clear, entries, remove

    if not model:
        found = entries()
        if found and not yes:
            size = format_size(sum(entry.bytes for entry in found))
            models = f"{counted(len(found), 'model')}, {size}"
            if not sys.stdin.isatty():
                raise typer.BadParameter(f"this removes {models}; give --yes, or name the models")
            if not typer.confirm(f"Remove {models}, from {cache_folder()}?", err=True):
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
        are_removed = [remove(entry.path) for entry in found if entry.model in named]
        removed = are_removed.count(True)
        kept = are_removed.count(False)
    remark = f", {kept} kept: a process has them open" if kept > 0 else ""
    note(f"{removed} removed{remark}")


def _weights(manifest: Manifest) -> str:
    """The type of the weights: compile's choice, or the type of the model's file or graph."""
    quantization = manifest.compilation and manifest.compilation.quantization
    if quantization and "dtype" in quantization:
        return str(quantization["dtype"])
    packed = manifest.packed_weights
    if packed:
        kind = packed.get("type")
        return str(kind) if kind else f"{' and '.join(map(str, packed['bits']))} bits"
    return manifest.interface.dtype


def _options(entry: Entry) -> list[str]:
    """The options of an entry: provider, weights, context and features."""
    manifest = entry.manifest
    compilation = manifest.compilation
    options = [_weights(manifest)]
    if compilation is not None:
        options = [compilation.provider, *options, f"{compilation.ctx_len} tokens"]
    features = manifest.interface.features
    names = ("logit_bias", "allowed_tokens", "logprobs", "top_logprobs", "probs")
    options += [name for name in names if getattr(features, name)]
    if features.logprobs_mode != RAW_LOGPROBS:
        options.append(features.logprobs_mode)
    options += features.filters
    if not features.sampler:
        options.append("no sampler")
    return options


def _described(entry: Entry) -> dict[str, Any]:
    """An entry as a JSON-ready dict."""
    last_used = datetime.fromtimestamp(entry.last_used).astimezone()
    return {
        "model": entry.model,
        "revision": entry.manifest.source.revision,
        "options": _options(entry),
        "bytes": entry.bytes,
        "last_used": last_used.isoformat(timespec="seconds"),
        "in_use": entry.in_use,
        "path": str(entry.path),
    }


INSPECT: Final = CliCommand(inspect, Panel.MEASURE, INSPECT_EXAMPLES)
PULL: Final = CliCommand(pull, Panel.CACHE, PULL_EXAMPLES)
CACHE: Final = CliCommand(cache_app, Panel.CACHE)
