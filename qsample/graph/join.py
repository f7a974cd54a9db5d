"""Joins the graphs of a model and a sampler at the logits, and separates them again.

A graph multiplies only the hidden state of each row's last token by the weights of its head. If it
scores prompts, the hidden states of the scored tokens follow as further rows of the same product.
The sampler reads the logits of the first rows, and the scorer reads the logits of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    ALL_LOGITS,
    INPUT_LENGTHS,
    LOGITS,
    PROMPT_LOGPROBS,
    PROMPT_RANKS,
    PROMPT_TOP_LOGPROB_OUTPUTS,
    SCORED_IDS,
    SCORED_PLACES,
    TensorSpec,
    retained_name,
)
from qsample.graph.edit import ancestors, initializer, insert, put_behind, reads, reshape_target
from qsample.graph.evaluate import inputs_of

# The prefix of names inside a joined sampler.
PREFIX: Final = "sampler."
_SCORER_PREFIX: Final = "scorer."
_SCORER_INPUTS: Final = (SCORED_PLACES, SCORED_IDS)
_SCORER_OUTPUTS: Final = (PROMPT_LOGPROBS, PROMPT_RANKS, *PROMPT_TOP_LOGPROB_OUTPUTS)


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


def takes_scorer(model: ir.Model) -> bool:
    """Whether `append_scorer` can change a graph: only each row's last hidden state leads to the
    logits."""
    return choice_of_position(_find(model.graph, LOGITS.name)) is not None


def append_scorer(decoder: ir.Model, scorer: ir.Model) -> None:
    """Append a scorer to a decode graph with its sampler, in place.

    Args:
        decoder: the graph, for which `takes_scorer` holds. Its new inputs are initializers without
            elements that a call may replace, so calls that score nothing need not feed them.
        scorer: the graph from `ALL_LOGITS` and `SCORED_IDS` on; it is empty afterwards.
    """
    graph = decoder.graph
    logits = _find(graph, LOGITS.name)
    choice = choice_of_position(logits)
    assert choice is not None
    places, ids = (_input_without_elements(graph, spec) for spec in _SCORER_INPUTS)
    rows = ALL_LOGITS.axes[0]
    _set_rows(graph, choice.outputs[0], logits, rows)
    _join_states(graph, choice, places, rows)
    known = {ids.name: ids, ALL_LOGITS.name: _cut_to_rows(graph, logits)}
    outputs = list(scorer.graph.outputs)
    _, nodes = _take_out(scorer.graph, graph, known, _SCORER_PREFIX)
    graph.extend(nodes)
    graph.outputs.extend(outputs)


def _input_without_elements(graph: ir.Graph, spec: TensorSpec) -> ir.Value:
    """A new input of the graph, [0] if a call does not give it."""
    value = ir.Value(
        name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(ir.DataType.INT32)
    )
    value.const_value = ir.tensor(np.zeros(0, np.int32), name=spec.name)
    graph.inputs.append(value)
    graph.register_initializer(value)
    return value


def _join_states(graph: ir.Graph, choice: ir.Node, places: ir.Value, rows: str | int) -> None:
    """Let the states at `places` follow the chosen states, for all who read these."""
    chosen = choice.outputs[0]
    states = choice.inputs[0]
    assert states is not None
    sizes = None if chosen.shape is None else [rows, *list(chosen.shape)[1:]]
    joined = put_behind(chosen, "Concat", attributes={"axis": 0}, name=f"{_SCORER_PREFIX}Concat")
    joined.shape = None if sizes is None else ir.Shape(sizes)
    concat = joined.producer()
    assert concat is not None
    flat = insert(concat, "Flatten", [states], [None, None], {"axis": 2})
    picked = insert(concat, "Gather", [flat, places], [None, None], {"axis": 0})
    if choice.op_type == "GatherElements":
        one = reshape_target(graph, [1])
        picked = insert(concat, "Unsqueeze", [picked, one], [None, 1, None])
    concat.resize_inputs(2)
    concat.replace_input_with(1, picked)


def _cut_to_rows(graph: ir.Graph, logits: ir.Value) -> ir.Value:
    """Let all who read the logits read those of the rows only. Returns the logits of all rows."""
    start = initializer(graph, "int64_0", np.array([0]))
    cut = put_behind(logits, "Slice", [start], name=f"{_SCORER_PREFIX}Slice")
    node = cut.producer()
    assert node is not None
    lengths = next(value for value in graph.inputs if value.name == INPUT_LENGTHS.name)
    count = insert(node, "Shape", [lengths], [1], dtype=ir.DataType.INT64)
    node.resize_inputs(4)
    node.replace_input_with(2, count)
    node.replace_input_with(3, start)
    if lengths.shape is not None and logits.shape is not None:
        cut.shape = ir.Shape([lengths.shape[0], *list(logits.shape)[1:]])
    logits.name = f"{_SCORER_PREFIX}{ALL_LOGITS.name}"
    cut.name = LOGITS.name
    return logits


def _remove_scorer(graph: ir.Graph) -> None:
    """Take out what `append_scorer` added; nothing for a graph without a scorer."""
    added = [
        value for value in graph.inputs if value.name in {spec.name for spec in _SCORER_INPUTS}
    ]
    if not added:
        return
    places = next(value for value in added if value.name == SCORED_PLACES.name)
    joined = _next_concat(places)
    chosen = joined.inputs[0]
    logits = _find(graph, LOGITS.name)
    cut = logits.producer()
    assert chosen is not None
    assert cut is not None
    all_logits = cut.inputs[0]
    assert all_logits is not None
    rows = logits.shape[0] if logits.shape else None
    ir.convenience.replace_all_uses_with(joined.outputs[0], chosen)
    ir.convenience.replace_all_uses_with(logits, all_logits, replace_graph_outputs=True)
    logits.name = None
    all_logits.name = LOGITS.name
    _set_rows(graph, chosen, all_logits, rows)
    names = {spec.name for spec in _SCORER_OUTPUTS}
    graph.outputs[:] = [value for value in graph.outputs if value.name not in names]
    needed = ancestors(graph.outputs)
    graph.remove([node for node in graph if node not in needed], safe=False)
    graph.inputs[:] = [value for value in graph.inputs if value not in added]
    for value in added:
        del graph.initializers[str(value.name)]


def _next_concat(value: ir.Value) -> ir.Node:
    """The node at which the states at the scored places join the chosen states."""
    node = next(iter(value.uses())).node
    while node.op_type != "Concat":
        node = next(iter(node.outputs[0].uses())).node
    return node


def _set_rows(
    graph: ir.Graph, chosen: ir.Value, logits: ir.Value, rows: int | str | ir.SymbolicDim | None
) -> None:
    """Write the number of rows into the shapes of the values from the chosen states to the
    logits."""
    above = ancestors([logits])
    dependent = {chosen}
    for node in graph:
        if node in above and not dependent.isdisjoint(node.inputs):
            dependent.update(node.outputs)
    for value in dependent - {chosen}:
        if value.shape is not None and len(value.shape) > 1:
            value.shape = ir.Shape([rows, *list(value.shape)[1:]])


def _find(graph: ir.Graph, name: str) -> ir.Value:
    """The value of that name that a node computes."""
    return next(value for node in graph for value in node.outputs if value.name == name)


def split_at_logits(decoder: ir.Model, interface: Interface) -> tuple[ir.Model, ir.Model | None]:
    """Separate a decode graph at its logits, in place; the inverse of `append_sampler`.

    Returns:
        The model up to its logits, which is `decoder` itself, and the sampler; None for a package
        without a baked sampler.
    """
    if not interface.features.sampler:
        return decoder, None
    graph = decoder.graph
    _remove_scorer(graph)
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

    These become its outputs. Inputs that only the sampler reads are removed, and a scorer is.
    """
    graph = model.graph
    _remove_scorer(graph)
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
