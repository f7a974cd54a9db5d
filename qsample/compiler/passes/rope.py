"""Rotary embeddings (RoPE): as an operator if a model writes them out, then inside the attention.

ONNX Runtime's fusions know x * cos + turn(x) * sin with the halves of a head as pairs. Other models pair neighbours.
Running a `turn` shows which of the two it is, however a model writes it.

GroupQueryAttention rotates by positions that it counts: the row's earlier tokens, then the new ones in order. A graph
with their cosines and sines, as running that part shows, needs no RotaryEmbedding nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.contract.tensors import BATCH, CAPACITY, LENGTHS, POSITION_OFFSETS, SEQUENCE
from qsample.graph.edit import ancestors, initializer, insert, part_of, producer, reads
from qsample.graph.evaluate import GraphPart, inputs_of, sizes
from qsample.graph.gqa import Slot, attentions, set_inputs
from qsample.graph.operators import CONTRIB_DOMAIN, is_contrib

# The sizes of the axes in trial runs.
_TRIAL_SIZES: Final = {BATCH: 2, SEQUENCE: 3}
# A prime below 2,048, up to which float16 holds every integer.
_TRIAL_NUMBERS: Final = 2039
# A longer chain of nodes is no rotation.
_MAX_NODES_OF_TURN: Final = 24
_POSITIONS: Final = (
    LENGTHS.name,
    POSITION_OFFSETS.name,
)  # the inputs that decide a token's positions


class _Rotation(NamedTuple):
    """A rotation as in `fuse_rope`, of neighbours if `interleaved`. cos and sin have an angle for each number of a head
    or for each pair."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: bool


def fuse_rope(model: ir.Model, *, halves_apart: bool = False) -> bool:
    """Make RotaryEmbedding nodes of rotations that are written out.

    1. A rotation is x * cos + turn(x) * sin, with x [B, heads, S, size], and cos and sin [B, 1, S, size].
    2. turn(x) is (-b, a) for each pair (a, b) of x: neighbours, or numbers half a size apart.
    3. Positions alone decide cos and sin, and both of a pair have the same.
    4. If x is the first part of each head, and the rest is only appended to it, the node takes whole heads.
    5. With `halves_apart`, halves that are rotated apart, (a * cos - b * sin, b * cos + a * sin), are a rotation, too,
       with cos and sin [B, 1, S, size / 2].
    """
    content = _content(model.graph)
    angles: dict[tuple[ir.Value, ir.Value, bool], list[ir.Value]] = {}
    modified = False
    for node in list(model.graph):
        rotation = _rotation(model, node, content)
        if rotation is None and halves_apart:
            rotation = _rotation_of_halves(node, content)
        if rotation is not None:
            key = (rotation.cos, rotation.sin, rotation.interleaved)
            if key not in angles:
                angles[key] = _angles(node, rotation)
            _rotate(node, rotation.x, angles[key], {"interleaved": int(rotation.interleaved)})
            modified = True
        elif _is_of_a_part(node):
            x = node.inputs[0]
            assert x is not None
            _rotate(node, x, node.inputs[1:], dict(node.attributes))
            modified = True
    return modified


def _rotate(
    node: ir.Node, x: ir.Value, angles: Sequence[ir.Value | None], attributes: Mapping[str, Any]
) -> None:
    """Replace `node`, the rotation of `x`, and the nodes that put the result back into heads, by a RotaryEmbedding."""
    last, whole = _whole_heads(node, x)
    assert whole.shape is not None
    merged = {**attributes, "num_heads": whole.shape[1]}
    if whole is not x:
        assert x.shape is not None
        merged["rotary_embedding_dim"] = x.shape[3]
    rotated = insert(
        last, "RotaryEmbedding", [whole, *angles], whole.shape, merged, domain=CONTRIB_DOMAIN
    )
    ir.convenience.replace_all_uses_with(last.outputs[0], rotated)


def _is_of_a_part(node: ir.Node) -> bool:
    """Whether `node` rotates the first part of each head, and knows nothing of the rest."""
    x = node.inputs[0] if is_contrib(node, "RotaryEmbedding") else None
    if x is None or x.shape is None or len(x.shape) != 4:
        return False
    known: int = node.attributes.get_int("rotary_embedding_dim", 0)
    return known == 0 and _whole_heads(node, x)[1] is not x


def _content(graph: ir.Graph) -> set[ir.Value]:
    """The values that depend on more than the positions of the tokens: on token ids, or on the cache."""
    content = {value for value in graph.inputs if value.name not in _POSITIONS}
    for node in graph:
        if node.op_type != "Shape" and not content.isdisjoint(reads(node)):
            content.update(node.outputs)
    return content


def _rotation(model: ir.Model, node: ir.Node, content: set[ir.Value]) -> _Rotation | None:
    """The rotation that `node` is the sum of."""
    if node.op_type != "Add":
        return None
    products = [_product(value, content) for value in node.inputs]
    for first, second in (products, products[::-1]):
        if first is None or second is None:
            return None
        (x, cos), (turned, sin) = first, second
        if _fits(x, cos) and _fits(x, sin):
            interleaved = _is_interleaved(model, x, turned)
            if interleaved is not None and _alike_in_pairs(
                model, cos, sin, interleaved=interleaved
            ):
                return _Rotation(x, cos, sin, interleaved)
    return None


def _rotation_of_halves(node: ir.Node, content: set[ir.Value]) -> _Rotation | None:
    """The rotation whose two halves `node` puts together, if it is a Concat."""
    if node.op_type != "Concat" or len(node.inputs) != 2 or not _is_over_last_axis(node):
        return None
    first, second = map(producer, node.inputs)
    if first is None or second is None or (first.op_type, second.op_type) != ("Sub", "Add"):
        return None
    minuend, subtrahend = (_product(value, content) for value in first.inputs)
    if minuend is None or subtrahend is None:
        return None
    (a, cos), (b, sin) = minuend, subtrahend
    if {_product(value, content) for value in second.inputs} != {(b, cos), (a, sin)}:
        return None
    split = producer(a)
    if split is None or split.op_type != "Split" or list(split.outputs) != [a, b]:
        return None
    x = split.inputs[0]
    if x is None or not _is_over_last_axis(split):
        return None
    fits = all(_fits(x, angles, of_pairs=True) for angles in (cos, sin))
    return _Rotation(x, cos, sin, interleaved=False) if fits else None


def _is_over_last_axis(node: ir.Node) -> bool:
    """Whether a Concat or a Split of [B, heads, S, size] is over the numbers of each head."""
    return node.attributes.get_int("axis", 0) in (-1, 3)


def _product(value: ir.Value | None, content: set[ir.Value]) -> tuple[ir.Value, ir.Value] | None:
    """(states, angles) if `value` is their product."""
    node = producer(value)
    if node is None or node.op_type != "Mul":
        return None
    first, second = node.inputs
    if first is None or second is None or (first in content) == (second in content):
        return None
    return (first, second) if first in content else (second, first)


def _fits(x: ir.Value, angles: ir.Value, *, of_pairs: bool = False) -> bool:
    """Whether the angles follow each row and position, for all heads, with one for each number or pair of a head."""
    if x.shape is None or angles.shape is None or len(x.shape) != 4 or len(angles.shape) != 4:
        return False
    batch, heads, length, size = x.shape
    if not isinstance(heads, int) or not isinstance(size, int) or size % 2 != 0 or x.dtype is None:
        return False
    named = all(isinstance(dim, int) or dim.value in _TRIAL_SIZES for dim in (batch, length))
    numbers = size // 2 if of_pairs else size
    return named and list(angles.shape) == [batch, 1, length, numbers]


def _is_interleaved(model: ir.Model, x: ir.Value, turned: ir.Value) -> bool | None:
    """Whether `turned` has (-b, a) for neighbours (a, b) of x, or for numbers half a size apart; None: neither."""
    if not _is_near(turned, x):
        return None
    assert x.dtype is not None
    shape = sizes(x, _TRIAL_SIZES)
    states = (1 + np.arange(np.prod(shape)) % _TRIAL_NUMBERS).reshape(shape).astype(x.dtype.numpy())
    (result,) = GraphPart(model, [turned], [x])({str(x.name): states}, _TRIAL_SIZES)
    half = states.shape[-1] // 2
    if np.array_equal(result, np.concatenate([-states[..., half:], states[..., :half]], axis=-1)):
        return False
    pairs = np.stack([-states[..., 1::2], states[..., 0::2]], axis=-1)
    return True if np.array_equal(result, pairs.reshape(states.shape)) else None


def _is_near(value: ir.Value, source: ir.Value) -> bool:
    """Whether few nodes stand between `source` and `value`, and nothing else goes in but the sizes of inputs."""
    between: set[ir.Node] = set()
    waiting = [value]
    while waiting and len(between) <= _MAX_NODES_OF_TURN:
        node = waiting.pop().producer()
        if node is None or node in between:
            continue
        between.add(node)
        if node.op_type != "Shape":
            waiting += [read for read in node.inputs if read is not None and read is not source]
    return 0 < len(between) <= _MAX_NODES_OF_TURN and any(source in node.inputs for node in between)


def _alike_in_pairs(model: ir.Model, cos: ir.Value, sin: ir.Value, *, interleaved: bool) -> bool:
    rows = sizes(cos, _TRIAL_SIZES)[0]
    offsets = np.arange(rows * _TRIAL_SIZES[SEQUENCE] * 3, dtype=np.int32).reshape(rows, -1, 3)
    feeds = {LENGTHS.name: np.arange(5, 5 + rows, dtype=np.int32), POSITION_OFFSETS.name: offsets}
    both = GraphPart(model, [cos, sin])(feeds, _TRIAL_SIZES)
    return all(np.array_equal(*_split(angles, interleaved=interleaved)) for angles in both)


def _split(angles: Array, *, interleaved: bool) -> tuple[Array, Array]:
    if interleaved:
        return angles[..., 0::2], angles[..., 1::2]
    half = angles.shape[-1] // 2
    return angles[..., :half], angles[..., half:]


def _whole_heads(node: ir.Node, x: ir.Value) -> tuple[ir.Node, ir.Value]:
    """The rotation's last node and its input: whole heads, if `x` is their first part and the rest is put behind."""
    part = part_of(x)
    uses = node.outputs[0].uses()
    user = next(iter(uses))[0] if len(uses) == 1 else None
    if (
        part is None
        or part.start != 0
        or user is None
        or user.op_type != "Concat"
        or len(user.inputs) != 2
    ):
        return node, x
    rest = part_of(user.inputs[1])
    shape = part.source.shape
    assert shape is not None
    behind = user.inputs[0] is node.outputs[0] and user.attributes.get_int("axis", 0) in (
        -1,
        len(shape) - 1,
    )
    if not behind or rest is None or rest.source is not part.source:
        return node, x
    return (user, part.source) if (rest.start, rest.stop) == (part.stop, shape[-1]) else (node, x)


def _angles(before: ir.Node, rotation: _Rotation) -> list[ir.Value]:
    """RotaryEmbedding's further inputs: [B, S] rows of the two tables after it, [B * S, size / 2], a row a token."""
    assert before.graph is not None
    assert rotation.x.shape is not None
    batch, _, length, size = rotation.x.shape
    assert isinstance(size, int)

    def numbers(name: str, values: int | list[int]) -> ir.Value:
        assert before.graph is not None
        return initializer(before.graph, f"rotation_{name}", np.array(values, dtype=np.int64))

    ends, step = (size, 2) if rotation.interleaved else (size // 2, 1)
    first_of_pairs = [
        numbers("start", [0]),
        numbers(f"{ends}", [ends]),
        numbers("axis", [3]),
        numbers(f"by{step}", [step]),
    ]
    rows = numbers(f"rows_{size // 2}", [-1, size // 2])
    tables = []
    for angles in (rotation.cos, rotation.sin):
        half = angles
        if angles.shape is not None and angles.shape[3] == size:
            half = insert(before, "Slice", [angles, *first_of_pairs], [batch, 1, length, size // 2])
        tables.append(insert(before, "Reshape", [half, rows], [None, size // 2]))
    shape = insert(
        before, "Shape", [rotation.cos], [4]
    )  # not of x: positions alone decide the angles
    shape.type = ir.TensorType(ir.DataType.INT64)
    counts = insert(before, "Gather", [shape, numbers("batch_and_length", [0, 2])], [2])
    tokens = insert(before, "ReduceProd", [counts], [], {"keepdims": 0})
    indices = insert(before, "Range", [numbers("zero", 0), tokens, numbers("one", 1)], [None])
    return [insert(before, "Reshape", [indices, counts], [batch, length]), *tables]


# GroupQueryAttention takes head and rotary sizes that are multiples of this.
_SIZE_MULTIPLE: Final = 16
# The table and the graph compute the same expression; a frequency that depends on more than the position is far off.
_TOLERANCE: Final = 1e-6


def absorb_rope(model: ir.Model, capacity: int) -> bool:
    """Let each GroupQueryAttention rotate its queries and keys if the graph does it by position (below `capacity`).

    1. Queries and keys come from RotaryEmbedding nodes over merged heads, both with the same cosines and sines.
    2. The head size and the rotated part of it are multiples of 16, as the operator takes them.
    3. The cosines and sines of a token follow from its position, not from its row and neighbours.
    """
    tables: dict[tuple[ir.Value | None, ...], tuple[ir.Value, ir.Value] | None] = {}
    modified = False
    for node in attentions(model.graph):
        query = _rotary(node.inputs[Slot.QUERY])
        key = _rotary(node.inputs[Slot.KEY])
        if query is None or key is None or not _same_rotation(query, key):
            continue
        if node.attributes.get_int("do_rotary", 0) != 0:
            continue
        if (
            key.head_size % _SIZE_MULTIPLE != 0
            or key.rotary_size(key.head_size) % _SIZE_MULTIPLE != 0
        ):
            continue
        angles = tuple(key.node.inputs[1:4])
        if angles not in tables:
            tables[angles] = _tables(model, angles, capacity)
        cos_and_sin = tables[angles]
        if cos_and_sin is not None:
            _rotate_inside(node, query, key, cos_and_sin)
            modified = True
    return modified


class _Rotary(NamedTuple):
    """A RotaryEmbedding of [B, S, heads * head_size]. (x, positions, cos, sin) are its inputs."""

    node: ir.Node
    head_size: int

    @property
    def interleaved(self) -> int:
        return int(self.node.attributes.get_int("interleaved", 0) or 0)

    def rotary_size(self, head_size: int) -> int:
        size = int(self.node.attributes.get_int("rotary_embedding_dim", 0) or 0)
        return head_size if size == 0 else size


def _rotary(value: ir.Value | None) -> _Rotary | None:
    """The rotation that made `value`, if it is a plain rotation of merged heads."""
    node = producer(value)
    if node is None or not is_contrib(node, "RotaryEmbedding"):
        return None
    x = node.inputs[0]
    heads = node.attributes.get_int("num_heads", 0)
    if (
        x is None
        or x.shape is None
        or len(x.shape) != 3
        or not isinstance(x.shape[2], int)
        or heads == 0
    ):
        return None
    plain = (
        node.attributes.get_int("is_packed_batching", 0) == 0
        and node.attributes.get_float("scale", 1.0) == 1.0
    )
    return _Rotary(node, x.shape[2] // heads) if plain else None


def _same_rotation(query: _Rotary, key: _Rotary) -> bool:
    return (
        query.head_size == key.head_size
        and query.interleaved == key.interleaved
        and query.rotary_size(query.head_size) == key.rotary_size(key.head_size)
        and list(query.node.inputs[1:4]) == list(key.node.inputs[1:4])
    )


def _rotate_inside(
    node: ir.Node, query: _Rotary, key: _Rotary, tables: tuple[ir.Value, ir.Value]
) -> None:
    cos, sin = tables
    x_of_query = query.node.inputs[0]
    x_of_key = key.node.inputs[0]
    set_inputs(
        node, {Slot.QUERY: x_of_query, Slot.KEY: x_of_key, Slot.COS_CACHE: cos, Slot.SIN_CACHE: sin}
    )
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    node.attributes["rotary_interleaved"] = ir.AttrInt64("rotary_interleaved", query.interleaved)


def _tables(
    model: ir.Model, angles: tuple[ir.Value | None, ...], capacity: int
) -> tuple[ir.Value, ir.Value] | None:
    """Initializers [T, rotary_size / 2]: cosines and sines of each position, if they depend on nothing else."""
    compute = _position_angles(model, angles, capacity)
    if compute is None:
        return None
    table = compute([0], capacity)
    # Other starts, lengths and neighbours: a token's angles have to follow from its position all the same. The first
    # position tells nothing: its angles are 0 at any frequency.
    middle = capacity // 2
    last = capacity - 1
    calls = (
        ([1], 1),
        ([last], 1),
        ([middle], capacity - middle),
        ([middle, 1], 1),
        ([0, 0], middle),
    )
    for starts, length in calls:
        if len(starts) > compute.most_rows:
            continue
        positions = [start + step for start in starts for step in range(length)]
        pairs = zip(compute(starts, length), table, strict=True)
        # NaN must not pass.
        if not all(
            abs(computed - by_position[positions]).max() <= _TOLERANCE
            for computed, by_position in pairs
        ):
            return None
    names = ((f"rope_{number}_cos", f"rope_{number}_sin") for number in itertools.count())
    cos, sin = next(pair for pair in names if model.graph.initializers.keys().isdisjoint(pair))
    return initializer(model.graph, cos, table[0]), initializer(model.graph, sin, table[1])


@dataclass(frozen=True, slots=True)
class _PositionAngles:
    """Computes tokens' angles. most_rows: 1 if the graph's batch is fixed. capacity: T, if the graph leaves it free."""

    part: GraphPart
    most_rows: int
    capacity: int

    def __call__(self, starts: list[int], length: int) -> tuple[Array, Array]:
        """Cosines and sines, [rows * length, rotary_size / 2] each, of `length` tokens a row that follow `starts`."""
        lengths = {LENGTHS.name: np.array(starts, dtype=np.int32)}
        positions, cos, sin = self.part(
            lengths, {BATCH: len(starts), SEQUENCE: length, CAPACITY: self.capacity}
        )
        return cos[positions.ravel()], sin[positions.ravel()]


def _position_angles(
    model: ir.Model, angles: tuple[ir.Value | None, ...], capacity: int
) -> _PositionAngles | None:
    """None if hidden states, and not the positions alone, decide the angles; or if a position has three parts."""
    wanted = [value for value in angles if value is not None]
    inputs = inputs_of(wanted)
    lengths = inputs.get(LENGTHS.name)
    if (
        lengths is None
        or POSITION_OFFSETS.name in inputs
        or any(node.domain == CONTRIB_DOMAIN for node in ancestors(wanted))
    ):
        return None
    most_rows = 1 if lengths.shape is not None and lengths.shape[0] == 1 else 2
    return _PositionAngles(GraphPart(model, wanted), most_rows, capacity)
