"""The last phases of the pipeline: from the rewritten graph to `decoder.onnx`, and where its nodes run.

ONNX Runtime optimises the graph offline for the CPU, or lets a provider compile the model part ahead of time into
EPContext nodes. ONNX Runtime's own provider then runs the sampler after it, control flow and float64 included: so the
tokens are exact, even if the compiling provider changes such operators, and that provider never writes to a state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as common_passes

from qsample.compiler.passes.capture import host_nodes
from qsample.compiler.passes.parts import cut_at_layers
from qsample.compiler.pipeline import DECODER, WEIGHTS, Build, Phase, Placement, save, step
from qsample.contract.tensors import CAPACITY, LOGITS
from qsample.errors import CompileError, QsampleError
from qsample.graph import gqa
from qsample.graph.edit import all_initializers, fix_axes
from qsample.graph.join import append_sampler, append_scorer
from qsample.graph.save import Place, WeightFile, save_graph
from qsample.ort.options import NO_PREPACKING, session_options
from qsample.ort.providers import compile_context, open_session
from qsample.package.manifest import GraphPart
from qsample.sampler import build_sampler
from qsample.sampler.scores import build_scores

CONTEXT: Final = "EPContext"
# Browsers load a file of weights as a whole.
MAX_PART_BYTES: Final = 256 << 20
_COPY_BYTES: Final = 1 << 24
RECORD: Final = {"session.record_ep_graph_assignment_info": "1"}
"""The session configuration without which ONNX Runtime does not report where its nodes run."""


def join_sampler(build: Build) -> None:
    """Append the sampler that was cut off, unless the package samples on the host."""
    if build.sampler is not None:
        append_sampler(build.model, build.sampler, build.plan.interface.without_guesses().decoder)


def join_scorer(build: Build) -> None:
    """Append the scorer of prompts if the package has one."""
    if build.plan.interface.features.prompt_logprobs:
        # The portable graph has a scorer, so this graph can have one.
        append_scorer(build.model, build_scores(build.plan.interface))


def join_flat_sampler(build: Build, *, for_webgpu: bool = False) -> None:
    """Append a sampler without the control flow that replay forbids; with a free capacity `for_webgpu`."""
    plan = build.plan
    if build.sampler is not None:
        sampler = build_sampler(plan.interface, plan.pad_token_id, for_webgpu=for_webgpu)
        fix_axes(sampler, {} if for_webgpu else {CAPACITY: plan.ctx_len})
        append_sampler(build.model, sampler, plan.interface.decoder)


def optimize_offline(
    build: Build, providers: Sequence[str], level: ort.GraphOptimizationLevel, *, final: bool = True
) -> None:
    """Let ONNX Runtime optimise the graph for `providers`, the first of which gets the fused nodes, and go on with the
    result; note who runs the nodes in `build.provider_of`. final: write it as the package's decode graph.

    The weights are written to their file before. ONNX Runtime maps the ones it looks at, and the file that it writes
    refers to them, so that nothing is written twice; it adds what it computes of constants.
    """
    fused = build.scratch / "fused.onnx"
    optimized = build.scratch / "optimized.onnx"
    with WeightFile(build.scratch / WEIGHTS) as weights:
        weights.take(build.model)
        ir.save(build.model, fused)
        build.provider_of = optimize_file(fused, optimized, providers, level)
        build.replace_model(optimized)
        weights.take(build.model)
    if weights.places != _places_in(build.model):  # ONNX Runtime replaced some
        return save(build) if final else None
    if final:
        build.publish_weights(weights.path, weights.sha256)
        ir.save(build.model, build.decoder)
    return None


def _places_in(model: ir.Model) -> set[Place]:
    """The places in files that the constants of `model` refer to."""
    tensors = (value.const_value for value in all_initializers(model.graph))
    return {
        (tensor.offset or 0, tensor.nbytes)
        for tensor in tensors
        if isinstance(tensor, ir.ExternalTensor)
    }


def optimize_file(
    source: Path, destination: Path, providers: Sequence[str], level: ort.GraphOptimizationLevel
) -> dict[str, str]:
    """Optimise `source` for `providers` into `destination` in the same folder; weights that lie in files stay there.
    Returns node name → provider, as ONNX Runtime reports it: of the graph before its last fusions."""
    options = session_options({**RECORD, **NO_PREPACKING})  # nothing runs here
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(destination)
    session = ort.InferenceSession(source, options, providers=list(providers))
    return {node.name: provider for provider, node in assigned_nodes(session)}


def cut_weights(build: Build, most: int = MAX_PART_BYTES) -> None:
    """Cut weights into files of at most `most` bytes, or of one larger tensor; the first keeps its name. Browsers load
    a file as a whole, and none of more than 2 GB."""
    whole = build.folder / WEIGHTS
    if not whole.exists() or whole.stat().st_size <= most:
        return
    values = [
        value
        for value in all_initializers(build.model.graph)
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    parts, end = [0], 0  # where each begins
    for start, size in sorted(_places_in(build.model)):
        if start >= end and start + size - parts[-1] > most and start > parts[-1]:
            parts.append(start)
        end = max(end, start + size)
    if len(parts) == 1:
        return
    names = [WEIGHTS, *(f"decoder-{number}.onnx.data" for number in range(2, len(parts) + 1))]
    with whole.open("rb+") as file:
        for name, start, stop in zip(names[1:], parts[1:], [*parts[2:], end], strict=True):
            file.seek(start)
            with (build.folder / name).open("wb") as part:
                for left in range(stop - start, 0, -_COPY_BYTES):
                    part.write(file.read(min(left, _COPY_BYTES)))
        file.truncate(parts[1])
    for value in values:
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        number = bisect_right(parts, tensor.offset or 0) - 1
        value.const_value = ir.ExternalTensor(
            names[number],
            (tensor.offset or 0) - parts[number],
            tensor.nbytes,
            tensor.dtype,
            shape=tensor.shape,
            name=str(value.name),
            base_dir=build.folder,
        )
    build.weights_sha256 = None  # of a file that is no more
    ir.save(build.model, build.decoder)


def cut_for_devices(build: Build) -> None:
    """Write a graph for each device next to the written decode graph, whose weights they share; nothing for one."""
    count = build.plan.options.num_devices
    if count == 1:
        return
    for number, part in enumerate(
        cut_at_layers(ir.load(build.decoder), build.plan.interface, count), start=1
    ):
        file = f"decoder-{number}-of-{count}.onnx"
        ir.save(part.model, build.folder / file)
        build.parts.append(GraphPart(file, (part.layers.start, part.layers.stop), part.nbytes))


def ahead_of_time_phases(
    providers: Sequence[str], provider_options: Mapping[str, str]
) -> list[Phase]:
    """The last phases for a provider that compiles ahead of time: from the model without its sampler to the file. The
    first of `providers` compiles, with `provider_options`; the remaining ones run the rest."""
    return [
        step(check_states, provider=providers[0]),
        step(compile_ahead, providers=providers, provider_options=provider_options),
        step(join_sampler),
        step(save_over),
        step(place_compiled, providers=providers, provider_options=provider_options),
    ]


def check_states(build: Build, provider: str) -> None:
    """Refuse states written by other nodes than GroupQueryAttention: a compiled part might write before it reads."""
    writers = {
        value.name: value.producer()
        for value in build.model.graph.outputs
        if value.name != LOGITS.name
    }
    others = [name for name, node in writers.items() if node is None or node.op_type != gqa.OP_TYPE]
    if others:
        raise CompileError(
            f"{provider} would update {len(others)} states of this model by itself ({others[0]} …), in place; it is "
            f"for models whose layers all attend through {gqa.OP_TYPE}. Compile it for cpu or cuda"
        )


def compile_ahead(
    build: Build, providers: Sequence[str], provider_options: Mapping[str, str]
) -> None:
    """Let the first of `providers` compile the model into EPContext nodes; CompileError if it cannot."""
    model = build.scratch / "model.onnx"
    save_graph(build.model, model)
    try:
        compile_context(model, build.decoder, providers, provider_options)
    except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
        raise CompileError(f"{providers[0]} cannot compile the model: {error}") from error
    build.replace_model(build.decoder)


def save_over(build: Build) -> None:
    """Write the model in place of the decode graph that it was read from and whose weights it still refers to."""
    # A compiled file names all domains that this build of ONNX Runtime knows; another build may not know them.
    common_passes.RemoveUnusedOpsetsPass()(build.model)
    written = build.scratch / DECODER
    digest = save_graph(build.model, written)
    written.replace(build.decoder)
    build.publish_weights(build.scratch / WEIGHTS, digest)


def place_compiled(
    build: Build, providers: Sequence[str], provider_options: Mapping[str, str]
) -> None:
    """Find out where the nodes run; CompileError if the graph does not load, or the first provider compiled nothing."""
    placement = placement_of(load_written(build, providers, provider_options))
    if CONTEXT not in placement.get(providers[0], {}):
        raise CompileError(
            f"{providers[0]} compiled no part of this model; compile it for another provider"
        )
    build.placement = placement


def load_written(
    build: Build, providers: Sequence[str], provider_options: Mapping[str, str], file: str = DECODER
) -> ort.InferenceSession:
    """The decode graph or its part, loaded as it will be run; CompileError if ONNX Runtime cannot."""
    options = {**provider_options, **build.provider_options}
    try:
        return open_session(build.folder / file, session_options(RECORD), providers, options)
    except QsampleError:
        raise
    except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
        raise CompileError(
            f"ONNX Runtime cannot load the compiled graph for {providers[0]}: {error}"
        ) from error


def misplaced_nodes(build: Build, session: ort.InferenceSession, device: str) -> list[str]:
    """The nodes of `session` that compute anything but shapes elsewhere than on `device`: "OPERATOR NAME"."""
    shapes = {node.name for node in host_nodes(build.model.graph)}
    return [
        f"{node.op_type} {node.name}"
        for provider, node in assigned_nodes(session)
        if provider != device and node.name not in shapes
    ]


def place_optimized(build: Build, default: str) -> None:
    """Count where the nodes of the optimised graph run. default: the provider of nodes that the report lacks."""
    build.placement = placement_in_graph(build.model, build.provider_of, default)


def assigned_nodes(session: ort.InferenceSession) -> list[tuple[str, Any]]:
    """(provider, node) of every node of a session that was opened with `RECORD`; a node has name and op_type."""
    return [
        (part.ep_name, node)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def placement_of(*sessions: ort.InferenceSession) -> Placement:
    """The placement of the nodes of sessions that were opened with `RECORD`."""
    return _count(
        (provider, node.op_type)
        for session in sessions
        for provider, node in assigned_nodes(session)
    )


def placement_in_graph(model: ir.Model, provider_of: Mapping[str, str], default: str) -> Placement:
    """The placement of the nodes of a graph, both sides of an If included. provider_of: node name → provider, as a
    session reported it before its last fusions; `default` for missing nodes."""
    nodes = model.graph.all_nodes()
    return _count((provider_of.get(node.name or "", default), node.op_type) for node in nodes)


def _count(nodes: Iterable[tuple[str, str]]) -> Placement:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for provider, operator in nodes:
        counts[provider][operator] += 1
    return {provider: dict(sorted(operators.items())) for provider, operators in counts.items()}
