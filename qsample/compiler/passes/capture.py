"""What the capture of a CUDA graph needs: no copies from the host to the device, and an opset that CUDA's kernels know.

ONNX Runtime computes shapes on the host, and copies a shape to the device if a kernel there takes it for data. Such a
copy forbids the capture (https://github.com/microsoft/onnxruntime/pull/16491: every node on CUDA, or on the CPU and no
Memcpy). A graph that calculates with a shape can cut that number out of a constant 0, 1, 2 … on the device instead:
kernels read the position of the cut on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import onnx.defs
import onnx_ir as ir

from qsample.errors import CompileError
from qsample.graph.edit import cast, constant, initializer, insert, suffixed
from qsample.graph.gqa import OP_TYPE as ATTENTION
from qsample.graph.gqa import Slot, attentions, set_inputs
from qsample.graph.operators import CONTRIB_DOMAIN

# Inputs that CUDA kernels read on the host: operator → their indices.
_ON_HOST: Final[dict[str, Collection[int]]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    ATTENTION: (Slot.TOTAL_SEQUENCE_LENGTH,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "ReduceMax": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
_SOURCES: Final = ("Shape", "Size")
_INTEGERS: Final = (ir.DataType.INT32, ir.DataType.INT64)


def host_nodes(graph: ir.Graph) -> set[ir.Node]:
    """The nodes that compute shapes, on the host."""
    return _host_values(graph).nodes


def host_arithmetic(graph: ir.Graph, more: Mapping[str, Collection[int]]) -> list[ir.Node]:
    """The nodes between shapes and the inputs that kernels read on the host: a device would have to give results back.
    more: operator → indices of further inputs that its kernels read on the host."""
    host = _host_values(graph).nodes
    found = list[ir.Node]()
    waiting = [
        value.producer()
        for node in graph.all_nodes()
        for index in {*_ON_HOST.get(node.op_type, ()), *more.get(node.op_type, ())}
        if index < len(node.inputs) and (value := node.inputs[index]) is not None
    ]
    while waiting:
        node = waiting.pop()
        if node in host and node.op_type not in _SOURCES and node not in found:
            found.append(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    return found


def host_data(graph: ir.Graph) -> list[str]:
    """The uses of values from the host as data on the device: "OPERATOR NODE takes VALUE"."""
    host = _host_values(graph)
    return [
        f"{node.op_type} {node.name} takes {value.name}"
        for node in graph
        if node not in host.nodes
        for index, value in enumerate(node.inputs)
        if value is not None
        and value in host.values
        and index not in _ON_HOST.get(node.op_type, ())
    ]


def remove_host_copies(model: ir.Model, limit: int) -> bool:
    """Cut the integers that the graph takes from shapes, scalars or [1] from 0 to `limit` - 1, out of a constant
    [limit] on the device, and make fixed shapes constants. Other values that the device takes from the host stay: see
    `host_data`."""
    graph = model.graph
    modified = _fold_static_shapes(graph)
    copies: dict[ir.Value, ir.Value] = {}
    host = _host_values(graph)
    for node in list(graph):
        for index, value in enumerate(node.inputs):
            if (
                value not in host.values
                or node in host.nodes
                or index in _ON_HOST.get(node.op_type, ())
            ):
                continue
            if (
                value is None
                or value.dtype not in _INTEGERS
                or value.shape is None
                or list(value.shape) not in ([], [1])
            ):
                continue
            if value not in copies:
                copies[value] = _number(_behind(value), value, limit)
            node.replace_input_with(index, copies[value])
            modified = True
    return modified


# The most parts along the last axis whose sizes CUDA's Split has among the arguments of its kernel. It copies the sizes
# of more, unless they are equal, and those along any other axis from the host
# (https://github.com/microsoft/onnxruntime/pull/32706).
_MAX_SPLIT_PARTS: Final = 4


def cut_splits(model: ir.Model) -> bool:
    """Replace Splits that would copy sizes from the host in each run: along the last axis by several Splits, along any
    other by Slices and (as ONNX Runtime would make a Split of Slices alone) a Gather of the smallest part."""
    graph = model.graph
    modified = False
    for node in [node for node in graph if node.op_type == "Split" and len(node.inputs) > 1]:
        source = node.inputs[0]
        sizes = constant(node.inputs[1])
        if source is None or sizes is None or len(set(sizes.tolist())) == 1:
            continue
        axis = node.attributes.get_int("axis", 0)
        rank = len(source.shape) if source.shape is not None else None
        if axis not in (-1, (rank or 0) - 1):
            parts = _slices(node, source, sizes.tolist())
        elif len(sizes) > _MAX_SPLIT_PARTS:
            parts = _splits(node, source, sizes.tolist())
        else:
            continue
        for output, part in zip(list(node.outputs), parts, strict=True):
            part.shape = output.shape
            part.type = output.type
            output.replace_all_uses_with(part, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        modified = True
    return modified


def _splits(node: ir.Node, source: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
    """The parts of `source`: each Split cuts the rest that the Split before it left."""
    assert node.graph is not None
    parts = list[ir.Value]()
    rest = source
    while sizes:
        own = sizes if len(sizes) <= _MAX_SPLIT_PARTS else sizes[: _MAX_SPLIT_PARTS - 1]
        sizes = sizes[len(own) :]
        lengths = [*own, sum(sizes)] if sizes else own
        name = f"sizes_{'_'.join(map(str, lengths))}"
        inputs = [rest, initializer(node.graph, name, np.array(lengths, np.int64))]
        split = ir.node(
            "Split",
            inputs,
            {"axis": -1},
            num_outputs=len(lengths),
            name=suffixed(node, str(len(parts))),
        )
        node.graph.insert_before(node, split)
        parts += split.outputs[: len(own)]
        rest = split.outputs[-1]
    return parts


def _slices(node: ir.Node, source: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
    """The parts of `source`: a Gather takes the smallest of several indices, and Slices take the rest."""
    graph = node.graph
    assert graph is not None
    axis = node.attributes.get_int("axis", 0)
    numbers = [0, *np.cumsum(sizes).tolist()]
    gathered = min(range(len(sizes)), key=lambda index: (sizes[index] < 2, sizes[index]))
    parts = list[ir.Value]()
    for index, (start, stop) in enumerate(itertools.pairwise(numbers)):
        name = f"{node.name}_{index}"
        if index == gathered:
            indices = initializer(graph, f"int64_{start}_to_{stop}", np.arange(start, stop))
            part = ir.node("Gather", [source, indices], {"axis": axis}, name=name)
        else:
            bounds = [
                initializer(graph, f"int64_{number}", np.array([number]))
                for number in (start, stop, axis)
            ]
            part = ir.node("Slice", [source, *bounds], name=name)
        graph.insert_before(node, part)
        parts.append(part.outputs[0])
    return parts


def fix_total_length(model: ir.Model, capacity: int) -> bool:
    """Give every GroupQueryAttention `capacity` as its longest total length: the host reads it, and must not wait."""
    total = initializer(model.graph, "attention_capacity", np.array(capacity, dtype=np.int32))
    nodes = attentions(model.graph)
    for node in nodes:
        set_inputs(node, {Slot.TOTAL_SEQUENCE_LENGTH: total})
    return bool(nodes)


class _Host(NamedTuple):
    """The values that are computed on the host, and the nodes that do it."""

    values: set[ir.Value | None]
    nodes: set[ir.Node]


def _host_values(graph: ir.Graph) -> _Host:
    """Shapes, and the values that are computed from them and constants alone, as ONNX Runtime places them: a node whose
    kernel for the device reads its input on the host runs on the device."""
    host = _Host(set(), set())
    for node in graph.all_nodes():
        on_host = _ON_HOST.get(node.op_type, ())
        computed = [
            (index, value)
            for index, value in enumerate(node.inputs)
            if value is not None and not value.is_initializer()
        ]
        follows = bool(computed) and all(
            value in host.values and index not in on_host for index, value in computed
        )
        if node.op_type in _SOURCES or follows:
            host.nodes.add(node)
            host.values.update(node.outputs)
    return host


def _fold_static_shapes(graph: ir.Graph) -> bool:
    """Replace shapes that the graph fixes by constants. Returns whether there were any."""
    modified = False
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Shape" else None
        if source is None or source.shape is None:
            continue
        start = node.attributes.get_int("start", 0)
        dims = list(source.shape)[start : node.attributes.get_int("end", len(source.shape))]
        if all(isinstance(dim, int) for dim in dims):
            name = "sizes_" + "_".join(map(str, dims))
            sizes = initializer(
                graph, name, np.array([int(str(dim)) for dim in dims], dtype=np.int64)
            )
            ir.convenience.replace_all_uses_with(node.outputs[0], sizes)
            modified = True
    return modified


def _number(before: ir.Node, value: ir.Value, limit: int) -> ir.Value:
    """The host's number `value`, a scalar or [1], cut out of a constant."""
    graph = before.graph
    assert graph is not None
    start = cast(value, ir.DataType.INT64, before)
    if not value.shape:
        start = insert(before, "Unsqueeze", [start, _int64(graph, 0)], [1])
    end = insert(before, "Add", [start, _int64(graph, 1)], [1])
    dtype = np.dtype(np.int64) if value.dtype is None else value.dtype.numpy()
    numbers = initializer(graph, f"numbers_{dtype}", np.arange(limit, dtype=dtype))
    number = insert(before, "Slice", [numbers, start, end], [1])
    if not value.shape:
        number = insert(before, "Squeeze", [number, _int64(graph, 0)], [])
    return number


def _behind(value: ir.Value) -> ir.Node:
    """The node right after the producer of `value`."""
    producer = value.producer()
    assert producer is not None
    assert producer.graph is not None
    following = list(producer.graph)
    return following[following.index(producer) + 1]


def _int64(graph: ir.Graph, number: int) -> ir.Value:
    return initializer(graph, f"int64_{number}", np.array([number], dtype=np.int64))


# Gelu is of opset 20; ONNX Runtime had both of its forms before.
_GELU: Final = {"none": "Gelu", "tanh": "FastGelu"}


def lower_opset(model: ir.Model, opset: int) -> bool:
    """Declare `model` to be of `opset`, and rewrite the operators that the opset writes differently. Raises
    CompileError for an operator or attribute that the opset does not have."""
    modified: bool = model.opset_imports.get("") != opset
    for node in model.graph.all_nodes():
        node.version = None
        if node.domain == "":
            _lower(node, opset)
    model.opset_imports[""] = opset
    return modified


def _lower(node: ir.Node, opset: int) -> None:
    if node.op_type == "Gelu":
        approximate = node.attributes.pop("approximate", None)
        node.op_type = _GELU["none" if approximate is None else approximate.as_string()]
        node.domain = CONTRIB_DOMAIN
        assert node.graph is not None
        node.graph.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
        return
    if node.op_type == "Cast":
        node.attributes.pop("saturate", None)  # of casts to float8
    if not onnx.defs.has(node.op_type, ""):
        return  # ONNX Runtime's own, like SimplifiedLayerNormalization
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError as error:
        raise CompileError(
            f"{node.op_type} {node.name} is not in opset {opset}, which this provider takes"
        ) from error
    unknown = [name for name in node.attributes if name not in schema.attributes]
    if unknown:
        raise CompileError(
            f"{node.op_type} {node.name} has {', '.join(unknown)}, which opset {opset} lacks, and this provider takes "
            "no newer opset"
        )
