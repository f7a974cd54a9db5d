"""A traced graph with markers after its linear layers enters; the same graph with inputs for LoRA adapters leaves."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from qsample.contract.interface import AdapterTarget, Interface
from qsample.contract.tensors import BATCH
from qsample.errors import UnsupportedModelError
from qsample.graph.adapters import Layer, add_adapters
from qsample.transforms.markers import ADAPTED_PATH


def adapt_layers(model: ir.Model, interface: Interface, root: str) -> Interface:
    """Let adapters change the linear layers of `model` that `transforms.adapters` marked, in place.

    1. A layer reads and returns [B, S, n], in the graph itself: of rows without an order, or inside of a loop, nobody
       knows whose adapter is theirs.
    2. All calls of a layer are like that.

    Args:
        model: as `trace` leaves it.
        interface: of the graph.
        root: the beginning of the markers' paths that is no part of a layer's name.

    Returns:
        The interface with these layers.

    Raises:
        UnsupportedModelError: If there is no such layer.
    """
    layers: list[Layer] = []
    others = set()
    for node in [node for node in model.graph.all_nodes() if ADAPTED_PATH in node.metadata_props]:
        path = node.metadata_props[ADAPTED_PATH].removeprefix(root)
        states, result = node.inputs
        assert states is not None
        assert result is not None
        node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
        assert node.graph is not None
        if node.graph is model.graph and _is_by_row(states) and _is_by_row(result) and result.producer() is not None:
            layers.append(Layer(path, states, result))
        else:
            others.add(path)
        node.graph.remove(node, safe=True)
    layers = [layer for layer in layers if layer.path not in others]
    if not layers:
        raise UnsupportedModelError(
            "max_loras was given, and the model has no linear layers that read [batch, sequence, features]; leave "
            "max_loras out, and merge the adapter at export"
        )
    sizes = {layer.path: (_features(layer.states), _features(layer.result)) for layer in layers}
    adapted = replace(interface, adapters=tuple(AdapterTarget(path, *both) for path, both in sizes.items()))
    add_adapters(model, adapted, layers)
    return adapted


def _is_by_row(value: ir.Value) -> bool:
    shape = value.shape
    return shape is not None and len(shape) == 3 and str(shape[0]) == BATCH and isinstance(shape[2], int)


def _features(value: ir.Value) -> int:
    assert value.shape is not None
    size = value.shape[2]
    assert isinstance(size, int)
    return size
