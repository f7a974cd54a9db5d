"""The rows of a batch in a foreign graph: their positions, computed from the contract's inputs, in
place of attention_mask and position_ids; their recurrent states; the choice of each row's last real
token before the head; and one rotary table of two.

A rotary table that follows the length of a batch (longrope) cannot stay: another row in the batch
must not change a row's tokens, and a cache that was filled with one table cannot be read with the
other.

LinearAttention and CausalConvWithState read all tokens of a call. Of a token that is not real,
keys, values and decay become 0, so that nothing is written and nothing decays. The inputs of a
convolution are kept up to the row's last real token. A row that begins starts from zeros."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.addons.bake.conventions import (
    IDS,
    MASK,
    POSITIONS,
    STATE,
    ForeignGraph,
    Recurrence,
    refusal,
)
from qsample.addons.bake.original import Original, probes
from qsample.contract.arrays import Array
from qsample.contract.tensors import INPUT_LENGTHS, LENGTHS, LOGITS, RUNNING, STATUS
from qsample.errors import QsampleError
from qsample.graph.edit import constant, initializer
from qsample.graph.evaluate import inputs_of

PREFIX = "qsample."

Dims = Iterable[Any]
_INT32: Final = ir.DataType.INT32
_INT64: Final = ir.DataType.INT64
_BOOL: Final = ir.DataType.BOOL
# Operators that compute a position from the length of the past, the mask or the number of new
# tokens.
_COUNTING_OPERATORS: Final = (
    *(
        "Range",
        "Add",
        "Sub",
        "Cast",
        "CumSum",
        "Unsqueeze",
        "Squeeze",
        "Reshape",
        "Slice",
        "Expand",
        "Where",
        "Gather",
    ),
    *("Mul", "Clip", "Min", "Max", "Identity", "Flatten", "Concat"),
)
_PRODUCTS: Final = ("MatMul", "Gemm", "MatMulNBits", "MatMulBnb4", "FusedMatMul", "MatMulFpQ4")
_ALONG: Final = ("Cast", "Mul", "Div", "Add", "Sub", "Tanh", "Identity", "Neg", "Clip", "Where")
_SHAPES: Final = ("Reshape", "Unsqueeze", "Squeeze", "Slice", "Gather", "Identity")
# Hidden states are [B, S, size].
_HIDDEN_RANK: Final = 3
CHOICES: Final = ("short", "long")
# The inputs of LinearAttention; decay and beta may be absent.
_KEY: Final = 1
_VALUE: Final = 2
_DECAY: Final = 4
_BETA: Final = 5
_LINEAR: Final = "recurrent_state"


class Nodes:
    """Adds nodes to `graph`. Their names begin with PREFIX, which no exporter uses."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._made = 0

    def __call__(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        dtype: ir.DataType | None,
        shape: Dims | None = None,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """The only output of a new node. shape: None if unknown."""
        return self.several(op_type, inputs, [(dtype, shape)], domain=domain, **attributes)[0]

    def several(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType | None, Dims | None]],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """The outputs of a new node, each with its dtype and shape."""
        self._made += 1
        name = f"{PREFIX}{op_type}_{self._made}"
        node = ir.node(
            op_type, list(inputs), attributes, domain=domain, num_outputs=len(outputs), name=name
        )
        for index, (value, (dtype, shape)) in enumerate(zip(node.outputs, outputs, strict=True)):
            value.name = f"{name}.{index}"
            value.type = None if dtype is None else ir.TensorType(dtype)
            # Without its dtype, a shape cannot be written.
            value.shape = None if shape is None or dtype is None else ir.Shape(list(shape))
        self.graph.append(node)
        return node.outputs

    def integers(self, *numbers: int, dtype: str = "int64") -> ir.Value:
        """A constant [n]."""
        name = f"{PREFIX}{dtype}_" + "_".join(map(str, numbers))
        return initializer(self.graph, name, np.array(numbers, dtype))

    def integer(self, number: int) -> ir.Value:
        """A constant int64 scalar."""
        return initializer(self.graph, f"{PREFIX}scalar_{number}", np.array(number, np.int64))

    def merged_heads(self, value: ir.Value, dtype: ir.DataType, heads: int, size: int) -> ir.Value:
        """[B, heads, S, D] as [B, S, heads * D]."""
        by_token = self("Transpose", [value], dtype, ["B", "S", heads, size], perm=[0, 2, 1, 3])
        return self.reshaped(by_token, heads * size)

    def reshaped(self, value: ir.Value, *sizes: int) -> ir.Value:
        """[B, S, ...] as [B, S, sizes]."""
        return self(
            "Reshape", [value, self.integers(0, 0, *sizes)], value.dtype, ["B", "S", *sizes]
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Values of the graph; B rows of S new tokens, in caches of T.

    positions: [B, S] int64, of the new tokens, padding included; less than T. seqlens_k: [B] int32
    and total_sequence_length: int32 scalar, as GroupQueryAttention takes them. last: [B, 1] int64,
    the index of a row's last real token. lengths, input_lengths, status: the contract's inputs; a
    graph without recurrences has no status. steps: [S] int64, 0 to S - 1."""

    positions: ir.Value
    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    last: ir.Value
    lengths: ir.Value
    input_lengths: ir.Value
    steps: ir.Value
    status: ir.Value | None = None


def add_rows(foreign: ForeignGraph, nodes: Nodes) -> Rows:
    """Compute `Rows` in the graph.

    GroupQueryAttention takes the new tokens' place to start at seqlens_k + 1 - S. So a row's
    padding counts: with lengths + input_lengths in its place, a padded chunk would be written S -
    input_lengths too early. More rows with several tokens are a first prefill, recognised by S ==
    total_sequence_length."""
    ids = foreign.input(IDS)
    assert ids is not None
    lengths, input_lengths, status = (
        ir.Value(name=spec.name, shape=ir.Shape(["B"]), type=ir.TensorType(_INT32))
        for spec in (LENGTHS, INPUT_LENGTHS, STATUS)
    )
    zero = nodes.integers(0)
    one = nodes.integers(1)
    batch = nodes("Shape", [ids], _INT64, [1], start=0, end=1)
    sequence = nodes("Shape", [ids], _INT64, [1], start=1, end=2)
    capacity = nodes(
        "Shape", [foreign.layers[0].past_key], _INT64, [1], start=2, end=3
    )  # of the contract's shape

    count = nodes("Squeeze", [sequence, zero], _INT64, [])
    steps = nodes("Range", [nodes.integer(0), count, nodes.integer(1)], _INT64, ["S"])
    start = nodes(
        "Unsqueeze", [nodes("Cast", [lengths], _INT64, ["B"], to=_INT64), one], _INT64, ["B", 1]
    )
    counted = nodes("Add", [start, steps], _INT64, ["B", "S"])
    # A row that has ended does not move; its positions would leave the tables otherwise.
    positions = nodes(
        "Min", [counted, nodes("Sub", [capacity, one], _INT64, [1])], _INT64, ["B", "S"]
    )

    before_last = nodes(
        "Cast", [nodes("Sub", [sequence, one], _INT64, [1])], _INT32, [1], to=_INT32
    )
    seqlens_k = nodes("Add", [lengths, before_last], _INT32, ["B"])
    one_row = nodes("Equal", [batch, one], _BOOL, [1])
    one_token = nodes("Equal", [sequence, one], _BOOL, [1])
    is_later = nodes("Or", [one_row, one_token], _BOOL, [1])
    # Of later pieces of several rows it is more than S, so that they are refused.
    furthest = nodes("Cast", [nodes("ReduceMax", [lengths], _INT32, [1])], _INT64, [1], to=_INT64)
    total = nodes(
        "Where", [is_later, capacity, nodes("Add", [sequence, furthest], _INT64, [1])], _INT64, [1]
    )
    total = nodes("Squeeze", [nodes("Cast", [total], _INT32, [1], to=_INT32), zero], _INT32, [])

    real = nodes("Sub", [input_lengths, nodes.integers(1, dtype="int32")], _INT32, ["B"])
    last = nodes(
        "Unsqueeze", [nodes("Cast", [real], _INT64, ["B"], to=_INT64), one], _INT64, ["B", 1]
    )
    has_status = bool(foreign.recurrences)
    return Rows(
        positions,
        seqlens_k,
        total,
        last,
        lengths,
        input_lengths,
        steps,
        status=status if has_status else None,
    )


def counted_positions(foreign: ForeignGraph, longest: int) -> list[ir.Value]:
    """Values [1, S] that hold the positions of the new tokens, in a graph that counts them itself.
    In runs of the file, they equal past, past + 1, ... for several pasts, up to `longest` tokens,
    and numbers of tokens."""
    candidates = _counting_values(foreign)
    if not candidates:
        return []
    original = Original(foreign, candidates)
    generator = np.random.default_rng(0)
    found = set(candidates)
    for past, tokens in probes(longest):
        results = original.run([1] * tokens, original.filled(past, generator), past)
        wanted = np.arange(past, past + tokens)[None]
        found = {value for value in found if _equal(results[str(value.name)], wanted)}
    return [value for value in candidates if value in found]


def _equal(array: Array, wanted: Array) -> bool:
    return array.shape == wanted.shape and np.array_equal(array, wanted)


def _counting_values(foreign: ForeignGraph) -> list[ir.Value]:
    """Integers computed from the length of the cache, the shape of the ids or the mask."""
    sizes = [value for layer in foreign.layers for value in layer.pasts]
    waiting = [
        node.outputs[0] for value in sizes for node, _ in value.uses() if node.op_type == "Shape"
    ]
    mask = foreign.input(MASK)
    waiting += [] if mask is None else [mask]
    found: dict[ir.Value, None] = {}
    seen: set[ir.Node] = set()
    while waiting:
        for node, _ in waiting.pop().uses():
            if node in seen or node.op_type not in _COUNTING_OPERATORS:
                continue
            seen.add(node)
            value = node.outputs[0]
            is_float = node.op_type == "Cast" and node.attributes.get_int("to", 0) not in (
                _INT32,
                _INT64,
            )
            if not is_float:
                found[value] = None
                waiting.append(value)
    return [
        value for value in found if value.name not in (None, "") and value.dtype in (None, _INT64)
    ]


def use_row_positions(foreign: ForeignGraph, rows: Rows, counted: Iterable[ir.Value]) -> None:
    """Replace position_ids, and the positions that the graph counts itself, by the rows'
    positions."""
    given = foreign.input(POSITIONS)
    for value in (*([given] if given is not None else []), *counted):
        value.replace_all_uses_with(rows.positions)


def check_free_of_sizes(foreign: ForeignGraph) -> None:
    """Raise UnsupportedModelError if the graph still reads the mask or the length of its caches, a
    capacity by now."""
    mask = foreign.input(MASK)
    if mask is not None and mask.uses():
        users = sorted({node.op_type for node, _ in mask.uses()})
        raise refusal(foreign.path, f"{MASK} is used beyond the attention, by {', '.join(users)}")
    for layer in foreign.layers:
        for value in (*layer.pasts, *layer.presents):
            for node, _ in value.uses():
                if (
                    node.op_type == "Shape"
                    and not str(node.name).startswith(PREFIX)
                    and not _reads_fixed_axes(node)
                ):
                    raise refusal(
                        foreign.path,
                        f"the number of cached tokens is used beyond the attention, by {node.name}",
                    )


def _reads_fixed_axes(shape: ir.Node) -> bool:
    """Whether only the number and size of heads are taken off the shape."""
    for node, _ in shape.outputs[0].uses():
        index = constant(node.inputs[1]) if node.op_type == "Gather" else None
        if index is None or not set(np.ravel(index).tolist()) <= {0, 1, 3, -1, -3, -4}:
            return False
    return not shape.outputs[0].is_graph_output()


def select_last(foreign: ForeignGraph, rows: Rows, nodes: Nodes) -> ir.Value:
    """`logits` [B, V] float32 of the rows' last real tokens, and the graph's first output from now
    on. Tokens that the file itself leaves out before its head (Slice, Gather) are chosen here
    instead."""
    graph = foreign.graph
    old = foreign.logits
    dims = ["B", foreign.vocab_size]
    head, following = _head(old)
    if head is None:
        flat = nodes("GatherND", [old, rows.last], old.dtype, dims, batch_dims=1)
    else:
        for node in following:
            if node.op_type in _SHAPES:  # they are of [B, S, V]
                _bypass(foreign, node)
        hidden = _hidden(head.inputs[0])
        size = hidden.shape[-1] if hidden.shape is not None else None
        row = nodes("GatherND", [hidden, rows.last], hidden.dtype, ["B", size], batch_dims=1)
        if head.op_type != "Gemm":
            row = nodes("Unsqueeze", [row, nodes.integers(1)], hidden.dtype, ["B", 1, size])
        head.replace_input_with(0, row)
        for node in (head, *following):
            node.outputs[0].shape = None
        last = next(
            value for value in graph.outputs if value is foreign.logits or value.name == LOGITS.name
        )
        flat = nodes("Reshape", [last, nodes.integers(-1, foreign.vocab_size)], last.dtype, dims)
        old = last
    if (
        flat.dtype != ir.DataType.FLOAT
    ):  # a Cast that changes nothing is optimised away, and the name with it
        flat = nodes("Cast", [flat], ir.DataType.FLOAT, dims, to=ir.DataType.FLOAT)
    old.name = f"{LOGITS.name}.foreign"
    flat.name = LOGITS.name
    graph.outputs[graph.outputs.index(old)] = flat
    return flat


def _head(logits: ir.Value) -> tuple[ir.Node | None, list[ir.Node]]:
    """The product that makes the logits, None if there is none, and the nodes after it, the last
    first."""
    following: list[ir.Node] = []
    node = logits.producer()
    while node is not None and node.op_type not in _PRODUCTS:
        computed = [value for value in node.inputs if value is not None and inputs_of([value])]
        along = node.op_type in _ALONG and len(computed) == 1
        if not along and not (
            node.op_type in _SHAPES and computed and computed[0] is node.inputs[0]
        ):
            return None, []
        following.append(node)
        node = computed[0].producer()
    return node, following


def _hidden(value: ir.Value | None) -> ir.Value:
    """[B, S, size] of which `value` is a slice or a flattened form; else `value` itself."""
    assert value is not None
    top = value
    found = value
    while (
        (node := top.producer()) is not None
        and node.op_type in _SHAPES
        and node.inputs[0] is not None
    ):
        top = node.inputs[0]
        if node.op_type == "Reshape" or (
            node.op_type in ("Slice", "Gather") and _is_along_tokens(node)
        ):
            found = top
    is_hidden = found.shape is None or len(found.shape) == _HIDDEN_RANK
    return found if is_hidden else value


def _is_along_tokens(node: ir.Node) -> bool:
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) in (1, -2)
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    return axes is not None and axes.tolist() in ([1], [-2])


def _bypass(foreign: ForeignGraph, node: ir.Node) -> None:
    source = node.inputs[0]
    output = node.outputs[0]
    assert source is not None
    if output.is_graph_output():
        graph = foreign.graph
        source.name = output.name
        output.name = f"{output.name}.shaped"
        graph.outputs[graph.outputs.index(output)] = source
    output.replace_all_uses_with(source)


def choose_table(foreign: ForeignGraph, rope: str | None) -> int | None:
    """Put a single table in the place of each If that chooses between two, in place: "short", also
    by default, or "long". Returns the tokens up to which the file itself takes the short table, or
    the rows of the long table; None if the graph has no such If. Raises QsampleError for a `rope`
    that the file cannot follow, and UnsupportedModelError for an If that chooses anything but
    constants."""
    choices = [node for node in foreign.graph if node.op_type == "If"]
    if not choices:
        if rope is not None:
            raise QsampleError(
                f"{foreign.path} has one rotary table, not a short and a long one; leave rope out"
            )
        return None
    if rope not in (None, *CHOICES):
        raise QsampleError(f"rope is {rope!r}; choose {', '.join(CHOICES)}")
    limits = []
    for node in choices:
        condition = node.inputs[0]
        if condition is None or not {*inputs_of([condition])} <= {MASK, POSITIONS}:
            raise refusal(foreign.path, f"it has an If, {node.name}, that no length decides")
        greater = condition.producer()
        threshold = (
            constant(greater.inputs[1])
            if greater is not None and greater.op_type == "Greater"
            else None
        )
        if threshold is None or threshold.size != 1:
            raise refusal(foreign.path, f"it has an If, {node.name}, that no length decides")
        branch = "then_branch" if rope == "long" else "else_branch"
        tables = _constants(foreign, node, node.attributes[branch].as_graph())
        for output, table in zip(node.outputs, tables, strict=True):
            output.replace_all_uses_with(
                initializer(
                    foreign.graph, f"{output.name}.{'short' if rope is None else rope}", table
                )
            )
        limits.append(
            int(tables[0].shape[0])
            if rope == "long"
            else min(int(threshold.item()), tables[0].shape[0])
        )
    common_passes.RemoveUnusedNodesPass()(foreign.model)
    return min(limits)


def _constants(foreign: ForeignGraph, node: ir.Node, branch: ir.Graph) -> list[Array]:
    tables = []
    for value in branch.outputs:
        source = value
        while (
            (maker := source.producer()) is not None
            and maker.op_type == "Identity"
            and maker.inputs[0] is not None
        ):
            source = maker.inputs[0]
        table = constant(source)
        if table is None:
            raise refusal(
                foreign.path, f"it has an If, {node.name}, that chooses between computed values"
            )
        tables.append(table)
    return tables


def keep_states(foreign: ForeignGraph, nodes: Nodes, rows: Rows) -> ForeignGraph:
    """`foreign` with recurrences that read real tokens only, in place; the next states of
    convolutions are new values. Padding becomes the row's first token, whose hidden states are
    numbers: keys of a padding token may be 0, and a norm of them NaN, and an attention would spread
    it."""
    ids = foreign.input(IDS)
    assert ids is not None
    assert rows.status is not None
    one = nodes.integers(1)
    running = nodes("Equal", [rows.status, nodes.integers(RUNNING, dtype="int32")], _BOOL, ["B"])
    none = nodes.integers(0, dtype="int32")
    advances = nodes("Where", [running, rows.input_lengths, none], rows.input_lengths.dtype, ["B"])
    counts = nodes(
        "Unsqueeze", [nodes("Cast", [advances], _INT64, ["B"], to=_INT64), one], _INT64, ["B", 1]
    )
    real = nodes("Less", [rows.steps, counts], _BOOL, ["B", "S"])
    goes_on = nodes("Greater", [rows.lengths, none], _BOOL, ["B"])

    readers = [use for use in ids.uses() if not str(use[0].name).startswith(PREFIX)]
    first = nodes("Slice", [ids, nodes.integers(0), one, one], ids.dtype, ["B", 1])
    filled = nodes("Where", [real, ids, first], ids.dtype, ["B", "S"])
    for node, place in readers:
        node.replace_input_with(place, filled)

    real = nodes("Unsqueeze", [real, nodes.integers(2)], _BOOL, ["B", "S", 1])
    changed = []
    for each in foreign.recurrences:
        axes = nodes.integers(*range(1, 1 + len(each.shape)))
        kept = nodes("Unsqueeze", [goes_on, axes], _BOOL, ["B", *[1] * len(each.shape)])
        past = nodes(
            "Where", [kept, each.past, _zero(nodes, each.dtype)], each.dtype, ["B", *each.shape]
        )
        each.node.replace_input_with(STATE, past)
        if each.kind == _LINEAR:
            _leave_out(each.node, (_KEY, _VALUE, _DECAY, _BETA), real, nodes)
            changed.append(each)
        else:
            changed.append(replace(each, present=_end_at_last(foreign, each, past, counts, nodes)))
    return replace(foreign, recurrences=tuple(changed))


def _zero(nodes: Nodes, dtype: ir.DataType) -> ir.Value:
    return initializer(
        nodes.graph, f"{PREFIX}zero_{dtype.name.lower()}", np.zeros((), dtype.numpy())
    )


def _leave_out(node: ir.Node, places: Sequence[int], real: ir.Value, nodes: Nodes) -> None:
    for place in places:
        value = node.inputs[place] if len(node.inputs) > place else None
        if value is not None:
            assert value.dtype is not None
            zero = _zero(nodes, value.dtype)
            node.replace_input_with(
                place, nodes("Where", [real, value, zero], value.dtype, value.shape)
            )


def _end_at_last(
    foreign: ForeignGraph, each: Recurrence, past: ir.Value, counts: ir.Value, nodes: Nodes
) -> ir.Value:
    """The next state of a convolution: the inputs [B, C, K - 1] before and up to the row's last
    real token."""
    channels, width = each.shape
    source = each.node.inputs[0]
    joined = nodes("Concat", [past, source], each.dtype, ["B", channels, None], axis=-1)
    columns = nodes("Add", [counts, nodes.integers(*range(width))], _INT64, ["B", width])
    columns = nodes("Unsqueeze", [columns, nodes.integers(1)], _INT64, ["B", 1, width])
    columns = nodes(
        "Expand", [columns, nodes.integers(1, channels, 1)], _INT64, ["B", channels, width]
    )
    present = nodes("GatherElements", [joined, columns], each.dtype, ["B", *each.shape], axis=-1)
    outputs = foreign.graph.outputs
    outputs[outputs.index(each.present)] = present
    present.name = each.present.name
    each.present.name = f"{each.present.name}.padded"
    return present
