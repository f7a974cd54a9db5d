"""A decode graph up to its logits and a sampler graph enter; one graph from token ids to next-token ids leaves."""

from __future__ import annotations

import onnx_ir as ir

from qsample.contract import GraphSpec

PREFIX = "sampler."


def append_sampler(decoder: ir.Model, sampler: ir.Model, spec: GraphSpec) -> ir.Model:
    """Put `sampler` behind `decoder`, in place; the result has the inputs and outputs of `spec`, in its order.

    Where the sampler has an input that the decoder has or computes as an output (the logits), the two become one;
    whatever is inside the sampler gets `PREFIX` before its name. `sampler` is used up.
    """
    graph, tail = decoder.graph, sampler.graph
    inputs, outputs = list(tail.inputs), list(tail.outputs)
    for value in _values(tail):
        if value not in inputs and value.name not in spec.output_names:
            value.name = f"{PREFIX}{value.name}"
    for node in tail.all_nodes():
        node.name = f"{PREFIX}{node.name}"

    known = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    tail.inputs.clear()
    tail.outputs.clear()
    for value in inputs:
        if value.name in known:
            value.replace_all_uses_with(known[value.name])
    initializers = list(tail.initializers.values())
    tail.initializers.clear()
    for value in initializers:
        graph.register_initializer(value)
    nodes = list(tail)
    tail.remove(nodes)
    graph.extend(nodes)

    found = {value.name: value for value in (*inputs, *outputs)} | known
    graph.inputs[:] = [found[name] for name in spec.input_names]
    graph.outputs[:] = [found[name] for name in spec.output_names]
    for domain, version in sampler.opset_imports.items():
        decoder.opset_imports.setdefault(domain, version)
    return decoder


def _values(graph: ir.Graph) -> list[ir.Value]:
    """Every value that a graph or one of its subgraphs defines, inputs aside."""
    found = [value for part in (graph, *graph.subgraphs()) for value in part.initializers.values()]
    return found + [value for node in graph.all_nodes() for value in node.outputs]
