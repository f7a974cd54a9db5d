"""Moves rotary embeddings (RoPE) into GroupQueryAttention.

The operator rotates by its own count of positions: the row's earlier tokens, then the new ones in order. A graph whose
cosines and sines are those of just these positions needs no RotaryEmbedding nodes. Whether they are is seen by running
that part of the graph, so it does not matter how a model computes them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract import BATCH, LENGTHS, SEQUENCE
from qsample.graph.edit import ancestors, initializer, producer
from qsample.graph.evaluate import GraphPart, inputs_of
from qsample.graph.gqa import Slot, attentions, set_inputs
from qsample.graph.operators import CONTRIB_DOMAIN, is_contrib
from qsample.tensors import Array

_MULTIPLE: Final = 16  # GroupQueryAttention takes head and rotary sizes that are multiples of this
# The table and the graph compute the same expression; a frequency that depends on more than the position is far off.
_TOLERANCE: Final = 1e-6


def absorb_rope(model: ir.Model, capacity: int) -> bool:
    """Let each GroupQueryAttention rotate its queries and keys where the graph does it by position; in place.

    1. Queries and keys come from RotaryEmbedding nodes over merged heads, both with the same cosines and sines.
    2. The head size and the rotated part of it are multiples of 16, as the operator takes them.
    3. The cosines and sines of a token are those of its position, whatever its row and neighbours.

    capacity: T, the positions that the tables of cosines and sines hold; it is fixed in `model`. Returns whether
    anything changed.
    """
    tables: dict[tuple[ir.Value | None, ...], tuple[ir.Value, ir.Value] | None] = {}
    modified = False
    for node in attentions(model.graph):
        query, key = _rotation(node.inputs[Slot.QUERY]), _rotation(node.inputs[Slot.KEY])
        if query is None or key is None or not _same_rotation(query, key):
            continue
        if node.attributes.get_int("do_rotary", 0):
            continue
        if key.head_size % _MULTIPLE or key.rotary_size(key.head_size) % _MULTIPLE:
            continue
        angles = tuple(key.node.inputs[1:4])
        if angles not in tables:
            tables[angles] = _tables(model, angles, capacity)
        cos_and_sin = tables[angles]
        if cos_and_sin is not None:
            _rotate_inside(node, query, key, cos_and_sin)
            modified = True
    return modified


class _Rotation(NamedTuple):
    """A RotaryEmbedding of [B, S, heads * head_size]. (x, positions, cos, sin) are its inputs."""

    node: ir.Node
    head_size: int

    @property
    def interleaved(self) -> int:
        return int(self.node.attributes.get_int("interleaved", 0) or 0)

    def rotary_size(self, head_size: int) -> int:
        return int(self.node.attributes.get_int("rotary_embedding_dim", 0) or 0) or head_size


def _rotation(value: ir.Value | None) -> _Rotation | None:
    """The rotation that made `value`, if it is one over merged heads with nothing else about it."""
    node = producer(value)
    if node is None or not is_contrib(node, "RotaryEmbedding"):
        return None
    x, heads = node.inputs[0], node.attributes.get_int("num_heads", 0)
    if x is None or x.shape is None or len(x.shape) != 3 or not isinstance(x.shape[2], int) or not heads:
        return None
    plain = node.attributes.get_int("is_packed_batching", 0) == 0 and node.attributes.get_float("scale", 1.0) == 1.0
    return _Rotation(node, x.shape[2] // heads) if plain else None


def _same_rotation(query: _Rotation, key: _Rotation) -> bool:
    return (
        query.head_size == key.head_size
        and query.interleaved == key.interleaved
        and query.rotary_size(query.head_size) == key.rotary_size(key.head_size)
        and list(query.node.inputs[1:4]) == list(key.node.inputs[1:4])
    )


def _rotate_inside(node: ir.Node, query: _Rotation, key: _Rotation, tables: tuple[ir.Value, ir.Value]) -> None:
    cos, sin = tables
    x_of_query, x_of_key = query.node.inputs[0], key.node.inputs[0]
    set_inputs(node, {Slot.QUERY: x_of_query, Slot.KEY: x_of_key, Slot.COS_CACHE: cos, Slot.SIN_CACHE: sin})
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    node.attributes["rotary_interleaved"] = ir.AttrInt64("rotary_interleaved", query.interleaved)


def _tables(model: ir.Model, angles: tuple[ir.Value | None, ...], capacity: int) -> tuple[ir.Value, ir.Value] | None:
    """Initializers [T, rotary_size / 2] with the cosines and sines of positions 0 to T - 1; None where those of the
    graph depend on anything but the position."""
    compute = _angles(model, angles)
    if compute is None:
        return None
    table = compute([0], capacity)
    # Other starts, lengths and neighbours: a token's angles have to be those of its position all the same. The first
    # position tells nothing: whatever the frequencies, its angles are 0.
    middle, last = capacity // 2, capacity - 1
    calls = (([1], 1), ([last], 1), ([middle], capacity - middle), ([middle, 1], 1), ([0, 0], middle))
    for starts, length in calls:
        if len(starts) > compute.most_rows:
            continue
        positions = [start + step for start in starts for step in range(length)]
        pairs = zip(compute(starts, length), table, strict=True)
        if any(abs(computed - by_position[positions]).max() > _TOLERANCE for computed, by_position in pairs):
            return None
    names = ((f"rope_{number}_cos", f"rope_{number}_sin") for number in itertools.count())
    cos, sin = next(pair for pair in names if model.graph.initializers.keys().isdisjoint(pair))
    return initializer(model.graph, cos, table[0]), initializer(model.graph, sin, table[1])


@dataclass(frozen=True, slots=True)
class _Angles:
    """The part of a graph that computes the angles of its tokens. most_rows: 1 where the graph's batch is fixed at
    that."""

    part: GraphPart
    most_rows: int

    def __call__(self, starts: list[int], length: int) -> tuple[Array, Array]:
        """Cosines and sines, [rows * length, rotary_size / 2] each, of `length` tokens a row that follow `starts`."""
        lengths = {LENGTHS.name: np.array(starts, dtype=np.int32)}
        positions, cos, sin = self.part(lengths, {BATCH: len(starts), SEQUENCE: length})
        return cos[positions.ravel()], sin[positions.ravel()]


def _angles(model: ir.Model, angles: tuple[ir.Value | None, ...]) -> _Angles | None:
    """None where hidden states, and not the positions alone, decide the angles."""
    wanted = [value for value in angles if value is not None]
    lengths = inputs_of(wanted).get(LENGTHS.name)
    if lengths is None or any(node.domain == CONTRIB_DOMAIN for node in ancestors(wanted)):
        return None
    return _Angles(GraphPart(model, wanted), 1 if lengths.shape is not None and lengths.shape[0] == 1 else 2)
