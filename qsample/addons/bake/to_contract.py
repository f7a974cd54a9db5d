"""A rewritten foreign graph gets ONNX Runtime's operators, the contract's names and axes, our
opset, and the shapes of its values.

Operators that ONNX has since opset 23 become ONNX Runtime's: compile fuses these, and every
provider has them. The graph then gets the oldest opset from OPSET on that has all of its operators.

Shapes are measured by runs at several sizes, for graphs that came without, as TorchScript's
exporter writes them: shape inference does not follow sizes through Shape, Gather and Concat, and a
fusion knows a pattern by its shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as common_passes

from qsample.addons.bake.conventions import IDS, ForeignGraph, refusal
from qsample.addons.bake.rows import Nodes, Rows
from qsample.contract.arrays import Array
from qsample.contract.interface import Features, Interface, KeyValueShape, RecurrentShape
from qsample.contract.tensors import BATCH, CAPACITY, INPUT_LENGTHS, SEQUENCE, retained_name
from qsample.graph.edit import constant, initializer, producer, reads
from qsample.graph.evaluate import with_outputs, zeros
from qsample.graph.operators import CONTRIB_DOMAIN, OPSET
from qsample.ort.options import NO_PREPACKING, WEIGHTS_FOLDER_KEY, session_options
from qsample.ort.providers import CPU

_IR_VERSION: Final = 10
_AXES: Final = {"batch_size": "B", "sequence_length": "S"}
_OURS: Final = ("B", "S", "T")
# No two axes have the same sizes in all of them; several rows with several tokens are a first
# prefill.
_SIZES: Final = ((2, 3, 37), (3, 5, 41), (1, 1, 7), (1, 4, 300))
# Further sizes for graphs that count tokens by their contents, as some mixtures count the tokens of
# each expert: few counts are equal in all of the runs.
_MANY_TOKENS_SIZES: Final = (1, 100, 301)
# A constant that is computed from shapes has at most this many numbers.
_MAX_NUMBERS: Final = 16
# Since this opset, reductions take their axes as an input, and Split states the number of parts.
_AXES_INPUT_OPSET: Final = 18
_REDUCTIONS: Final = (
    *(
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
    ),
    "ReduceSumSquare",
)
# The sizes of their outputs may depend on the contents of their inputs.
_COUNTING_OPERATORS: Final = ("Range", "NonZero", "Compress", "Unique")
_ROTARY_ATTRIBUTES: Final = ("interleaved", "num_heads", "rotary_embedding_dim")
# The inputs of ONNX's RotaryEmbedding.
_COS: Final = 1
_SIN: Final = 2
_POSITIONS: Final = 3


def interface_of(foreign: ForeignGraph, features: Features) -> Interface:
    """The package's interface, with a cache of `foreign.dtype`."""
    dtype = "float32" if foreign.dtype == ir.DataType.FLOAT else "float16"
    shapes = tuple(
        KeyValueShape(layer.heads, layer.head_dim, layer.number) for layer in foreign.layers
    )
    in_order = [shape.layer for shape in shapes] == list(range(len(shapes)))
    if in_order:  # as an export writes them
        shapes = tuple(KeyValueShape(shape.num_key_value_heads, shape.head_dim) for shape in shapes)
    counted: Counter[tuple[int, str]] = Counter()
    recurrent = []
    for each in foreign.recurrences:
        index = counted[each.number, each.kind]
        counted[each.number, each.kind] += 1
        state_dtype = each.dtype.numpy().name
        recurrent.append(RecurrentShape(each.number, each.kind, index, each.shape, state_dtype))
    return Interface(foreign.vocab_size, shapes, dtype, features, recurrent=tuple(recurrent))


def use_contract_names(
    foreign: ForeignGraph, logits: ir.Value, rows: Rows, interface: Interface
) -> ir.Model:
    """The model up to its logits, as `Interface.model` has it; in place. Raises
    UnsupportedModelError for an input of the file that is still used and not in the contract."""
    model = foreign.model
    graph = foreign.graph
    ids = foreign.input(IDS)
    assert ids is not None
    ids.shape = ir.Shape(["B", "S"])
    _free_names(graph, {*interface.decoder.input_names, *interface.decoder.output_names}, {logits})
    inputs = [ids, rows.input_lengths, rows.lengths]
    outputs = [logits]
    inputs += [] if rows.status is None else [rows.status]
    pairs = [
        pair for layer in foreign.layers for pair in zip(layer.pasts, layer.presents, strict=True)
    ]
    pairs += [(each.past, each.present) for each in foreign.recurrences]
    for spec, (past, present) in zip(interface.cache_states, pairs, strict=True):
        for value, name in ((past, spec.name), (present, retained_name(spec.name))):
            value.name = name
            value.shape = ir.Shape(list(spec.axes))
        present.type = past.type
        inputs.append(past)
        outputs.append(present)
    dropped = [value for value in graph.inputs if value not in inputs]
    graph.outputs[:] = outputs
    graph.inputs[:] = [*inputs, *dropped]
    common_passes.RemoveUnusedNodesPass()(model)
    used = {
        str(value.name): sorted({node.op_type for node, _ in value.uses()})
        for value in dropped
        if value.uses()
    }
    for name, users in used.items():
        raise refusal(foreign.path, f"its input {name} is still used by {', '.join(users)}")
    graph.inputs[:] = inputs
    _rename_axes(graph)
    graph.sort()
    set_opset(foreign)
    model.ir_version = max(model.ir_version, _IR_VERSION)
    common_passes.ClearMetadataAndDocStringPass()(model)
    model.producer_name = "qsample"
    model.producer_version = None
    return model


def _free_names(graph: ir.Graph, names: set[str], kept: set[ir.Value]) -> None:
    """Rename values with names of the contract, because the sampler's values will have these."""
    values = [value for node in graph.all_nodes() for value in node.outputs]
    constants = [
        value for part in (graph, *graph.subgraphs()) for value in part.initializers.values()
    ]
    for value in [*values, *constants, *graph.inputs]:
        if value.name in names and value not in kept and value.name != IDS:
            value.name = f"{value.name}.foreign"


def _rename_axes(graph: ir.Graph) -> None:
    """Our names for our axes; shape inference finds the rest again."""
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                dims = [
                    dim if isinstance(dim, int) else _AXES.get(str(dim), str(dim))
                    for dim in value.shape
                ]
                value.shape = ir.Shape(
                    [dim if isinstance(dim, int) or dim in _OURS else None for dim in dims]
                )


def record_shapes(
    model: ir.Model, folder: Path, limit: int | None = None, *, vocab_size: int = 1
) -> int:
    """Give every value of the main graph its shape and dtype, in place.

    Args:
        model: the model of an `Interface.model`.
        folder: the folder of its external data.
        limit: the number of positions that it knows; None for any number.
        vocab_size: the vocabulary from which the ids of the runs are drawn.

    Returns:
        The number of values that became constants.
    """
    from_shapes = _from_shapes(model.graph)
    counts = any(
        node.op_type in _COUNTING_OPERATORS and not from_shapes.issuperset(node.outputs)
        for node in model.graph
    )
    sizes = [
        (
            rows,
            min(tokens, tokens if limit is None else limit),
            min(capacity, capacity if limit is None else limit),
        )
        for rows, tokens, capacity in (*_SIZES, *([_MANY_TOKENS_SIZES] if counts else []))
    ]
    runs = [
        _run(model, folder, dict(zip((BATCH, SEQUENCE, CAPACITY), each, strict=True)), vocab_size)
        for each in sizes
    ]
    constants = 0
    for node in model.graph:
        for value in node.outputs:
            name = str(value.name)
            if value.name in (None, "") or name not in runs[0]:
                continue
            found = [run[name] for run in runs]
            value.type = ir.TensorType(ir.DataType.from_numpy(found[0].dtype))
            value.shape = _shape(found, sizes)
            numbers = _always(found)
            if value in from_shapes and not value.is_graph_output() and numbers is not None:
                value.replace_all_uses_with(initializer(model.graph, f"{name}.fixed", numbers))
                constants += 1
    for node in model.graph:
        if node.op_type == "Reshape" and not node.domain:
            _fix_target(model.graph, node, runs)
    common_passes.RemoveUnusedNodesPass()(model)
    return constants


class _Found(NamedTuple):
    """A value in a run.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        numbers: its numbers; None if there are too many.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    numbers: Array | None


def _run(
    model: ir.Model, folder: Path, axes: Mapping[str, int], vocab_size: int
) -> dict[str, _Found]:
    """The values of the main graph by name, with random tokens (seeded) in empty caches; not values
    that constants alone make."""
    graph = model.graph
    feeds = {str(value.name): zeros(value, axes) for value in graph.inputs}
    feeds[IDS] = np.random.default_rng(0).integers(0, vocab_size, feeds[IDS].shape)
    feeds[INPUT_LENGTHS.name] += axes[SEQUENCE]
    options = session_options({WEIGHTS_FOLDER_KEY: str(folder), **NO_PREPACKING})
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    fixed = _from_constants(graph)
    values = [
        value
        for node in graph
        for value in node.outputs
        if value.name not in (None, "") and value not in fixed
    ]
    session = ort.InferenceSession(with_outputs(model, values), options, providers=[CPU])
    names = [output.name for output in session.get_outputs()]
    arrays = zip(names, session.run(names, feeds), strict=True)
    return {
        name: _Found(array.shape, array.dtype, array if array.size <= _MAX_NUMBERS else None)
        for name, array in arrays
    }


def _from_constants(graph: ir.Graph) -> set[ir.Value]:
    """Values that constants alone make, such as transposed weights."""
    found: set[ir.Value] = set()
    for node in graph:
        read = reads(node)
        if read and all(value in found or constant(value) is not None for value in read):
            found.update(node.outputs)
    return found


def _from_shapes(graph: ir.Graph) -> set[ir.Value]:
    """Values that shapes alone decide, not the contents of inputs."""
    found: set[ir.Value] = set()
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        inner = any(
            attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()
        )
        known = all(value in found or constant(value) is not None for value in read)
        if node.op_type in ("Shape", "Size") or (known and read and not inner):
            found.update(node.outputs)
    return found


def _always(found: Sequence[_Found]) -> Array | None:
    """The numbers of all runs; None if they differ."""
    first = found[0].numbers
    if first is None or any(
        other.numbers is None or not np.array_equal(first, other.numbers) for other in found[1:]
    ):
        return None
    return first


def _shape(found: Sequence[_Found], sizes: Sequence[tuple[int, int, int]]) -> ir.Shape | None:
    """The shape, with the names of axes whose `sizes` it has in all runs."""
    if len({len(each.shape) for each in found}) > 1:
        return None
    named = dict(zip(zip(*sizes, strict=True), (BATCH, SEQUENCE, CAPACITY), strict=True))
    dims = list(zip(*(each.shape for each in found), strict=True))
    # A size of 0 is a count of the tokens that happen to be of a kind.
    return ir.Shape(
        [each[0] if len(set(each)) == 1 and each[0] else named.get(each) for each in dims]
    )


def _fix_target(graph: ir.Graph, node: ir.Node, runs: Sequence[Mapping[str, _Found]]) -> None:
    """Let a Reshape keep the axes that it does keep (0), so that its target is a constant."""
    data = node.inputs[0]
    target = node.inputs[1]
    assert data is not None
    assert target is not None
    takes_zero = node.attributes.get_int("allowzero", 0) == 1
    if (
        constant(target) is not None
        or takes_zero
        or not {str(data.name), str(target.name)} <= runs[0].keys()
    ):
        return
    targets = [run[str(target.name)].numbers for run in runs]
    lengths = {None if numbers is None else len(numbers) for numbers in targets}
    if None in lengths or len(lengths) > 1:  # of a rank that varies
        return
    wanted = list(
        zip(*(numbers.tolist() for numbers in targets if numbers is not None), strict=True)
    )
    given = list(
        zip(*(run[str(data.name)].shape for run in runs), strict=False)
    )  # its rank may vary
    numbers: list[int] = []
    for index, found in enumerate(wanted):
        if len(set(found)) == 1:
            numbers.append(int(found[0]))
        elif index < len(given) and found == given[index]:
            numbers.append(0)
        else:
            numbers.append(-1)
    if numbers.count(-1) <= 1:
        name = "target_" + "_".join(map(str, numbers))
        node.replace_input_with(1, initializer(graph, name, np.array(numbers, np.int64)))


def rotary_tables(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Positions, cosines and sines [positions, size] of ONNX's RotaryEmbedding; None if it computes
    its angles."""
    cos = node.inputs[_COS]
    sin = node.inputs[_SIN]
    positions = node.inputs[_POSITIONS] if len(node.inputs) > _POSITIONS else None
    if cos is None or sin is None:
        return None
    if positions is not None:
        return positions, cos, sin
    looked_up = producer(cos), producer(sin)
    if (
        looked_up[0] is None
        or looked_up[1] is None
        or {node.op_type for node in looked_up if node} != {"Gather"}
    ):
        return None
    (cos, positions), (sin, others) = (node.inputs[:2] for node in looked_up if node)
    axes = {node.attributes.get_int("axis", 0) for node in looked_up if node}
    if positions is not others or axes != {0} or cos is None or sin is None or positions is None:
        return None
    return positions, cos, sin


def use_own_operators(foreign: ForeignGraph, nodes: Nodes) -> None:
    """Replace RMSNormalization and RotaryEmbedding of ONNX by ONNX Runtime's operators, in
    place."""
    for node in list(foreign.graph):
        if node.domain:
            continue
        output = node.outputs[0]
        if node.op_type == "RMSNormalization":
            new = nodes(
                "SimplifiedLayerNormalization",
                node.inputs[:2],
                output.dtype,
                output.shape,
                epsilon=node.attributes.get_float("epsilon", 1e-5),
                axis=node.attributes.get_int("axis", -1),
                stash_type=node.attributes.get_int("stash_type", 1),
            )
        elif node.op_type == "RotaryEmbedding" and (tables := rotary_tables(node)) is not None:
            positions, *angles = tables
            given = {name: node.attributes.get_int(name, 0) for name in _ROTARY_ATTRIBUTES}
            inputs = [node.inputs[0], positions, *angles]
            new = nodes(
                "RotaryEmbedding",
                inputs,
                output.dtype,
                output.shape,
                domain=CONTRIB_DOMAIN,
                **given,
            )
        else:
            continue
        output.replace_all_uses_with(new)
        foreign.graph.remove(node, safe=True)


def set_opset(foreign: ForeignGraph) -> None:
    """To OPSET, or the next that has all operators as they are, in place; UnsupportedModelError if
    there is none. Between opset 14 and OPSET, reductions and equal splits alone came to be written
    differently."""
    model = foreign.model
    graph = foreign.graph
    have = graph.opset_imports[""]
    for node in graph.all_nodes():
        node.version = None
        if have < _AXES_INPUT_OPSET and not node.domain:
            _write_inputs(graph, node)
    missing = ""
    for target in range(OPSET, max(have, OPSET) + 1):
        missing = next(
            (
                text
                for node in graph.all_nodes()
                if (text := _missing(node, target, is_older=target < have))
            ),
            "",
        )
        if not missing:
            graph.opset_imports[""] = target
            model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
            return
    raise refusal(foreign.path, missing)


def _write_inputs(graph: ir.Graph, node: ir.Node) -> None:
    if node.op_type in _REDUCTIONS and "axes" in node.attributes:
        axes = list(node.attributes.pop("axes").as_ints())
        node.resize_inputs(2)
        name = "axes_" + "_".join(map(str, axes))
        node.replace_input_with(1, initializer(graph, f"qsample.{name}", np.array(axes, np.int64)))
    if node.op_type == "Split" and (len(node.inputs) < 2 or node.inputs[1] is None):
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


def _missing(node: ir.Node, opset: int, *, is_older: bool) -> str:
    """Parts of `node` that `opset` lacks; "" for none. is_older: than the opset of the file."""
    if node.domain or not onnx.defs.has(node.op_type, ""):
        return ""  # ONNX Runtime keeps some contrib operators in ONNX's domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return f"its {node.op_type} is not in opset {opset}"
    unknown = [name for name in node.attributes if name not in schema.attributes]
    if unknown:
        return f"its {node.op_type} has {unknown[0]}, which opset {opset} lacks"
    if not is_older:
        return ""
    if len(node.inputs) > schema.max_input:
        return f"its {node.op_type} has {len(node.inputs)} inputs, and {schema.max_input} in opset {opset}"
    for value, parameter in zip(node.inputs, schema.inputs, strict=False):
        dtype = None if value is None else value.dtype
        if dtype is not None and f"tensor({dtype.name.lower()})" not in parameter.types:
            return f"its {node.op_type} takes {dtype}, which opset {opset} does not"
    return ""
