"""Sums of a few numbers a row: the same bits at every place of a batch, and alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.exporters.row_sums import align_row_sums
from qsample.runtime import SamplingParams, load
from qsample.runtime.decode.slots import Slots
from qsample.tensors import Array
from tests.helpers.mixtures import mixture
from tests.helpers.requests import make_sequence
from tests.helpers.tiny_models import export_without_sampler

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
        [x], total.outputs, nodes=[absolute, total], initializers=[axes_value], opset_imports={"": 20}, name="g"
    )
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model, x: Array) -> Array:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    return result


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("length", [3, 5, 6, 7, 9, 10, 12, 20, 23, 24, 48, 100])
def test_a_row_has_one_sum(length: int) -> None:
    model = summing(("B", length), [-1])
    align_row_sums(model)
    assert operators(model) == ["Abs", "Pad", "ReduceSum"] or length == 48
    rng = np.random.default_rng(length)
    for row in rng.normal(size=(20, length)).astype(np.float32):
        alone = run(model, row[None])
        assert alone[0, 0] == pytest.approx(np.abs(row.astype(np.float64)).sum(), rel=1e-6)
        rows = rng.normal(size=(9, length)).astype(np.float32)
        for place in range(9):
            assert run(model, np.insert(rows, place, row, axis=0))[place].tobytes() == alone[0].tobytes()


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
    assert operators(model) == ["Abs", "ReduceSum"]


def test_three_axes_without_the_last_one() -> None:
    model = summing(("B", 3, 10), [2], keepdims=0)
    align_row_sums(model)
    x = np.random.default_rng(0).normal(size=(4, 3, 10)).astype(np.float32)
    np.testing.assert_allclose(run(model, x), np.abs(x).sum(-1), rtol=1e-6)
    assert operators(model) == ["Abs", "Pad", "ReduceSum"]


@pytest.mark.parametrize("chosen", [6, 10])
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
            slots.begin(slot, sequence.prompt, 1, sequence.parameters)
            slots.prefill(slot, sequence.prompt, emit=True)
        for _ in range(6):
            slots.decode()
        return [slots._state.read(spec.name)[place].tobytes() for spec in model.interface.cache_states]

    places = [(rows, place) for rows in (1, 2, 3, 4) for place in range(rows)]
    assert len({tuple(caches(*place)) for place in places}) == 1
