"""What the command line shows of packages, generations and benchmarks: rich tables, and JSON-ready dicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.markup import escape
from rich.table import Table

from qsample.cli.terminal import console, note
from qsample.contract import AXIS_MEANINGS, CAPACITY, TensorSpec
from qsample.interface import GraphSpec
from qsample.package import Package

if TYPE_CHECKING:
    from qsample.runtime import GenerateOutput
    from qsample.runtime.bench import Measurement

_LAYERS_SHOWN: Final = 1  # caches of further layers are counted, not listed
_WIDTH_OF_A_FILE: Final = 120


def written(package: Package) -> None:
    """Say on stderr what was written, and its path on stdout."""
    size = sum(entry.bytes for entry in package.manifest.files.values())
    compilation = package.manifest.compilation
    if compilation is not None and compilation.quantization is not None:
        note(_quantization(compilation.quantization))
        note(f"divergence from the float model: {_figures(compilation.quantization['divergence'])}")
    note(f"{package.manifest.kind} package of {package.manifest.source.model_id}, {format_size(size)}, written to")
    print(package.path)


def generation(prompts: Sequence[str], output: GenerateOutput) -> dict[str, Any]:
    """A generation as one JSON-ready dict: one entry of `results` for each prompt."""
    results: list[dict[str, Any]] = []
    for row, prompt in enumerate(prompts):
        new = output.token_ids[row]
        entry: dict[str, Any] = {
            "prompt": prompt,
            "text": output.texts[row] if output.texts is not None else None,
            "token_ids": new,
            "finish_reason": output.finish_reasons[row],
            "seed": output.seeds[row],
            "prompt_tokens": output.prompt_lengths[row],
        }
        for name in ("logprobs", "top_logprob_ids", "top_logprobs"):
            values = getattr(output, name)
            if values is not None:
                entry[name] = finite(values[row, : len(new)].tolist())
        results.append(entry)
    return {"results": results, "timing": asdict(output.timing)}


def show_generation(prompts: Sequence[str], output: GenerateOutput, *, with_prompt: bool) -> None:
    """Print a batch on stdout, a section for each prompt."""
    screen = console()
    for row, prompt in enumerate(prompts):
        count, reason = len(output.token_ids[row]), output.finish_reasons[row]
        screen.rule(f"{row + 1}: {count} tokens, {reason}, seed {output.seeds[row]}", align="left", style="dim")
        print((prompt if with_prompt else "") + (output.texts or [])[row])


def figures(output: GenerateOutput) -> str:
    """How much was generated, how fast, and what reproduces it."""
    count, timing = sum(map(len, output.token_ids)), output.timing
    seconds = timing.prefill_seconds + timing.decode_seconds
    seeds = ", ".join(map(str, output.seeds))
    return f"{count} tokens in {seconds:.2f} s, {count / seconds:.0f} a second; seed {seeds}"


def describe(package: Package) -> dict[str, Any]:
    """The package as one JSON-ready dict: the manifest, and every graph's tensors with dtype, axes and meaning."""
    return {
        "path": str(package.path),
        "graphs": {name: describe_graph(graph) for name, graph in package.interface.graphs.items()},
        "axes": {**AXIS_MEANINGS, **fixed_axes(package)},
        **asdict(package.manifest),
    }


def describe_graph(graph: GraphSpec) -> dict[str, Any]:
    """Inputs, states (each with the output that holds its next value) and outputs of one graph."""

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
    """Print the package on stdout: facts, graphs, placement, files."""
    screen = console()
    if not screen.is_terminal:
        screen.width = _WIDTH_OF_A_FILE
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
    table = Table(
        title=escape(str(package.path)), show_header=False, box=None, title_justify="left", title_style="bold"
    )
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
        ("parity", _figures(manifest.parity or {})),
    ]
    if packed := manifest.packed_weights:
        rows.append(("packed", _told(_packed, packed)))
    if compilation := manifest.compilation:
        rows += [
            ("compiled for", f"{compilation.provider} ({', '.join(compilation.execution_providers)})"),
            ("rows, context", f"{compilation.batch_size or 'any number of'} rows, {compilation.ctx_len} tokens"),
            ("self-test", _figures(compilation.self_test)),
        ]
        if quantization := compilation.quantization:
            rows += [
                ("quantized", _told(_quantization, quantization)),
                ("divergence", _told(_figures, quantization.get("divergence"))),
            ]
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _feature(name: str, value: Any) -> str:
    return name if value is True else f"{name} {value if isinstance(value, str | int) else ' '.join(value)}"


def _told(describe: Callable[[Any], str], figures: Any) -> str:
    """Figures in words; as they are where they are others than expected: a manifest may hold any."""
    try:
        return describe(figures)
    except (LookupError, TypeError, ValueError, AttributeError):
        return f"{figures!r:.200}"


def _packed(figures: Any) -> str:
    bits, sizes = (" and ".join(map(str, figures[name])) for name in ("bits", "block_sizes"))
    return f"{figures['matrices']} matrices of the checkpoint, {bits} bits, blocks of {sizes}"


def _quantization(figures: Any) -> str:
    parts = []
    if "dtype" in figures:
        mib_before, mib_after = (figures[f"bytes_{when}"] / 2**20 for when in ("before", "after"))
        sizes = " and ".join(map(str, figures.get("block_sizes") or [figures.get("block_size")]))
        blocks = f" in blocks of {sizes} ({figures['method']})" if "block_size" in figures else ""
        parts.append(
            f"{figures['dtype']} weights{blocks}, {figures['matrices']} matrices{_experts(figures)}, "
            f"{mib_before:.1f} to {mib_after:.1f} MiB"
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


def _figures(figures: Any) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def _graph_table(name: str, graph: GraphSpec) -> Table:
    table = _table(name)
    table.add_column("name", no_wrap=True)
    table.add_column("type", no_wrap=True)
    table.add_column("meaning")
    for role, specs in (("inputs", graph.inputs), ("retained states", graph.states), ("outputs", graph.outputs)):
        if specs:
            table.add_section()
            table.add_row(f"[dim]{role}[/dim]")
        shown = [spec for spec in specs if _layer(spec) < _LAYERS_SHOWN]
        for spec in shown:
            table.add_row(escape(spec.name), escape(_type(spec)), escape(_meaning(spec, graph)))
        if len(shown) < len(specs):
            table.add_row(f"… {len(specs) - len(shown)} more", "", "keys and values of each further layer")
    return table


def _layer(spec: TensorSpec) -> int:
    """The attention layer of a cache tensor; -1 for any other."""
    return int(spec.name.split(".")[1]) if spec.name.startswith("past_key_values.") else -1


def _type(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.axes))}]" if spec.axes else spec.dtype


def _meaning(spec: TensorSpec, graph: GraphSpec) -> str:
    told = spec.off is None or "= off" in spec.meaning
    off = "" if told else f" (off: {spec.off if spec.dtype == 'float32' else int(spec.off or 0)})"
    after = f" → {graph.retained[spec.name]}" if spec.name in graph.retained else ""
    return spec.meaning + off + after


def describe_bench(package: Package, measurements: Sequence[Measurement], load_seconds: float) -> dict[str, Any]:
    """A benchmark as one JSON-ready dict; see `runtime.bench`."""
    from qsample.runtime.bench import peak_memory_bytes

    return {
        "package": str(package.path),
        "package_bytes": sum(entry.bytes for entry in package.manifest.files.values()),
        "load_seconds": load_seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "measurements": [asdict(measurement) for measurement in measurements],
    }


def show_bench(package: Package, measurements: Sequence[Measurement], load_seconds: float) -> None:
    """Print a benchmark on stdout."""
    facts = describe_bench(package, measurements, load_seconds)
    prompt, new = measurements[0].prompt_tokens, measurements[0].new_tokens
    table = _table(
        f"{package.path}: {prompt} prompt tokens, {new} decode steps",
        "rows",
        "TTFT, ms",
        "prefill, tok/s",
        "step, ms",
        "p90, ms",
        "decode, tok/s",
    )
    for m in measurements:
        table.add_row(
            str(m.rows),
            f"{m.first_token_ms:.1f}",
            f"{m.prefill_tokens_per_second:.0f}",
            f"{m.decode_ms:.2f}",
            f"{m.decode_ms_p90:.2f}",
            f"{m.tokens_per_second:.1f}",
        )
    screen = console()
    screen.print(table)
    screen.print(
        f"loaded in {load_seconds:.2f} s; {format_size(facts['package_bytes'])} on disk, "
        f"{format_size(facts['peak_memory_bytes'])} of memory at the peak"
    )


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _placement_table(package: Package) -> Table:
    assert package.manifest.compilation
    table = _table("Placement", "execution provider", "nodes", "operators")
    for provider, operators in package.manifest.compilation.placement.items():
        ordered = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
        counts = ", ".join(f"{name} {count}" for name, count in ordered)
        table.add_row(escape(provider), str(sum(operators.values())), escape(counts))
    return table


def _file_table(package: Package) -> Table:
    table = _table("Files", "file", "size", "sha256")
    for name, entry in sorted(package.manifest.files.items()):
        table.add_row(escape(name), format_size(entry.bytes), escape(f"{entry.sha256[:16]}…"))
    return table


def finite(value: Any) -> Any:
    """JSON-ready lists and dicts without infinities and NaN, which JSON lacks: null takes their place."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def format_size(count: int) -> str:
    """`12.3 MB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} B"
