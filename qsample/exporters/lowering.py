"""From a trace to a graph that ONNX Runtime runs: placeholders become weights; markers become
`Scan`, `MoE` and the products of LoRA adapters.

1. `fill_placeholders`: weights of which torch had only placeholders (`transforms.deferred`) refer
   to their place in files, or are computed when the graph is saved.
2. `outline_scans`: a trace has the code of a loop's step in line. A `ScanBegin` marker
   (`transforms.recurrent`) gives the states and a token of each input. The nodes that depend on it,
   up to its `ScanEnd`, move into the body of a Scan. All other nodes stay outside and are computed
   once.
3. `lower_experts`: ONNX Runtime's MoE reads its weights in one layout: outputs before inputs, gate
   and up alternating. They are arranged when the graph is saved, a matrix of all experts of a layer
   at a time, so that a checkpoint's weights stay mapped from their files; if only the order of
   whole rows changes, a graph that refers to these files can do it (`JoinedTensor`).
4. `align_row_sums`: ONNX Runtime's CPU adds several aligned numbers at a time. In a tensor [B, 10],
   every other row begins next to such a boundary and would round otherwise: the place of a row in
   the batch would decide its last bits.
5. `adapt_layers`: each marked linear layer gets the products of adapters (`graph.adapters`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import Tensor

from qsample.contract.arrays import Array
from qsample.contract.interface import AdapterTarget, Interface
from qsample.contract.tensors import BATCH
from qsample.errors import UnsupportedModelError
from qsample.graph import moe
from qsample.graph.adapters import Layer, add_adapters
from qsample.graph.edit import (
    all_initializers,
    ancestors,
    constant,
    copy_node,
    drop_unread,
    initializer,
    insert,
    producer,
    reads,
    replace_node,
    replace_outputs,
)
from qsample.graph.operators import CONTRIB_DOMAIN
from qsample.graph.weights import JoinedTensor, StoredTensor, rearranged, rows_in_turns
from qsample.transforms import markers
from qsample.transforms.deferred import Deferred, Joined, deferred, stored_view
from qsample.transforms.markers import ADAPTED_PATH, MARKER_DOMAIN, NUM_STATES, SCAN_BEGIN, SCAN_END

_MARKER_INPUTS: Final = 7  # absent inputs are counted
# The widest registers hold this many float32 numbers.
_ALIGNMENT_NUMBERS: Final = 16
# Longer rows are not routing weights, and padding them would take an expensive copy.
_MAX_ROW_NUMBERS: Final = 256


def fill_placeholders(model: ir.Model) -> bool:
    """Replace constants that are placeholders, or views of them, by their numbers, in place;
    returns whether it found any."""
    modified = False
    for value in all_initializers(model.graph):
        view = _view(getattr(value.const_value, "raw", None))
        if view is None:
            continue
        meaning = deferred(view)
        if meaning is not None:
            value.const_value = _stored(view, meaning, str(value.name))
            modified = True
    return modified


def _view(raw: Any) -> Tensor | None:
    """The tensor that owns a constant's memory, in the constant's shape and strides: optimisers
    transpose in NumPy."""
    if isinstance(raw, Tensor):
        return raw
    owner = raw
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(raw, np.ndarray) or not isinstance(owner, Tensor) or deferred(owner) is None:
        return None
    size = raw.itemsize
    offset = (raw.__array_interface__["data"][0] - owner.untyped_storage().data_ptr()) // size
    return torch.as_strided(owner, raw.shape, [stride // size for stride in raw.strides], offset)


def _stored(view: Tensor, found: Deferred, name: str) -> ir.TensorProtocol:
    """The numbers of `view`: in float32 a StoredTensor, in other dtypes computed."""
    if view.dtype != torch.float32:
        return _in_files(view, found, name) or _computed(view, found, view.dtype, name)
    turned = view.ndim == 2 and not view.is_contiguous() and view.T.is_contiguous()
    whole = view.T if turned else view
    stored = _in_files(whole, found, name) or _computed(whole, found, found.dtype, name)
    return StoredTensor(stored, name, transposed=turned)


def _in_files(view: Tensor, found: Deferred, name: str) -> ir.TensorProtocol | None:
    """The numbers of `view` in their files; None if they are in no file, or in another order."""
    if found.place is None or not view.is_contiguous():
        return None
    if not isinstance(found.place, Joined):
        return _lying(found.place, view.shape, found.dtype, name, int(view.storage_offset()))
    is_whole = view.nbytes == view.untyped_storage().nbytes()
    return _lying(found.place, view.shape, found.dtype, name) if is_whole else None


def _lying(
    place: Any, shape: Sequence[int], dtype: torch.dtype, name: str, first: int = 0
) -> ir.TensorProtocol:
    """The numbers of `shape` at `place`, from the number `first` on."""
    if isinstance(place, Joined):
        parts = zip(place.places, place.shapes, strict=True)
        return JoinedTensor(
            [_lying(*part, dtype, f"{name}_{i}") for i, part in enumerate(parts)],
            place.axis,
            shape,
            name,
        )
    return ir.ExternalTensor(
        place.path,
        place.offset + first * dtype.itemsize,
        math.prod(shape) * dtype.itemsize,
        tensor_adapters.from_torch_dtype(dtype),
        shape=ir.Shape(shape),
        name=name,
    )


def _computed(view: Tensor, found: Deferred, dtype: torch.dtype, name: str) -> ir.TensorProtocol:
    def numbers() -> ir.TensorProtocol:
        return tensor_adapters.TorchTensor(
            stored_view(view, found).to(dtype).contiguous(), name=name
        )

    return ir.LazyTensor(
        numbers, tensor_adapters.from_torch_dtype(dtype), ir.Shape(view.shape), name=name
    )


def outline_scans(model: ir.Model) -> bool:
    """Turn every pair of loop markers into a `Scan` over axis 1, in place; returns whether anything
    changed."""
    graph = model.graph
    ends = [node for node in graph if node.domain == MARKER_DOMAIN and node.op_type == SCAN_END]
    for number, end in enumerate(ends):
        _outline_scan(graph, end, f"scan{number}")
    model.opset_imports.pop(MARKER_DOMAIN, None)
    return bool(ends)


def _outline_scan(graph: ir.Graph, end: ir.Node, name: str) -> None:
    begin, steps = _loop(graph, end)
    num_states = int(end.attributes[NUM_STATES].as_int())
    body = _body_graph(begin, steps, end, name)
    num_inputs = len(body.inputs) - num_states
    num_results = len(body.outputs) - num_states
    attributes = [
        ir.AttrGraph("body", body),
        ir.AttrInt64("num_scan_inputs", num_inputs),
        ir.AttrInt64s("scan_input_axes", [1] * num_inputs),
        ir.AttrInt64s("scan_output_axes", [1] * num_results),
    ]
    scan = ir.Node(
        "", "Scan", list(begin.inputs), attributes, num_outputs=len(end.outputs), name=name
    )
    replace_outputs(end, scan)
    graph.insert_before(end, scan)
    graph.remove([end, *reversed(steps), begin], safe=False)


def _loop(graph: ir.Graph, end: ir.Node) -> tuple[ir.Node, list[ir.Node]]:
    """The marker that `end` belongs to, and the nodes of a step in graph order."""
    needed = ancestors(end.inputs)
    # Earlier loops are Scan nodes by now, so there is a single marker.
    (begin,) = (node for node in needed if node.op_type == SCAN_BEGIN)
    per_token = {*begin.outputs}
    steps = []
    for node in graph:
        if node in needed and not per_token.isdisjoint(reads(node)):
            per_token.update(node.outputs)
            steps.append(node)
    return begin, steps


def _body_graph(begin: ir.Node, steps: Sequence[ir.Node], end: ir.Node, name: str) -> ir.Graph:
    """Copies of the nodes of a step, between the outputs of `begin` and the inputs of `end`."""
    copies = {
        value: ir.Value(name=f"{value.name}_{name}", type=value.type, shape=value.shape)
        for value in begin.outputs
    }
    inputs = list(copies.values())
    nodes = [copy_node(node, copies, name) for node in steps]
    outputs: list[ir.Value] = []
    for value in end.inputs:
        assert value is not None
        inner = copies.get(value, value)
        # A body has to produce each of its outputs with a separate node, once.
        if inner is value or inner in inputs or inner in outputs:
            nodes.append(_identity(inner, value, f"{value.name}_{name}_{len(outputs)}"))
            inner = nodes[-1].outputs[0]
        outputs.append(inner)
    return ir.Graph(inputs, outputs, nodes=nodes, name=name)


def _identity(source: ir.Value, like: ir.Value, name: str) -> ir.Node:
    """An Identity of `source` with an output of that name, and the type and shape of `like`."""
    output = ir.Value(name=name, type=like.type, shape=like.shape)
    return ir.Node("", "Identity", [source], outputs=[output])


def lower_experts(model: ir.Model) -> bool:
    """Turn every marker into an MoE, in place, and every other lookup of experts' parameters into a
    plain Gather, because weight quantization knows it and CUDA replays it. Returns whether anything
    changed."""
    graph = model.graph
    found = [
        node
        for node in graph
        if node.domain == markers.MARKER_DOMAIN and node.op_type == markers.EXPERTS
    ]
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
        gather = ir.Node(
            "", "Gather", [lookup.inputs[0], unsqueeze.inputs[0]], [ir.AttrInt64("axis", 0)]
        )
        _replace_and_drop(graph, lookup, gather)
    return bool(found or lookups)


def _lower(graph: ir.Graph, marker: ir.Node) -> None:
    marker.resize_inputs(_MARKER_INPUTS)
    rows, choice, gate, down, gate_bias, down_bias, up = marker.inputs
    assert choice is not None
    assert choice.shape is not None
    experts = int(str(choice.shape[1]))
    in_turns = bool(marker.attributes.get_int(markers.INTERLEAVED, 0))
    fc1 = _Matrices(
        graph, [gate, up], experts, bool(marker.attributes.get_int(markers.GATE_TRANSPOSED, 0))
    )
    fc2 = _Matrices(
        graph, [down], experts, bool(marker.attributes.get_int(markers.DOWN_TRANSPOSED, 0))
    )
    inputs: dict[moe.Slot, ir.Value | None] = {
        moe.Slot.INPUT: rows,
        moe.Slot.ROUTER: choice,
        moe.Slot.FC1: fc1.value(in_turns=in_turns),
        moe.Slot.FC1_BIAS: gate_bias
        if in_turns or gate_bias is None
        else _bias_in_turns(graph, gate_bias),
        moe.Slot.FC2: fc2.value(in_turns=True),
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
    _replace_and_drop(
        graph,
        marker,
        ir.node(moe.OP_TYPE, listed, attributes, domain=CONTRIB_DOMAIN, name=f"{marker.name}_moe"),
    )


class _Matrices:
    """A matrix [N, K] for each expert, put together from parameters [E, N, K], or [E, K, N] if
    `transposed`. Their first two axes may be merged, and they may have more experts."""

    def __init__(
        self, graph: ir.Graph, parts: list[ir.Value | None], experts: int, transposed: bool
    ) -> None:
        self._graph = graph
        self._experts = experts
        self._transposed = transposed
        self._parts = [part for part in parts if part is not None]
        # Matrices that are computed from a checkpoint's integers are in the wanted order already.
        self._are_computed = producer(self._parts[0]) is not None
        self._tensors = [] if self._are_computed else [_parameter(part) for part in self._parts]

    def value(self, *, in_turns: bool) -> ir.Value:
        """[E, N, K], N the outputs of all parts. in_turns: they are in the wanted order; otherwise
        the rows of up follow all rows of gate, and both are put in turns."""
        if self._are_computed:
            return self._parts[0]
        shapes = [self._shape(tensor) for tensor in self._tensors]
        shape = (self._experts, sum(outputs for outputs, _ in shapes), shapes[0][1])
        if in_turns and not self._transposed and self._tensors[0].shape.numpy() == shape:
            return self._parts[0]

        def arrange(arrays: list[Array]) -> Array:
            matrices = [self._matrices(array) for array in arrays]
            return matrices[0] if in_turns else _take_turns(matrices)

        are_rows = not self._transposed and all(
            tensor.shape.numpy()[:1] == shape[:1] for tensor in self._tensors
        )
        return _arranged(
            self._graph, self._parts, shape, arrange, take_turns=are_rows and not in_turns
        )

    def _shape(self, tensor: ir.TensorProtocol) -> tuple[int, int]:
        """N, K."""
        *first, columns = tensor.shape.numpy()
        rows = first[1] if len(first) == 2 else first[0] // self._experts
        return (columns, rows) if self._transposed else (rows, columns)

    def _matrices(self, array: Array) -> Array:
        matrices = (
            array[: self._experts]
            if array.ndim == 3
            else array.reshape(self._experts, -1, array.shape[-1])
        )
        return matrices.swapaxes(1, 2) if self._transposed else matrices


def _bias_in_turns(graph: ir.Graph, bias: ir.Value) -> ir.Value:
    tensor = _parameter(bias)
    return _arranged(graph, [bias], tensor.shape.numpy(), _take_turns)


def _take_turns(parts: list[Array]) -> Array:
    """Gate and up, apart or concatenated along the second axis, in turns along it."""
    gate, up = parts if len(parts) == 2 else np.split(parts[0], 2, axis=1)
    return np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])


def _parameter(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None, f"{value.name} is not a parameter"
    return value.const_value


def _arranged(
    graph: ir.Graph,
    parts: Sequence[ir.Value],
    shape: Sequence[int],
    arrange: Callable[[list[Array]], Array],
    *,
    take_turns: bool = False,
) -> ir.Value:
    """The initializer of `arrange(parts)`, shared by layers that share parameters. take_turns:
    `arrange` is `_take_turns`, of parts [E, N, K]."""
    name = f"{parts[0].name}_arranged"
    if name not in graph.initializers:
        tensors = [_parameter(part) for part in parts]
        in_files = rows_in_turns(tensors, name) if take_turns else None
        tensor = in_files or rearranged(tensors, shape, arrange, name)
        value = ir.Value(
            name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        graph.register_initializer(value)
    return graph.initializers[name]


def _is_lookup(node: ir.Node) -> bool:
    """Whether `node` is a GatherND that looks constants up by a single index."""
    if (
        node.op_type != "GatherND"
        or node.attributes.get_int("batch_dims", 0) != 0
        or constant(node.inputs[0]) is None
    ):
        return False
    indices = node.inputs[1]
    unsqueeze = producer(indices)
    if (
        unsqueeze is None
        or unsqueeze.op_type != "Unsqueeze"
        or indices is None
        or indices.shape is None
    ):
        return False
    axes = constant(unsqueeze.inputs[1])
    return axes is not None and axes.tolist() in ([-1], [len(indices.shape) - 1])


def _replace_and_drop(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Put `new` in the place of `old`, and drop unread constants."""
    read = list(old.inputs)
    replace_node(old, [new])
    drop_unread(graph, read)


def align_row_sums(model: ir.Model) -> None:
    """Pad rows that are summed with zeros, in place, to a length at which every row is aligned
    alike."""
    for node in list(model.graph):
        length = _summed_length(node)
        if length is not None and length % _ALIGNMENT_NUMBERS != 0 and length & (length - 1) != 0:
            source = node.inputs[0]
            assert source is not None
            assert source.shape is not None
            padding = -length % _ALIGNMENT_NUMBERS
            ends = np.array([*[0] * (2 * len(source.shape) - 1), padding], dtype=np.int64)
            pads = initializer(model.graph, f"pads_{len(source.shape)}_{padding}", ends)
            padded = insert(node, "Pad", [source, pads], [*source.shape[:-1], length + padding])
            node.replace_input_with(0, padded)


def _summed_length(node: ir.Node) -> int | None:
    """The number of numbers that `node` sums in each row, if it sums only the last axis and its
    size is known and small."""
    source = node.inputs[0] if node.op_type == "ReduceSum" and len(node.inputs) == 2 else None
    if source is None or source.shape is None or node.inputs[1] is None:
        return None
    axes = ir.convenience.get_const_tensor(node.inputs[1])
    length = source.shape[-1]
    if axes is None or axes.numpy().tolist() not in ([-1], [len(source.shape) - 1]):
        return None
    is_float = source.dtype is not None and source.dtype.is_floating_point()
    return length if is_float and isinstance(length, int) and length <= _MAX_ROW_NUMBERS else None


def adapt_layers(model: ir.Model, interface: Interface, root: str) -> Interface:
    """Add the products of adapters to the linear layers that `decoder.linear_layers_marked` marked,
    in place.

    Every call of a layer must read and return [B, S, n] in the main graph: rows without an order,
    or inside of a loop, cannot be matched with adapters.

    Args:
        model: the graph.
        interface: the interface of the graph without adapters.
        root: the beginning of the markers' paths that does not belong to the layers' names.

    Returns:
        The interface with the adapted layers.

    Raises:
        UnsupportedModelError: no layer can be adapted.
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
        if (
            node.graph is model.graph
            and _is_by_row(states)
            and _is_by_row(result)
            and result.producer() is not None
        ):
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
    adapted = replace(
        interface, adapters=tuple(AdapterTarget(path, *both) for path, both in sizes.items())
    )
    add_adapters(model, adapted, layers)
    return adapted


def _is_by_row(value: ir.Value) -> bool:
    shape = value.shape
    return (
        shape is not None
        and len(shape) == 3
        and str(shape[0]) == BATCH
        and isinstance(shape[2], int)
    )


def _features(value: ir.Value) -> int:
    assert value.shape is not None
    size = value.shape[2]
    assert isinstance(size, int)
    return size
