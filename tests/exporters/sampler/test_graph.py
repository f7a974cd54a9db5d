"""sampler.onnx as a graph: its interface, its control flow, and the mode that has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.contract import INVALID_LOGITS, RUNNING, STALLED
from qsample.exporters.sampler import export_sampler
from tests.helpers.reference import reference_step
from tests.helpers.sampler_cases import (
    ALL_FEATURES,
    PAD,
    compare_step,
    exported,
    graph,
    interface,
    make_inputs,
    random_step,
    session,
)

FACE = interface(320)
STRAIGHT = {"num_candidates": 64, "control_flow": False}
NO_SEARCH = {"searched_rows": np.zeros(1, np.int64)}  # of a row that needs none
CONTROL_FLOW = {"If", "Loop", "Scan"}
NO_CUDA_KERNEL = {
    "BitShift",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Multinomial",
    "Bernoulli",
    "GatherND",
    "NonZero",
}


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph.all_nodes()}


def test_interface() -> None:
    runner = session(FACE)
    assert [node.name for node in runner.get_inputs()] == FACE.sampler.input_names
    assert [node.name for node in runner.get_outputs()] == FACE.sampler.output_names


def test_expensive_operators_are_inside_branches() -> None:
    """A greedy batch sorts nothing and takes no exponential: all of that is under an If."""
    model = graph(FACE)
    assert "If" in operators(model)
    assert not {"TopK", "Exp", "CumSum", "Log"} & {node.op_type for node in model.graph}
    assert not any(node.domain == "qsample" for node in model.graph.all_nodes())


@pytest.mark.parametrize("options", [{}, STRAIGHT, {"resumes": True}])
def test_recorded_shapes_are_those_that_onnx_infers(options: dict[str, Any]) -> None:
    """Passes trust them, and infer none at all where one is wrong."""
    onnx.shape_inference.infer_shapes(ir.to_proto(graph(FACE, **options)), strict_mode=True, data_prop=True)


def test_a_greedy_step_runs_few_nodes() -> None:
    """Outside the branches: a node costs most of a microsecond, however little it computes."""
    model = graph(FACE)
    assert sum(1 for _ in model.graph) <= 80
    assert "Floor" not in operators(model)  # an integer division by way of floats
    for node in model.graph.all_nodes():
        if node.op_type == "ReduceMax" and node.inputs[0] is not None:
            producer = node.inputs[0].producer()
            source = producer.inputs[0] if producer is not None and producer.op_type == "Cast" else None
            assert source is None or source.dtype != ir.DataType.BOOL


def test_no_control_flow() -> None:
    assert not (CONTROL_FLOW | NO_CUDA_KERNEL) & operators(graph(FACE, **STRAIGHT))


# On the CPU, ONNX Runtime before 1.32 gives reductions over no rows a wrong shape.
needs_1_32 = pytest.mark.skipif(tuple(map(int, ort.__version__.split(".")[:2])) < (1, 32), reason="empty reductions")


@pytest.mark.parametrize("listed", [pytest.param([], marks=needs_1_32), [4, 2, 2], [0, 1, 2, 3, 4, 5]])
def test_without_control_flow_a_row_is_exact_or_stalls(listed: list[int]) -> None:
    """And the resuming graph gives the stalled rows the contract's token, and leaves the others as they are.

    listed: in `searched_rows`. None of them stalls: float32 tells no two of these logits apart within a cell.
    """
    step, resume = exported(FACE, **STRAIGHT), exported(FACE, resumes=True)
    rng = np.random.default_rng(8)
    names = ("lengths", "status", "tokens", "output_counts")
    stalled = settled = free = 0
    for _ in range(60):
        logits, inputs = random_step(rng, FACE, 6, sequence=2)
        inputs["status"][inputs["status"] == STALLED] = RUNNING
        got = step(logits, inputs | {"searched_rows": np.array(listed, np.int64)})
        expected = reference_step(logits, inputs, pad_token_id=PAD)
        resumed = resume(logits, inputs | {name: got[f"{name}_RetainedState"] for name in names})
        for row in range(6):
            # Temperature and min-p alone need no threshold, however many tokens may be drawn.
            searched = inputs["top_p"][row] < 1 or 0 < inputs["top_k"][row] < FACE.vocab_size
            if got["status_RetainedState"][row] == STALLED:
                assert searched
                assert row not in listed
                stalled += 1
                assert got["next_ids"][row, 0] == inputs["input_ids"][row, inputs["input_lengths"][row] - 1]
                for name in ("lengths", "tokens", "output_counts"):
                    np.testing.assert_array_equal(got[f"{name}_RetainedState"][row], inputs[name][row])
                assert not compare_step(resumed, expected, row)
            else:
                settled += 1
                free += not searched and inputs["temperature"][row] > 0
                assert not compare_step(got, expected, row)
                for name in names:
                    np.testing.assert_array_equal(
                        resumed[f"{name}_RetainedState"][row], got[f"{name}_RetainedState"][row]
                    )
                if expected["output_counts_RetainedState"][row].sum() > inputs["output_counts"][row].sum():
                    assert resumed["next_ids"][row, 0] == got["next_ids"][row, 0]
    assert stalled > 3 * (6 - len(set(listed))) or len(listed) == 6
    assert settled > 100
    assert free > 20


def test_without_control_flow_min_p_holds_beyond_the_candidates() -> None:
    """100 tokens pass, more than there are candidates; without the filter, half of the rows would draw another."""
    logits = np.full((40, FACE.vocab_size), np.log(0.4), np.float32)
    logits[:, ::3][:, :100] = 0
    inputs = make_inputs(FACE, 40, temperature=1.0, min_p=0.5)
    inputs["noise"] = np.random.default_rng(3).random(inputs["noise"].shape).astype(np.float32)
    got = exported(FACE, **STRAIGHT)(logits, inputs | NO_SEARCH)
    expected = reference_step(logits, inputs, pad_token_id=PAD)
    assert not (got["status_RetainedState"] == STALLED).any()
    for row in range(40):
        assert not compare_step(got, expected, row)
        assert logits[row, got["next_ids"][row, 0]] == 0


def test_a_stalled_row_waits_in_the_graph_without_control_flow() -> None:
    inputs = make_inputs(FACE, status=STALLED, lengths=3, temperature=0)
    got = exported(FACE, **STRAIGHT)(np.zeros((1, 320), np.float32), inputs | NO_SEARCH)
    assert got["status_RetainedState"][0] == STALLED
    assert got["lengths_RetainedState"][0] == 3


@pytest.mark.parametrize("options", [{"num_candidates": 0}, {"chunk_size": 0}])
def test_bad_sizes(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        export_sampler(FACE, PAD, **options)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_invalid_logit_anywhere_is_noticed(value: float) -> None:
    """In the graph, not the module: ONNX Runtime's ReduceMax drops NaN where torch's keeps it."""
    logits = np.zeros((320, 320), np.float32)
    np.fill_diagonal(logits, value)
    everywhere = {"searched_rows": np.arange(320)}
    for step, more in ((exported(FACE), {}), (exported(FACE, **STRAIGHT), everywhere)):
        result = step(logits, make_inputs(FACE, 320, temperature=np.arange(320) % 2, top_p=0.9) | more)
        assert (result["status_RetainedState"] == INVALID_LOGITS).all()
        assert not result["lengths_RetainedState"].any()


def test_ties_of_top_logprobs_are_in_id_order() -> None:
    face = interface(1000, ALL_FEATURES)
    logits = np.round(np.random.default_rng(0).normal(size=(50, 1000))).astype(np.float32)
    ids = exported(face)(logits, make_inputs(face, 50))["top_logprob_ids"]
    np.testing.assert_array_equal(ids, np.argsort(-logits, kind="stable", axis=1)[:, :3])
