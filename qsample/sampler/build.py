"""Builds the sampler of an `Interface` as a graph: `sampler.onnx`, or the end of a decode graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import ADJUSTED_LOGITS, CANDIDATES, TensorSpec, retained_name
from qsample.sampler.adjust import adjusted_logits
from qsample.sampler.call import Call
from qsample.sampler.commit import next_ids, next_states, results
from qsample.sampler.draw import draw
from qsample.sampler.replay import replayed_step
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
    """Build the sampler and its states: a step of every row, from the logits on.

    Args:
        interface: the graph's inputs, states and outputs are those of `interface.sampler`. If it is
            `captured`, the graph is one for replay: it has neither If nor Loop.
        pad_token_id: the value of `next_ids` in a row that emits nothing.
        num_candidates: K, how many of the largest logits are sorted; 64 in the contract.
        for_webgpu: in a graph for replay, put an If around each part that a list of rows may
            switch off, because WebGPU cannot reduce empty tensors, and use no number of 64 bits.

    Raises:
        ValueError: `num_candidates` is below 1.
    """
    if num_candidates < 1:
        raise ValueError(f"num_candidates is {num_candidates}; it must be at least 1")
    spec = interface.sampler
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        if interface.captured:
            tensors = replayed_step(
                interface, inputs, pad_token_id, num_candidates, for_webgpu=for_webgpu
            )
            # The adjusted logits of all rows are an output only where they cost nothing.
            wanted = [one for one in spec.results if one.name in tensors]
        else:
            tensors = _step(interface, inputs, pad_token_id, num_candidates)
            wanted = list(spec.results)
        set_outputs(graph, interface, wanted, tensors)
    return finished(graph)


def _step(
    interface: Interface, inputs: Mapping[str, Tensor], pad_token_id: int, num_candidates: int
) -> dict[str, Tensor]:
    """The outputs of a step with control flow, by name."""
    call = Call(interface, inputs)
    adjusted = adjusted_logits(call)
    drawn = draw(call, adjusted, num_candidates)
    states = {retained_name(name): state for name, state in next_states(call, drawn).items()}
    outputs = results(call, drawn, next_ids(drawn, pad_token_id))
    return outputs | states | {ADJUSTED_LOGITS.name: adjusted}


def new_graph(interface: Interface, spec: GraphSpec) -> tuple[ir.Graph, dict[str, Tensor]]:
    """Make a graph with the inputs of `spec` and no nodes; returns it and its inputs by name."""
    values = [_value(interface, tensor) for tensor in (*spec.inputs, *spec.states)]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": OPSET}, name="sampler")
    return graph, {str(value.name): Tensor(value) for value in values}


def _value(interface: Interface, spec: TensorSpec) -> ir.Value:
    sizes: list[int | str] = []
    for axis in spec.axes:
        sizes.append(interface.sizes.get(axis, axis) if isinstance(axis, str) else axis)
    dtype = ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
    return ir.Value(name=spec.name, shape=ir.Shape(sizes), type=ir.TensorType(dtype))


def set_outputs(
    graph: ir.Graph,
    interface: Interface,
    outputs: Sequence[TensorSpec],
    tensors: Mapping[str, Tensor],
) -> None:
    """Make `tensors` the graph's outputs and give all other values and all nodes unique names.

    Args:
        graph: the graph that is built, in place.
        interface: the sizes of named axes.
        outputs: the outputs, in order.
        tensors: the tensor of each output, by the output's name.
    """
    for spec in outputs:
        value = tensors[spec.name].value
        if value.is_graph_input() or value.is_graph_output():
            value = op("Identity", value).value
        declared = _value(interface, spec)
        value.shape = declared.shape
        value.type = declared.type
        graph.outputs.append(value)
    for index, node in enumerate(graph.all_nodes()):
        node.name = f"{node.op_type}_{index}"
        for place, value in enumerate(node.outputs):
            value.name = f"{node.name}.{place}"
    for index, subgraph in enumerate(graph.subgraphs()):
        for place, value in enumerate(subgraph.inputs):
            value.name = f"{subgraph.name}_{index}.{place}"
    for spec, value in zip(outputs, graph.outputs, strict=True):
        value.name = spec.name


def finished(graph: ir.Graph) -> ir.Model:
    """Make a model of a graph whose outputs are set, without duplicates and unused nodes."""
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")
    common_passes.DeduplicateInitializersPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    # The builder's scopes are metadata.
    common_passes.ClearMetadataAndDocStringPass()(model)
    return model
