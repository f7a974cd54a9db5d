"""Where the rows of a batch stand, computed from the contract's inputs: what takes the place of attention_mask and
position_ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract import INPUT_LENGTHS, LENGTHS
from qsample.exporters.foreign.interface import IDS, MASK, POSITIONS, ForeignGraph, refusal
from qsample.exporters.foreign.nodes import PREFIX, Nodes
from qsample.exporters.foreign.original import Original
from qsample.graph.edit import constant
from qsample.tensors import Array

_INT32: Final = ir.DataType.INT32
_INT64: Final = ir.DataType.INT64
_BOOL: Final = ir.DataType.BOOL
# What a position is computed by, from the length of the past, the mask or the number of new tokens.
_COUNTING: Final = (
    *("Range", "Add", "Sub", "Cast", "CumSum", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Expand", "Where", "Gather"),
    *("Mul", "Clip", "Min", "Max", "Identity", "Flatten", "Concat"),
)
_PROBES: Final = ((0, 5), (6, 3), (4, 1))  # tokens in the cache, new ones


@dataclass(frozen=True, slots=True)
class Rows:
    """Values of the graph; B rows of S new tokens, in caches of T.

    positions: [B, S] int64, of the new tokens, padding included; less than T. seqlens_k: [B] int32 and
    total_sequence_length: int32 scalar, as GroupQueryAttention takes them. last: [B, 1] int64, the index of a row's
    last real token. lengths, input_lengths: the contract's inputs.
    """

    positions: ir.Value
    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    last: ir.Value
    lengths: ir.Value
    input_lengths: ir.Value


def add_rows(foreign: ForeignGraph, nodes: Nodes) -> Rows:
    """Compute `Rows` in the graph.

    GroupQueryAttention takes the new tokens' place to start at seqlens_k + 1 - S. So a row's padding counts: with
    lengths + input_lengths in its place, a padded chunk would be written S - input_lengths too early. More rows with
    several tokens are a first prefill, which it tells by S == total_sequence_length.
    """
    ids = foreign.input(IDS)
    assert ids is not None
    lengths, input_lengths = (
        ir.Value(name=spec.name, shape=ir.Shape(["B"]), type=ir.TensorType(_INT32)) for spec in (LENGTHS, INPUT_LENGTHS)
    )
    zero, one = nodes.integers(0), nodes.integers(1)
    batch = nodes("Shape", [ids], _INT64, [1], start=0, end=1)
    sequence = nodes("Shape", [ids], _INT64, [1], start=1, end=2)
    capacity = nodes("Shape", [foreign.layers[0].past_key], _INT64, [1], start=2, end=3)

    count = nodes("Squeeze", [sequence, zero], _INT64, [])
    steps = nodes("Range", [nodes.integer(0), count, nodes.integer(1)], _INT64, ["S"])
    start = nodes("Unsqueeze", [nodes("Cast", [lengths], _INT64, ["B"], to=_INT64), one], _INT64, ["B", 1])
    counted = nodes("Add", [start, steps], _INT64, ["B", "S"])
    # A row that has ended stays where it is; its positions would leave the tables otherwise.
    positions = nodes("Min", [counted, nodes("Sub", [capacity, one], _INT64, [1])], _INT64, ["B", "S"])

    before_last = nodes("Cast", [nodes("Sub", [sequence, one], _INT64, [1])], _INT32, [1], to=_INT32)
    seqlens_k = nodes("Add", [lengths, before_last], _INT32, ["B"])
    one_row = nodes("Equal", [batch, one], _BOOL, [1])
    one_token = nodes("Equal", [sequence, one], _BOOL, [1])
    is_later = nodes("Or", [one_row, one_token], _BOOL, [1])
    # Of later pieces of several rows it is more than S, so that they are refused.
    furthest = nodes("Cast", [nodes("ReduceMax", [lengths], _INT32, [1])], _INT64, [1], to=_INT64)
    total = nodes("Where", [is_later, capacity, nodes("Add", [sequence, furthest], _INT64, [1])], _INT64, [1])
    total = nodes("Squeeze", [nodes("Cast", [total], _INT32, [1], to=_INT32), zero], _INT32, [])

    real = nodes("Sub", [input_lengths, nodes.integers(1, dtype="int32")], _INT32, ["B"])
    last = nodes("Unsqueeze", [nodes("Cast", [real], _INT64, ["B"], to=_INT64), one], _INT64, ["B", 1])
    return Rows(positions, seqlens_k, total, last, lengths, input_lengths)


def counted_positions(foreign: ForeignGraph) -> list[ir.Value]:
    """Values [1, S] that hold the positions of the new tokens, in a graph that counts them itself.

    Told by running the file: what equals past, past + 1, ... for several pasts and numbers of tokens.
    """
    candidates = _counting_values(foreign)
    if not candidates:
        return []
    original = Original(foreign, candidates)
    generator, found = np.random.default_rng(0), set(candidates)
    for past, tokens in _PROBES:
        results = original.run([1] * tokens, original.filled(past, generator), past)
        wanted = np.arange(past, past + tokens)[None]
        found = {value for value in found if _equal(results[str(value.name)], wanted)}
    return [value for value in candidates if value in found]


def _equal(array: Array, wanted: Array) -> bool:
    return array.shape == wanted.shape and np.array_equal(array, wanted)


def _counting_values(foreign: ForeignGraph) -> list[ir.Value]:
    """Integers computed from the length of the cache, the shape of the ids or the mask."""
    sizes = [value for layer in foreign.layers for value in layer.pasts]
    waiting = [node.outputs[0] for value in sizes for node, _ in value.uses() if node.op_type == "Shape"]
    mask = foreign.input(MASK)
    waiting += [] if mask is None else [mask]
    found: dict[ir.Value, None] = {}
    seen: set[ir.Node] = set()
    while waiting:
        for node, _ in waiting.pop().uses():
            if node in seen or node.op_type not in _COUNTING:
                continue
            seen.add(node)
            value = node.outputs[0]
            is_float = node.op_type == "Cast" and node.attributes.get_int("to", 0) not in (_INT32, _INT64)
            if not is_float:
                found[value] = None
                waiting.append(value)
    return [value for value in found if value.name and value.dtype in (None, _INT64)]


def use_row_positions(foreign: ForeignGraph, rows: Rows, counted: Iterable[ir.Value]) -> None:
    """Let what reads position_ids, or positions that the graph counts, read the rows' own."""
    given = foreign.input(POSITIONS)
    for value in (*([given] if given is not None else []), *counted):
        value.replace_all_uses_with(rows.positions)


def check_free_of_sizes(foreign: ForeignGraph) -> None:
    """Raise UnsupportedModelError where the graph still computes with the mask, or with the length of its cache, which
    is the capacity of a buffer now."""
    mask = foreign.input(MASK)
    if mask is not None and mask.uses():
        users = sorted({node.op_type for node, _ in mask.uses()})
        raise refusal(foreign.path, f"{MASK} is used beyond the attention, by {', '.join(users)}")
    for layer in foreign.layers:
        for value in (*layer.pasts, *layer.presents):
            for node, _ in value.uses():
                if node.op_type == "Shape" and not str(node.name).startswith(PREFIX) and not _reads_fixed_axes(node):
                    raise refusal(
                        foreign.path, f"the number of cached tokens is used beyond the attention, by {node.name}"
                    )


def _reads_fixed_axes(shape: ir.Node) -> bool:
    """Whether only the number and size of heads are taken off the shape."""
    for node, _ in shape.outputs[0].uses():
        index = constant(node.inputs[1]) if node.op_type == "Gather" else None
        if index is None or not set(np.ravel(index).tolist()) <= {0, 1, 3, -1, -3, -4}:
            return False
    return not shape.outputs[0].is_graph_output()
