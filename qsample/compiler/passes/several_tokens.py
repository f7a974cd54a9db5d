"""Lets a decode graph check guessed tokens: it reads any number of tokens of each row in a call.

The attention takes a count of new tokens a row (`query_seqlens`), over rows padded to the same length. Everything else
computes each token by itself, so the tokens of all rows lie one after the other, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.compiler.passes.expert_rows import row_multiple
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    BATCH,
    IMAGE_ROWS,
    INPUT_IDS,
    INPUT_LENGTHS,
    LENGTHS,
    LOGITS,
    POSITION_OFFSETS,
    ROW_MULTIPLE,
)
from qsample.errors import CompileError
from qsample.graph.edit import (
    ancestors,
    cast,
    initializer,
    insert,
    put_behind,
    reads,
    reshape_target,
)
from qsample.graph.gqa import Slot, attentions, get_input, set_inputs
from qsample.graph.join import append_sampler, choice_of_position, cut_at_logits, prepend
from qsample.sampler.guess import (
    LAST_AT,
    PADDED_AT,
    POSITIONS,
    SEQLENS_K,
    STEP_IDS,
    STEP_LENGTHS,
    TOKENS_AT,
    build_drafter,
    build_verifier,
    verifier_inputs,
)

_PREFIX: Final = "guess."
_CONTROL: Final = (Slot.SEQLENS_K, Slot.TOTAL_SEQUENCE_LENGTH)
_ADDED_PER_TOKEN: Final = (Slot.POSITION_IDS, Slot.ATTENTION_BIAS)
# The inputs of images have a value for each token.
_IMAGE_INPUTS: Final = (IMAGE_ROWS.name, POSITION_OFFSETS.name)
_PADDED_INPUTS: Final = (INPUT_IDS.name, *_IMAGE_INPUTS)
Values = dict[str, ir.Value]


def check_guesses(model: ir.Model, interface: Interface, pad_token_id: int, *, pack: bool) -> bool:
    """Give a decode graph the inputs and outputs of `interface`, with `num_speculative_tokens`.

    1. The nodes of `sampler.guess` come first, and the model reads their tokens in place of `input_ids`; behind the
       inputs of images, guesses are text.
    2. Every layer attends through GroupQueryAttention, with the number of tokens of each row as an input.
    3. If `pack`, the model's other nodes read the tokens packed, unless more than positions tells rows apart.
    4. The logits are those after each token that a draw follows, for the verifier in place of the sampler.

    Raises CompileError if more than each row's last hidden state leads to the logits.
    """
    cut_at_logits(model, interface.without_guesses())
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == LOGITS.name)
    choice = choice_of_position(logits)
    if choice is None:
        raise CompileError(
            "num_speculative_tokens needs a model whose logits come from each row's last hidden state alone; leave it "
            "out"
        )
    positions = [node for node in graph if _adds_positions(node)]
    packed = pack and _can_be_packed(graph, choice, positions)
    _forget_shapes(graph, logits)
    image_inputs = {str(value.name): value for value in graph.inputs if value.name in _IMAGE_INPUTS}
    replaced = (INPUT_IDS.name, INPUT_LENGTHS.name, *image_inputs)
    values = prepend(model, build_drafter(interface, packed=packed), replaced, _PREFIX)
    if packed:
        # Steps of single tokens have the multiple, too, so that guesses change nothing under any host.
        row_multiple(graph, 2)
    for node in attentions(graph):
        control = {
            Slot.QUERY_SEQLENS: values[STEP_LENGTHS.name],
            Slot.SEQLENS_K: values[SEQLENS_K.name],
        }
        set_inputs(node, {**control, Slot.TOTAL_SEQUENCE_LENGTH: _capacity(graph, node)})
    _choose(graph, choice, logits, values)
    first = next(node for node in graph if not str(node.name).startswith(_PREFIX))
    ids = values[STEP_IDS.name]
    for name, value in image_inputs.items():
        continued = _continued(first, value, ids)
        if packed:
            continued = _packed(first, continued, values)
        values[name].replace_all_uses_with(continued)
    if packed:
        ids = _packed(first, ids, values)
        _pack_positions(first, positions, values)
        for node in attentions(graph):
            _pad_around(node, values)
        _count_one_row(graph)
    values[INPUT_IDS.name].replace_all_uses_with(ids)
    values[INPUT_LENGTHS.name].replace_all_uses_with(values[STEP_LENGTHS.name])

    graph.outputs.extend(values[spec.name] for spec in verifier_inputs(interface))
    append_sampler(model, build_verifier(interface, pad_token_id), interface.decoder)
    if packed:
        # `interface` has no row multiple, so `append_sampler` did not keep this input.
        graph.inputs.append(graph.initializers[ROW_MULTIPLE.name])
    return True


def _forget_shapes(graph: ir.Graph, logits: ir.Value) -> None:
    """Remove the shapes of all values but the graph's other outputs: they have other rows and columns from here on."""
    for node in graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    logits.shape = None


def _pack_positions(first: ir.Node, positions: Sequence[ir.Node], values: Values) -> None:
    """Give the readers of the positions that nodes add up the packed tokens' positions."""
    for node in positions:
        place = _packed(first, values[POSITIONS.name], values)
        dtype = node.outputs[0].dtype
        if dtype is not None:
            place = cast(place, dtype, first)
        node.outputs[0].replace_all_uses_with(place)


def _adds_positions(node: ir.Node) -> bool:
    """Whether `node` adds each row's length to the numbers of the columns: [B, S]."""
    if (
        node.op_type != "Add"
        or node.domain
        or (shape := node.outputs[0].shape) is None
        or len(shape) != 2
    ):
        return False
    return any(
        _names(ancestors([value]), value) == {LENGTHS.name} and _is_column(value)
        for value in node.inputs
    )


def _is_column(value: ir.Value | None) -> bool:
    return (
        value is not None
        and value.shape is not None
        and len(value.shape) == 2
        and value.shape[1] == 1
    )


def _names(nodes: set[ir.Node], value: ir.Value | None) -> set[str]:
    """The inputs of the graph that `nodes` read to make `value`; not those whose shape alone is read."""
    sources = (source for node in nodes if node.op_type != "Shape" for source in reads(node))
    return {str(source.name) for source in sources if _is_input(source)}


def _is_input(value: ir.Value) -> bool:
    return value.is_graph_input() and not value.is_initializer()


def _can_be_packed(graph: ir.Graph, choice: ir.Node, positions: list[ir.Node]) -> bool:
    """Whether nothing but the attentions, `positions` and `choice` reads an input that has a value for each row."""
    if any(
        get_input(node, slot) is not None for node in attentions(graph) for slot in _ADDED_PER_TOKEN
    ):
        return False

    def computes(node: ir.Node) -> list[ir.Value]:
        if node in positions:
            return []
        if node is choice:
            return [value for value in node.inputs[:1] if value is not None]
        slots = _CONTROL if node.op_type == "GroupQueryAttention" else ()
        return [
            value
            for index, value in enumerate(node.inputs)
            if value is not None and index not in slots
        ] + [value for value in reads(node) if value not in node.inputs]

    nodes = ancestors(graph.outputs, reads=computes)
    read = (
        value
        for node in nodes
        if node.op_type not in ("Shape", "GroupQueryAttention")
        for value in computes(node)
    )
    return all(
        value.name in _PADDED_INPUTS or BATCH not in map(str, value.shape or ())
        for value in read
        if _is_input(value)
    )


def _capacity(graph: ir.Graph, attention: ir.Node) -> ir.Value:
    past = get_input(attention, Slot.PAST_KEY)
    assert past is not None
    assert past.shape is not None
    return initializer(graph, "capacity", np.array(past.shape[2], np.int32))


def _continued(before: ir.Node, given: ir.Value, ids: ir.Value) -> ir.Value:
    """An input of images, [B, S] or [B, S, 3], for guesses, too: they are text, and positions follow the last token."""
    assert before.graph is not None
    assert given.shape is not None
    rank = len(given.shape)
    offsets = given.name == POSITION_OFFSETS.name
    tokens, columns = (
        insert(before, "Shape", [value], [1], {"start": 1, "end": 2}, dtype=ir.DataType.INT64)
        for value in (ids, given)
    )
    more = insert(before, "Sub", [tokens, columns], [1])
    fixed = [
        initializer(before.graph, f"zeros_{n}", np.zeros(n, np.int64)) for n in (rank + 1, rank - 2)
    ]
    pads = insert(before, "Concat", [fixed[0], more, fixed[1]], [2 * rank], {"axis": 0})
    none = (
        None
        if offsets
        else initializer(before.graph, "no_image_row", np.array(IMAGE_ROWS.off, np.int32))
    )
    return insert(
        before, "Pad", [given, pads, none], None, {"mode": "edge" if offsets else "constant"}
    )


def _packed(before: ir.Node, padded: ir.Value, values: Values) -> ir.Value:
    """`padded` [B, S] or [B, S, 3] without its padding, [1, N] or [1, N, 3]."""
    return insert(before, "GatherND", [padded, values[TOKENS_AT.name]], None)


def _pad_around(attention: ir.Node, values: Values) -> None:
    """Pad the queries, keys and values [1, N, n] of `attention` to [B, S, n], and pack its output again."""
    for slot in (Slot.QUERY, Slot.KEY, Slot.VALUE):
        if (source := get_input(attention, slot)) is not None:
            padded = insert(
                attention, "GatherND", [source, values[PADDED_AT.name]], [None, None, None]
            )
            set_inputs(attention, {slot: padded})
    put_behind(attention.outputs[0], "GatherND", [values[TOKENS_AT.name]])


def _choose(graph: ir.Graph, choice: ir.Node, logits: ir.Value, values: Values) -> None:
    """Let `logits` be those after each of the tokens LAST_AT, in place of each row's last one."""
    states = choice.inputs[0]
    chosen = choice.outputs[0]
    assert states is not None
    flat = insert(choice, "Flatten", [states], [None, None], {"axis": 2})
    picked = insert(choice, "Gather", [flat, values[LAST_AT.name]], [None, None], {"axis": 0})
    if choice.op_type == "GatherElements":
        picked = insert(choice, "Unsqueeze", [picked, reshape_target(graph, [1])], [None, 1, None])
    chosen.replace_all_uses_with(picked, replace_graph_outputs=True)
    if chosen is logits:
        chosen.name = None
        picked.name = LOGITS.name
    graph.remove(choice, safe=True)


def _count_one_row(graph: ir.Graph) -> None:
    """Let nodes that ask an input other than the tokens how many rows there are see the one row of packed tokens."""
    for node in graph.all_nodes():
        source = (
            node.inputs[0]
            if node.op_type == "Shape" and not str(node.name).startswith(_PREFIX)
            else None
        )
        if (
            source is None
            or not _is_input(source)
            or source.name in _PADDED_INPUTS
            or source.shape is None
        ):
            continue
        first = node.attributes.get_int("start", 0)
        last = node.attributes.get_int("end", len(source.shape))
        sizes = [1 if dim == ir.SymbolicDim(BATCH) else dim for dim in source.shape][first:last]
        assert all(isinstance(size, int) for size in sizes), (
            f"{source.name} has other sizes than its batch's"
        )
        constant = initializer(
            graph, "one_row_" + "_".join(map(str, sizes)), np.array(sizes, np.int64)
        )
        node.outputs[0].replace_all_uses_with(constant)
