"""Experts as ONNX Runtime's operator: every layout of weights, every family's router, and bugs that the gate finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from torch import Tensor

from qsample.errors import ParityError
from qsample.exporters import experts as lowering
from qsample.exporters.experts import lower_experts
from qsample.graph import moe
from qsample.tensors import Array
from qsample.transforms import experts as transform
from qsample.transforms import markers
from tests.helpers.mixtures import ROUTERS, experts_reference, mixture
from tests.helpers.tiny_models import export_without_sampler

EXPERTS, HIDDEN, SIZE, ROWS = 5, 16, 12, 9
QUICK = ("gpt_oss", "qwen2_moe")


def marked_model(weights: dict[str, Array], **attributes: float) -> ir.Model:
    """rows, choice → marker → result, with the weights that there are."""
    names = ("gate", "down", "gate_bias", "down_bias", "up")
    values: dict[str, ir.Value] = {}
    for name, shape in {"rows": ("S", HIDDEN), "choice": ("S", EXPERTS)}.items():
        values[name] = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    for name, array in weights.items():
        tensor = ir.Tensor(array, name=name)
        values[name] = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
    inputs = [values["rows"], values["choice"], *(values.get(name) for name in names)]
    marker = ir.node(markers.EXPERTS, inputs, attributes, domain=markers.MARKER_DOMAIN, name="marker")
    output = marker.outputs[0]
    output.name, output.shape, output.type = "result", ir.Shape(("S", HIDDEN)), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        inputs[:2],
        [output],
        nodes=[marker],
        initializers=[values[name] for name in weights],
        opset_imports={"": 20, markers.MARKER_DOMAIN: 1},
        name="marked",
    )
    return ir.Model(graph, ir_version=10)


def in_turns(joint: Array) -> Array:
    """[E, 2 * I, ..], gate in front of up, as [E, 2 * I, ..] with both in turns; written out, unlike what is tested."""
    half = joint.shape[1] // 2
    return np.stack([joint[:, (i // 2) + half * (i % 2)] for i in range(2 * half)], axis=1)


LAYOUTS: dict[str, tuple[Callable[[Array, Array, Array, Array], dict[str, Array]], dict[str, float]]] = {
    "one behind the other": (lambda fc1, fc2, b1, b2: {"gate": fc1, "down": fc2}, {}),
    "with biases": (
        lambda fc1, fc2, b1, b2: {"gate": fc1, "down": fc2, "gate_bias": b1, "down_bias": b2},
        {"alpha": 1.702, "beta": 1.0, "limit": 1.5},
    ),
    "in turns, transposed, with biases": (
        lambda fc1, fc2, b1, b2: {
            "gate": in_turns(fc1).swapaxes(1, 2),
            "down": fc2.swapaxes(1, 2),
            "gate_bias": in_turns(b1),
            "down_bias": b2,
        },
        {"interleaved": 1, "gate_transposed": 1, "down_transposed": 1},
    ),
    "in turns": (lambda fc1, fc2, b1, b2: {"gate": in_turns(fc1), "down": fc2}, {"interleaved": 1}),
    "apart and merged": (
        lambda fc1, fc2, b1, b2: {
            "gate": fc1[:, :SIZE].reshape(-1, HIDDEN),
            "up": fc1[:, SIZE:].reshape(-1, HIDDEN),
            "down": fc2.swapaxes(1, 2).reshape(-1, HIDDEN),
        },
        {"down_transposed": 1},
    ),
    "more than there are": (
        lambda fc1, fc2, b1, b2: {"gate": np.concatenate([fc1, fc1[:2] + 1]), "down": fc2},
        {},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_weights(layout: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {"fc1": (EXPERTS, 2 * SIZE, HIDDEN), "fc2": (EXPERTS, HIDDEN, SIZE)}
    shapes |= {"b1": (EXPERTS, 2 * SIZE), "b2": (EXPERTS, HIDDEN)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    arrange, attributes = LAYOUTS[layout]
    weights = {name: np.ascontiguousarray(array) for name, array in arrange(*arrays.values()).items()}
    model = marked_model(weights, **attributes)
    assert lower_experts(model)
    rows = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
    chosen = rng.integers(0, EXPERTS, ROWS)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    result = session.run(None, {"rows": rows, "choice": np.eye(EXPERTS, dtype=np.float32)[chosen]})[0]
    has_bias = "gate_bias" in weights
    expected = experts_reference(
        rows,
        chosen,
        in_turns(arrays["fc1"]),
        arrays["fc2"],
        fc1_bias=in_turns(arrays["b1"]) if has_bias else None,
        fc2_bias=arrays["b2"] if has_bias else None,
        **{name: attributes[name] for name in ("alpha", "beta", "limit") if name in attributes},
    )
    np.testing.assert_allclose(result, expected, atol=2e-5, rtol=1e-5)
    assert set(model.graph.initializers) == {
        str(value.name) for node in model.graph for value in node.inputs[2:] if value is not None
    }


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(ROUTERS)],
)
def test_every_router(model_type: str, tmp_path: Path) -> None:
    """The gate of the export compares the logits with transformers' own; here it only has to have met the transform."""
    package = export_without_sampler(mixture(model_type), tmp_path / "package")
    graph = ir.load(package.path / "decoder.onnx").graph
    assert len(moe.mixtures(graph)) == 1


def swap(parts: list[Array]) -> Array:
    gate, up = np.split(parts[0], 2, axis=1)
    return in_turns(np.concatenate([up, gate], axis=1))


RUN_EXPERTS = transform.run_experts


def next_expert(hidden_states: Tensor, chosen: Tensor, experts: transform.ExpertWeights) -> Tensor:
    return RUN_EXPERTS(hidden_states, (chosen + 1) % experts.count, experts)


PLANTS: dict[str, tuple[Any, str, Any]] = {
    "gate and up are swapped": (lowering, "_take_turns", swap),
    "the next expert": (transform, "run_experts", next_expert),
    "weights are not applied": (transform, "combine", lambda outputs, weights: outputs.sum(dim=1)),
}


@pytest.mark.parametrize(
    "plant", [next(iter(PLANTS)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*PLANTS][1:])]
)
def test_the_gate_finds_a_bug(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTS[plant])
    with pytest.raises(ParityError, match="differ"):
        export_without_sampler(mixture("qwen2_moe"), tmp_path / "package")
