"""Joins a model's graph and the sampler after its logits, cuts it off again, and lets graphs return all logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping

import onnx_ir as ir

from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import INPUT_LENGTHS, LOGITS, retained_name
from qsample.graph.edit import ancestors, insert, reads, reshape_target
from qsample.graph.evaluate import inputs_of

PREFIX = "sampler."


def append_sampler(decoder: ir.Model, sampler: ir.Model, spec: GraphSpec) -> ir.Model:
    """Append `sampler` to `decoder`, in place; the result has the inputs and outputs of `spec`, in its order. An input
    of the sampler that the decoder has or computes as an output (the logits) is joined with it; names inside the
    sampler get `PREFIX` unless they have it. `sampler` is used up."""
    graph, outputs = decoder.graph, list(sampler.graph.outputs)
    known = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    inputs, nodes = _taken_over(graph, sampler.graph, known, PREFIX)
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
    """Put the nodes of `front` before the nodes of `model`, in place; `front` is used up, and its inner names get
    `prefix`. Inputs are joined by name, and `model` gets the ones it lacks; `front`'s outputs have new names. `model`
    must not read inputs in `replaced` from here on: the caller connects their readers. Returns, by name, the outputs of
    `front`, and values that stand for the inputs in `replaced`."""
    graph, outputs = model.graph, list(front.graph.outputs)
    known = {value.name: value for value in graph.inputs}
    stand_ins = {}
    for name in replaced:
        stand_ins[name] = ir.Value(name=name, shape=known[name].shape, type=known[name].type)
        known[name].replace_all_uses_with(stand_ins[name])
    inputs, nodes = _taken_over(graph, front.graph, known, prefix)
    graph.insert_before(graph[0], nodes)
    graph.inputs.extend(value for value in inputs if value.name not in known)
    return {str(value.name): value for value in outputs} | stand_ins


def _taken_over(
    graph: ir.Graph, part: ir.Graph, known: Mapping[str | None, ir.Value], prefix: str
) -> tuple[list[ir.Value], list[ir.Node]]:
    """Empty `part` into `graph`, names prefixed: its inputs, replaced by `known` by name, and its nodes, not placed."""
    inputs, outputs = list(part.inputs), list(part.outputs)

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
    """The model up to its logits (`decoder` itself, changed), and the sampler, as `append_sampler` takes it, if any."""
    if not interface.features.sampler:
        return decoder, None
    graph, spec = decoder.graph, interface.sampler
    logits = next(value for node in graph for value in node.outputs if value.name == LOGITS.name)
    logits.dtype = ir.DataType.FLOAT  # by the contract, also if the graph does not record it
    inputs = [logits, *(value for value in graph.inputs if value.name in spec.input_names)]
    outputs = [value for value in graph.outputs if value.name in spec.output_names]
    tail = ir.convenience.extract(graph, inputs, outputs)
    sampler = ir.Model(tail, ir_version=decoder.ir_version, producer_name=decoder.producer_name)
    return cut_at_logits(decoder, interface), sampler


def cut_at_logits(model: ir.Model, interface: Interface) -> ir.Model:
    """Cut a decode graph off after its logits and cache, now its outputs, in place; inputs of the sampler alone go."""
    graph = model.graph
    outputs = {value.name: value for node in graph for value in node.outputs}
    kept = [
        outputs[name]
        for name in (LOGITS.name, *(retained_name(state.name) for state in interface.cache_states))
    ]
    graph.outputs[:] = kept
    needed = ancestors(kept)
    graph.remove([node for node in graph if node not in needed], safe=False)
    read = {value for node in needed for value in reads(node)}
    graph.inputs[:] = [value for value in graph.inputs if value in read]
    for name in [name for name, value in graph.initializers.items() if value not in read]:
        del graph.initializers[name]
    return model


def return_logits(model: ir.Model) -> ir.Model:
    """`model`, a decode graph, with its logits among the outputs; in place."""
    graph = model.graph
    if all(output.name != LOGITS.name for output in graph.outputs):
        graph.outputs.append(
            next(value for node in graph for value in node.outputs if value.name == LOGITS.name)
        )
    return model


def return_all_logits(model: ir.Model) -> bool:
    """Let `model`, cut at its logits, return those after each token of a call: [B * S, V], row by row; in place. Every
    position becomes a separate row behind the choice of the last one, so the head may be anything. Returns False, with
    nothing changed, if more than one choice leads from the tokens to the logits."""
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == LOGITS.name)
    choice = choice_of_position(logits)
    if choice is None:
        return False
    for value in (value for node in ancestors([logits], {choice}) for value in node.outputs):
        value.shape = None  # B is the number of positions from here on
    states, chosen = choice.inputs[0], choice.outputs[0]
    assert states is not None
    flat = insert(choice, "Flatten", [states], [None, None], {"axis": 2})
    if choice.op_type == "GatherElements":
        flat = insert(choice, "Unsqueeze", [flat, reshape_target(graph, [1])], [None, 1, None])
    chosen.replace_all_uses_with(flat, replace_graph_outputs=True)
    if chosen is logits:
        chosen.name, flat.name = None, LOGITS.name
    graph.remove(choice, safe=True)
    return True


def choice_of_position(logits: ir.Value) -> ir.Node | None:
    """The node that takes the states [B, S, n] at each row's last token, [B, n] or [B, 1, n]; None if more than this
    choice leads from the tokens to the logits."""
    choice = next((node for node in _upwards(logits) if _chooses_a_position(node)), None)
    return None if choice is None or inputs_of([logits], choice.outputs) else choice


def _upwards(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that `value` comes from, the nearest first."""
    waiting, seen = deque([value.producer()]), set()
    while waiting:
        node = waiting.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(source.producer() for source in node.inputs if source is not None)


def _chooses_a_position(node: ir.Node) -> bool:
    """Whether `node` takes, of states [B, S, n], those at each row's last token."""
    along_positions = (
        node.op_type == "GatherElements" and node.attributes.get_int("axis", 0) == 1
    ) or (node.op_type == "GatherND" and node.attributes.get_int("batch_dims", 0) == 1)
    index = node.inputs[1] if along_positions else None
    return index is not None and INPUT_LENGTHS.name in inputs_of([index])


def _values(graph: ir.Graph) -> list[ir.Value]:
    """Every value that a graph or a subgraph of it defines, inputs aside."""
    constants = [
        value for part in (graph, *graph.subgraphs()) for value in part.initializers.values()
    ]
    return constants + [value for node in graph.all_nodes() for value in node.outputs]
