"""The two halves of a decode graph: split at the logits, and joined to the graph that they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample.graph.join import (
    append_sampler,
    append_scorer,
    choice_of_position,
    cut_at_logits,
    return_all_logits,
    return_logits,
    split_at_logits,
    takes_scorer,
)
from qsample.graph.runner import GraphRunner, error_of_scores, scores_of_last_tokens
from qsample.package.package import read_package
from qsample.sampler.scores import build_scores
from tests.helpers.small_graphs import results, small_graph

CAPACITY = 24
PARAMETERS = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}


def test_split_and_joined_again_it_is_the_same_graph(llama_package: Path) -> None:
    package = read_package(llama_package)
    path, interface = package.file("decoder.onnx"), package.interface
    model, sampler = split_at_logits(ir.load(path), interface)
    assert model.graph.outputs[0].name == "logits"
    assert {value.name for value in sampler.graph.inputs} == set(interface.sampler.input_names)
    assert not any(str(node.name).startswith("sampler.") for node in model.graph)
    assert all(str(node.name).startswith("sampler.") for node in sampler.graph)

    joined, whole = append_sampler(model, sampler, interface.decoder), ir.load(path)
    for side in ("inputs", "outputs"):
        assert [value.name for value in getattr(joined.graph, side)] == [
            value.name for value in getattr(whole.graph, side)
        ]
    assert {node.name for node in joined.graph.all_nodes()} == {
        node.name for node in whole.graph.all_nodes()
    }
    assert joined.graph.initializers.keys() == whole.graph.initializers.keys()
    operators = [
        Counter(node.op_type for node in graph.graph.all_nodes()) for graph in (joined, whole)
    ]
    assert operators[0] == operators[1]

    tokens = []
    for graph in (joined, whole):
        runner = GraphRunner(graph, package.path, interface, CAPACITY)
        state, ids = runner.start(2), np.array([[5], [9]])
        for _ in range(8):
            ids = runner.step(ids, np.ones(2), state, PARAMETERS)["next_ids"].copy()
            tokens.append(ids)
    assert np.array_equal(tokens[:8], tokens[8:])


def test_a_scorer_comes_off_with_the_sampler(exported: Callable[..., Path]) -> None:
    """The halves are those of the package without a scorer, and a scorer can be appended to them again."""
    scoring = read_package(exported("llama", logprobs=True, top_logprobs=3, prompt_logprobs=True))
    plain = read_package(exported("llama", logprobs=True, top_logprobs=3))
    whole = ir.load(scoring.file("decoder.onnx"))
    added = {value.name for value in whole.graph.outputs} - set(
        plain.interface.decoder.output_names
    )
    assert added == {spec.name for spec in scoring.interface.prompt_outputs}
    halves = [
        split_at_logits(ir.load(package.file("decoder.onnx")), package.interface)
        for package in (scoring, plain)
    ]
    described = [
        (
            [value.name for value in half.graph.inputs],
            [(value.name, value.shape) for value in half.graph.outputs],
            Counter(node.op_type for node in half.graph.all_nodes()),
        )
        for pair in halves
        for half in pair
        if half is not None
    ]
    assert described[:2] == described[2:]
    shapes = [
        {str(value.name): value.shape for node in pair[0].graph for value in node.outputs}
        for pair in halves
    ]
    assert shapes[0] == shapes[1]

    model, sampler = halves[0]
    assert sampler is not None
    again = append_sampler(model, sampler, scoring.interface.decoder)
    append_scorer(again, build_scores(scoring.interface))
    ids, lengths, tokens = np.array([[5, 6, 7], [8, 9, 0]]), np.array([3, 2]), np.array([11, 12])
    results = []
    for graph in (again, ir.load(scoring.file("decoder.onnx"))):
        runner = GraphRunner(return_logits(graph), scoring.path, scoring.interface, CAPACITY)
        scored = scores_of_last_tokens(ids, lengths, tokens)
        results.append(runner.step(ids, lengths, runner.start(2), scored))
        assert error_of_scores(results[-1], tokens) < 1e-4
    for name in ("logits", "next_ids", "prompt_logprobs", "prompt_ranks"):
        np.testing.assert_array_equal(results[0][name], results[1][name])


def test_a_graph_that_returns_its_logits_has_one_half(exported: Callable[..., Path]) -> None:
    package = read_package(exported("llama", include_sampler=False))
    graph = ir.load(package.file("decoder.onnx"))
    model, sampler = split_at_logits(graph, package.interface)
    assert model is graph
    assert model.graph.outputs[0].name == "logits"
    assert sampler is None


def test_a_graph_cut_off_at_its_logits_has_no_sampler(llama_package: Path) -> None:
    package = read_package(llama_package)
    model = cut_at_logits(ir.load(package.file("decoder.onnx")), package.interface)
    assert model.graph.outputs[0].name == "logits"
    assert not {"temperature", "top_p", "output_counts"} & {
        value.name for value in model.graph.inputs
    }
    assert not {"If", "TopK", "CumSum"} & {node.op_type for node in model.graph}


HEAD = """model (int64[B,S] input_ids, int32[B] input_lengths, float[B] bias, float[B,S,4] other, int64[B,1,4] place,
    float[9,4] table, float[4,9] weights, float[8,9] twice, int64[1] axis, int64[2] axes, int64[3] wide, float[1] one)
    => (float[B,9] logits) {
    states = Gather (table, input_ids)
    lengths = Cast <to = 7> (input_lengths)
    column = Unsqueeze (lengths, axes)
    index = Expand (column, wide)
    row = Unsqueeze (lengths, axis)
"""
CONSTANTS = {
    "table": np.ones((9, 4), np.float32),
    "weights": np.ones((4, 9), np.float32),
    "twice": np.ones((8, 9), np.float32),
    "axis": np.array([1]),
    "axes": np.array([1, 2]),
    "wide": np.array([1, 1, 4]),
    "one": np.ones(1, np.float32),
}
LAST = "last = GatherElements <axis = 1> (states, index)\n chosen = Squeeze (last, axis)\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{LAST} logits = MatMul (chosen, weights)", "last"),
        (
            "last = GatherND <batch_dims = 1> (states, row)\n logits = MatMul (last, weights)",
            "last",
        ),
        (f"{LAST} scaled = Mul (chosen, one)\n logits = MatMul (scaled, weights)", "last"),
        # The nearest of two.
        (
            f"""first = GatherElements <axis = 1> (other, index)
            more = Add (states, first)
            {LAST.replace("states", "more")} logits = MatMul (chosen, weights)""",
            "last",
        ),
        # A second way leads from the tokens to the logits: behind the choice, beside it, from another input.
        (
            f"""{LAST} mean = ReduceMean <keepdims = 0> (states, axis)
            both = Add (chosen, mean)\n logits = MatMul (both, weights)""",
            None,
        ),
        (
            f"""first = GatherElements <axis = 1> (other, index)\n one_more = Squeeze (first, axis)
            {LAST} both = Concat <axis = 1> (chosen, one_more)\n logits = MatMul (both, twice)""",
            None,
        ),
        (
            f"""{LAST} column_bias = Unsqueeze (bias, axis)\n product = MatMul (chosen, weights)
            logits = Add (product, column_bias)""",
            None,
        ),
        (
            f"""{LAST} product = MatMul (chosen, weights)\n length = Cast <to = 1> (row)
            logits = Div (product, length)""",
            None,
        ),
        # No choice of a position: along another axis, at a place that the lengths do not say, none at all.
        (
            """last = GatherElements <axis = 2> (states, index)\n chosen = ReduceMax <keepdims = 0> (last, axis)
            logits = MatMul (chosen, weights)""",
            None,
        ),
        (
            """last = GatherElements (states, index)\n chosen = ReduceMax <keepdims = 0> (last, axis)
            logits = MatMul (chosen, weights)""",
            None,
        ),
        (
            """last = GatherElements <axis = 1> (states, place)\n chosen = Squeeze (last, axis)
            logits = MatMul (chosen, weights)""",
            None,
        ),
        ("last = GatherND (states, row)\n logits = MatMul (last, weights)", None),
        (
            "chosen = ReduceMean <keepdims = 0> (states, axis)\n logits = MatMul (chosen, weights)",
            None,
        ),
    ],
)
def test_the_choice_of_a_position_is_the_only_way_to_the_logits(
    body: str, expected: str | None
) -> None:
    model = small_graph(f"{HEAD}{body}\n}}", constants=CONSTANTS)
    (logits,) = model.graph.outputs
    found = choice_of_position(logits)
    assert (None if found is None else found.name) == expected
    assert takes_scorer(model) == (expected is not None)


UNREAD = {
    "bias": np.zeros(2, np.float32),
    "other": np.zeros((2, 1, 4), np.float32),
    "place": np.zeros((2, 1, 4), np.int64),
}


@pytest.mark.parametrize(
    "body",
    [
        f"{LAST} logits = MatMul (chosen, weights)",
        "last = GatherND <batch_dims = 1> (states, row)\n logits = MatMul (last, weights)",
    ],
)
def test_logits_of_all_tokens(body: str) -> None:
    """Row by row, [B * S, V]: those of each token that a call up to it would return."""
    rng = np.random.default_rng(0)
    numbers = {name: array for name, array in CONSTANTS.items() if name != "axes"}
    numbers |= {
        "table": rng.standard_normal((9, 4), np.float32),
        "weights": rng.standard_normal((4, 9), np.float32),
        "axes": np.array([1, 2]),
    }
    model = small_graph(
        f"{HEAD}{body}\n}}", {"states": ["B", "S", 4], "last": ["B", 4]}, constants=numbers
    )
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    feeds = {**UNREAD, "input_ids": ids, "input_lengths": np.array([1, 2], np.int32)}
    before = len(model.graph)
    assert return_all_logits(model)
    (output,) = model.graph.outputs
    assert output.name == "logits"
    assert "last" not in {node.name for node in model.graph}
    assert len(model.graph) <= before + 1
    (found,) = results(model, feeds)
    np.testing.assert_allclose(
        found, numbers["table"][ids.reshape(-1)] @ numbers["weights"], rtol=1e-5, atol=1e-6
    )


def test_logits_that_are_the_chosen_states_themselves() -> None:
    body = "logits = GatherND <batch_dims = 1> (states, row)"
    numbers = {**CONSTANTS, "table": np.arange(36, dtype=np.float32).reshape(9, 4)}
    text = f"{HEAD}{body}\n}}".replace("float[B,9] logits", "float[B,4] logits")
    model = small_graph(text, {"states": ["B", "S", 4]}, constants=numbers)
    assert return_all_logits(model)
    assert [value.name for value in model.graph.outputs] == ["logits"]
    ids = np.array([[1, 2], [8, 0]])
    feeds = {**UNREAD, "input_ids": ids, "input_lengths": np.array([1, 1], np.int32)}
    (found,) = results(model, feeds)
    np.testing.assert_array_equal(found, numbers["table"][[1, 2, 8, 0]])


def test_logits_of_all_tokens_where_more_leads_to_them() -> None:
    body = f"""{LAST} mean = ReduceMean <keepdims = 0> (states, axis)
        both = Add (chosen, mean)\n logits = MatMul (both, weights)"""
    model = small_graph(f"{HEAD}{body}\n}}", constants=CONSTANTS)
    nodes = list(model.graph)
    assert not return_all_logits(model)
    assert list(model.graph) == nodes


def test_logits_become_an_output_once() -> None:
    model = small_graph(
        """g (float[B,4] x) => (int64[B] token) {
            logits = Neg (x)
            token = ArgMax <axis = 1, keepdims = 0> (logits)
        }"""
    )
    for _ in range(2):
        assert return_logits(model) is model
        assert [value.name for value in model.graph.outputs] == ["token", "logits"]
