"""An `Interface` enters; the sampler as a graph leaves: `sampler.onnx`, or what a decode graph ends with."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract import ADJUSTED_LOGITS, CANDIDATES, VOCAB, GraphSpec, Interface, TensorSpec, retained_name
from qsample.sampler.step import Step
from qsample.sampler.tensor import Tensor, building, op

OPSET = 20
_IR_VERSION = 10


def build_sampler(interface: Interface, pad_token_id: int, *, num_candidates: int = CANDIDATES) -> ir.Model:
    """The sampler with its states: draws, and commits what it drew.

    Args:
        interface: the vocabulary and the features; `captured`: a graph without If and Loop, for capture and replay.
        pad_token_id: `next_ids` of a row that emits nothing.
        num_candidates: K, how many of the largest logits are sorted, at least 1. Not the contract's 64 only in tests.

    Returns:
        A graph with the inputs and outputs of `interface.sampler`.

    Raises:
        ValueError: If `num_candidates` is below 1.
    """
    if num_candidates < 1:
        raise ValueError(f"num_candidates is {num_candidates}; it must be at least 1")
    spec = interface.sampler
    graph, inputs = _graph(interface, spec)
    with building(graph):
        step = Step(interface, inputs, pad_token_id, num_candidates)
        adjusted = step.adjusted_logits()
        draw = step.draw(adjusted)
        results = step.results(draw) | {retained_name(name): state for name, state in step.commit(draw).items()}
        results[ADJUSTED_LOGITS.name] = adjusted
        _finish(graph, interface, [*spec.outputs, *_next_states(spec)], results)
    return _model(graph)


def build_draw(interface: Interface, pad_token_id: int) -> ir.Model:
    """The sampler without its commit, for a host or a graph that keeps the states itself: several positions of one row
    can be rows of it, each with the tokens and counts of the positions before.

    Returns:
        A graph with the inputs of `interface.sampler`, which it only reads, the outputs of a step, and `status` [B]
        int32, what the step makes of it.
    """
    spec = interface.sampler
    status = next(state for state in spec.states if state.name == "status")
    graph, inputs = _graph(interface, spec)
    with building(graph):
        step = Step(interface, inputs, pad_token_id)
        draw = step.draw(step.adjusted_logits())
        results = step.results(draw) | {retained_name("status"): step.commit(draw)["status"]}
        outputs = [output for output in spec.outputs if output is not ADJUSTED_LOGITS]
        _finish(graph, interface, [*outputs, replace(status, name=retained_name("status"))], results)
    return _model(graph)


def _graph(interface: Interface, spec: GraphSpec) -> tuple[ir.Graph, dict[str, Tensor]]:
    values = [_value(interface, tensor) for tensor in (*spec.inputs, *spec.states)]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": OPSET}, name="sampler")
    return graph, {str(value.name): Tensor(value) for value in values}


def _value(interface: Interface, spec: TensorSpec) -> ir.Value:
    shape = ir.Shape([interface.sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in spec.axes])
    dtype = ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
    return ir.Value(name=spec.name, shape=shape, type=ir.TensorType(dtype))


def _next_states(spec: GraphSpec) -> list[TensorSpec]:
    return [replace(state, name=retained_name(state.name)) for state in spec.states if not state.read_only]


def _finish(graph: ir.Graph, interface: Interface, outputs: list[TensorSpec], results: dict[str, Tensor]) -> None:
    """Let `results` be the outputs of the graph, under their names, and everything else have a name of its own."""
    for spec in outputs:
        value = results[spec.name].value
        if value.is_graph_input() or value.is_graph_output():
            value = op("Identity", value).value
        declared = _value(interface, spec)
        value.shape, value.type = declared.shape, declared.type
        graph.outputs.append(value)
    for index, node in enumerate(graph.all_nodes()):
        node.name = f"{node.op_type}_{index}"
        for place, value in enumerate(node.outputs):
            value.name = f"{node.name}.{place}"
    for part in graph.subgraphs():
        for place, value in enumerate(part.inputs):
            value.name = f"{part.name}_{id(part)}.{place}"
    for spec, value in zip(outputs, graph.outputs, strict=True):
        value.name = spec.name


def _model(graph: ir.Graph) -> ir.Model:
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.DeduplicateInitializersPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.ClearMetadataAndDocStringPass()(model)
    return model


_ = VOCAB
