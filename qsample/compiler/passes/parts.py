"""A decode graph enters; its parts for several devices leave, cut at borders between layers.

A part has whole layers with their states, and reads inputs of the graph under their names. A few tensors, the hidden
states, go from a part to a later one. Numbers that follow from the inputs alone, such as positions, are computed again
in each part that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import onnx_ir as ir

from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, INPUT_IDS, SEQUENCE, retained_name
from qsample.errors import CompileError
from qsample.graph.edit import all_initializers, reads

# A weight → its bytes.
_Weights = dict[ir.Value, int]


class Part(NamedTuple):
    """A part of a graph.

    Attributes:
        model: the part as a model.
        layers: the numbers of its layers.
        nbytes: the bytes of its weights; a weight that two parts read counts in both.
    """

    model: ir.Model
    layers: range
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Border:
    """A place between two nodes of the order. layer: the number of the first layer behind it. cost: bytes of the
    values that cross it, for a token."""

    position: int
    layer: int
    crossing: tuple[ir.Value, ...] = ()
    cost: float = math.inf


def layers_of(interface: Interface) -> dict[str, int]:
    """State of the cache → the number of its layer."""
    return {state.name: int(state.name.split(".")[1]) for state in interface.cache_states}


def cut_at_layers(model: ir.Model, interface: Interface, count: int) -> list[Part]:
    """Cut `model`, a decode graph, into `count` parts in order, with at most as many bytes of weights in the largest as
    in that of any other cut. `model` is changed: its parts take its place. Raises CompileError if it cannot be cut."""
    graph = model.graph
    layer_of = layers_of(interface)
    _read_batch_from_ids(graph, layer_of)
    levels, fresh = _levels(graph, layer_of)
    _move_to_readers(graph, levels)
    order = sorted((node for node in graph if node not in fresh), key=levels.__getitem__)
    start = _Border(0, -1)
    end = _Border(len(order), max(layer_of.values()) + 1)
    borders = [start, *_borders(order, levels, layer_of), end]
    weights = [
        _weights_of(order[one.position : two.position], fresh) for one, two in pairwise(borders)
    ]
    if len(weights) < count:
        raise CompileError(
            f"num_devices is {count}, and the graph can be cut into {len(weights)} parts, between layers that share no "
            f"state; give at most {len(weights)}"
        )
    chosen = [borders[index] for index in _balanced(weights, count)]
    position = {node: index for index, node in enumerate(order)}
    later = [border.position for border in chosen[1:-1]]
    outputs: list[list[ir.Value]] = [[] for _ in range(count)]
    for value in graph.outputs:  # what follows from the inputs alone is the last part's
        place = position.get(value.producer(), len(order))  # type: ignore[arg-type]
        outputs[sum(place >= border for border in later)].append(value)
    parts = []
    for number, (one, two) in enumerate(pairwise(chosen)):
        # A value that crosses several borders goes from its part to each reader.
        given = [value for value in two.crossing if value not in one.crossing]
        part = _extracted(model, one.crossing, [*outputs[number], *given])
        nbytes = sum(map(_nbytes, all_initializers(part.graph)))
        parts.append(Part(part, range(max(one.layer, 0), two.layer), nbytes))
    return parts


def _read_batch_from_ids(graph: ir.Graph, layer_of: Mapping[str, int]) -> None:
    """Take the number of rows from the ids, in place of some layer's state that another part may lack."""
    ids = next(value for value in graph.inputs if value.name == INPUT_IDS.name)
    for node in graph:
        attributes = node.attributes
        first = attributes.get_int("start", 0) == 0 and attributes.get_int("end", 0) == 1
        if (
            node.op_type == "Shape"
            and first
            and node.inputs[0] is not None
            and node.inputs[0].name in layer_of
        ):
            node.replace_input_with(0, ids)


def _levels(
    graph: ir.Graph, layer_of: Mapping[str, int]
) -> tuple[dict[ir.Node, int], set[ir.Node]]:
    """The last layer whose states each node depends on, -1 for none; and the nodes that each part computes again.

    A part computes a node again that depends only on constants, such as a cast of weights, or on inputs and constants
    of one axis.
    """
    levels = dict[ir.Node, int]()
    fresh = set[ir.Node]()
    constant = set[ir.Node]()
    for node in graph:
        read = reads(node)
        before = {levels[source] for value in read if (source := value.producer()) in levels}
        levels[node] = max({-1, *before, *(layer_of.get(str(value.name), -1) for value in read)})
        fixed = [value for value in read if value.is_initializer() or value.producer() in constant]
        if len(fixed) == len(read):
            constant.add(node)
        others = [
            source
            for value in read
            if value not in fixed and (source := value.producer()) in levels
        ]
        if node in constant or (
            levels[node] < 0 and not any(map(_is_matrix, fixed)) and fresh.issuperset(others)
        ):
            fresh.add(node)
    return levels, fresh


def _move_to_readers(graph: ir.Graph, levels: dict[ir.Node, int]) -> None:
    """Give nodes that depend on no states the level of their first reader, if that is behind layer 0.

    So a mask of the vocabulary is computed in the part with the logits, and does not pass through the parts before. The
    first layer keeps its level -1, which no border may follow.
    """
    level_of_first_reader = dict[ir.Node, int]()
    for node in reversed(graph):
        reader_level = level_of_first_reader.get(node, -1)
        if levels[node] < 0 < reader_level:
            levels[node] = reader_level
        for value in reads(node):
            source = value.producer()
            if source in levels:
                known = level_of_first_reader.get(source, levels[node])
                level_of_first_reader[source] = min(known, levels[node])


def _is_matrix(value: ir.Value) -> bool:
    return value.shape is None or sum(dim != 1 for dim in value.shape) > 1


def _borders(
    order: Sequence[ir.Node], levels: Mapping[ir.Node, int], layer_of: Mapping[str, int]
) -> Iterator[_Border]:
    """The place with the least crossing bytes behind the states of each layer except the last, if there is one."""
    place = {node: position for position, node in enumerate(order)}
    begin, spans = (
        dict[int, int](),
        dict[ir.Value, tuple[int, int]](),
    )  # from where to where a value is needed
    for position, node in enumerate(order):
        begin.setdefault(levels[node], position)
        for value in reads(node):
            if value.name in layer_of:
                spans[value] = begin.get(layer_of[str(value.name)], position), position
            elif (source := value.producer()) in place:
                spans[value] = place[source], position
    states = {*layer_of, *map(retained_name, layer_of)}
    best: dict[int, _Border] = {}
    for position in range(1, len(order)):
        level = levels[order[position - 1]]
        if 0 <= level < max(begin):
            crossing = tuple(
                value for value, (first, last) in spans.items() if first < position <= last
            )
            cost = sum(math.inf if value.name in states else _cost(value) for value in crossing)
            if cost < math.inf and (
                level not in best or cost <= best[level].cost
            ):  # the last of equals: whole layers
                best[level] = _Border(position, level + 1, crossing, cost)
    yield from (best[level] for level in sorted(best))


def _cost(value: ir.Value) -> float:
    """The bytes of a value for a token; infinity if a host cannot know its sizes."""
    if value.shape is None or value.dtype is None:
        return math.inf
    sizes = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    if any(size not in (BATCH, SEQUENCE) for size in sizes if not isinstance(size, int)):
        return math.inf
    return math.prod(size for size in sizes if isinstance(size, int)) * value.dtype.itemsize


def _nbytes(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes


def _weights_of(nodes: Sequence[ir.Node], fresh: set[ir.Node]) -> _Weights:
    """The constants that nodes read, also through nodes that are computed again."""
    found = _Weights()
    waiting = list(nodes)
    seen = set[ir.Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for value in reads(node):
            if value.is_initializer():
                found[value] = _nbytes(value)
            elif (source := value.producer()) in fresh:
                waiting.append(source)
    return found


def _balanced(weights: Sequence[_Weights], count: int) -> list[int]:
    """The ends of `count` adjacent groups of `weights`, 0 included, of which the largest is as small as it can be."""
    ends = range(len(weights) + 1)
    size = {}
    for start in ends:
        together: _Weights = {}
        for end in range(start + 1, len(weights) + 1):
            together |= weights[end - 1]
            size[start, end] = sum(together.values())
    # best[end]: the largest group, and all ends, of the groups up to `end`
    best = {end: (size[0, end], [0, end]) for end in ends if end != 0}
    for groups in range(2, count + 1):
        best = {
            end: min(
                (max(best[start][0], size[start, end]), [*best[start][1], end])
                for start in range(groups - 1, end)
            )
            for end in range(groups, len(weights) + 1)
        }
    return best[len(weights)][1]


def _extracted(
    model: ir.Model, received: Sequence[ir.Value], outputs: Sequence[ir.Value]
) -> ir.Model:
    graph = ir.convenience.extract(model.graph, [*model.graph.inputs, *received], outputs)
    read = {value for node in graph for value in reads(node)}
    graph.inputs[:] = [value for value in graph.inputs if value in read]
    part = ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name)
    part.opset_imports.update(model.opset_imports)
    return part
