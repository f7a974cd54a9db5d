"""`qsample inspect`: the contents of a package, or of decoder files of another exporter, as tables or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from qsample.cli.common import Json, is_package
from qsample.cli.terminal import console, format_size, table
from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import AXIS_MEANINGS, CAPACITY, TensorSpec
from qsample.package.package import Package, read_package

EXAMPLES: Final = "[bold]Examples[/bold]\n\nqsample inspect qwen3-cpu\n\nqsample inspect qwen3-cpu --json | jq .graphs"
_INPUTS_SHOWN: Final = 6
_WIDTH_OF_A_FILE: Final = 120


def inspect(
    package: Annotated[
        Path,
        typer.Argument(
            metavar="PACKAGE",
            help="Folder of a package; or decoder files of another exporter: an .onnx file, a folder.",
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every file with its sha256.")] = True,
    as_json: Json = False,
) -> None:
    """Show a package: its graphs' inputs, states and outputs, its source, and the devices of its operators.

    Of decoder files of another exporter, it shows what they are and whether `qsample bake` takes them.
    """
    from qsample.models.auto_model import is_decoder

    if not is_package(str(package)) and is_decoder(package):
        _show_decoders(package, as_json)
        return
    opened = read_package(package, verify=verify)
    if as_json:
        typer.echo(json.dumps(describe(opened), indent=2))
    else:
        show(opened)


def _show_decoders(path: Path, as_json: bool) -> None:
    from qsample.models.auto_model import describe_decoders

    decoders = describe_decoders(path)
    if as_json:
        typer.echo(json.dumps([asdict(decoder) for decoder in decoders], indent=2))
        return
    screen = console(width_of_a_file=_WIDTH_OF_A_FILE)
    for decoder in decoders:
        facts = _facts_table(decoder.file)
        counts = ", ".join(f"{count} {name}" for name, count in sorted(decoder.operators.items()))
        rows = {
            "made by": f"{decoder.made_by}, opset {decoder.opset}",
            "inputs": _some(decoder.inputs),
            "operators": counts,
            "layers": decoder.layers,
            "states": f"{decoder.states} recurrent or convolutional" if decoder.states else "",
            "numbers": f"{decoder.dtype} caches, vocabulary {decoder.vocab_size}" if decoder.dtype else "",
            "weights": f"packed in {' and '.join(map(str, decoder.bits))} bits" if decoder.bits else "",
            "bake": decoder.refusal or "takes it; it runs the file to measure its attention, and compares",
        }
        for name, value in rows.items():
            if value:
                facts.add_row(name, escape(value))
        screen.print(facts)


def _some(names: Sequence[str]) -> str:
    """The first names, and how many others there are."""
    rest = len(names) - _INPUTS_SHOWN
    return ", ".join(names[:_INPUTS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _facts_table(title: str) -> Table:
    return Table(title=escape(title), show_header=False, box=None, title_justify="left", title_style="bold")


def describe(package: Package) -> dict[str, Any]:
    """The package as a JSON-ready dict: the manifest, and every graph's tensors with dtype, axes and meaning."""
    return {
        "path": str(package.path),
        "graphs": {name: describe_graph(graph) for name, graph in package.interface.graphs.items()},
        "axes": {**AXIS_MEANINGS, **fixed_axes(package)},
        "rounding": _rounding(package),
        **json.loads(package.manifest.to_json()),
    }


def describe_graph(graph: GraphSpec) -> dict[str, Any]:
    """Inputs, states (each with the output that holds its next value) and outputs of a graph."""

    def entry(spec: TensorSpec) -> dict[str, Any]:
        off = {} if spec.off is None else {"off": spec.off}
        return {"name": spec.name, "dtype": spec.dtype, "axes": list(spec.axes), "meaning": spec.meaning, **off}

    return {
        "inputs": [entry(spec) for spec in graph.inputs],
        "states": [{**entry(spec), "next": graph.retained.get(spec.name)} for spec in graph.states],
        "outputs": [entry(spec) for spec in graph.outputs],
    }


def fixed_axes(package: Package) -> dict[str, int]:
    """The named axes whose size this package fixes."""
    sizes = {name: size for name, size in package.interface.sizes.items() if size}
    if package.manifest.compilation:
        sizes[CAPACITY] = package.manifest.compilation.ctx_len
    return sizes


def show(package: Package) -> None:
    """Print a package on stdout: facts, graphs, placement, files."""
    screen = console(width_of_a_file=_WIDTH_OF_A_FILE)
    screen.print(_facts(package))
    for name, graph in package.interface.graphs.items():
        screen.print(_graph_table(name, graph))
    sizes = fixed_axes(package)
    axes = (f"{axis} = {sizes.get(axis, meaning)}" for axis, meaning in AXIS_MEANINGS.items())
    screen.print("[bold]Axes[/bold]\n" + "; ".join(axes) + "\n")
    if package.manifest.compilation:
        screen.print(_placement_table(package))
    screen.print(_file_table(package))


def _facts(package: Package) -> Table:
    manifest, interface = package.manifest, package.interface
    source, layers = manifest.source, len(interface.key_values)
    features = [_feature(name, value) for name, value in asdict(interface.features).items() if value]
    facts = _facts_table(str(package.path))
    rows: list[tuple[str, str]] = [
        ("kind", manifest.kind),
        ("source", source.model_id + (f" @ {source.revision}" if source.revision else "")),
        (
            "architecture",
            f"{source.architecture} ({source.model_type}), {layers} layers, vocabulary {interface.vocab_size}",
        ),
        ("weights", f"{interface.dtype}, sha256 {source.weight_hash[:16]}…"),
        ("contract", manifest.contract_version),
        ("features", ", ".join(features)),
        ("end tokens", ", ".join(map(str, manifest.token_ids.eos)) or "none"),
        ("longest context", str(manifest.max_position_embeddings or "unlimited")),
        ("made with", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))),
        ("parity", figures_in_words(manifest.parity or {})),
    ]
    if packed := manifest.packed_weights:
        rows.append(("packed", _or_raw(_packed, packed)))
    if compilation := manifest.compilation:
        rows += [
            ("compiled for", f"{compilation.provider} ({', '.join(compilation.execution_providers)})"),
            ("rows, context", f"{compilation.batch_size or 'any number of'} rows, {compilation.ctx_len} tokens"),
            ("self-test", figures_in_words(compilation.self_test)),
        ]
        if quantization := compilation.quantization:
            rows += [
                ("quantized", _or_raw(quantization_in_words, quantization)),
                ("divergence", _or_raw(figures_in_words, quantization.get("divergence"))),
            ]
    if rounding := _rounding(package):
        rows.append(("rows here", rounding))
    for name, value in rows:
        facts.add_row(name, escape(value))
    return facts


def _rounding(package: Package) -> str:
    """How this machine's kernels round the rows of a package for the CPU, in words; "" = another device."""
    from qsample.errors import QsampleError
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
    return name if value is True else f"{name} {value if isinstance(value, str | int) else ' '.join(value)}"


def _or_raw(describe: Callable[[Any], str], figures: Any) -> str:
    """Figures in words; unexpected figures, which a manifest may contain, as they are."""
    try:
        return describe(figures)
    except (LookupError, TypeError, ValueError, AttributeError):
        return f"{figures!r:.200}"


def _packed(figures: Any) -> str:
    bits, sizes = (" and ".join(map(str, figures[name])) for name in ("bits", "block_sizes"))
    return f"{figures['matrices']} matrices of the checkpoint, {bits} bits, blocks of {sizes}"


def quantization_in_words(figures: Any) -> str:
    """The manifest's figures of a quantization, such as "int4 weights in blocks of 32 (rtn), 28 matrices, ..."."""
    parts = []
    if "dtype" in figures:
        mib_before, mib_after = (figures[f"bytes_{when}"] / 2**20 for when in ("before", "after"))
        sizes = " and ".join(map(str, figures.get("block_sizes") or [figures.get("block_size")]))
        blocks = f" in blocks of {sizes} ({figures['method']})" if "block_size" in figures else ""
        parts.append(
            f"{figures['dtype']} weights{blocks}, {figures['matrices']} matrices{_experts(figures)}, "
            f"{mib_after:.1f} MiB, {mib_before:.1f} as float"
        )
        if figures.get("float_bytes"):
            parts.append(f"{figures['float_bytes'] / 2**20:.1f} MiB still float")
    if "packed_matrices" in figures:
        parts.append(f"{figures['packed_matrices']} matrices as the checkpoint packed them")
    if "kv_cache_dtype" in figures:
        parts.append(f"{figures['kv_cache_dtype']} keys and values")
    return "; ".join(parts)


def _experts(figures: Any) -> str:
    count, blocks = figures.get("experts"), figures.get("expert_block_size")
    if not count:
        return ""
    return f" and {count} experts" + (f" (blocks of {blocks})" if blocks != figures.get("block_size") else "")


def figures_in_words(figures: Any) -> str:
    """Named figures of the manifest, such as "kl 0.0123, tokens 4096"."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def _graph_table(name: str, graph: GraphSpec) -> Table:
    shown_graph = table(name)
    shown_graph.add_column("name", no_wrap=True)
    shown_graph.add_column("type", no_wrap=True)
    shown_graph.add_column("meaning")
    for role, specs in (("inputs", graph.inputs), ("retained states", graph.states), ("outputs", graph.outputs)):
        if specs:
            shown_graph.add_section()
            shown_graph.add_row(f"[dim]{role}[/dim]")
        shown = {_in_any_layer(spec): spec for spec in reversed(specs)}
        for spec in reversed(shown.values()):
            shown_graph.add_row(escape(spec.name), escape(_type(spec)), escape(_meaning(spec, graph)))
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


def _placement_table(package: Package) -> Table:
    assert package.manifest.compilation
    placement = table("Placement", "execution provider", "nodes", "operators")
    for provider, operators in package.manifest.compilation.placement.items():
        ordered = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
        counts = ", ".join(f"{name} {count}" for name, count in ordered)
        placement.add_row(escape(provider), str(sum(operators.values())), escape(counts))
    return placement


def _file_table(package: Package) -> Table:
    files = table("Files", "file", "size", "sha256")
    for name, entry in sorted(package.manifest.files.items()):
        files.add_row(escape(name), format_size(entry.bytes), escape(f"{entry.sha256[:16]}…"))
    return files
