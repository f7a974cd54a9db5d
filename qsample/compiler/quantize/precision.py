"""Which matrices a mixed recipe holds in 8 bits: the head, and those of the first and the last layer.

They are those that quantization harms most for their size: onnxruntime-genai's k_quant_mixed and llama.cpp's Q4_K_M
keep them, or some of them, finer too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import onnx_ir as ir

from qsample.contract import LOGITS
from qsample.graph.edit import ancestors

WIDE_BITS: Final = 8
_STATE: Final = "past_key_values."


def head_products(graph: ir.Graph, products: Collection[ir.Node]) -> set[ir.Node]:
    """Those of `products`, nodes of `graph` that multiply by a weight, that the logits come from without another one
    between."""
    logits = [value for node in graph for value in node.outputs if value.name == LOGITS.name]
    return _directly_behind(logits, products)


def sensitive_products(graph: ir.Graph, products: Collection[ir.Node]) -> set[ir.Node]:
    """Those of `products`, nodes of `graph` that multiply by a weight, that belong to the head or to the first or last
    layer. A layer is what lies between the states that its attention, convolution or recurrence reads."""
    order = {node: place for place, node in enumerate(graph)}
    wide, mixers = head_products(graph, products), _mixers(graph)
    if mixers:
        own = [node for node in products if node in order]
        second = mixers[1] if len(mixers) > 1 else None
        of_second = _directly_behind(second.inputs, own) if second is not None else set()
        wide |= {node for node in own if second is None or order[node] < order[second]} - of_second
        wide |= {node for node in own if order[node] > order[mixers[-1]]} | _directly_behind(mixers[-1].inputs, own)
    return wide


def _mixers(graph: ir.Graph) -> list[ir.Node]:
    """The node of each layer that reads the layer's first state, in the graph's order."""
    readers: dict[str, ir.Node] = {}
    for node in graph:
        for value in node.inputs:
            name = str(value.name) if value is not None and value.is_graph_input() else ""
            if name.startswith(_STATE) and node.op_type != "Shape":
                readers.setdefault(name.removeprefix(_STATE).split(".")[0], node)
    return list(readers.values())


def _directly_behind(values: Collection[ir.Value | None], products: Collection[ir.Node]) -> set[ir.Node]:
    """Those of `products` from which `values` come without another one between."""
    reached = ancestors(values, set(products))
    sources = [*values, *(value for node in reached for value in node.inputs)]
    producers = {value.producer() for value in sources if value is not None}
    return {node for node in products if node in producers}
