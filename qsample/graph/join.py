"""Joins the graphs of a model and a sampler at the logits, and separates them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import onnx_ir as ir

from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import INPUT_LENGTHS, LOGITS, retained_name
from qsample.graph.edit import ancestors, insert, reads, reshape_target
from qsample.graph.evaluate import inputs_of

# The prefix of names inside a joined sampler.
PREFIX: Final = "sampler."


def append_sampler(decoder: ir.Model, sampler: ir.Model, spec: GraphSpec) -> ir.Model:
    """Append a sampler to a decoder, in place.

    An input of the sampler is joined with the input or output of the decoder of the same name, such
    as the logits.

    Args:
        decoder: the graph up to the logits.
        sampler: the graph from the logits on; it is empty afterwards. Names inside it get `PREFIX`,
            unless they have it.
        spec: the inputs and outputs of the result, in order.
    """
    graph = decoder.graph
    outputs = list(sampler.graph.outputs)
    known = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    inputs, nodes = _take_out(sampler.graph, graph, known, PREFIX)
    graph.extend(nodes)

    by_name = {value.name: value for value in (*inputs, *outputs)} | known
    graph.inputs[:] = [by_name[name] for name in spec.input_names]
    graph.outputs[:] = [by_name[name] for name in spec.output_names]
    for domain, version in sampler.opset_imports.items():
        decoder.opset_imports.setdefault(domain, version)
    return decoder


def prepend(
    model: ir.Model, front: ir.Model, replaced: Collection[str], prefix: str
) -> dict[str, ir.Value]:
    """Put the nodes of a graph before those of a model, in place.

    Inputs are joined by name, and `model` gets the further inputs of `front`.

    Args:
        model: the model.
        front: the graph, whose outputs have new names; it is empty afterwards.
        replaced: inputs that `model` no longer reads: the caller connects their readers.
        prefix: the prefix for the names inside `front`.

    Returns:
        By name, the outputs of `front`, and values in place of the inputs in `replaced`.
    """
    graph = model.graph
    outputs = list(front.graph.outputs)
    known = {value.name: value for value in graph.inputs}
    stand_ins: dict[str, ir.Value] = {}
    for name in replaced:
        stand_in = ir.Value(name=name, shape=known[name].shape, type=known[name].type)
        known[name].replace_all_uses_with(stand_in)
        stand_ins[name] = stand_in
    inputs, nodes = _take_out(front.graph, graph, known, prefix)
    graph.insert_before(graph[0], nodes)
    graph.inputs.extend(value for value in inputs if value.name not in known)
    return {str(value.name): value for value in outputs} | stand_ins


def _take_out(
    part: ir.Graph, graph: ir.Graph, known: Mapping[str | None, ir.Value], prefix: str
) -> tuple[list[ir.Value], list[ir.Node]]:
    """Take the contents out of a graph, to put them into another.

    Args:
        part: the graph that is emptied.
        graph: the other graph, which gets the initializers.
        known: values that replace the inputs of the same name.
        prefix: the prefix for the names inside `part`.

    Returns:
        The inputs of `part`, and its nodes, which are in no graph.
    """
    inputs = list(part.inputs)
    outputs = list(part.outputs)

    def prefixed(name: str | None) -> str:
        return str(name) if str(name).startswith(prefix) else f"{prefix}{name}"

    for value in _values(part):
        if value not in inputs and value not in outputs:
            value.name = prefixed(value.name)
    for node in part.all_nodes():
        node.name = prefixed(node.name)
    part.inputs.clear()
    part.outputs.clear()
    for value in inputs:
        if value.name in known:
            value.replace_all_uses_with(known[value.name])
    initializers = list(part.initializers.values())
    part.initializers.clear()
    for value in initializers:
        graph.register_initializer(value)
    nodes = list(part)
    part.remove(nodes)
    return inputs, nodes


def split_at_logits(decoder: ir.Model, interface: Interface) -> tuple[ir.Model, ir.Model | None]:
    """Separate a decode graph at its logits, in place; the inverse of `append_sampler`.

    Returns:
        The model up to its logits, which is `decoder` itself, and the sampler; None for a package
        without a baked sampler.
    """
    if not interface.features.sampler:
        return decoder, None
    graph = decoder.graph
    spec = interface.sampler
    logits = next(value for node in graph for value in node.outputs if value.name == LOGITS.name)
    # The contract says so, even if the graph does not.
    logits.dtype = ir.DataType.FLOAT
    inputs = [logits, *(value for value in graph.inputs if value.name in spec.input_names)]
    outputs = [value for value in graph.outputs if value.name in spec.output_names]
    tail = ir.convenience.extract(graph, inputs, outputs)
    sampler = ir.Model(tail, ir_version=decoder.ir_version, producer_name=decoder.producer_name)
    return cut_at_logits(decoder, interface), sampler


def cut_at_logits(model: ir.Model, interface: Interface) -> ir.Model:
    """Cut a decode graph off after its logits and its cache, in place.

    These become its outputs. Inputs that only the sampler reads are removed.
    """
    graph = model.graph
    computed = {value.name: value for node in graph for value in node.outputs}
    names = [LOGITS.name, *(retained_name(state.name) for state in interface.cache_states)]
    outputs = [computed[name] for name in names]
    graph.outputs[:] = outputs
    needed = ancestors(outputs)
    graph.remove([node for node in graph if node not in needed], safe=False)
    read = {value for node in needed for value in reads(node)}
    graph.inputs[:] = [value for value in graph.inputs if value in read]
    for name in [name for name, value in graph.initializers.items() if value not in read]:
        del graph.initializers[name]
    return model


def return_logits(model: ir.Model) -> ir.Model:
    """Add the logits of a decode graph to its outputs, in place."""
    graph = model.graph
    if all(output.name != LOGITS.name for output in graph.outputs):
        values = (value for node in graph for value in node.outputs)
        graph.outputs.append(next(value for value in values if value.name == LOGITS.name))
    return model


def return_all_logits(model: ir.Model) -> bool:
    """Let a graph that ends at its logits return those after each token of a call, in place.

    They are [B * S, V], row by row. Each position becomes a separate row after the node that
    selects the last position, so the head may be any computation.

    Returns:
        False if more than this node leads from the tokens to the logits; nothing is changed then.
    """
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == LOGITS.name)
    choice = choice_of_position(logits)
    if choice is None:
        return False
    for node in ancestors([logits], {choice}):
        for value in node.outputs:
            # The batch axis counts positions now.
            value.shape = None
    states = choice.inputs[0]
    chosen = choice.outputs[0]
    assert states is not None
    flat = insert(choice, "Flatten", [states], [None, None], {"axis": 2})
    if choice.op_type == "GatherElements":
        flat = insert(choice, "Unsqueeze", [flat, reshape_target(graph, [1])], [None, 1, None])
    chosen.replace_all_uses_with(flat, replace_graph_outputs=True)
    if chosen is logits:
        chosen.name = None
        flat.name = LOGITS.name
    graph.remove(choice, safe=True)
    return True


def choice_of_position(logits: ir.Value) -> ir.Node | None:
    """The node that selects the states, [B, S, n], at each row's last token: [B, n] or [B, 1, n].

    None if more than this node leads from the tokens to the logits.
    """
    choice = next((node for node in _upwards(logits) if _chooses_a_position(node)), None)
    if choice is None or inputs_of([logits], choice.outputs):
        return None
    return choice


def _upwards(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes from which `value` is computed, the nearest first."""
    waiting = deque([value.producer()])
    seen: set[ir.Node] = set()
    while waiting:
        node = waiting.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(source.producer() for source in node.inputs if source is not None)


def _chooses_a_position(node: ir.Node) -> bool:
    """Whether `node` selects the states, [B, S, n], at each row's last token."""
    if node.op_type == "GatherElements":
        along_positions = node.attributes.get_int("axis", 0) == 1
    elif node.op_type == "GatherND":
        along_positions = node.attributes.get_int("batch_dims", 0) == 1
    else:
        return False
    index = node.inputs[1]
    return along_positions and index is not None and INPUT_LENGTHS.name in inputs_of([index])


def _values(graph: ir.Graph) -> list[ir.Value]:
    """Every value that a graph or its subgraphs define, except inputs."""
    constants = [
        value for part in (graph, *graph.subgraphs()) for value in part.initializers.values()
    ]
    return constants + [value for node in graph.all_nodes() for value in node.outputs]
