"""How many kernels the sampler of a captured step launches, by what its rows need; its steps against the reference.

A reduction by cuDNN counts as a kernel. The numbers are those of docs/architecture.md and docs/devices.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes import common as common_passes

from qsample.compiler.passes.capture import cut_splits, lower_opset, remove_host_copies
from qsample.compiler.pipeline import apply
from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import ADJUSTED_LOGITS, CAPACITY, EXTRA_PARAMETERS
from qsample.graph.edit import fix_axes
from qsample.sampler import build_sampler
from tests.cuda import puppet
from tests.cuda.trace import Trace
from tests.helpers.sampler_cases import (
    PAD,
    compare_step,
    excused,
    expected_step,
    make_inputs,
    random_step,
)
from tests.helpers.vectors import interface_of
from tests.test_vectors import by_graph, check

Array = np.ndarray
LLM_VOCAB, ROWS, CONTEXT = 151_936, 4, 64
# The lengths of processed_rows, vocabulary_rows and searched_rows, and the kernels of a step.
STEPS = {
    "greedy": ((0, 0, 0), 30),
    "candidates": ((ROWS, 0, 0), 111),
    "vocabulary": ((ROWS, ROWS, 0), 175),
    "one searched row": ((ROWS, ROWS, 1), 212),
    "every row searched": ((ROWS, ROWS, ROWS), 236),
}


def captured_sampler(face: Interface, capacity: int) -> ir.Model:
    """The sampler as compile appends it to a decode graph for CUDA."""
    model = build_sampler(face, PAD)
    model.graph.outputs[:] = [
        value for value in model.graph.outputs if value.name != ADJUSTED_LOGITS.name
    ]
    common_passes.RemoveUnusedNodesPass()(model)
    fix_axes(model, {CAPACITY: capacity})
    apply(
        model,
        cut_splits,
        partial(remove_host_copies, limit=capacity + 1),
        partial(lower_opset, opset=18),
    )
    return model


def opened(model: ir.Model, **options: str) -> Any:
    return ort.InferenceSession(
        ir.to_proto(model).SerializeToString(),
        ort.SessionOptions(),
        providers=[puppet.CUDA, puppet.CPU],
        provider_options=[{"use_tf32": "0", **options}, {}],
    )


def capture(session: Any, feeds: Mapping[str, Array], number: int) -> None:
    """Run once, over memory of the device. States are updated in place."""
    binding = session.io_binding()
    on_device = {
        name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), "cuda", 0)
        for name, array in feeds.items()
    }
    for value in session.get_inputs():
        binding.bind_ortvalue_input(value.name, on_device[value.name])
    for value in session.get_outputs():
        state = value.name.removesuffix("_RetainedState")
        if state in on_device:
            binding.bind_ortvalue_output(value.name, on_device[state])
        else:
            made = np.zeros((ROWS, 1), np.int64)
            binding.bind_ortvalue_output(
                value.name, ort.OrtValue.ortvalue_from_numpy(made, "cuda", 0)
            )
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    session.run_with_iobinding(binding, options)


def test_kernels_by_need(trace: Trace) -> None:
    """Few, and none of a part that no row needs."""
    face = Interface(LLM_VOCAB, (), captured=True)
    session = opened(captured_sampler(face, CONTEXT), enable_cuda_graph="1")
    logits = np.random.default_rng(0).normal(size=(ROWS, LLM_VOCAB)).astype(np.float32)
    found, copies = {}, {}
    for number, (name, (lengths, _)) in enumerate(STEPS.items(), start=1):
        lists = dict(
            zip(
                ("processed_rows", "vocabulary_rows", "searched_rows"),
                map(np.arange, lengths),
                strict=True,
            )
        )
        feeds = make_inputs(face, ROWS, capacity=CONTEXT, stops=2, status=1, **lists)
        trace.clear()
        capture(session, {"logits": logits, **feeds}, number)
        assert not trace.problems()
        assert not trace.captured_reads_of_the_host()
        found[name] = trace.captured_launches()
        copies[name] = trace.captured_copies()
    assert found == {name: kernels for name, (_, kernels) in STEPS.items()}
    # Each sort of a row clears counters.
    assert copies == {
        "greedy": 4,
        "candidates": 10,
        "vocabulary": 12,
        "one searched row": 21,
        "every row searched": 38,
    }


@pytest.mark.parametrize(
    ("features", "steps"),
    [
        (Features(probs=True), 300),
        (Features(probs=True, filters=tuple(EXTRA_PARAMETERS)), 60),
        pytest.param(Features(probs=True), 2000, marks=pytest.mark.slow),
        pytest.param(
            Features(probs=True, filters=tuple(EXTRA_PARAMETERS)), 2000, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "filters", "plain, many", "filters, many"],
)
def test_random_steps(features: Features, steps: int) -> None:
    """On the device the graph runs as compile leaves it; the CPU's provider computes the numbers."""
    face, rng = Interface(1187, (), features=features, captured=True), np.random.default_rng(7)
    session = opened(captured_sampler(face, 24))
    names = [value.name for value in session.get_outputs()]
    read = {value.name for value in session.get_inputs()}
    rows = near = 0
    for number in range(steps):
        logits, inputs = random_step(rng, face, ROWS, sequence=1 + number % 2)
        feeds = {
            name: array for name, array in {"logits": logits, **inputs}.items() if name in read
        }
        got = dict(zip(names, session.run(names, feeds), strict=True))
        expected = expected_step(face, logits, inputs)
        for row in range(ROWS):
            wrong = compare_step(got, expected, row)
            assert not wrong or excused(expected, row, wrong), (number, row, wrong)
            rows, near = rows + 1, near + bool(wrong)
    assert near <= rows // 100


@pytest.mark.parametrize("name", ["adjust", "filters", "wide"])
def test_vectors(name: str) -> None:
    for batch in by_graph(name):
        face = interface_of(batch[0]["vocab_size"], batch[0]["filter_order"], captured=True)
        session = opened(captured_sampler(face, batch[0]["capacity"]))
        names = [value.name for value in session.get_outputs()]
        read = {value.name for value in session.get_inputs()}

        def step(
            logits: Array,
            inputs: Mapping[str, Array],
            session: Any = session,
            names: list[str] = names,
            read: set[str] = read,
        ) -> dict[str, Array]:
            given = {
                name: one for name, one in {"logits": logits, **inputs}.items() if name in read
            }
            return dict(zip(names, session.run(names, given), strict=True))

        check(batch, face, step)
