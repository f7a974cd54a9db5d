"""Fuses rotary embeddings (RoPE) that a model writes out into RotaryEmbedding nodes.

ONNX Runtime's fusions know x * cos + turn(x) * sin with a head's halves as pairs. Other models pair neighbours. Which
of the two a `turn` is shows when it is run, so it does not matter how a model writes it down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract import BATCH, LENGTHS, SEQUENCE
from qsample.graph.edit import initializer, insert, part_of, producer, reads
from qsample.graph.evaluate import GraphPart, sizes
from qsample.graph.operators import CONTRIB_DOMAIN, is_contrib
from qsample.tensors import Array

_AXES: Final = {BATCH: 2, SEQUENCE: 3}  # for trying things out
_NUMBERS: Final = 2039  # a prime; float16 holds integers up to 2,048
_MOST_NODES: Final = 24  # of a `turn`; what is longer is none


class _Rotation(NamedTuple):
    """x * cos + turn(x) * sin. x: [B, heads, S, size]. cos, sin: [B, 1, S, size], the same for both of a pair, which
    are neighbours (`interleaved`) or `size` / 2 apart."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    interleaved: bool


def fuse_rope(model: ir.Model) -> bool:
    """Make RotaryEmbedding nodes of rotations that are written out, in place. Returns whether there was one.

    1. A rotation is x * cos + turn(x) * sin, with x [B, heads, S, size], and cos and sin [B, 1, S, size].
    2. turn(x) is (-b, a) for each pair (a, b) of x: neighbours, or numbers half a size apart.
    3. Positions alone decide cos and sin, and both of a pair have the same.
    4. Where x is the first part of each head, and the rest is only put behind it, the node takes whole heads.
    """
    content = _content(model.graph)
    angles: dict[tuple[ir.Value, ir.Value, bool], list[ir.Value]] = {}
    modified = False
    for node in list(model.graph):
        rotation = _rotation(model, node, content)
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


def _rotate(node: ir.Node, x: ir.Value, angles: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> None:
    """Replace `node`, which rotates `x`, and what puts the result back into heads, by a RotaryEmbedding."""
    last, whole = _whole_heads(node, x)
    assert whole.shape is not None
    merged = {**attributes, "num_heads": whole.shape[1]}
    if whole is not x:
        assert x.shape is not None
        merged["rotary_embedding_dim"] = x.shape[3]
    rotated = insert(last, "RotaryEmbedding", [whole, *angles], whole.shape, merged, domain=CONTRIB_DOMAIN)
    ir.convenience.replace_all_uses_with(last.outputs[0], rotated)


def _is_of_a_part(node: ir.Node) -> bool:
    """Whether `node` rotates the first part of each head, and knows nothing of the rest."""
    x = node.inputs[0] if is_contrib(node, "RotaryEmbedding") else None
    if x is None or x.shape is None or len(x.shape) != 4:
        return False
    known: int = node.attributes.get_int("rotary_embedding_dim", 0)
    return known == 0 and _whole_heads(node, x)[1] is not x


def _content(graph: ir.Graph) -> set[ir.Value]:
    """What depends on more than the positions of the tokens: on token ids, or on what the cache holds."""
    content = {value for value in graph.inputs if value.name != LENGTHS.name}
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
            if interleaved is not None and _alike_in_pairs(model, cos, sin, interleaved=interleaved):
                return _Rotation(x, cos, sin, interleaved)
    return None


def _product(value: ir.Value | None, content: set[ir.Value]) -> tuple[ir.Value, ir.Value] | None:
    """(states, angles) where `value` is their product."""
    node = producer(value)
    if node is None or node.op_type != "Mul":
        return None
    first, second = node.inputs
    if first is None or second is None or (first in content) == (second in content):
        return None
    return (first, second) if first in content else (second, first)


def _fits(x: ir.Value, angles: ir.Value) -> bool:
    """Whether the angles are those of each row and position, for all heads."""
    if x.shape is None or angles.shape is None or len(x.shape) != 4 or len(angles.shape) != 4:
        return False
    batch, heads, length, size = x.shape
    known = isinstance(heads, int) and isinstance(size, int) and size % 2 == 0 and x.dtype is not None
    named = all(isinstance(dim, int) or dim.value in _AXES for dim in (batch, length))
    return known and named and list(angles.shape) == [batch, 1, length, size]


def _is_interleaved(model: ir.Model, x: ir.Value, turned: ir.Value) -> bool | None:
    """Whether `turned` has (-b, a) for neighbours (a, b) of x, or for numbers half a size apart; None: neither."""
    if not _is_near(turned, x):
        return None
    assert x.dtype is not None
    shape = sizes(x, _AXES)
    states = (1 + np.arange(np.prod(shape)) % _NUMBERS).reshape(shape).astype(x.dtype.numpy())
    (result,) = GraphPart(model, [turned], [x])({str(x.name): states}, _AXES)
    half = states.shape[-1] // 2
    if np.array_equal(result, np.concatenate([-states[..., half:], states[..., :half]], axis=-1)):
        return False
    pairs = np.stack([-states[..., 1::2], states[..., 0::2]], axis=-1)
    return True if np.array_equal(result, pairs.reshape(states.shape)) else None


def _is_near(value: ir.Value, source: ir.Value) -> bool:
    """Whether few nodes stand between `source` and `value`, and nothing else goes in but the sizes of inputs."""
    between: set[ir.Node] = set()
    waiting = [value]
    while waiting and len(between) <= _MOST_NODES:
        node = waiting.pop().producer()
        if node is None or node in between:
            continue
        between.add(node)
        if node.op_type != "Shape":
            waiting += [read for read in node.inputs if read is not None and read is not source]
    return 0 < len(between) <= _MOST_NODES and any(source in node.inputs for node in between)


def _alike_in_pairs(model: ir.Model, cos: ir.Value, sin: ir.Value, *, interleaved: bool) -> bool:
    lengths = np.arange(5, 5 + sizes(cos, _AXES)[0], dtype=np.int32)
    both = GraphPart(model, [cos, sin])({LENGTHS.name: lengths}, _AXES)
    return all(np.array_equal(*_split(angles, interleaved=interleaved)) for angles in both)


def _split(angles: Array, *, interleaved: bool) -> tuple[Array, Array]:
    if interleaved:
        return angles[..., 0::2], angles[..., 1::2]
    half = angles.shape[-1] // 2
    return angles[..., :half], angles[..., half:]


def _whole_heads(node: ir.Node, x: ir.Value) -> tuple[ir.Node, ir.Value]:
    """The last node of the rotation, and what it is a rotation of: where `x` is the first part of each head and `node`
    is put in front of the rest, that and the whole heads."""
    part, uses = part_of(x), node.outputs[0].uses()
    user = next(iter(uses))[0] if len(uses) == 1 else None
    if part is None or part.start != 0 or user is None or user.op_type != "Concat" or len(user.inputs) != 2:
        return node, x
    rest = part_of(user.inputs[1])
    shape = part.source.shape
    assert shape is not None
    behind = user.inputs[0] is node.outputs[0] and user.attributes.get_int("axis", 0) in (-1, len(shape) - 1)
    if not behind or rest is None or rest.source is not part.source:
        return node, x
    return (user, part.source) if (rest.start, rest.stop) == (part.stop, shape[-1]) else (node, x)


def _angles(before: ir.Node, rotation: _Rotation) -> list[ir.Value]:
    """RotaryEmbedding's further inputs: [B, S] rows of the two tables behind it, [B * S, size / 2]: a token each."""
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
        half = insert(before, "Slice", [angles, *first_of_pairs], [batch, 1, length, size // 2])
        tables.append(insert(before, "Reshape", [half, rows], [None, size // 2]))
    shape = insert(before, "Shape", [rotation.cos], [4])  # not of x: positions alone decide the angles
    shape.type = ir.TensorType(ir.DataType.INT64)
    counts = insert(before, "Gather", [shape, numbers("batch_and_length", [0, 2])], [2])
    tokens = insert(before, "ReduceProd", [counts], [], {"keepdims": 0})
    indices = insert(before, "Range", [numbers("zero", 0), tokens, numbers("one", 1)], [None])
    return [insert(before, "Reshape", [indices, counts], [batch, length]), *tables]
