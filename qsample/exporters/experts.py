"""ONNX Runtime's MoE from the markers that a trace leaves of experts.

The operator wants its weights in one layout: outputs before inputs, gate and up in turns. They are arranged when the
graph is saved, one matrix of all experts of a layer at a time, so that a checkpoint's weights stay mapped from their
files; where the order of whole rows is all that changes, a graph that refers to these files can do it (`joined`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from qsample.graph import moe
from qsample.graph.edit import constant, drop_unread, producer, replace_node
from qsample.graph.operators import CONTRIB_DOMAIN
from qsample.graph.weights import rearranged, rows_in_turns
from qsample.tensors import Array
from qsample.transforms import markers

_INPUTS = 7  # of a marker, those that are absent included


def lower_experts(model: ir.Model) -> bool:
    """Turn every marker into an MoE, in place, and every other lookup of experts' parameters into a plain Gather, which
    weight quantization knows and CUDA replays. Returns whether there was anything to do."""
    graph = model.graph
    found = [node for node in graph if node.domain == markers.MARKER_DOMAIN and node.op_type == markers.EXPERTS]
    for marker in found:
        _lower(graph, marker)
    if found:
        model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    model.opset_imports.pop(markers.MARKER_DOMAIN, None)
    lookups = [node for node in graph if _is_lookup(node)]
    for lookup in lookups:
        indices = lookup.inputs[1]
        unsqueeze = producer(indices)
        assert unsqueeze is not None
        gather = ir.Node("", "Gather", [lookup.inputs[0], unsqueeze.inputs[0]], [ir.AttrInt64("axis", 0)])
        _replace(graph, lookup, gather)
    return bool(found or lookups)


def _lower(graph: ir.Graph, marker: ir.Node) -> None:
    marker.resize_inputs(_INPUTS)
    rows, choice, gate, down, gate_bias, down_bias, up = marker.inputs
    assert choice is not None
    assert choice.shape is not None
    experts = int(str(choice.shape[1]))
    in_turns = bool(marker.attributes.get_int(markers.INTERLEAVED, 0))
    fc1 = _Matrices(graph, [gate, up], experts, bool(marker.attributes.get_int(markers.GATE_TRANSPOSED, 0)))
    fc2 = _Matrices(graph, [down], experts, bool(marker.attributes.get_int(markers.DOWN_TRANSPOSED, 0)))
    inputs: dict[moe.Slot, ir.Value | None] = {
        moe.Slot.INPUT: rows,
        moe.Slot.ROUTER: choice,
        moe.Slot.FC1: fc1.initializer(in_turns=in_turns),
        moe.Slot.FC1_BIAS: gate_bias if in_turns or gate_bias is None else _bias_in_turns(graph, gate_bias),
        moe.Slot.FC2: fc2.initializer(in_turns=True),
        moe.Slot.FC2_BIAS: down_bias,
    }
    attributes = {
        **moe.ATTRIBUTES,
        "activation_alpha": marker.attributes.get_float(markers.ALPHA, 1.0),
        "activation_beta": marker.attributes.get_float(markers.BETA, 0.0),
    }
    limit = marker.attributes.get_float(markers.LIMIT, None)
    if limit is not None:
        attributes["swiglu_limit"] = limit
    listed = [inputs[slot] for slot in moe.Slot]
    while listed[-1] is None:
        listed.pop()
    _replace(graph, marker, ir.node(moe.OP_TYPE, listed, attributes, domain=CONTRIB_DOMAIN, name=f"{marker.name}_moe"))


class _Matrices:
    """One matrix [N, K] an expert, put together from parameters of the graph.

    Each is [E, N, K], or [E, K, N] where `transposed`. Its first two axes may be merged, and it may have more experts.
    """

    def __init__(self, graph: ir.Graph, parts: list[ir.Value | None], experts: int, transposed: bool) -> None:
        self._graph, self._experts, self._transposed = graph, experts, transposed
        self._parts = [part for part in parts if part is not None]
        self._tensors = [_tensor(part) for part in self._parts]

    def initializer(self, *, in_turns: bool) -> ir.Value:
        """[E, N, K], N the outputs of all parts. in_turns: they are in the wanted order; otherwise they are gate and
        up, one behind the other, and become one and one in turns."""
        shapes = [self._shape(tensor) for tensor in self._tensors]
        shape = (self._experts, sum(outputs for outputs, _ in shapes), shapes[0][1])
        if in_turns and not self._transposed and self._tensors[0].shape.numpy() == shape:
            return self._parts[0]

        def arrange(arrays: list[Array]) -> Array:
            matrices = [self._matrices(array) for array in arrays]
            return matrices[0] if in_turns else _take_turns(matrices)

        are_rows = not self._transposed and all(tensor.shape.numpy()[:1] == shape[:1] for tensor in self._tensors)
        return _arranged(self._graph, self._parts, shape, arrange, take_turns=are_rows and not in_turns)

    def _shape(self, tensor: ir.TensorProtocol) -> tuple[int, int]:
        """N, K."""
        *first, columns = tensor.shape.numpy()
        rows = first[1] if len(first) == 2 else first[0] // self._experts
        return (columns, rows) if self._transposed else (rows, columns)

    def _matrices(self, array: Array) -> Array:
        matrices = array[: self._experts] if array.ndim == 3 else array.reshape(self._experts, -1, array.shape[-1])
        return matrices.swapaxes(1, 2) if self._transposed else matrices


def _bias_in_turns(graph: ir.Graph, bias: ir.Value) -> ir.Value:
    tensor = _tensor(bias)
    return _arranged(graph, [bias], tensor.shape.numpy(), _take_turns)


def _take_turns(parts: list[Array]) -> Array:
    """Gate and up, apart or one behind the other along the second axis, in turns along it."""
    gate, up = parts if len(parts) == 2 else np.split(parts[0], 2, axis=1)
    return np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None, f"{value.name} is no parameter"
    return value.const_value


def _arranged(
    graph: ir.Graph,
    parts: Sequence[ir.Value],
    shape: Sequence[int],
    arrange: Callable[[list[Array]], Array],
    *,
    take_turns: bool = False,
) -> ir.Value:
    """The initializer that holds what `arrange` makes of the numbers of `parts`, in their place; layers that share
    parameters share it. take_turns: `arrange` is `_take_turns`, of parts [E, N, K]."""
    name = f"{parts[0].name}_arranged"
    if name not in graph.initializers:
        tensors = [_tensor(part) for part in parts]
        in_files = rows_in_turns(tensors, name) if take_turns else None
        tensor = in_files or rearranged(tensors, shape, arrange, name)
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]


def _is_lookup(node: ir.Node) -> bool:
    """Whether `node` is a GatherND that looks constants up by one index each."""
    if node.op_type != "GatherND" or node.attributes.get_int("batch_dims", 0) != 0 or constant(node.inputs[0]) is None:
        return False
    indices = node.inputs[1]
    unsqueeze = producer(indices)
    if unsqueeze is None or unsqueeze.op_type != "Unsqueeze" or indices is None or indices.shape is None:
        return False
    axes = constant(unsqueeze.inputs[1])
    return axes is not None and axes.tolist() in ([-1], [len(indices.shape) - 1])


def _replace(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Put `new` where `old` is, and drop the constants that nothing reads any more."""
    read = list(old.inputs)
    replace_node(old, [new])
    drop_unread(graph, read)
