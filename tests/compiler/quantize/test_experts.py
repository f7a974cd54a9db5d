"""Quantized experts: what QMoE computes, block sizes, experts that it does not take, and what is left in float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.quantize import blocks as module
from qsample.compiler.quantize.blocks import float_bytes, quantization_report
from qsample.compiler.quantize.experts import quantize_experts
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.contract.arrays import Array
from qsample.graph import moe
from tests.helpers.mixtures import experts_reference
from tests.helpers.small_graphs import small_graph

EXPERTS, ROWS = 6, 40
WAYS = [
    WeightQuantization(4),
    WeightQuantization(8),
    WeightQuantization(4, 16),
    WeightQuantization(8, 64),
]


def mixture_graph(weights: dict[str, Array], **attributes: float) -> ir.Model:
    """rows, choice → MoE → result. weights: fc1, fc2 and perhaps fc1_bias, fc2_bias."""
    given = "".join(f", float{list(array.shape)} {name}" for name, array in weights.items())
    operands = ", ".join(
        name if name in weights else "" for name in ("fc1", "fc1_bias", "fc2", "fc2_bias")
    )
    hidden = weights["fc1"].shape[2]
    model = small_graph(
        f"""mixture (float[S,{hidden}] rows, float[S,{EXPERTS}] choice{given}) => (float[S,{hidden}] result)
            {{ result = com.microsoft.MoE (rows, choice, {operands}) }}""",
        constants=weights,
    )
    (node,) = model.graph
    for attribute in ir.convenience.convert_attributes({**moe.ATTRIBUTES, **attributes}):
        node.attributes.add(attribute)
    return model


def lookup_graph(weights: Array, *, transposed: bool) -> ir.Model:
    """rows, ids → the product of each row with its expert's matrix, as `batched_mm` has it, but with one axis more."""
    rows, product = ("1,64", "rows, matrices") if transposed else ("64,1", "matrices, rows")
    return small_graph(
        f"""lookup (float[S,{rows}] rows, int64[S] ids, float{list(weights.shape)} weights) => (float[S,M,N] result)
            {{ matrices = Gather <axis = 0> (weights, ids)  result = MatMul ({product}) }}""",
        constants={"weights": weights},
    )


def make_weights(hidden: int, size: int, *, biases: bool = False) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"fc1": (EXPERTS, 2 * size, hidden), "fc2": (EXPERTS, hidden, size)}
    if biases:
        shapes |= {"fc1_bias": (EXPERTS, 2 * size), "fc2_bias": (EXPERTS, hidden)}
    return {
        name: (0.12 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()
    }


def saved(model: ir.Model, folder: Path) -> tuple[ort.InferenceSession, dict[str, Array]]:
    """The session of a quantized model, and its constants; they are computed when it is saved."""
    ir.save(model, folder / "m.onnx", external_data="m.data")
    constants = ir.load(folder / "m.onnx").graph.initializers
    arrays = {
        name: value.const_value.numpy()
        for name, value in constants.items()
        if value.const_value is not None
    }
    return ort.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"]), arrays


def dequantized(stored: dict[str, Array], name: str, way: WeightQuantization) -> Array:
    """float64 [E, N, K], from what is stored; written from the operator's documentation."""
    levels = unpacked(stored[f"{name}_blocks"], way.bits)
    scales = stored[f"{name}_scales"].astype(np.float64).reshape(*levels.shape[:2], -1)
    blocks = scales.shape[2]
    shaped = levels.reshape(*levels.shape[:2], blocks, -1).astype(np.float64)
    return ((shaped - 2 ** (way.bits - 1)) * scales[..., None]).reshape(levels.shape)


def unpacked(stored: Array, bits: int) -> Array:
    if bits == 8:
        return stored
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)


def rounded(rows: Array, block: int) -> Array:
    """Activations as the kernel rounds them: a block to 127 levels either side of 0."""
    blocks = rows.astype(np.float32).reshape(len(rows), -1, block)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    levels = np.round(blocks * np.where(scales > 0, 1 / np.where(scales > 0, scales, 1), 0))
    return (levels * scales).reshape(rows.shape)


def kernel(rows: Array, chosen: Array, fc1: Array, fc2: Array, block: int, **gate: float) -> Array:
    """QMoE on the CPU in float64, but for its activations."""
    joint = np.einsum("snk,sk->sn", fc1[chosen], rounded(rows, block))
    limit = gate.get("limit", np.inf)
    left, right = np.minimum(joint[:, 0::2], limit), np.clip(joint[:, 1::2], -limit, limit)
    hidden = left / (1 + np.exp(-gate.get("alpha", 1.0) * left)) * (right + gate.get("beta", 0.0))
    return np.einsum("snk,sk->sn", fc2[chosen], rounded(hidden, block))


def random_rows(hidden: int) -> tuple[Array, Array, dict[str, Array]]:
    rng = np.random.default_rng(1)
    rows, chosen = (
        rng.normal(size=(ROWS, hidden)).astype(np.float32),
        rng.integers(0, EXPERTS, ROWS),
    )
    return rows, chosen, {"rows": rows, "choice": np.eye(EXPERTS, dtype=np.float32)[chosen]}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_operator_computes_with_the_rounded_weights(
    way: WeightQuantization, tmp_path: Path
) -> None:
    weights = make_weights(64, 128)
    model = mixture_graph(weights)
    assert quantize_experts(model, way)
    session, stored = saved(model, tmp_path)
    for name, original in weights.items():
        step = (
            np.abs(original).reshape(*original.shape[:2], -1, way.block_size).max(-1)
            * 2
            / (2**way.bits - 2)
        )
        error = (
            np.abs(dequantized(stored, name, way) - original)
            .reshape(*step.shape, way.block_size)
            .max(-1)
        )
        assert (error <= step * 1.01).all()
        assert error.max() > 0
    rows, chosen, feeds = random_rows(64)
    matrices = [dequantized(stored, name, way) for name in ("fc1", "fc2")]
    result = session.run(None, feeds)[0]
    np.testing.assert_allclose(result, kernel(rows, chosen, *matrices, way.block_size), atol=1e-3)
    # The activations alone: far less than a wrong expert, or gate and up the other way round, would make.
    exact = experts_reference(rows, chosen, *matrices)
    assert np.abs(result - exact).max() < 0.05 * np.abs(exact).max()
    assert (
        np.abs(exact - experts_reference(rows, (chosen + 1) % EXPERTS, *matrices)).max()
        > np.abs(exact).max() / 2
    )

    report = quantization_report(model)
    assert (report.experts, report.expert_block_size) == (EXPERTS, way.block_size)
    assert report.bytes_before == sum(array.nbytes for array in weights.values())
    assert report.bytes_after == sum(array.nbytes for array in stored.values())
    assert float_bytes(model) == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_others(bits: int, tmp_path: Path) -> None:
    """Bit for bit: in any batch, beside pads of any kind, and alone if it comes twice, which some processors need."""
    model = mixture_graph(make_weights(64, 128))
    quantize_experts(model, WeightQuantization(bits))
    session, _ = saved(model, tmp_path)
    _, _, feeds = random_rows(64)
    together = session.run(None, feeds)[0]
    order = np.random.default_rng(2).permutation(ROWS)
    np.testing.assert_array_equal(
        session.run(None, {name: array[order] for name, array in feeds.items()})[0], together[order]
    )
    for row in range(ROWS):
        alone = session.run(None, {name: array[[row, row]] for name, array in feeds.items()})[0]
        np.testing.assert_array_equal(alone[0], together[row])
    pads = {
        name: np.concatenate([array, np.repeat(array[:1], ROWS, 0)])
        for name, array in feeds.items()
    }
    pads["rows"][ROWS:] = np.nan
    np.testing.assert_array_equal(session.run(None, pads)[0][:ROWS], together)


@pytest.mark.parametrize(
    ("hidden", "size", "way", "block_sizes", "taken"),
    [
        (64, 96, WeightQuantization(4, 64), (16, 32, 64), 32),  # divides both
        (64, 40, WeightQuantization(4, 32), (16, 32, 64), 32),  # hidden units are padded
        (128, 40, WeightQuantization(4, 32), (64, 128), 64),  # what the device takes
        (32, 24, WeightQuantization(4, 32), (32,), 32),  # padded, to one block a row
        (80, 64, WeightQuantization(8, 256), (16, 32, 64), 16),
        (72, 64, WeightQuantization(8, 32), (16, 32, 64), None),
    ],
)
def test_block_sizes(
    hidden: int,
    size: int,
    way: WeightQuantization,
    block_sizes: tuple[int, ...],
    taken: int | None,
    tmp_path: Path,
) -> None:
    weights = make_weights(hidden, size, biases=True)
    gate = {"alpha": 1.702, "beta": 1.0, "limit": 1.5}
    attributes = {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 1.5}
    model = mixture_graph(weights, **attributes)
    assert quantize_experts(model, way, block_sizes) is (taken is not None)
    if taken is None:
        assert float_bytes(model) == sum(array.nbytes for array in weights.values())
        return
    (node,) = model.graph
    assert node.attributes.get_int("block_size", 0) == taken
    session, _ = saved(model, tmp_path)
    rows, chosen, feeds = random_rows(hidden)
    exact = experts_reference(rows, chosen, **weights, **gate)
    # Nothing but rounding: 4 bits lose about an eighth.
    error = np.abs(session.run(None, feeds)[0] - exact).max() / np.abs(exact).max()
    assert error < (0.25 if way.bits == 4 else 0.04)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", [WeightQuantization(4), WeightQuantization(8, 16)], ids=str)
def test_experts_with_another_gate(
    way: WeightQuantization, transposed: bool, tmp_path: Path
) -> None:
    """They are looked up in levels, and nothing of them stays float."""
    weights = make_weights(64, 48)["fc1"]
    given = np.ascontiguousarray(weights.swapaxes(1, 2)) if transposed else weights
    model = lookup_graph(given, transposed=transposed)
    assert quantize_experts(model, way)
    assert float_bytes(model) == 0
    report = quantization_report(model)
    assert report.experts == EXPERTS
    session, _ = saved(model, tmp_path)
    rows, chosen, _ = random_rows(64)
    feeds = {"rows": rows[:, None] if transposed else rows[..., None], "ids": chosen}
    result = session.run(None, feeds)[0].reshape(ROWS, -1)
    exact = np.einsum("snk,sk->sn", weights[chosen].astype(np.float64), rows)
    assert (
        0 < np.abs(result - exact).max() / np.abs(exact).max() < (0.15 if way.bits == 4 else 0.02)
    )


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_half_precision_keeps_its_scales(dtype: ir.DataType, tmp_path: Path) -> None:
    weights = {name: array.astype(dtype.numpy()) for name, array in make_weights(64, 64).items()}
    model = mixture_graph(weights)
    assert quantize_experts(model, WeightQuantization(4))
    scales = [value for name, value in model.graph.initializers.items() if name.endswith("_scales")]
    assert [value.dtype for value in scales] == [dtype, dtype]
    for value in scales:
        assert value.const_value.numpy().dtype == dtype.numpy()


def test_one_expert_is_quantized_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the model is saved, not before, and each once."""
    quantized: list[tuple[int, ...]] = []
    original = module.quantize_matrix

    def counted(weight: Array, way: WeightQuantization) -> tuple[Array, Array]:
        quantized.append(weight.shape)
        return original(weight, way)

    monkeypatch.setattr(module, "quantize_matrix", counted)
    model = mixture_graph(make_weights(64, 32))
    quantize_experts(model, WeightQuantization(4))
    assert not quantized
    saved(model, tmp_path)
    assert quantized == [(64, 64)] * EXPERTS + [(32, 64)] * EXPERTS
