"""The last phases of the pipeline: from the rewritten graph to `decoder.onnx`, and where its nodes run.

ONNX Runtime optimises the graph offline for the CPU, or lets a provider compile the model part ahead of time into
EPContext nodes. Only the model is compiled then: ONNX Runtime's own provider runs the sampler after it, control flow
and float64 included. So the tokens are exact whatever the compiling provider makes of such operators, and it never
writes to a state.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as common_passes

from qsample.compiler.pipeline import Build, Phase, Placement, step
from qsample.contract import LOGITS
from qsample.errors import CompileError
from qsample.graph import gqa
from qsample.graph.edit import all_initializers
from qsample.graph.join import append_sampler
from qsample.ort.options import NO_PREPACKING, session_options
from qsample.ort.providers import compile_context, open_session
from qsample.tensors import Array

CONTEXT: Final = "EPContext"
RECORD: Final = {"session.record_ep_graph_assignment_info": "1"}
"""The session configuration without which ONNX Runtime does not report where its nodes run."""
_LEAST: Final = 1 << 16  # bytes; smaller tensors are not worth a look
_PAGE: Final = 4096
_PIECE: Final = 1 << 24  # bytes that are compared at once

Place = tuple[int, int]  # offset and length in the file, in bytes


def join_sampler(build: Build) -> None:
    """Append the sampler that was cut off, unless the package samples on the host."""
    if build.sampler is not None:
        append_sampler(build.model, build.sampler, build.plan.interface.decoder)


def optimize_offline(
    build: Build, providers: Sequence[str], level: ort.GraphOptimizationLevel, *, final: bool = True
) -> None:
    """Let ONNX Runtime optimise the graph for `providers`, and go on with the result.

    Args:
        build: its placement is known afterwards.
        providers: ONNX Runtime's names, the first of which gets the nodes that are fused.
        level: how far ONNX Runtime goes.
        final: the result is the package's decode graph; otherwise later phases change it.
    """
    fused = build.scratch / "fused.onnx"
    ir.save(build.model, fused, external_data="fused.onnx.data")
    optimized = build.decoder if final else build.scratch / "optimized.onnx"
    build.provider_of = optimize_file(fused, optimized, providers, level)
    build.replace_model(optimized)


def optimize_file(
    source: Path, destination: Path, providers: Sequence[str], level: ort.GraphOptimizationLevel
) -> dict[str, str]:
    """Optimise `source` for `providers` and write the result to `destination`, its weights to `DESTINATION.data`.

    Returns:
        Node name → provider, as ONNX Runtime reports it: of the graph before its last fusions.
    """
    options = session_options(
        {
            **RECORD,
            "session.optimized_model_external_initializers_file_name": f"{destination.name}.data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
            **NO_PREPACKING,  # nothing runs here
        }
    )
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(destination)
    session = ort.InferenceSession(source, options, providers=list(providers))
    return {node.name: provider for provider, node in assigned_nodes(session)}


def ahead_of_time_phases(providers: Sequence[str], provider_options: Mapping[str, str]) -> list[Phase]:
    """The last phases for a provider that compiles ahead of time: from the model without its sampler to the file.

    Args:
        providers: ONNX Runtime's names; the first compiles, the others run the rest.
        provider_options: of the first.
    """
    return [
        step(check_states, provider=providers[0]),
        step(compile_ahead, providers=providers, provider_options=provider_options),
        step(join_sampler),
        step(save_over),
        step(place_compiled, providers=providers, provider_options=provider_options),
    ]


def check_states(build: Build, provider: str) -> None:
    """Refuse a model in which anything but GroupQueryAttention writes to a state: a compiled part might do that before
    it has read the state."""
    writers = {value.name: value.producer() for value in build.model.graph.outputs if value.name != LOGITS.name}
    others = [name for name, node in writers.items() if node is None or node.op_type != gqa.OP_TYPE]
    if others:
        raise CompileError(
            f"{provider} would update {len(others)} states of this model by itself ({others[0]} …), in place; it is "
            f"for models whose layers all attend through {gqa.OP_TYPE}. Compile it for cpu or cuda"
        )


def compile_ahead(build: Build, providers: Sequence[str], provider_options: Mapping[str, str]) -> None:
    """Let the first of `providers` compile the model into EPContext nodes, and go on with the result.

    Raises CompileError if it cannot.
    """
    model = build.scratch / "model.onnx"
    ir.save(build.model, model, external_data=f"{model.name}.data")
    try:
        compile_context(model, build.decoder, providers, provider_options)
    except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
        raise CompileError(f"{providers[0]} cannot compile the model: {error}") from error
    build.replace_model(build.decoder)


def save_over(build: Build) -> None:
    """Write the model in place of the decode graph that it was read from, whose weights it still refers to."""
    # A compiled file names all domains that this build of ONNX Runtime knows, which another may not.
    common_passes.RemoveUnusedOpsetsPass()(build.model)
    written = build.scratch / build.decoder.name
    ir.save(build.model, written, external_data=f"{written.name}.data")
    for file in build.scratch.glob(f"{written.name}*"):
        file.replace(build.folder / file.name)


def place_compiled(build: Build, providers: Sequence[str], provider_options: Mapping[str, str]) -> None:
    """Find out where the nodes run.

    Raises CompileError if ONNX Runtime cannot load the compiled graph, and if the first of `providers` compiled no part
    of it.
    """
    try:
        session = open_session(build.decoder, session_options(RECORD), providers, provider_options)
    except Exception as error:
        raise CompileError(f"ONNX Runtime cannot load what {providers[0]} compiled: {error}") from error
    build.placement = placement_of(session)
    if CONTEXT not in build.placement.get(providers[0], {}):
        raise CompileError(f"{providers[0]} compiled no part of this model; compile it for another provider")


def place_optimized(build: Build, default: str) -> None:
    """Count where the nodes of the optimised file run. default: the provider of nodes that the report lacks."""
    build.placement = placement_in_file(build.decoder, build.provider_of, default)


def assigned_nodes(session: ort.InferenceSession) -> list[tuple[str, Any]]:
    """(provider, node) of every node of a session that was opened with `RECORD`; a node has name and op_type."""
    return [(part.ep_name, node) for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()]


def placement_of(session: ort.InferenceSession) -> Placement:
    """The placement of the nodes of `session`, opened with `RECORD`."""
    return _count((provider, node.op_type) for provider, node in assigned_nodes(session))


def placement_in_file(path: Path, provider_of: Mapping[str, str], default: str) -> Placement:
    """The placement of the nodes in a file, those of both sides of an If included.

    Args:
        path: an ONNX file.
        provider_of: node name → provider, as a session reported it before its last fusions.
        default: the provider of nodes that `provider_of` lacks.
    """
    nodes = ir.load(path).graph.all_nodes()
    return _count((provider_of.get(node.name or "", default), node.op_type) for node in nodes)


def _count(nodes: Iterable[tuple[str, str]]) -> Placement:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for provider, operator in nodes:
        counts[provider][operator] += 1
    return {provider: dict(sorted(operators.items())) for provider, operators in counts.items()}


def share_equal_data(path: Path) -> None:
    """Store numbers once that the graph at `path` has twice, such as a table of embeddings that the head is tied to.

    Operators want them in shapes of their own, so the graph has an initializer for each. ONNX Runtime maps both from
    one place of the file. The data file is replaced by a new one if it has equal numbers.
    """
    model = ir.load(path)
    stored = {
        value: value.const_value
        for value in all_initializers(model.graph)
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    files = {os.fspath(tensor.location) for tensor in stored.values()}
    if len(files) != 1:
        return
    data = path.parent / files.pop()
    mapped = np.memmap(data, np.uint8, "r")
    places = _places(mapped, (_place(tensor) for tensor in stored.values()))
    kept = sorted(set(places.values()))
    if len(kept) == len(places):
        return
    part = data.with_name(f"{data.name}.part")
    moved = _copy(mapped, part, kept)
    for value, tensor in stored.items():
        offset, length = moved[places[_place(tensor)]]
        value.const_value = ir.ExternalTensor(
            tensor.location,
            offset,
            length,
            tensor.dtype,
            shape=tensor.shape,
            name=str(value.name),
            base_dir=path.parent,
        )
    part.replace(data)
    ir.save(model, path)


def _place(tensor: ir.ExternalTensor) -> Place:
    return tensor.offset or 0, tensor.nbytes


def _places(data: Array, wanted: Iterable[Place]) -> dict[Place, Place]:
    """Each place of `data`, [bytes of the file] uint8 → the first one that has the same bytes."""
    alike: dict[tuple[int, bytes], list[Place]] = {}
    found: dict[Place, Place] = {}
    for offset, length in sorted(set(wanted)):
        place = (offset, length)
        found[place] = place
        if length >= _LEAST:
            others = alike.setdefault((length, data[offset : offset + _PAGE].tobytes()), [])
            found[place] = next((other for other in others if _equal(data, other[0], offset, length)), place)
            if found[place] is place:
                others.append(place)
    return found


def _equal(data: Array, one: int, other: int, length: int) -> bool:
    steps = range(0, length, _PIECE)
    sizes = [min(_PIECE, length - start) for start in steps]
    return all(
        np.array_equal(data[one + start : one + start + size], data[other + start : other + start + size])
        for start, size in zip(steps, sizes, strict=True)
    )


def _copy(data: Array, target: Path, places: Iterable[Place]) -> dict[Place, Place]:
    """Write these places of a file to another one, each at the beginning of a page; returns where they are there."""
    moved = {}
    with target.open("wb") as file:
        for offset, length in places:
            file.write(bytes(-file.tell() % _PAGE))
            moved[offset, length] = (file.tell(), length)
            file.write(data[offset : offset + length].data)
    return moved
