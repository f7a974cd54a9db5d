"""sampler.onnx as a graph: its interface, its control flow, and the mode that has none."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
import pytest

from qsample.contract import RUNNING, STALLED, Interface
from qsample.exporters.sampler import export_sampler
from tests.reference import reference_step
from tests.transforms.sampler.cases import PAD, compare_step, exported, interface, make_inputs, random_step, session

FACE = interface(300)
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


@functools.cache
def straight(face: Interface) -> ir.Model:
    return export_sampler(face, PAD, num_candidates=64, control_flow=False)


def operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph.all_nodes()}


def test_interface() -> None:
    runner = session(FACE)
    assert [node.name for node in runner.get_inputs()] == FACE.sampler.input_names
    assert [node.name for node in runner.get_outputs()] == FACE.sampler.output_names


def test_expensive_operators_are_inside_branches() -> None:
    """A greedy batch sorts nothing and takes no exponential: all of that is under an If."""
    model = export_sampler(interface(1000), PAD)
    assert "If" in operators(model)
    assert not {"TopK", "Exp", "CumSum", "Log"} & {node.op_type for node in model.graph}
    assert not any(node.domain == "qsample" for node in model.graph.all_nodes())


def test_no_control_flow() -> None:
    assert not (CONTROL_FLOW | NO_CUDA_KERNEL) & operators(straight(FACE))


def test_without_control_flow_a_row_is_exact_or_stalls() -> None:
    """And a stalled row, run again on the portable graph with the same inputs, gets the contract's token."""
    step = exported(FACE, num_candidates=64, control_flow=False)
    rng = np.random.default_rng(8)
    stalled = settled = 0
    for _ in range(60):
        logits, inputs = random_step(rng, FACE, 6, sequence=2)
        inputs["status"][inputs["status"] == STALLED] = RUNNING
        got, expected = step(logits, inputs), reference_step(logits, inputs, pad_token_id=PAD)
        rerun = exported(FACE)(logits, inputs | {"status": got["status_RetainedState"]})
        for row in range(6):
            if got["status_RetainedState"][row] == STALLED:
                stalled += 1
                assert got["next_ids"][row, 0] == PAD
                for name in ("lengths", "tokens", "output_counts"):
                    np.testing.assert_array_equal(got[f"{name}_RetainedState"][row], inputs[name][row])
                again = {name: array[row : row + 1] for name, array in rerun.items()}
                assert not compare_step(again, {n: a[row : row + 1] for n, a in expected.items()}, 0)
            else:
                settled += 1
                assert not compare_step(got, expected, row)
    assert stalled > 20
    assert settled > 100


def test_a_stalled_row_waits_in_the_graph_without_control_flow() -> None:
    inputs = make_inputs(FACE, status=STALLED, lengths=3, temperature=0)
    got = exported(FACE, num_candidates=64, control_flow=False)(np.zeros((1, 300), np.float32), inputs)
    assert got["status_RetainedState"][0] == STALLED
    assert got["lengths_RetainedState"][0] == 3


@pytest.mark.parametrize("options", [{"num_candidates": 0}, {"chunk_size": 0}])
def test_bad_sizes(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        export_sampler(FACE, PAD, **options)
