"""How many bits each matrix gets: a table from patterns of names to bits; and the names of a graph's matrices.

Measured divergence per byte chose the defaults (docs/quantization.md). Presets say what the head, with an embedding
that is tied to it, and the outer layers have beside 4 bits. With 2 bits, all but the feed-forward matrices of the inner
layers have 4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

import onnx_ir as ir

from qsample.compiler.quantize import Preset, entry_of_table
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.contract.interface import adapter_names
from qsample.contract.tensors import LOGITS
from qsample.graph.edit import ancestors

HEAD: Final = "lm_head"
_STATE: Final = "past_key_values."
_ADAPTER_ENDS: Final = adapter_names("")


@dataclass(frozen=True, slots=True)
class BitsTable:
    """The bits of matrices.

    Attributes:
        entries: the bits of each pattern of names, as `fnmatch` reads them: "int2", "int4" or "int8", with a block size
            "int4:32", or "float" for a matrix that stays as it is. The first pattern that matches a name counts.
    """

    entries: Mapping[str, str]

    def way(self, name: str, otherwise: WeightQuantization) -> WeightQuantization | None:
        """How to quantize the matrix `name`: `otherwise` if no pattern matches, and None if it stays float."""
        kind = next(
            (kind for pattern, kind in self.entries.items() if fnmatchcase(name, pattern)), None
        )
        if kind is None:
            return otherwise
        bits, size = entry_of_table(kind)
        return (
            None
            if bits is None
            else replace(
                otherwise, bits=bits, block_size=otherwise.block_size if size is None else size
            )
        )


PLAIN: Final = BitsTable({})


def table_of(given: Mapping[str, str], bits: int, preset: Preset, layers: int) -> BitsTable:
    """The table of a model of that many layers: the caller's entries before the defaults of weights in `bits`."""
    outer = [f"layers.{layer}.*" for layer in (0, layers - 1)] if layers != 0 else []
    defaults = {}
    if bits == 4:
        defaults = {HEAD: preset.head, **dict.fromkeys(outer, preset.outer)}
    if bits == 2:
        four = [*outer, "*.qkv_proj", "*.o_proj", "embed_tokens"]
        defaults = {HEAD: "int8:128", **dict.fromkeys(four, "int4")}
    return BitsTable(
        {**given, **{pattern: kind for pattern, kind in defaults.items() if pattern not in given}}
    )


def names_of(graph: ir.Graph, nodes: Collection[ir.Node]) -> dict[ir.Node, str]:
    """The name of the matrix of each of `nodes`, products and lookups of `graph` and of the loops in it.

    A layer extends between the states that its attention, convolution or recurrence reads. Its matrices are qkv_proj
    before that node, o_proj behind it, down_proj at the end, and gate_up_proj between them, several of one name if the
    graph does not join them. Matrices before the first layer that are no lookups count to the first.
    """
    products = [node for node in nodes if node.op_type != "Gather"]
    # A search from a node back to its sources ends here.
    ends = {*products, *_products_of_adapters(graph)}
    order = {node: place for place, node in enumerate(graph)}
    names = {node: "embed_tokens" for node in nodes if node.op_type == "Gather"}
    names |= dict.fromkeys(_head_products(graph, products, ends), HEAD)
    mixers = _mixers(graph)
    own = [node for node in products if node in order and node not in names]
    before = [_directly_behind(mixer.inputs, own, ends) for mixer in mixers]
    starts = [
        min((order[node] for node in found), default=order[mixer])
        for mixer, found in zip(mixers, before, strict=True)
    ]
    for layer, mixer in enumerate(mixers):
        end = starts[layer + 1] if layer + 1 < len(mixers) else len(order)
        first = starts[layer] if layer != 0 else 0
        members = [node for node in own if first <= order[node] < end and node not in names]
        behind = [node for node in members if order[node] > order[mixer]]
        for node in members:
            names[node] = f"layers.{layer}.{_role(node, mixer, before[layer], behind, ends)}"
    return {node: names.get(node, "other") for node in nodes}


def _role(
    node: ir.Node,
    mixer: ir.Node,
    before: Collection[ir.Node],
    behind: list[ir.Node],
    ends: Collection[ir.Node],
) -> str:
    if node in before:
        return "qkv_proj"
    if mixer in ancestors(node.inputs[:1], ends):
        return "o_proj"
    return "down_proj" if behind and node is behind[-1] else "gate_up_proj"


def layers_of(graph: ir.Graph) -> int:
    """The number of layers that read a state."""
    return len(_mixers(graph))


def _head_products(
    graph: ir.Graph, products: Collection[ir.Node], ends: Collection[ir.Node]
) -> set[ir.Node]:
    """The `products` with weights, nodes of `graph`, from which the logits come without another of them between."""
    logits = [value for node in graph for value in node.outputs if value.name == LOGITS.name]
    return _directly_behind(logits, products, ends)


def _products_of_adapters(graph: ir.Graph) -> set[ir.Node]:
    """The products with matrices of LoRA adapters. Each reads the input of a product with weights, and its result is
    added to the output of that product: a path through the adapter would miss the product."""
    matrices = [value for value in graph.inputs if str(value.name).endswith(_ADAPTER_ENDS)]
    return {node for value in matrices for node, _ in value.uses()}


def _mixers(graph: ir.Graph) -> list[ir.Node]:
    """The node of each layer that reads the layer's first state, in the graph's order."""
    readers: dict[str, ir.Node] = {}
    for node in graph:
        for value in node.inputs:
            name = str(value.name) if value is not None and value.is_graph_input() else ""
            if name.startswith(_STATE) and node.op_type != "Shape":
                readers.setdefault(name.removeprefix(_STATE).split(".")[0], node)
    return list(readers.values())


def _directly_behind(
    values: Collection[ir.Value | None], products: Collection[ir.Node], ends: Collection[ir.Node]
) -> set[ir.Node]:
    """The `products` from which `values` come without one of `ends` between."""
    reached = ancestors(values, ends)
    sources = [*values, *(value for node in reached for value in node.inputs)]
    producers = {value.producer() for value in sources if value is not None}
    return {node for node in products if node in producers}
