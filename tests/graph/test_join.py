"""The two halves of a decode graph: split at the logits, and joined to the graph that they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from qsample.graph.join import append_sampler, cut_at_logits, split_at_logits
from qsample.graph.runner import GraphRunner
from qsample.package.package import read_package

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
