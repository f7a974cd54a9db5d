"""Experts that came as integers: QMoE has the numbers that they stand for, or float constants have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.quantize.experts import quantize_experts
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.compiler.quantize.packed_experts import keep_packed_experts, num_packed_experts
from qsample.contract.arrays import DTYPES, Array
from qsample.graph import moe
from tests.helpers.mixtures import experts_reference
from tests.helpers.small_graphs import small_graph

EXPERTS = 3
HIDDEN, SIZE = 256, 128
# Bits, block size.
Form = tuple[int, int]


def packed_matrix(form: Form, outputs: int, inputs: int, seed: int) -> tuple[Array, Array, Array]:
    """Levels and scales as a portable graph has them, and the float64 matrices that they stand for."""
    bits, block = form
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, 2**bits, (EXPERTS, outputs, inputs)).astype(np.uint8)
    scales = (rng.random((EXPERTS, outputs, inputs // block)) / 2**bits).astype(np.float32)
    meant = (levels.astype(np.float64) - 2 ** (bits - 1)) * np.repeat(scales, block, -1)
    packed = levels if bits == 8 else levels[..., 0::2] | levels[..., 1::2] << 4
    return packed, scales, meant


def portable(
    first: Form | None, second: Form | None, ids: Array | None = None, layers: int = 1
) -> tuple[ir.Model, Array, Array]:
    """rows, choice → MoE → result, as export writes it, and the float64 matrices of both products. A form of None: the
    matrix is a float constant. layers: how many MoE in a row read the same weights."""
    constants: dict[str, Array] = {"ids": np.arange(EXPERTS) if ids is None else ids}
    nodes, meant = [], []
    for seed, (name, form, outputs, inputs) in enumerate(
        (("fc1", first, 2 * SIZE, HIDDEN), ("fc2", second, HIDDEN, SIZE))
    ):
        levels, scales, matrices = packed_matrix(form or (8, 32), outputs, inputs, seed)
        meant.append(matrices)
        if form is None:
            constants[name] = matrices.astype(np.float32)
            continue
        constants |= {f"{name}_levels": levels, f"{name}_scales": scales}
        nodes.append(f"""
            {name} = com.microsoft.GatherBlockQuantized
                <bits = {form[0]}, block_size = {form[1]}, gather_axis = 0, quantize_axis = 2>
                ({name}_levels, ids, {name}_scales)""")
    for layer in range(layers):
        rows = "rows" if layer == 0 else f"hidden{layer}"
        result = "result" if layer == layers - 1 else f"hidden{layer + 1}"
        nodes.append(f"{result} = com.microsoft.MoE ({rows}, choice, fc1, , fc2)")
    kinds = {np.dtype(np.uint8): "uint8", np.dtype(np.float32): "float"}
    given = "".join(
        f", {kinds.get(array.dtype, 'int64')}{list(array.shape)} {name}"
        for name, array in constants.items()
    )
    model = small_graph(
        f"""mixture (float[S,{HIDDEN}] rows, float[S,{EXPERTS}] choice{given})
            => (float[S,{HIDDEN}] result) {{ {chr(10).join(nodes)} }}""",
        constants=constants,
    )
    for node in moe.mixtures(model.graph):
        for attribute in ir.convenience.convert_attributes(moe.ATTRIBUTES):
            node.attributes.add(attribute)
    return model, meant[0], meant[1]


def stored(node: ir.Node, slot: int) -> Array:
    """float64 [E, N, K], from the operands of a QMoE; written from the operator's documentation."""
    bits = node.attributes.get_int("expert_weight_bits", 0)
    block = node.attributes.get_int("block_size", 0)
    levels, scales = (value.const_value.numpy() for value in node.inputs[slot : slot + 2])  # type: ignore[union-attr]
    if bits == 4:
        levels = np.stack([levels & 15, levels >> 4], -1).reshape(*levels.shape[:2], -1)
    return (levels.astype(np.float64) - 2 ** (bits - 1)) * np.repeat(scales, block, -1)


def computed(model: ir.Model, folder: Path, feeds: dict[str, Array]) -> Array:
    ir.save(model, folder / "m.onnx", external_data="m.data")
    session = ort.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    result: Array = session.run(None, feeds)[0]
    return result


def random_rows() -> tuple[Array, dict[str, Array]]:
    rng = np.random.default_rng(5)
    chosen = rng.integers(0, EXPERTS, 9)
    rows = rng.normal(size=(9, HIDDEN)).astype(np.float32)
    return chosen, {"rows": rows, "choice": np.eye(EXPERTS, dtype=np.float32)[chosen]}


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ((4, 32), (4, 32), (4, 32)),
        ((8, 32), (8, 32), (8, 32)),
        ((4, 32), (8, 16), (8, 16)),
        ((8, 16), (4, 128), (8, 16)),
        ((4, 256), (4, 16), (4, 16)),
    ],
)
def test_qmoe_has_the_same_numbers(first: Form, second: Form, kept: Form, tmp_path: Path) -> None:
    model, fc1, fc2 = portable(first, second)
    assert keep_packed_experts(model)
    assert num_packed_experts(model) == EXPERTS
    node = model.graph[-1]
    assert node.op_type == "QMoE"
    assert node.attributes.get_int("expert_weight_bits", 0) == kept[0]
    assert node.attributes.get_int("block_size", 0) == kept[1]
    np.testing.assert_array_equal(stored(node, 2), fc1)
    np.testing.assert_array_equal(stored(node, 5), fc2)
    chosen, feeds = random_rows()
    wanted = experts_reference(feeds["rows"], chosen, fc1, fc2)
    result = computed(model, tmp_path, feeds)
    # Activations are rounded to 8 bits, once in front of each product.
    assert np.abs(result - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("first", "second", "sizes"),
    [((4, 32), None, (16, 32)), (None, (8, 32), (16, 32)), ((4, 32), (4, 32), (64, 128))],
    ids=["only the first", "only the second", "no such blocks"],
)
def test_otherwise_they_are_float(
    first: Form | None, second: Form | None, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """And quantized with all other experts, if compile is to do that."""
    model, fc1, fc2 = portable(first, second)
    before = computed(model, tmp_path, random_rows()[1])
    assert keep_packed_experts(model, sizes)
    assert num_packed_experts(model) == 0
    (node,) = moe.mixtures(model.graph)
    for slot, wanted in ((moe.Slot.FC1, fc1), (moe.Slot.FC2, fc2)):
        value = node.inputs[slot]
        assert value is not None
        assert value.const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), wanted.astype(np.float32))
    np.testing.assert_array_equal(computed(model, tmp_path, random_rows()[1]), before)
    assert quantize_experts(model, WeightQuantization(8))
    assert model.graph[-1].op_type == "QMoE"


def test_a_device_takes_a_part_of_a_block() -> None:
    model, fc1, fc2 = portable((8, 256), (8, 128))
    keep_packed_experts(model, (32, 64))
    node = model.graph[-1]
    assert node.attributes.get_int("block_size", 0) == 64
    np.testing.assert_array_equal(stored(node, 2), fc1)
    np.testing.assert_array_equal(stored(node, 5), fc2)


def test_layers_share_integers() -> None:
    model, _, _ = portable((4, 32), (8, 32), layers=2)
    keep_packed_experts(model)
    first, second = (node for node in model.graph if node.op_type == "QMoE")
    assert first.inputs[2:] == second.inputs[2:]
    assert num_packed_experts(model) == 2 * EXPERTS


@pytest.mark.parametrize("change", ["other experts", "zero points", "none"])
def test_other_lookups_stay(change: str) -> None:
    """Experts in another order, and levels with zero points, are no integers of an export."""
    ids = np.array([0, 2, 1]) if change == "other experts" else None
    forms: Any = (None, None) if change == "none" else ((8, 32), (8, 32))
    model, _, _ = portable(*forms, ids=ids)
    if change == "zero points":
        for node in model.graph:
            if node.op_type == "GatherBlockQuantized":
                node.resize_inputs(4)
                node.replace_input_with(3, node.inputs[0])
    assert not keep_packed_experts(model)
    assert num_packed_experts(model) == 0
    assert len(moe.mixtures(model.graph)) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_half_precision(dtype: str) -> None:
    """Scales are in half precision by then; levels are multiplied in float32."""
    model, _, _ = portable((4, 32), (4, 32))
    half = ir.DataType(DTYPES[dtype].onnx)
    node = moe.mixtures(model.graph)[0]
    (first, _) = moe.packed_weights(node)
    assert first.scales.const_value is not None
    rounded = first.scales.const_value.numpy().astype(half.numpy())
    first.scales.const_value = ir.Tensor(rounded, dtype=half)
    first.scales.type = ir.TensorType(half)
    levels = stored_levels(first)
    keep_packed_experts(model, (64, 128))
    value = node.inputs[moe.Slot.FC1]
    assert value is not None
    assert value.dtype == half
    assert value.const_value is not None
    wanted = levels * np.repeat(rounded.astype(np.float64), 32, -1)
    np.testing.assert_array_equal(value.const_value.numpy(), wanted.astype(half.numpy()))


def stored_levels(packed: moe.PackedMatrices) -> Array:
    """[E, N, K] levels of 4 bits around 0."""
    assert packed.levels.const_value is not None
    bytes_ = packed.levels.const_value.numpy()
    return np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(packed.shape).astype(np.float64) - 8
