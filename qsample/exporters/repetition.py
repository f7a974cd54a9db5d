"""A graph with a single node for each layer that repeats another enters; the graph of all layers
leaves.

`repeated_layers.standing_in` traced the first of several equal layers between two markers. A copy
of the nodes between these reads another layer's weights and states, and takes the place of that
layer's node. Nodes that depend neither on the layer's hidden states nor on its states or weights,
such as masks and rotations, are shared.

In the meantime the first layer's weights are inputs of the graph, so that nothing is computed from
their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import retained_name
from qsample.graph.edit import ancestors, constant_value, copy_node, reads
from qsample.transforms.markers import (
    GROUP,
    LAYER,
    LAYER_BEGIN,
    LAYER_END,
    MARKER_DOMAIN,
    REPEATED_LAYER,
)
from qsample.transforms.repeated_layers import DecoderLayers, RepeatedLayers

# A number of a tensor becomes a size, and torch may reason about it: JetMoE's rows of each expert.
_TORCH_NODE: Final = "pkg.torch.onnx.fx_node"
_SCALAR: Final = "_local_scalar_dense"


class NotRepeatedError(Exception):
    """No copy of a layer can take the place of another."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """The repeated layers of a model.

    Attributes:
        groups: the groups of equal layers.
        layers: all layers.
        tensors: all weights by name.
    """

    groups: Sequence[RepeatedLayers]
    layers: DecoderLayers
    tensors: Mapping[str, Tensor]

    def copied_states(self) -> dict[str, str]:
        """The name of each state outside of the trace → the name of the first layer's state."""
        copied: dict[str, str] = {}
        for group in self.groups:
            first_names = self.layers.state_names(group.first)
            for layer in group.others:
                copied.update(zip(self.layers.state_names(layer), first_names, strict=True))
        return copied


def open_weights(model: ir.Model, repetition: Repetition) -> dict[str, ir.Value]:
    """Make the weights of the first layer of each group inputs of `model`, in place; returns them
    by name."""
    graph = model.graph
    names = [
        group.prefix(group.first) + name for group in repetition.groups for name in group.weights
    ]
    opened = {name: graph.initializers.pop(name) for name in names if name in graph.initializers}
    for value in opened.values():
        value.const_value = None
        graph.inputs.append(value)
    return opened


def repeat_layers(
    model: ir.Model,
    repetition: Repetition,
    opened: Mapping[str, ir.Value],
    traced: GraphSpec,
    spec: GraphSpec,
) -> None:
    """Replace the nodes of the other layers by copies of the first layers, in place.

    Args:
        model: the traced graph.
        repetition: the repeated layers.
        opened: the result of `open_weights`; these values become constants again.
        traced: the inputs and outputs before.
        spec: the inputs and outputs afterwards.

    Raises:
        NotRepeatedError: a first layer is more than a function of its inputs; `model` cannot be
            used any more.
    """
    graph = model.graph
    for name, value in opened.items():
        graph.inputs.remove(value)
        value.const_value = TorchTensor(repetition.tensors[name], name=name)
        graph.register_initializer(value)
    inputs = {str(value.name): value for value in graph.inputs}
    added: dict[str, ir.Value] = {}
    markers = {node for node in graph if node.domain == MARKER_DOMAIN and GROUP in node.attributes}
    for number, group in enumerate(repetition.groups):
        own = [
            node for node in graph if node in markers and node.attributes[GROUP].as_int() == number
        ]
        first = _first_layer(graph, group, own, markers, opened)
        for node in own:
            if node.op_type == REPEATED_LAYER:
                new_inputs, new_outputs = _put_copy(graph, node, first, repetition)
                inputs |= new_inputs
                added |= new_outputs
    for node in [node for node in graph if node in markers]:
        for value, source in zip(node.outputs, node.inputs, strict=True):
            assert source is not None
            value.replace_all_uses_with(source, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    outputs = dict(zip(traced.output_names, graph.outputs, strict=True)) | added
    graph.inputs[:] = [inputs[name] for name in spec.input_names]
    graph.outputs[:] = [outputs[name] for name in spec.output_names]


@dataclass(frozen=True, slots=True)
class _FirstLayer:
    """The traced layer of a group.

    Attributes:
        group: the group.
        inputs: the hidden states, then the retained states, before the layer.
        outputs: the hidden states, then the retained states, after the layer.
        weights: the layer's weights, with their names in the layer.
        nodes: the nodes that a copy needs, in graph order.
    """

    group: RepeatedLayers
    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    weights: Mapping[ir.Value, str]
    nodes: Sequence[ir.Node]


def _first_layer(
    graph: ir.Graph,
    group: RepeatedLayers,
    own: Sequence[ir.Node],
    markers: set[ir.Node],
    opened: Mapping[str, ir.Value],
) -> _FirstLayer:
    """own: the markers of `group`, in graph order."""
    placed = [node.attributes[LAYER].as_int() for node in own if node.op_type == REPEATED_LAYER]
    if placed != [*group.others]:
        raise NotRepeatedError(
            f"the model runs the layers {placed} of {group.others}, in this order"
        )
    (begin,) = (node for node in own if node.op_type == LAYER_BEGIN)
    (end,) = (node for node in own if node.op_type == LAYER_END)
    prefix = group.prefix(group.first)
    weights = {
        value: name.removeprefix(prefix)
        for name, value in opened.items()
        if name.startswith(prefix)
    }
    nodes = _nodes(graph, begin, end, {*weights}, markers)
    read = {value for node in nodes for value in node.inputs}
    outputs = [value for value in end.inputs if value is not None]
    return _FirstLayer(
        group,
        begin.outputs,
        outputs,
        {value: weights[value] for value in weights if value in read},
        nodes,
    )


def _put_copy(
    graph: ir.Graph, node: ir.Node, first: _FirstLayer, repetition: Repetition
) -> tuple[dict[str, ir.Value], dict[str, ir.Value]]:
    """Put a copy of `first` in the place of `node`; returns its retained states, before and after,
    by name."""
    group = first.group
    layer = node.attributes[LAYER].as_int()
    names = repetition.layers.state_names(layer)
    states = {name: _like(value, name) for name, value in zip(names, first.inputs[1:], strict=True)}
    hidden = node.inputs[0]
    assert hidden is not None
    copies = dict(zip(first.inputs, [hidden, *states.values()], strict=True))
    for value, inner in first.weights.items():
        name = group.prefix(layer) + inner
        copies[value] = constant_value(name, TorchTensor(repetition.tensors[name], name=name))
        graph.register_initializer(copies[value])
    graph.insert_before(node, [_copy(original, copies, group, layer) for original in first.nodes])
    result, *after = (copies.get(value, value) for value in first.outputs)
    node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return states, dict(zip(map(retained_name, names), after, strict=True))


def _nodes(
    graph: ir.Graph, begin: ir.Node, end: ir.Node, weights: set[ir.Value], markers: set[ir.Node]
) -> list[ir.Node]:
    """The nodes between two markers that depend on the first of them or on the layer's weights, in
    graph order."""
    needed = ancestors(end.inputs, stop={begin})
    inside = {*begin.outputs, *weights}
    nodes = []
    for node in graph:
        if node is end or inside.isdisjoint(reads(node)):
            continue
        if node not in needed or node in markers:
            raise NotRepeatedError(
                f"{node.name} is outside of a layer and reads what is computed inside"
            )
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            raise NotRepeatedError(f"{node.name} has a graph of its own")
        if _SCALAR in node.metadata_props.get(_TORCH_NODE, ""):
            raise NotRepeatedError(f"{node.name} computes a size from numbers")
        inside.update(node.outputs)
        nodes.append(node)
    shared = {value for node in (*nodes, end) for value in node.inputs if value not in inside}
    if not markers.isdisjoint(ancestors(shared)):
        raise NotRepeatedError(f"{begin.name} begins a layer that reads what is computed in others")
    return nodes


def _copy(
    node: ir.Node, copies: dict[ir.Value, ir.Value], group: RepeatedLayers, layer: int
) -> ir.Node:
    """A copy of a node of the first layer of `group`, for `layer`."""
    copy = copy_node(node, copies, f"layer{layer}")
    first = f"{group.path}.{group.first}"
    own = f"{group.path}.{layer}"
    copy.metadata_props.update(
        (key, text.replace(first, own)) for key, text in node.metadata_props.items()
    )
    for value in copy.outputs:
        value.shape = (
            None if value.shape is None else value.shape.copy()
        )  # passes change shapes in place
    return copy


def _like(value: ir.Value, name: str) -> ir.Value:
    """A new value of the type and shape of `value`."""
    assert value.shape is not None
    return ir.Value(name=name, type=value.type, shape=value.shape.copy())
