"""The products of LoRA adapters in a decode graph: added to linear layers, removed, put into
branches.

A layer that computes y from x becomes

    y + Where(adapter_ids == adapter, x A^T, 0) B

with the matrices A, [P, in], and B, [P, out], of all bound adapters one below the other. Every row
names an adapter; for the ranks of other adapters, it adds exact zeros. Without bound adapters P is
0, and the operators have nothing to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract.interface import Interface, adapter_ids, adapter_names, kind_of, ranks_axis
from qsample.contract.tensors import ADAPTER, BATCH
from qsample.errors import CompileError
from qsample.graph.edit import (
    copy_node,
    initializer,
    insert,
    producer,
    put_behind,
    replace_outputs,
    reshape_target,
)
from qsample.graph.operators import CONTRIB_DOMAIN, is_contrib, is_matmul_nbits
from qsample.graph.packed import offsets_of
from qsample.graph.weights import JoinedTensor

# A number that no adapter has.
_NO_ADAPTER: Final = -(2**31)
_FUSED_PRODUCT: Final = "FusedMatMul"
_PRODUCTS: Final = ("MatMul", "Gemm")


class Layer(NamedTuple):
    """A linear layer of a graph.

    Attributes:
        path: PEFT's name of the layer.
        states: its input, [B, S, in], or [B, in, S] if `transposed`.
        result: its output, [B, S, out]; of joined layers, the outputs side by side.
        factor: the factor on the product in the graph.
        transposed: whether the states are transposed.
    """

    path: str
    states: ir.Value
    result: ir.Value
    factor: float = 1.0
    transposed: bool = False


def add_adapters(model: ir.Model, interface: Interface, layers: Iterable[Layer]) -> None:
    """Add `interface.adapter_inputs` to a graph, and the products with them to its layers, in
    place."""
    _Adapters(model, interface).add([[layer] for layer in layers])


class _Adapters:
    """Adds products to a graph, and the inputs for adapters."""

    def __init__(self, model: ir.Model, interface: Interface) -> None:
        self._graph = model.graph
        self._dtype = _dtype(interface.dtype)
        self._inputs = {
            spec.name: _like(spec.axes, _dtype(spec.dtype), spec.name)
            for spec in interface.adapter_inputs
        }
        model.graph.inputs.extend(self._inputs.values())
        model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
        zero = np.zeros((), self._dtype.numpy())
        self._zero = initializer(model.graph, f"adapter_zero_{interface.dtype}", zero)
        graph = model.graph
        first = next(iter(graph))
        int32 = ir.DataType.INT32
        boolean = ir.DataType.BOOL
        given = self._inputs[ADAPTER.name]
        shape = reshape_target(graph, [-1, 1, 1])
        rows = (BATCH, 1, 1)
        row = insert(first, "Reshape", [given, shape], rows, dtype=int32, name="adapter.row")
        zero_id = initializer(graph, "adapter_0", np.array(0, np.int32))
        no_adapter = initializer(graph, f"adapter_{_NO_ADAPTER}", np.array(_NO_ADAPTER, np.int32))
        # Adapter 0 always means no adapter, even if the host gives that id to unused ranks.
        has = insert(first, "Greater", [row, zero_id], rows, dtype=boolean, name="adapter.any")
        number = insert(
            first, "Where", [has, row, no_adapter], rows, dtype=int32, name="adapter.number"
        )
        # For each kind of layers, the ranks that belong to the adapter of each row.
        self._masks: dict[str, ir.Value] = {}
        for kind in interface.adapter_kinds:
            ids = self._inputs[adapter_ids(kind).name]
            mask_shape = (BATCH, 1, ranks_axis(kind))
            self._masks[kind] = insert(
                first, "Equal", [number, ids], mask_shape, dtype=boolean, name=f"adapter.{kind}"
            )

    def add(self, layers: Iterable[Sequence[Layer]]) -> None:
        """Add products to layers; layers of a group have their results side by side in one
        value."""
        for parts in layers:
            result = parts[0].result
            name = f"adapter.{parts[0].path}"
            total = put_behind(result, "Add", [self._zero], name=name)
            total.name = name
            node = total.producer()
            assert node is not None
            changes = [self._product(node, part) for part in parts]
            change = changes[0]
            if len(changes) > 1:
                change = insert(
                    node, "Concat", changes, result.shape, {"axis": -1}, name=f"{name}.joint"
                )
            node.replace_input_with(1, change)

    def _product(self, before: ir.Node, layer: Layer) -> ir.Value:
        name = f"adapter.{layer.path}"
        kind = kind_of(layer.path)
        a, b = (self._inputs[one] for one in adapter_names(layer.path))
        assert layer.states.shape is not None
        assert a.shape is not None
        assert b.shape is not None
        batch, *sizes = layer.states.shape
        rows = [batch, sizes[-1 if layer.transposed else 0]]
        turned = {"transA": int(layer.transposed), "transB": 1}
        narrow = [*rows, a.shape[0]]

        def put(
            op_type: str, inputs: list[ir.Value], shape: list[Any], part: str, **more: Any
        ) -> ir.Value:
            return insert(
                before, op_type, inputs, shape, dtype=self._dtype, name=f"{name}.{part}", **more
            )

        down = put(
            _FUSED_PRODUCT,
            [layer.states, a],
            narrow,
            "down",
            attributes=turned,
            domain=CONTRIB_DOMAIN,
        )
        own = put("Where", [self._masks[kind], down, self._zero], narrow, "own")
        factor = {"alpha": layer.factor}
        return put(
            _FUSED_PRODUCT,
            [own, b],
            [*rows, b.shape[1]],
            "up",
            attributes=factor,
            domain=CONTRIB_DOMAIN,
        )


def _like(
    shape: Sequence[int | str | ir.SymbolicDim], dtype: ir.DataType, name: str | None = None
) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _dtype(name: str) -> ir.DataType:
    return ir.DataType.FLOAT if name == "float32" else ir.DataType[name.upper()]


def split_adapters(model: ir.Model, interface: Interface) -> list[tuple[str, str]]:
    """Remove the inputs and products of adapters from a graph, in place.

    Returns:
        The path of each layer and the name of its weight, in the order of the graph.

    Raises:
        CompileError: a layer is not a product with a constant.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    cut: dict[ir.Node, str] = {}
    for target in interface.adapters:
        _, b = (inputs[name] for name in adapter_names(target.path))
        for up, _ in b.uses():
            ((total, _),) = up.outputs[0].uses()
            cut[total] = target.path
    found = []
    for node in [node for node in graph if node in cut]:
        result = node.inputs[0]
        assert result is not None
        weight = _weight_of(result)
        if weight is None or weight.const_value is None:
            raise CompileError(
                f"adapters cannot change {cut[node]}, which is no product with a matrix of this graph"
            )
        # The name by which the weight is found again as a part of a joined weight.
        weight.const_value.name = weight.name
        found.append((cut[node], str(weight.name)))
        node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    common_passes.RemoveUnusedNodesPass()(model)
    names = {spec.name for spec in interface.adapter_inputs}
    graph.inputs[:] = [value for value in graph.inputs if value.name not in names]
    return found


def join_adapters(
    model: ir.Model, interface: Interface, weights: Iterable[tuple[str, str]]
) -> None:
    """The inverse of `split_adapters`, in place.

    Passes may have changed the graph in between: products may be joined, and their weights packed.

    Args:
        model: the graph.
        interface: the interface of the graph.
        weights: the result of `split_adapters`.

    Raises:
        CompileError: a layer is gone.
    """
    # For each weight, the layers that have it, in order.
    waiting: defaultdict[str, list[str]] = defaultdict(list)
    for path, weight in weights:
        waiting[weight].append(path)
    found = []
    for node in list(model.graph):
        names = _part_names(node)
        if _is_product(node) and node.inputs[1] is not None and str(node.inputs[1].name) in waiting:
            names = [str(node.inputs[1].name)]
        if any(name in waiting for name in names):
            paths = [waiting[name].pop(0) if waiting.get(name) else None for name in names]
            found.append(_layers(node, paths))
    missing = [path for paths in waiting.values() for path in paths]
    if missing:
        raise CompileError(
            f"adapters cannot change {', '.join(missing[:3])}, whose products were fused with others"
        )
    _Adapters(model, interface).add(found)


def _layers(node: ir.Node, paths: Sequence[str | None]) -> list[Layer]:
    """The layers that a product computes.

    Args:
        node: the product.
        paths: the path of the layer of each part of its weight; None if a part has no layer.
    """
    states = node.inputs[0]
    result = node.outputs[0]
    offsets = offsets_of(node)
    if offsets is not None:
        result = offsets.total.outputs[0]
    gather = producer(states)
    if gather is not None and is_matmul_nbits(node) and gather.op_type == "Gather":
        # The columns of the weight are in act-order.
        states = gather.inputs[0]
    if states is None or states.shape is None or len(states.shape) != 3 or None in paths:
        known = ", ".join(path for path in paths if path is not None)
        raise CompileError(
            f"adapters cannot change {known}: {node.name}, its product here, is not only theirs, row by row"
        )
    factor = node.attributes.get_float("alpha", 1.0)
    transposed = bool(node.attributes.get_int("transA", 0))
    return [Layer(path, states, result, factor, transposed) for path in paths if path is not None]


def _part_names(node: ir.Node) -> list[str]:
    """The names of the weights of a product, from the first to the last columns of its result."""
    value = node.inputs[1] if _is_product(node) else None
    tensor = None if value is None else value.const_value
    if value is None or tensor is None:
        return []
    if isinstance(tensor, JoinedTensor) and tensor.axis == (0 if is_matmul_nbits(node) else 1):
        return [str(part.name) for part in tensor.parts]
    return [str(value.name)]


def _weight_of(result: ir.Value) -> ir.Value | None:
    """The weight of the product from which `result` comes, perhaps with a bias or another shape."""
    node = producer(result)
    while node is not None and not _is_product(node):
        if node.op_type not in ("Add", "Reshape"):
            return None
        node = next((one for one in map(producer, node.inputs) if one is not None), None)
    return None if node is None else node.inputs[1]


def _is_product(node: ir.Node) -> bool:
    return node.op_type in _PRODUCTS or is_contrib(node, _FUSED_PRODUCT) or is_matmul_nbits(node)


def branch_where_adapters_are(model: ir.Model, interface: Interface) -> bool:
    """Move the products of adapters, and the sums that add them to results, into branches; in
    place.

    If no adapter has ranks, the other side of the If passes the result on, which copies it once.
    Without the branch, zeros are computed and added in three passes over the result.

    Returns whether there were such products.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    # The kind of layers of each matrix B.
    kinds = {inputs[adapter_names(target.path)[1]]: target.kind for target in interface.adapters}
    order = {node: place for place, node in enumerate(graph)}
    found = [
        (node, sorted(made, key=order.__getitem__))
        for node in order
        if (made := _added(node, kinds))
    ]
    conditions: dict[tuple[str, ...], ir.Value] = {}
    for total, products in found:
        own = tuple(
            dict.fromkeys(
                kinds[value] for node in products for value in node.inputs if value in kinds
            )
        )
        if own not in conditions:
            conditions[own] = _any_ranks(graph, [inputs[adapter_ids(kind).name] for kind in own])
        copies: dict[ir.Value, ir.Value] = {}
        added = [copy_node(node, copies, "branch") for node in (*products, total)]
        same = ir.node("Identity", [total.inputs[0]], name=f"{total.name}.none")
        same.outputs[0].name = same.name
        same.outputs[0].type = total.outputs[0].type
        sides = [
            ir.AttrGraph(
                side,
                ir.Graph([], list(nodes[-1].outputs), nodes=nodes, name=f"{total.name}.{side}"),
            )
            for side, nodes in (("then_branch", added), ("else_branch", [same]))
        ]
        branch = ir.Node("", "If", [conditions[own]], sides, num_outputs=1, name=f"{total.name}.if")
        replace_outputs(total, branch)
        graph.insert_before(total, branch)
        graph.remove([total, *products], safe=True)
    return bool(found)


def _added(total: ir.Node, kinds: dict[ir.Value, str]) -> set[ir.Node]:
    """The nodes of the adapter products that `total` adds to a result; none for any other sum."""
    last = producer(total.inputs[1]) if total.op_type == "Add" else None
    if last is None:
        return set()
    found = {last}
    for up in map(producer, last.inputs) if last.op_type == "Concat" else (last,):
        own = (
            producer(up.inputs[0])
            if up is not None and len(up.inputs) > 1 and up.inputs[1] in kinds
            else None
        )
        down = producer(own.inputs[1]) if own is not None else None
        if up is None or own is None or down is None:
            return set()
        found |= {up, own, down}
    return found


def _any_ranks(graph: ir.Graph, ids: list[ir.Value]) -> ir.Value:
    """Whether any of these inputs has an element: a scalar bool."""
    sizes = [insert(graph[0], "Size", [value], [], dtype=ir.DataType.INT64) for value in ids]
    first = next(node for node in graph if node.op_type != "Size")
    most = insert(first, "Max", sizes, []) if len(sizes) > 1 else sizes[0]
    zero = initializer(graph, "no_ranks", np.zeros((), np.int64))
    return insert(first, "Greater", [most, zero], [], dtype=ir.DataType.BOOL)
