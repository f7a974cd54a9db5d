"""Branches the products of LoRA adapters: a step without adapters computes none of them.

Without adapters their matrices have no ranks, so the products give zeros. But to make the zeros and to add them takes
three passes over the results of all linear layers. The branch copies each result once.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qsample.contract.interface import Interface, adapter_ids, adapter_names
from qsample.graph.edit import copy_node, initializer, insert, producer, replace_outputs


def branch_where_adapters_are(model: ir.Model, interface: Interface) -> bool:
    """Move the products of adapters, and the sum that adds them to a result, into one side of an If; in place.

    The other side, if no adapter has ranks there, is the result. Returns whether there were such products.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    kinds = {inputs[adapter_names(target.path)[1]]: target.kind for target in interface.adapters}  # of each matrix B
    order = {node: place for place, node in enumerate(graph)}
    found = [(node, products) for node in order if (products := _products(node, kinds))]
    conditions: dict[tuple[str, ...], ir.Value] = {}
    for total, products in found:
        own = tuple(dict.fromkeys(kinds[value] for node in products for value in node.inputs if value in kinds))
        if own not in conditions:
            conditions[own] = _any_ranks(graph, [inputs[adapter_ids(kind).name] for kind in own])
        copies: dict[ir.Value, ir.Value] = {}
        added = [copy_node(node, copies, "branch") for node in (*sorted(products, key=order.__getitem__), total)]
        same = ir.node("Identity", [total.inputs[0]], name=f"{total.name}.none")
        same.outputs[0].name, same.outputs[0].type = same.name, total.outputs[0].type
        sides = [
            ir.AttrGraph(side, ir.Graph([], list(nodes[-1].outputs), nodes=nodes, name=f"{total.name}.{side}"))
            for side, nodes in (("then_branch", added), ("else_branch", [same]))
        ]
        branch = ir.Node("", "If", [conditions[own]], sides, num_outputs=1, name=f"{total.name}.if")
        replace_outputs(total, branch)
        graph.insert_before(total, branch)
        graph.remove([total, *products], safe=True)
    return bool(found)


def _products(total: ir.Node, kinds: dict[ir.Value, str]) -> set[ir.Node]:
    """The nodes that compute what `total` adds to a result, if that is a product with matrices of adapters."""
    last = producer(total.inputs[1]) if total.op_type == "Add" else None
    if last is None:
        return set()
    found = {last}
    for up in map(producer, last.inputs) if last.op_type == "Concat" else (last,):
        own = producer(up.inputs[0]) if up is not None and len(up.inputs) > 1 and up.inputs[1] in kinds else None
        down = producer(own.inputs[1]) if own is not None else None
        if up is None or own is None or down is None:
            return set()
        found |= {up, own, down}
    return found


def _any_ranks(graph: ir.Graph, ids: list[ir.Value]) -> ir.Value:
    """A bool scalar: whether any of these inputs has a value."""
    sizes = [insert(graph[0], "Size", [value], []) for value in ids]
    for size in sizes:
        size.dtype = ir.DataType.INT64
    first = next(node for node in graph if node.op_type != "Size")
    most = insert(first, "Max", sizes, []) if len(sizes) > 1 else sizes[0]
    bound = insert(first, "Greater", [most, initializer(graph, "no_ranks", np.zeros((), np.int64))], [])
    bound.dtype = ir.DataType.BOOL
    return bound
