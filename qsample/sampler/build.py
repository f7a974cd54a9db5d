"""An `Interface` enters; the sampler as a graph leaves: `sampler.onnx`, or the end of a decode graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import ADJUSTED_LOGITS, CANDIDATES, TensorSpec, retained_name
from qsample.sampler.adjust import adjusted_logits
from qsample.sampler.call import Call
from qsample.sampler.commit import next_states, results
from qsample.sampler.draw import draw
from qsample.sampler.tensor import Tensor, building, op

OPSET: Final = 20
_IR_VERSION: Final = 10


def build_sampler(
    interface: Interface,
    pad_token_id: int,
    *,
    num_candidates: int = CANDIDATES,
    for_webgpu: bool = False,
) -> ir.Model:
    """The sampler and its states, by `interface.sampler`: a step of every row, from the logits on.

    `interface.captured` asks for a graph without If and Loop, for capture and replay. With `for_webgpu` as well, an If
    around each search skips it if `searched_rows` is empty, because WebGPU reduces no empty tensors; and no number has
    64 bits. `pad_token_id` is `next_ids` of a row that emits nothing. `num_candidates` is K, how many of the largest
    logits are sorted: 64 in the contract; below 1 raises ValueError.
    """
    if num_candidates < 1:
        raise ValueError(f"num_candidates is {num_candidates}; it must be at least 1")
    spec = interface.sampler
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        call = Call(interface, inputs, for_webgpu=for_webgpu)
        adjusted = adjusted_logits(call)
        drawn = draw(call, adjusted, num_candidates)
        states = {retained_name(name): state for name, state in next_states(call, drawn).items()}
        found = results(call, drawn, pad_token_id) | states | {ADJUSTED_LOGITS.name: adjusted}
        set_outputs(graph, interface, spec.results, found)
    return finished(graph)


def new_graph(interface: Interface, spec: GraphSpec) -> tuple[ir.Graph, dict[str, Tensor]]:
    """A graph with the inputs of `spec` and no nodes, and these inputs by name."""
    values = [_value(interface, tensor) for tensor in (*spec.inputs, *spec.states)]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": OPSET}, name="sampler")
    return graph, {str(value.name): Tensor(value) for value in values}


def _value(interface: Interface, spec: TensorSpec) -> ir.Value:
    shape = ir.Shape(
        [interface.sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.axes]
    )
    dtype = ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
    return ir.Value(name=spec.name, shape=shape, type=ir.TensorType(dtype))


def set_outputs(
    graph: ir.Graph,
    interface: Interface,
    outputs: Sequence[TensorSpec],
    found: Mapping[str, Tensor],
) -> None:
    """Let `found` be the graph's outputs, under their names, and give everything else a unique name."""
    for spec in outputs:
        value = found[spec.name].value
        if value.is_graph_input() or value.is_graph_output():
            value = op("Identity", value).value
        declared = _value(interface, spec)
        value.shape, value.type = declared.shape, declared.type
        graph.outputs.append(value)
    for index, node in enumerate(graph.all_nodes()):
        node.name = f"{node.op_type}_{index}"
        for place, value in enumerate(node.outputs):
            value.name = f"{node.name}.{place}"
    for index, part in enumerate(graph.subgraphs()):
        for place, value in enumerate(part.inputs):
            value.name = f"{part.name}_{index}.{place}"
    for spec, value in zip(outputs, graph.outputs, strict=True):
        value.name = spec.name


def finished(graph: ir.Graph) -> ir.Model:
    """The model of a graph whose outputs are set, without what is there twice or for nothing."""
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")
    common_passes.DeduplicateInitializersPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.ClearMetadataAndDocStringPass()(model)  # the builder's scopes
    return model
