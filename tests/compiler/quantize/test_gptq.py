"""GPTQ beside the paper's algorithm in plain NumPy, and what it is for: closer products on the inputs given."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample import AutoModelForCausalLM
from qsample.addons.evaluate import evaluate
from qsample.compiler.quantize.gptq import decomposed, gptq
from qsample.compiler.quantize.methods import Levels, WeightQuantization, quantize_matrix
from qsample.contract.arrays import Array
from qsample.errors import PackageError
from tests.compiler.quantize.test_weights import levels

INPUTS, OUTPUTS = 192, 40  # more columns than are corrected at once


def correlated_inputs(tokens: int = 600, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(INPUTS, INPUTS)) * np.exp(-np.arange(INPUTS) / 40)[:, None]
    return rng.normal(size=(tokens, INPUTS)) @ mixing


def dequantized(found: Levels, way: WeightQuantization) -> Array:
    """[K, N] float64."""
    packed, scales, _ = found
    count = INPUTS // way.block_size
    numbers = levels(packed.reshape(OUTPUTS, count, -1), way.bits) - middles(found, way).reshape(
        OUTPUTS, count, 1
    )
    return (
        (numbers * scales.astype(np.float64).reshape(OUTPUTS, count, 1)).reshape(OUTPUTS, INPUTS).T
    )


def middles(found: Levels, way: WeightQuantization) -> Array:
    """Of each block, the level that stands for 0."""
    assert (found.zeros is not None) == way.zero_points
    return (
        np.full(found.scales.size, 2 ** (way.bits - 1))
        if found.zeros is None
        else found.zeros.astype(np.int64)
    )


def fitted(weight: Array, moments: Array, way: WeightQuantization) -> Levels:
    return gptq(weight, decomposed(moments.astype(np.float32)), way)[0]


def reference(
    weight: Array, moments: Array, found: Levels, way: WeightQuantization
) -> tuple[Array, Array]:
    """Levels [N, K] by the paper's equations (2) and (3), one weight after another, from the column with the largest
    inputs on, and the inverse made anew for the columns that are left; with the grids of `found`. And how far each
    weight is from a rounding boundary, in steps."""
    scales = found.scales.reshape(OUTPUTS, -1).astype(np.float64)
    zeros = middles(found, way).reshape(OUTPUTS, -1)
    damped = moments + 0.01 * np.diag(moments).mean() * np.eye(INPUTS)
    rows = weight.T.astype(np.float64).copy()
    chosen, margins = np.zeros(rows.shape), np.zeros(rows.shape)
    left = list(np.argsort(np.diag(moments)))
    while left:
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        column = left[-1]
        scale, zero = (grid[:, column // way.block_size] for grid in (scales, zeros))
        exact = rows[:, column] / scale + zero
        level = np.clip(np.round(exact), 0, 2**way.bits - 1)
        chosen[:, column], margins[:, column] = level, np.abs(np.abs(exact - np.floor(exact)) - 0.5)
        error = (rows[:, column] - (level - zero) * scale) / inverse[-1, -1]
        rows[:, left] -= np.outer(error, inverse[-1])
        left.pop()
    return chosen, margins


@pytest.mark.parametrize(
    "way",
    [
        WeightQuantization(4, 32, "gptq"),
        WeightQuantization(4, 64, "gptq", zero_points=True),
        WeightQuantization(8, 64, "gptq"),
    ],
    ids=str,
)
def test_levels_are_those_of_the_paper(way: WeightQuantization) -> None:
    inputs = correlated_inputs()
    weight = np.random.default_rng(1).normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
    moments = inputs.T @ inputs
    found = fitted(weight, moments, way)
    expected, margins = reference(weight, moments, found, way)
    got = levels(found[0].reshape(OUTPUTS, -1), way.bits)
    # Once float32 rounds a weight to the other side of a boundary, the rest of its row is another one.
    order = np.argsort(np.diag(moments))[::-1]
    same_so_far = np.cumsum((got != expected)[:, order], axis=1) == 0
    first = order[(~same_so_far).argmax(1)]
    differs = ~same_so_far.all(1)
    assert (margins[np.arange(OUTPUTS), first][differs] < 2e-3 * 2 ** (way.bits - 4)).all()
    assert differs.mean() <= 0.3


def test_the_last_block_is_filled_up() -> None:
    """180 inputs in blocks of 64: the last one has 52 weights, and levels of 0. Without correlations, the levels are
    those of rounding; the weights returned are those that the levels stand for."""
    weight = np.random.default_rng(4).normal(size=(180, OUTPUTS)).astype(np.float32)
    way = WeightQuantization(4, 64, "gptq")
    (packed, scales, _), rounded = gptq(weight, decomposed(np.eye(180, dtype=np.float32)), way)
    expected = quantize_matrix(np.pad(weight, ((0, 12), (0, 0))), WeightQuantization(4, 64))
    assert scales.tolist() == expected[1].tolist()
    got = levels(packed, 4).reshape(OUTPUTS, 3, 64)
    assert (got == levels(expected[0], 4)).mean() > 0.999, "halves are rounded to even here"
    assert (got.reshape(OUTPUTS, -1)[:, 180:] == 8).all()
    numbers = (got - 8.0) * scales.reshape(OUTPUTS, 3, 1)
    np.testing.assert_allclose(rounded, numbers.reshape(OUTPUTS, -1)[:, :180].T, atol=1e-6)


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (4, True), (8, False)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_products_are_closer_than_with_rounding(bits: int, zero_points: bool, dtype: type) -> None:
    """On the inputs given and on others like them."""
    weight = np.random.default_rng(2).normal(size=(INPUTS, OUTPUTS)).astype(dtype)
    inputs, others = correlated_inputs(), correlated_inputs()[::-1] + 0.01
    losses = {}
    for method in ("rtn", "gptq"):
        way = WeightQuantization(bits, 32, method, zero_points)
        found = (
            fitted(weight, inputs.T @ inputs, way)
            if method == "gptq"
            else quantize_matrix(weight, way)
        )
        error = dequantized(found, way) - weight.astype(np.float64)
        assert found[1].dtype == dtype
        losses[method] = [np.square(x @ error).mean() for x in (inputs, others)]
    assert (np.array(losses["gptq"]) < 0.5 * np.array(losses["rtn"])).all()


def test_inputs_that_are_never_there_and_none_at_all() -> None:
    weight = np.random.default_rng(3).normal(size=(INPUTS, OUTPUTS)).astype(np.float32)
    weight[:, 0] = 0
    weight[:, 1] = np.abs(weight[:, 1])  # of one sign
    inputs = correlated_inputs()
    inputs[:, 5:60] = 0
    for moments, zero_points in itertools.product(
        (inputs.T @ inputs, np.zeros((INPUTS, INPUTS))), (False, True)
    ):
        way = WeightQuantization(4, 32, "gptq", zero_points)
        result = dequantized(fitted(weight, moments, way), way)
        assert np.isfinite(result).all()
        assert (result[:, 0] == 0).all()
        assert np.abs(result - weight)[5:60].max() < (
            1.0 if zero_points else 0.5
        )  # rounded all the same


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_blocks_of_zeros(dtype: type, zero_points: bool) -> None:
    """Their scale is too small for float16; the columns after them are made up for as ever."""
    weight = np.random.default_rng(3).normal(size=(INPUTS, OUTPUTS)).astype(dtype)
    weight[-32:] = 0
    inputs, way = correlated_inputs(), WeightQuantization(4, 32, "gptq", zero_points)
    found = fitted(weight, inputs.T @ inputs, way)
    error = dequantized(found, way) - weight.astype(np.float64)
    assert np.array_equal(error[-32:], np.zeros((32, OUTPUTS)))
    assert np.abs(error).max() < 1


TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the morning comes. "


def test_the_room_that_fitting_takes_is_asked_for_before_it_begins(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, stages = shutil.disk_usage(tmp_path), list[str]()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PackageError, match="fitting the weights to the text needs about"):
        AutoModelForCausalLM.from_pretrained(llama_package).compile(
            tmp_path / "fitted",
            ctx_len=64,
            weights="int4",
            preset="speed",
            calibration_text=[TEXT * 4],
            progress=lambda stage, _: stages.append(stage),
        )
    assert stages[1:] == ["fitting weights to the text"], "and no progress of it"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_package_fitted_to_a_text(llama_package: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_package)
    stages: list[str] = []
    table = {"layers.*": "int8", "lm_head": "int4"}
    options: dict[str, Any] = {"ctx_len": 64, "weights": table, "preset": "speed", "block_size": 32}
    fitted = model.compile(
        tmp_path / "fitted",
        calibration_text=[TEXT * 4],
        progress=lambda stage, _: stages.append(stage),
        **options,
    )
    assert "fitting weights to the text" in stages
    assert [path.name for path in tmp_path.iterdir()] == ["fitted"], "nothing is left beside it"
    compilation = fitted.package.manifest.compilation
    figures = compilation.quantization
    assert (figures["method"], figures["preset"]) == ("gptq", "speed")
    names = {
        f"layers.{layer}.{role}"
        for layer in (0, 1)
        for role in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    }
    assert figures["bits"] == dict.fromkeys(names, "int8:32") | {
        "lm_head": "int4:32",
        "embed_tokens": "int4:32",
    }
    nodes = ir.load(fitted.package.path / "decoder.onnx").graph.all_nodes()
    bits = {
        (node.op_type, node.attributes.get_int("bits", 0))
        for node in nodes
        if "bits" in node.attributes
    }
    assert bits == {("MatMulNBits", 8), ("MatMulNBits", 4), ("GatherBlockQuantized", 4)}
    assert evaluate(fitted, TEXT, against=model).packages[0].comparisons[0].kl.value < 0.05
    assert fitted.generate("The quick", max_new_tokens=3, do_sample=False).token_ids[0]
