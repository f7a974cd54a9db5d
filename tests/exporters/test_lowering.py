"""From a trace to a graph: loops become Scan nodes, experts one operator; sums of a row have the same bits anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.arrays import Array
from qsample.contract.interface import AdapterTarget, Features, Interface
from qsample.errors import ParityError, UnsupportedModelError
from qsample.exporters import lowering
from qsample.exporters.lowering import (
    adapt_layers,
    align_row_sums,
    fill_placeholders,
    lower_experts,
    outline_scans,
)
from qsample.graph import moe
from qsample.graph.edit import constant_value
from qsample.runtime import SamplingParams, load
from qsample.runtime.decode.slots import Slots
from qsample.transforms import experts as transform
from qsample.transforms import markers
from qsample.transforms.deferred import defer
from qsample.transforms.markers import ADAPTED_PATH
from tests.helpers.mixtures import ROUTERS, experts_reference, mixture
from tests.helpers.requests import make_sequence
from tests.helpers.tiny_models import export_without_sampler


def parse(graph: str) -> ir.Model:
    opsets = '<ir_version: 10, opset_import: ["" : 20, "qsample" : 1]>'
    model = ir.from_proto(onnx.parser.parse_model(f"{opsets} graph {graph}"))
    for number, node in enumerate(model.graph):  # the text has no names for nodes; a trace has
        node.name = f"{node.op_type}_{number}"
    return model


def session_of(model: ir.Model) -> ort.InferenceSession:
    return ort.InferenceSession(ir.to_proto(model).SerializeToString())


def run(model: ir.Model, **inputs: object) -> list[Array]:
    session = session_of(model)
    types = {value.name: value.dtype for value in model.graph.inputs}
    return session.run(
        None, {name: np.array(value, types[name].numpy()) for name, value in inputs.items()}
    )


def only(graph: ir.Graph, op_type: str) -> ir.Node:
    (node,) = (node for node in graph if node.op_type == op_type)
    return node


def operators(graph: ir.Graph) -> list[str]:
    return sorted(node.op_type for node in graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placeholders_and_their_views_become_the_numbers_of_a_file(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    data = stored.view(torch.int16).numpy().tobytes()
    (tmp_path / "weights").write_bytes(b"header, " + data)
    place = SimpleNamespace(path=str(tmp_path / "weights"), offset=8)
    weight = defer(stored.shape, dtype, lambda: stored, torch.bfloat16, place)
    views: list[Callable[[Tensor], Tensor]] = [
        lambda w: w,
        lambda w: w[2:5],
        lambda w: w.T,
        lambda w: w[:, 1:3],
    ]
    values = [
        constant_value(f"w{i}", TorchTensor(view(weight), f"w{i}")) for i, view in enumerate(views)
    ]
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=values), ir_version=10)
    assert fill_placeholders(model)
    assert not fill_placeholders(model)
    for value, view in zip(values, views, strict=True):
        assert value.const_value is not None
        np.testing.assert_array_equal(
            value.const_value.numpy().astype(np.float32), view(stored).float().numpy()
        )
    in_file = [
        isinstance(getattr(value.const_value, "stored", value.const_value), ir.ExternalTensor)
        for value in values
    ]
    assert in_file == [True, True, dtype == torch.float32, False]


def test_a_graph_without_markers_stays_as_it_is() -> None:
    model = parse("(float[N] x) => (float[N] y) { y = Neg (x) }")
    assert not outline_scans(model)
    assert operators(model.graph) == ["Neg"]


RUNNING_SUM = """(float[B] start, float[B, S] x, float[B] scale) => (float[B] last, float[B, S] sums) {
    factor = Exp (scale)
    state, token = qsample.ScanBegin <num_states = 1> (start, x)
    scaled = Mul (token, factor)
    sum = Add (state, scaled)
    last, sums = qsample.ScanEnd <num_states = 1> (sum, sum)
}"""
TWO_LOOPS = """(float[B] start, float[B, S] x) => (float[B] last, float[B, S] twice, float[B, S] kept) {
    state, token = qsample.ScanBegin <num_states = 1> (start, x)
    sum = Add (state, token)
    first_last, sums = qsample.ScanEnd <num_states = 1> (sum, sum)
    state2, token2, input2 = qsample.ScanBegin <num_states = 1> (first_last, sums, x)
    sum2 = Add (state2, token2)
    last, twice, kept = qsample.ScanEnd <num_states = 1> (sum2, sum2, input2)
}"""


def test_a_loop_holds_what_depends_on_the_token() -> None:
    model = parse(RUNNING_SUM)
    assert outline_scans(model)
    scan = only(model.graph, "Scan")
    assert operators(model.graph) == ["Exp", "Scan"]
    assert operators(scan.attributes["body"].as_graph()) == ["Add", "Identity", "Mul"]
    assert "qsample" not in model.opset_imports
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    last, sums = run(model, start=[10, 20], x=x, scale=np.log([1, 2]))
    expected = np.array([[11, 13, 16], [28, 38, 50]])
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    np.testing.assert_allclose(last, expected[:, -1], rtol=1e-6)


def test_a_loop_over_the_results_of_another() -> None:
    """And a result that no node of the body computes: the token itself."""
    model = parse(TWO_LOOPS)
    assert outline_scans(model)
    assert operators(model.graph) == ["Scan", "Scan"]
    x = np.array([[1, 2, 3]], np.float32)
    last, twice, kept = run(model, start=[0], x=x)
    sums = np.cumsum(x, axis=1)
    np.testing.assert_array_equal(twice, sums[:, -1:] + np.cumsum(sums, axis=1))
    np.testing.assert_array_equal(last, twice[:, -1])
    np.testing.assert_array_equal(kept, x)


EXPERTS, HIDDEN, SIZE, ROWS = 5, 16, 12, 9
QUICK = ("qwen2_moe",)  # test_greedy has others


def marked_model(weights: dict[str, Array], **attributes: float) -> ir.Model:
    """rows, choice → marker → result, with the weights that there are."""
    names = ("gate", "down", "gate_bias", "down_bias", "up")
    values: dict[str, ir.Value] = {}
    for name, shape in {"rows": ("S", HIDDEN), "choice": ("S", EXPERTS)}.items():
        values[name] = ir.Value(
            name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT)
        )
    for name, array in weights.items():
        tensor = ir.Tensor(array, name=name)
        values[name] = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
    inputs = [values["rows"], values["choice"], *(values.get(name) for name in names)]
    marker = ir.node(
        markers.EXPERTS, inputs, attributes, domain=markers.MARKER_DOMAIN, name="marker"
    )
    output = marker.outputs[0]
    output.name, output.shape, output.type = (
        "result",
        ir.Shape(("S", HIDDEN)),
        ir.TensorType(ir.DataType.FLOAT),
    )
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


LAYOUTS: dict[
    str, tuple[Callable[[Array, Array, Array, Array], dict[str, Array]], dict[str, float]]
] = {
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
    weights = {
        name: np.ascontiguousarray(array) for name, array in arrange(*arrays.values()).items()
    }
    model = marked_model(weights, **attributes)
    assert lower_experts(model)
    rows = rng.normal(size=(ROWS, HIDDEN)).astype(np.float32)
    chosen = rng.integers(0, EXPERTS, ROWS)
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    result = session.run(None, {"rows": rows, "choice": np.eye(EXPERTS, dtype=np.float32)[chosen]})[
        0
    ]
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


@pytest.mark.ci
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in sorted(ROUTERS)
    ],
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


@pytest.mark.ci
@pytest.mark.parametrize(
    "plant",
    [next(iter(PLANTS)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*PLANTS][1:])],
)
def test_the_gate_finds_a_bug(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTS[plant])
    with pytest.raises(ParityError, match="differ"):
        export_without_sampler(mixture("qwen2_moe"), tmp_path / "package")


CAPACITY = 32


def summing(shape: tuple[str | int, ...], axes: list[int], *, keepdims: int = 1) -> ir.Model:
    """x → |x| → its sum. The second node begins at an aligned address."""
    x = ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    axes_value = ir.Value(
        name="axes",
        shape=ir.Shape([len(axes)]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.array(axes, dtype=np.int64), name="axes"),
    )
    absolute = ir.node("Abs", [x])
    absolute.outputs[0].shape, absolute.outputs[0].type = x.shape, x.type
    total = ir.node("ReduceSum", [absolute.outputs[0], axes_value], {"keepdims": keepdims})
    total.outputs[0].name, total.outputs[0].type = "y", x.type
    graph = ir.Graph(
        [x],
        total.outputs,
        nodes=[absolute, total],
        initializers=[axes_value],
        opset_imports={"": 20},
        name="g",
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("length", [3, 10, 12, 23, 48, 100])
def test_a_row_has_one_sum(length: int) -> None:
    model = summing(("B", length), [-1])
    align_row_sums(model)
    assert operators(model.graph) == ["Abs", "Pad", "ReduceSum"] or length == 48
    session, rng = session_of(model), np.random.default_rng(length)
    for row in rng.normal(size=(20, length)).astype(np.float32):
        alone = session.run(None, {"x": row[None]})[0]
        assert alone[0, 0] == pytest.approx(np.abs(row.astype(np.float64)).sum(), rel=1e-6)
        rows = rng.normal(size=(9, length)).astype(np.float32)
        for place in range(9):
            got = session.run(None, {"x": np.insert(rows, place, row, axis=0)})[0]
            assert got[place].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        (("B", 8), [-1]),  # aligned, whatever the place
        (("B", 4), [-1]),
        (("B", 32), [1]),
        (("B", 10, 16), [1]),  # numbers of one row are not next to each other
        (("B", 10), [0, 1]),
        (("B", "N"), [1]),
        (("B", 151_937), [1]),
    ],
)
def test_other_sums_stay(shape: tuple[str | int, ...], axes: list[int]) -> None:
    model = summing(shape, axes)
    align_row_sums(model)
    assert operators(model.graph) == ["Abs", "ReduceSum"]


def test_three_axes_without_the_last_one() -> None:
    model = summing(("B", 3, 10), [2], keepdims=0)
    align_row_sums(model)
    x = np.random.default_rng(0).normal(size=(4, 3, 10)).astype(np.float32)
    np.testing.assert_allclose(run(model, x=x)[0], np.abs(x).sum(-1), rtol=1e-6)
    assert operators(model.graph) == ["Abs", "Pad", "ReduceSum"]


@pytest.mark.ci
@pytest.mark.parametrize("chosen", [6, pytest.param(10, marks=pytest.mark.slow)])
def test_a_mixture_computes_a_row_alike_in_any_batch(chosen: int, tmp_path: Path) -> None:
    """The second layer's keys and values are of what the first layer's experts made of a token."""
    mixed = mixture("qwen3_moe", num_hidden_layers=2, num_experts=16, num_experts_per_tok=chosen)
    portable = export_without_sampler(mixed, tmp_path / "portable")
    options = CompileOptions(ctx_len=CAPACITY, weights="int4", max_divergence=10)
    model = load(compile_package(portable, tmp_path / "package", options).path)
    params = SamplingParams(temperature=1.0, max_new_tokens=8, eos_token_id=())

    def caches(rows: int, place: int) -> list[bytes]:
        slots = Slots(model.sessions, rows, CAPACITY)
        for slot in range(rows):
            prompt = [5, 6, 7] if slot == place else [9 + slot, 8 + slot]
            sequence = make_sequence(model, prompt, params, 1, CAPACITY)
            slots.begin(slot, sequence.request.prompt, 1, sequence.request.parameters)
            slots.prefill(slot, sequence.request.prompt, emit=True)
        for _ in range(6):
            slots.decode()
        return [
            slots._state[spec.name].read()[place].tobytes() for spec in model.interface.cache_states
        ]

    places = [(rows, place) for rows in (1, 2, 3, 4) for place in range(rows)]
    assert len({tuple(caches(*place)) for place in places}) == 1


def marked(path: str, states: ir.Value, result_shape: list[Any]) -> list[ir.Node]:
    """A layer that squares its input, and the marker after it."""
    result = ir.node("Mul", [states, states])
    result.outputs[0].shape, result.outputs[0].dtype = ir.Shape(result_shape), ir.DataType.FLOAT
    marker = ir.node(
        "Adapted",
        [states, result.outputs[0]],
        domain="qsample",
        metadata_props={ADAPTED_PATH: path},
    )
    return [result, marker]


def test_layers_whose_rows_nobody_knows_are_left_alone() -> None:
    def named(name: str, *shape: Any) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))

    by_row, flat = named("x", "B", "S", 4), named("flat", "N", 4)
    calls = [("root.a", by_row), ("root.b", flat), ("root.c", by_row), ("root.c", flat)]
    chains = [marked(path, states, list(states.shape or ())) for path, states in calls]
    nodes = [node for chain in chains for node in chain]
    outputs = [chain[-1].outputs[0] for chain in chains]
    graph = ir.Graph([by_row, flat], outputs, nodes=nodes, opset_imports={"": 20}, name="g")
    interface = Interface(9, (), features=Features(max_loras=1))
    model = ir.Model(graph, ir_version=10)
    adapted = adapt_layers(model, interface, "root.")
    assert adapted.adapters == (AdapterTarget("a", 4, 4),)
    assert all(node.op_type != "Adapted" for node in graph)
    assert [value.name for value in graph.inputs] == [
        "x",
        "flat",
        *(spec.name for spec in adapted.adapter_inputs),
    ]
    flat = named("flat", "N", 4)
    graph = ir.Graph(
        [flat], [], nodes=marked("root.b", flat, ["N", 4]), opset_imports={"": 20}, name="g"
    )
    with pytest.raises(
        UnsupportedModelError, match=r"no linear layers that read .*leave max_loras out"
    ):
        adapt_layers(ir.Model(graph, ir_version=10), interface, "root.")
