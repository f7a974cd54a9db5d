"""Turns another exporter's decoder file into a portable package with the sampler in its graph.

Stages: locate → recognise → run the file as its authors do → rewrite → write → parity gate →
publish. Nothing here needs torch or transformers; all is written aside and renamed into place at
the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.addons.bake import attention
from qsample.addons.bake.conventions import POSITIONS, ForeignGraph
from qsample.addons.bake.files import (
    Location,
    Settings,
    generation_config,
    locate,
    read_settings,
    without_links,
    write_files,
)
from qsample.addons.bake.original import Original, reference
from qsample.addons.bake.recognise import graph_errors, load, recognise
from qsample.addons.bake.rows import (
    Nodes,
    add_rows,
    check_free_of_sizes,
    choose_table,
    counted_positions,
    keep_states,
    select_last,
    use_row_positions,
)
from qsample.addons.bake.to_contract import (
    interface_of,
    record_shapes,
    rotary_tables,
    use_contract_names,
    use_own_operators,
)
from qsample.addons.bake.unpacked import unpack_levels
from qsample.checkpoints.source import CONFIG, license_of, origin_of
from qsample.contract.interface import Features, Interface
from qsample.errors import QsampleError, printable
from qsample.exporters import parity
from qsample.exporters.portable import Draft, possible_interface, write_draft
from qsample.graph import gqa
from qsample.graph.operators import INT8_ACTIVATIONS, is_matmul_nbits
from qsample.package import package
from qsample.package.disk.scratch import scratch_near
from qsample.package.disk.source_files import SourceFiles
from qsample.progress import Progress, Stage, Stages, metered
from qsample.request.own_settings import with_needed

if TYPE_CHECKING:
    from qsample.models.sources import GraphSource

# A further comparison: the folder of the unpublished package, its interface and the tolerance (None
# if weights are quantized) → the figures for the manifest.
Comparison = Callable[[Path, Interface, float | None], Mapping[str, Any]]
# Percentages of the time.
_STAGE_SHARES: Final[Mapping[str, float]] = {
    Stage.FINDING: 5,
    Stage.READING: 5,
    Stage.RUNNING: 30,
    Stage.REWRITING: 10,
    Stage.WRITING_WEIGHTS: 20,
    Stage.COMPARING: 10,
    Stage.COMPARING_WITH_CHECKPOINT: 10,
    Stage.PUBLISHING: 10,
}
# The assumed context of a model that states none; windows are searched up to it.
_DEFAULT_CONTEXT: Final = 8192
_MAX_PROBED_TOKENS: Final = 32768
# The index of the table of cosines among the inputs of ONNX Runtime's RotaryEmbedding.
_ROTARY_COS_SLOT: Final = 2
# Largest difference per unit of the largest logit, by the arithmetic of the file. Activations that
# are rounded to 8 bits jump by 1/127 of a block if an attention's sum differs in its last bit.
_TOLERANCES: Final = {"float32": 1e-4, "8-bit activations": 2e-2, "float16": 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BakeOptions:
    """How a decoder becomes a package; see `qsample.bake`.

    Attributes:
        features: the features of the graph.
        rope: which of a file's two rotary tables is used, "short" or "long"; None for the short one.
        overwrite: whether a package in the same place is replaced.
        compare: a further comparison, beside the one with the file itself; None for none.
    """

    features: Features
    rope: str | None = None
    overwrite: bool = False
    compare: Comparison | None = None


def bake(
    source: GraphSource,
    out: str | Path,
    options: BakeOptions,
    *,
    progress: Progress | None = None,
) -> package.Package:
    """Bake the sampler into a decoder, and return the portable package at `out`. Raises QsampleError
    if a file of the decoder changes meanwhile."""
    with metered(progress) as report, SourceFiles() as sources:
        stages = Stages(report, _STAGE_SHARES)
        stages.begin(Stage.FINDING)
        location = locate(source.model_id, source.file, hub=source.hub)
        sources.add(location.files.values())
        package.check_not_source(out, location.file.parent)

        def bake_at(location: Location) -> package.Package:
            return _bake(source, location, out, options, stages, sources)

        if not location.is_linked:
            return bake_at(location)
        with scratch_near(Path(out)) as scratch:
            plain_files = without_links(location, scratch.new)
            try:
                return bake_at(plain_files)
            except QsampleError as error:
                named = str(error).replace(str(plain_files.file.parent), str(location.file.parent))
                raise type(error)(named) from error


def _bake(
    source: GraphSource,
    location: Location,
    out: str | Path,
    options: BakeOptions,
    stages: Stages,
    sources: SourceFiles,
) -> package.Package:
    settings = read_settings(location)
    stages.begin(Stage.READING)
    with graph_errors(location.file):
        model = load(location.file)
        foreign = recognise(
            location.file, model, head_dim=settings.head_dim, vocab_size=settings.vocab_size
        )
        del model
    origin = _source(source, location, settings, foreign)
    size = sum(file.stat().st_size for file in (location.file, *location.data))
    with package.write_package(out, overwrite=options.overwrite, required_bytes=size) as writer:
        token_ids = settings.token_ids(foreign.vocab_size)
        generation = generation_config(settings, token_ids)
        end = write_files(
            location, generation, foreign.vocab_size, source.tokenizer, writer.directory
        )
        token_ids = token_ids.ending_at(end, foreign.vocab_size)
        features = with_needed(options.features, generation)
        with graph_errors(location.file):
            baked = rewrite(foreign, features, settings, options.rope, stages)
        del foreign
        tolerance = _TOLERANCES[arithmetic_of(baked.model)]
        draft = Draft(
            baked.model,
            baked.interface,
            baked.expected,
            origin,
            token_ids,
            baked.limit,
            original="the file",
            tolerance=tolerance,
        )
        manifest = write_draft(draft, writer.directory, stages)
        if options.compare is None:
            warnings.warn(
                f"{location.name}: the baked graph was compared with this file alone, which does not show that the "
                "file computes its model; reference (--reference) names a checkpoint to compare with transformers, too",
                stacklevel=5,
            )
        else:
            stages.begin(Stage.COMPARING_WITH_CHECKPOINT)
            limit = None if manifest.packed_weights else tolerance
            others = options.compare(writer.directory, baked.interface, limit)
            manifest = replace(manifest, parity={**(manifest.parity or {}), **others})
        stages.begin(Stage.PUBLISHING)
        sources.check()
        writer.finish(manifest)
    stages.finish()
    return package.read_package(out, verify=False)


@dataclass(frozen=True, slots=True)
class Baked:
    """A rewritten graph.

    Attributes:
        model: the graph up to its logits.
        interface: the interface of the package.
        expected: the logits of the file.
        limit: the number of positions that the model knows; None for any number.
    """

    model: ir.Model
    interface: Interface
    expected: parity.Reference
    limit: int | None


def rewrite(
    foreign: ForeignGraph, features: Features, settings: Settings, rope: str | None, stages: Stages
) -> Baked:
    """Rewrite a graph to the contract, in place, after the file was run as its authors run it.

    Args:
        foreign: the graph.
        features: the features of the package.
        settings: the settings of the file's configurations.
        rope: the rotary table to keep, "short" or "long"; None for the short table.
        stages: the stages of the whole work, which include RUNNING and REWRITING.

    Raises:
        UnsupportedModelError: the graph cannot be rewritten.
    """
    table = choose_table(foreign, rope)
    limits = settings.context, table, *_rotary_tables(foreign)
    limit = min((one for one in limits if one is not None), default=None)
    longest = min(
        _DEFAULT_CONTEXT if limit is None else limit,
        _MAX_PROBED_TOKENS if foreign.size is None else foreign.size,
        _MAX_PROBED_TOKENS,
    )
    is_grouped = foreign.layers[0].attention is not None
    is_unfused = False
    rotates = False
    matches: list[attention.Match] = []
    rules: list[attention.Rule] = []
    running = stages.begin(Stage.RUNNING)
    if is_grouped:
        attention.check_attentions(foreign)
        is_unfused = attention.unfuse_norms(foreign)
        attention.drop_causal_biases(foreign, longest)
        windows = attention.windows(foreign)
        rotates = attention.rotates(foreign)
    else:
        attention.unfuse_attentions(foreign)
        attention.drop_unseen_rows(foreign, longest)
        matches = [attention.match(foreign, layer) for layer in foreign.layers]
        rules = attention.measure(foreign, matches, longest)
        windows = [-1 if rule.window is None else rule.window for rule in rules]
    counted = (
        []
        if rotates or foreign.input(POSITIONS) is not None
        else counted_positions(foreign, longest)
    )
    original = Original(foreign, rewritten=foreign.changed or is_unfused or rope == "long")
    running(0.3)
    compared = min((one for one in (limit, foreign.size) if one is not None), default=None)
    expected = reference(original, foreign.vocab_size, compared, windows)
    del original  # its session holds the weights
    _warn_of_windows(foreign, settings, windows, limit)

    stages.begin(Stage.REWRITING)
    nodes = Nodes(foreign.graph)
    rows = add_rows(foreign, nodes)
    if foreign.recurrences:
        foreign = keep_states(foreign, nodes, rows)
    if is_grouped:
        attention.use_rows(foreign, rows)
    else:
        foreign = attention.put_operators(foreign, nodes, rows, matches, rules)
    use_own_operators(foreign, nodes)
    use_row_positions(foreign, rows, counted)
    logits = select_last(foreign, rows, nodes)
    common_passes.RemoveUnusedNodesPass()(foreign.model)
    check_free_of_sizes(foreign)
    if features.max_loras > 0:
        raise QsampleError(
            f"max_loras is {features.max_loras}, and the layers of a decoder file have no names that adapters could be "
            "matched with; export the model's checkpoint, or leave max_loras out"
        )
    interface = interface_of(foreign, features)
    model = use_contract_names(foreign, logits, rows, interface)
    interface = possible_interface(model, interface)
    if not is_grouped or foreign.recurrences:
        record_shapes(model, foreign.path.parent, limit, vocab_size=foreign.vocab_size)
    # Last, because graphs that are run in between would hold these weights themselves.
    if unpack_levels(model):
        common_passes.RemoveUnusedNodesPass()(model)
    return Baked(model, interface, expected, limit)


def arithmetic_of(model: ir.Model) -> str:
    """The arithmetic of the graph: a key of _TOLERANCES."""
    nodes = list(model.graph.all_nodes())
    halves = any(value.dtype == ir.DataType.FLOAT16 for node in nodes for value in node.outputs)
    if halves or any(value.dtype == ir.DataType.FLOAT16 for value in model.graph.inputs):
        return "float16"
    packed = [node for node in nodes if is_matmul_nbits(node)]
    rounds = any(
        node.attributes.get_int("accuracy_level", 0) == INT8_ACTIVATIONS for node in packed
    )
    return "8-bit activations" if rounds else "float32"


def _rotary_tables(foreign: ForeignGraph) -> list[int]:
    """The number of positions of each rotary table."""
    slots: dict[str, int] = {gqa.OP_TYPE: gqa.Slot.COS_CACHE, "RotaryEmbedding": _ROTARY_COS_SLOT}
    sizes = []
    for node in foreign.graph:
        if node.op_type == "RotaryEmbedding" and not node.domain:
            tables = rotary_tables(node)
            table = None if tables is None else tables[1]
        else:
            table = gqa.get_input(node, slots[node.op_type]) if node.op_type in slots else None
        if (
            table is not None
            and table.shape is not None
            and isinstance(rows := table.shape[0], int)
        ):
            sizes.append(rows)
    return sizes


def _warn_of_windows(
    foreign: ForeignGraph, settings: Settings, windows: list[int], limit: int | None
) -> None:
    """Warn if the graph's windows differ from its configuration: then the file itself is not that
    model."""
    stated = settings.window
    found = sorted({window for window in windows if window > 0})
    if (
        stated is not None
        and stated < (_DEFAULT_CONTEXT if limit is None else limit)
        and stated not in found
    ):
        has = f"of {', '.join(map(str, found))}" if found else "none: it attends to all tokens"
        warnings.warn(
            f"{foreign.path}: its configuration states an attention window of {stated} tokens, and the graph has "
            f"{has}; the baked graph computes the same as the file, which is not that model beyond the window",
            stacklevel=6,
        )


def _source(
    source: GraphSource, location: Location, settings: Settings, foreign: ForeignGraph
) -> package.Source:
    model_id, revision = origin_of(
        source.model_id, source.hub, CONFIG if source.file is None else source.file
    )
    model = foreign.model
    made_by = " ".join(filter(None, (model.producer_name, model.producer_version))) or "unknown"
    return package.Source(
        model_id=model_id,
        revision=revision,
        model_type=printable(settings.model_type),
        architecture=printable(f"{location.file.name}, a decoder by {made_by}"),
        license=license_of(location.files),
        files={name: package.sha256_of(path) for name, path in location.files.items()},
    )
