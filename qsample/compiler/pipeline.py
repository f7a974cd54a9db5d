"""Everything that compile does to a decode graph, as a list of named phases.

A target lists its phases; the functions here make the phases that several targets share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.compiler.calibration import given_text, own_text
from qsample.compiler.debug_dump import DebugDump
from qsample.compiler.passes.attention import pack_qkv, remove_head_transposes, simplify_reshapes
from qsample.compiler.passes.fusions import (
    fold_constants,
    fuse_operators,
    join_projections,
    replace_gemms,
)
from qsample.compiler.passes.half_precision import HALF_DTYPES, convert_to_half
from qsample.compiler.passes.rope import absorb_rope, fuse_rope
from qsample.compiler.passes.window_caches import slide_windows
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize import PRESETS
from qsample.compiler.quantize.bits import layers_of, table_of
from qsample.compiler.quantize.experts import quantize_experts
from qsample.compiler.quantize.kv_cache import BITS, measure_scales, quantize_kv_cache
from qsample.compiler.quantize.packed_experts import keep_packed_experts
from qsample.compiler.quantize.walk import Calibration, calibrated_levels
from qsample.compiler.quantize.weights import check_quantized, quantize_weights
from qsample.contract.arrays import Array
from qsample.contract.tensors import BLOCK_SIZES, CAPACITY, HOST_AXES, IMAGE_FEATURES
from qsample.graph.adapters import join_adapters, split_adapters
from qsample.graph.edit import all_initializers, fix_axes
from qsample.graph.image_blocks import cut_image_blocks, see_whole_images
from qsample.graph.join import split_at_logits
from qsample.graph.packed import in_bytes
from qsample.graph.save import save_graph
from qsample.graph.weights import load_graph, widen_weights
from qsample.package.disk.space import check_free
from qsample.package.manifest import GraphPart
from qsample.progress import Progress, Stage, Stages

DECODER: Final = "decoder.onnx"
WEIGHTS: Final = f"{DECODER}.data"
Placement = dict[str, dict[str, int]]
"""Execution provider → operator type → how many nodes run there."""


def stages_of(plan: CompilePlan, progress: Progress | None) -> Stages:
    """The stages of a whole compile, with their shares of the time as measured in docs/benchmarks/export.md."""
    shares: dict[str, float] = {
        Stage.WRITING_TEXT: 20 if plan.calibrated and plan.options.calibration_text is None else 0,
        Stage.OPTIMISING: 3,
        Stage.MEASURING_CACHE: 2 if plan.kv_cache_dtype is not None else 0,
        Stage.FITTING: 30 if plan.calibrated else 0,
        Stage.WRITING_GRAPH: 3,
        Stage.TESTING: 3,
        Stage.DIVERGENCE: 9 if plan.quantized else 0,
        Stage.PUBLISHING: 0.3,
    }
    return Stages(progress, shares)


Pass = Callable[[ir.Model], bool]
"""Changes a model in place and returns whether there was anything to change. It may leave nodes that nothing reads."""


@dataclass(slots=True)
class Build:
    """A decode graph on its way through the phases.

    Attributes:
        plan: the plan of the compile.
        stages: the stages of the compile, for progress.
        folder: the folder of the package, with `decoder.onnx` at the end.
        scratch: an empty folder on the same disk, for files that are read until the graph is written.
        model: the graph after the phases so far.
        texts: the token ids that weights are fitted to, [n] int64 each; empty unless the plan is calibrated.
        adapted: the layers that adapters may change and their weights, while the adapters are apart from the model.
        blockwise: the layers in which the tokens of an image see each other.
        sampler: the sampler, while it is apart from the model.
        provider_of: a node's name → its provider, as ONNX Runtime reported it when it optimised the graph.
        placement: where the nodes run, once the last phase has found out.
        weights_sha256: the sha256 of the file of the decode graph's weights, once there is such a file.
        provider_options: the options that depend on the graph, in addition to the target's.
        parts: the parts of the written graph, one for each device; none for one device.
    """

    plan: CompilePlan
    stages: Stages
    folder: Path
    scratch: Path
    model: ir.Model
    texts: Sequence[Array] = ()
    sampler: ir.Model | None = None
    adapted: Sequence[tuple[str, str]] = ()
    blockwise: Sequence[int] = ()
    provider_of: Mapping[str, str] = field(default_factory=dict)
    placement: Placement | None = None
    weights_sha256: str | None = None
    provider_options: Mapping[str, str] = field(default_factory=dict)
    parts: list[GraphPart] = field(default_factory=list)

    @property
    def decoder(self) -> Path:
        """The file that the last phases write."""
        return self.folder / DECODER

    def publish_weights(self, written: Path, sha256: str | None) -> None:
        """Move the file `written`, if there is one, to the place of the decode graph's weights."""
        if written.exists():
            written.replace(self.folder / WEIGHTS)
        self.weights_sha256 = sha256

    def replace_model(self, path: Path) -> None:
        """Go on with the model in `path`, made of the present model; reports of passes are kept."""
        meta = self.model.meta
        self.model = load_optimized(path)
        self.model.meta.update(meta)


def load_optimized(path: Path) -> ir.Model:
    """A model that ONNX Runtime wrote. It writes constants in the order of a hash table, which differs from process to
    process: they are sorted."""
    model = ir.load(path)
    for part in (model.graph, *model.graph.subgraphs()):
        constants = sorted(part.initializers.items())
        part.initializers.clear()
        part.initializers.update(constants)
    return model


class Phase(NamedTuple):
    """An entry of a target's list: its name, and a function that changes a build in place."""

    name: str
    run: Callable[[Build], object]


def step(function: Callable[..., object], **arguments: object) -> Phase:
    """The phase that calls `function` with the build and `arguments`, named after it."""
    return Phase(function.__name__.replace("_", "-"), partial(function, **arguments))


def graph_pass(function: Callable[..., bool], **arguments: object) -> Phase:
    """The phase that runs a `Pass`, `function` with `arguments`, on the build's model, named after it."""

    def run_pass(build: Build) -> None:
        apply(build.model, partial(function, **arguments))

    return Phase(function.__name__.replace("_", "-"), run_pass)


def apply(model: ir.Model, *passes: Pass) -> bool:
    """Run `passes` in order, each on a graph without unused nodes; returns whether any of them changed the model."""
    modified = False
    for change in passes:
        if change(model):
            common_passes.RemoveUnusedNodesPass()(model)
            modified = True
    return modified


def start(plan: CompilePlan, stages: Stages, folder: Path, scratch: Path) -> Build:
    """The build of a package's portable decode graph, whose weights stay in their files."""
    texts: Sequence[Array] = ()
    if plan.calibrated and plan.options.calibration_text is not None:
        texts = given_text(plan)  # before the work: it may be refused
    elif plan.calibrated:
        texts = own_text(plan, stages.begin(Stage.WRITING_TEXT))
    stages.begin(Stage.OPTIMISING)
    model = load_graph(plan.decoder)
    widen_weights(model)
    in_bytes(model)
    return Build(plan, stages, folder, scratch, model, texts=texts)


def run(build: Build, phases: Iterable[Phase], dump: DebugDump | None = None) -> None:
    """Run `phases` on `build` in order; `dump` writes the graph before the first and after each of them."""
    if dump is not None:
        dump.write("portable", build.model)
    for phase in phases:
        phase.run(build)
        if dump is not None:
            dump.write(phase.name, build.model)


def fixed_sizes(plan: CompilePlan, sizes: Mapping[str, int] | None = None) -> Phase:
    """Gives the capacity, and the further axes in `sizes`, their fixed size."""
    return graph_pass(fix_axes, sizes={CAPACITY: plan.ctx_len, **(sizes or {})})


def split_sampler(build: Build) -> None:
    """Cut the sampler off the model: it then ends with its logits."""
    build.model, build.sampler = split_at_logits(build.model, build.plan.source.interface)


def cut_adapters(build: Build) -> None:
    """Take the products of adapters out of the model: they would be in the way of passes."""
    if build.plan.source.interface.adapters:
        build.adapted = split_adapters(build.model, build.plan.source.interface)


def put_adapters(build: Build) -> None:
    """Add the products of adapters again."""
    if build.adapted:
        join_adapters(build.model, build.plan.interface, build.adapted)


def cut_blocks(build: Build) -> None:
    """Take the branches for images out of the model: passes find the attentions of a text model."""
    build.blockwise = cut_image_blocks(build.model)


def put_blocks(build: Build) -> None:
    """Add the branches for images again, to the attentions as they are now."""
    see_whole_images(build.model, build.blockwise)


def fold_sampler(build: Build) -> None:
    """Compute what depends on constants alone in the separate sampler: there is nothing in it to fuse."""
    if build.sampler is not None:
        fold_constants(build.sampler)


def lean_phases(provider: str, capacity: int) -> list[Phase]:
    """Phases that make ONNX Runtime's own operators of a decode graph, as few a layer as they allow: ten for Llama, two
    norms with their skips, four matrix products, the attention, and the gate's three. provider: one of
    `fusions.FUSION_PROVIDERS`. capacity: T, fixed in the graph."""
    return [
        graph_pass(join_projections),  # as the fusions would, but without reading the weights
        graph_pass(fuse_operators, provider=provider),
        # From here on, each clears the way for the next.
        graph_pass(replace_gemms),
        # On the CPU, the last bits of packages compiled before stay as they are.
        graph_pass(fuse_rope, halves_apart=provider == "cuda"),
        graph_pass(remove_head_transposes),
        graph_pass(simplify_reshapes),
        graph_pass(absorb_rope, capacity=capacity),
        graph_pass(pack_qkv),
    ]


def half_phases(plan: CompilePlan) -> list[Phase]:
    """The phase that makes a float32 graph half precision, if the plan says so; recurrent states stay float32."""
    if plan.dtype not in HALF_DTYPES:
        return []
    kept = {state.name for state in plan.interface.recurrent}
    states = {state.name for state in plan.interface.cache_states} - kept
    states |= {IMAGE_FEATURES} if plan.interface.image is not None else set()
    return [graph_pass(convert_to_half, dtype=plan.dtype, states=states)]


def quantization_phases(
    plan: CompilePlan,
    *,
    expert_block_sizes: Collection[int] = BLOCK_SIZES,
    pads_blocks: bool = False,
    copies: int = 1,
) -> list[Phase]:
    """Phases that keep the integers of experts, quantize the cache and the weights if the plan says so, and check the
    result. The device's QMoE takes `expert_block_sizes`, and its MatMulNBits a part of a block if `pads_blocks`.
    copies: how often the weights are written."""
    phases = [graph_pass(keep_packed_experts, block_sizes=expert_block_sizes)]
    phases += [step(quantize_cache)] if plan.kv_cache_dtype is not None else []
    if plan.weights is not None:
        phases += [
            graph_pass(
                quantize_experts, quantization=plan.expert_weights, block_sizes=expert_block_sizes
            ),
            step(quantize_matrices, pads=pads_blocks),
        ]
    return [*phases, step(check, copies=copies)]


def slide_caches(build: Build) -> None:
    """Let layers with a window forget old tokens."""
    plan = build.plan
    held = slide_windows(build.model, plan.ctx_len)
    pairs = zip(plan.interface.cache_layers, plan.interface.key_values, strict=True)
    shapes = (
        replace(shape, capacity=held.get(f"past_key_values.{layer}.key")) for layer, shape in pairs
    )
    build.plan = replace(plan, interface=replace(plan.interface, key_values=tuple(shapes)))


def quantize_cache(build: Build) -> None:
    """Make the cache int8 or int4, with scales that are measured with the portable graph."""
    source = build.plan.source
    progress = build.stages.begin(Stage.MEASURING_CACHE)
    bits = BITS[str(build.plan.kv_cache_dtype)]
    scales = measure_scales(source, bits, build.plan.ctx_len, progress)
    apply(build.model, partial(quantize_kv_cache, scales=scales, bits=bits))


def quantize_matrices(build: Build, pads: bool) -> None:
    """Quantize the weights, fitted to the calibration text if the method does that."""
    plan = build.plan
    calibrate = None
    assert plan.weights is not None
    if plan.calibrated:
        progress = build.stages.begin(Stage.FITTING)
        axes = {
            **plan.source.interface.sizes,
            CAPACITY: plan.ctx_len,
            **dict.fromkeys(HOST_AXES, 1),
        }
        caches = [state.name for state in plan.interface.cache_states if CAPACITY in state.axes]
        calibration = Calibration(build.texts, axes, caches, build.scratch, progress)
        calibrate = partial(calibrated_levels, calibration=calibration)
    table = table_of(
        plan.options.table,
        plan.weights.bits,
        PRESETS[plan.options.preset],
        layers_of(build.model.graph),
    )
    change = partial(
        quantize_weights, quantization=plan.weights, table=table, pads=pads, calibrate=calibrate
    )
    apply(build.model, change)


def check(build: Build, copies: int) -> None:
    """Refuse a model of which nothing was quantized though it should be, and a disk without room for the package."""
    build.stages.begin(Stage.WRITING_GRAPH)
    plan = build.plan
    if plan.weights is not None:
        check_quantized(build.model, plan.weights)
    tensors = (value.const_value for value in all_initializers(build.model.graph))
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    check_free(build.folder, copies * size + size // 2 * plan.store_float16, "the package")


def save(build: Build) -> None:
    """Write the model, whose lazy weights are computed meanwhile, as the package's decode graph."""
    build.weights_sha256 = save_graph(build.model, build.decoder)
