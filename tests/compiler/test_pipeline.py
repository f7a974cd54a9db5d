"""Lists of passes: each meets a clean graph, and those for lean layers change no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import pipeline
from qsample.compiler.pipeline import apply, lean_phases, quantization_phases
from qsample.contract.arrays import Array
from qsample.graph.edit import fix_axes
from qsample.graph.join import cut_at_logits
from qsample.graph.runner import GraphRunner
from qsample.package.package import read_package
from tests.helpers.building import run_on
from tests.helpers.small_graphs import small_graph
from tests.helpers.tiny_models import VOCAB_SIZE

CAPACITY = 48
PHASES = lean_phases("cpu", CAPACITY)
FUSIONS, LEAN = PHASES[:2], PHASES[2:]


def test_each_pass_meets_a_graph_without_unused_nodes() -> None:
    x = ir.val("x", ir.DataType.FLOAT, [2])
    middle = ir.node("Neg", [x])
    last = ir.node("Abs", [middle.outputs[0]])
    model = ir.Model(
        ir.Graph([x], [last.outputs[0]], nodes=[middle, last], opset_imports={"": 20}),
        ir_version=10,
    )
    met = []

    def skip_negation(model: ir.Model) -> bool:
        met.append([node.op_type for node in model.graph])
        modified = last.inputs[0] is not x
        last.replace_input_with(0, x)
        return modified

    assert apply(model, skip_negation, skip_negation)
    assert met == [["Neg", "Abs"], ["Abs"]]
    assert not apply(model, skip_negation)
    assert not apply(model)


@pytest.mark.ci
@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3",
        "gpt_oss",
        *(
            pytest.param(t, marks=pytest.mark.slow)
            for t in ("cohere", "gemma3_text", "glm", "gpt2", "gpt_neox", "phi3")
        ),
    ],
)
def test_same_logits(exported: Callable[..., Path], model_type: str) -> None:
    package = read_package(exported(model_type))
    runners = []
    for leaner in (False, True):
        model = cut_at_logits(ir.load(package.path / "decoder.onnx"), package.interface)
        fix_axes(model, {"T": CAPACITY})
        run_on(model, FUSIONS)
        before = len(model.graph)
        if leaner:
            run_on(model, LEAN)
            assert (after := len(model.graph)) < before
            run_on(model, LEAN)
            assert len(model.graph) == after
        runners.append(GraphRunner(model, package.path, package.interface, CAPACITY))
    plain, lean = (generate(runner) for runner in runners)
    # The same float32 operations on the same numbers, so only a fused kernel's order of additions may differ.
    np.testing.assert_allclose(lean, plain, rtol=0, atol=2e-5 * np.abs(plain).max())


def generate(runner: GraphRunner) -> Array:
    """Logits of a ragged batch and three steps after it, and of one row in chunks: every way to count positions."""
    rng = np.random.default_rng(3)
    rows, lengths = 3, np.array([11, 4, 7])
    state = runner.start(rows)
    found = [runner.step(rng.integers(0, VOCAB_SIZE, (rows, 11)), lengths, state)["logits"]]
    found += [
        runner.step(rng.integers(0, VOCAB_SIZE, (rows, 1)), np.ones(rows), state)["logits"]
        for _ in range(3)
    ]
    state = runner.start(1)
    found += [
        runner.step(rng.integers(0, VOCAB_SIZE, (1, n)), np.array([n]), state)["logits"]
        for n in (9, 1, 12)
    ]
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("given", "in_float16", "needed"),
    [({}, False, 48), ({}, True, 72), ({"copies": 2}, False, 96), ({"copies": 2}, True, 120)],
)
def test_the_room_for_a_package_is_checked_before_it_is_written(
    given: dict[str, int], in_float16: bool, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights as often as they are written, and half of them again in float16."""
    plan: Any = SimpleNamespace(kv_cache_dtype=None, weights=None, store_float16=in_float16)
    model = small_graph(
        "model (float[2] x, float[4] a, float[8] b) => (float[2] y) { y = Neg (x) }",
        constants={"a": np.ones(4, np.float32), "b": np.ones(8, np.float32)},
    )
    stages: Any = SimpleNamespace(begin=lambda stage: None)
    build: Any = SimpleNamespace(plan=plan, model=model, folder=Path("/a"), stages=stages)
    checked: list[tuple[Path, int, str]] = []
    monkeypatch.setattr(pipeline, "check_free", lambda *arguments: checked.append(arguments))
    last = quantization_phases(plan, **given)[-1]
    last.run(build)
    assert last.name == "check"
    assert checked == [(Path("/a"), needed, "the package")]
