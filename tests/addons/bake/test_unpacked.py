"""Files in 2 bits and in 1 bit: a baked package has their numbers, and compiles."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import qsample
from qsample import AutoModelForCausalLM
from qsample.addons.bake.unpacked import unpack_levels
from qsample.cli import run
from qsample.contract.arrays import Array
from qsample.models.model import PackagedModel
from tests.helpers.low_bits import BLOCK, write_low_bits
from tests.helpers.small_graphs import results, small_graph

Decoder = Callable[[str], tuple[Path, str | None]]
PROMPTS = [[1, 17, 40, 23, 9], [1, 88], [1, 30, 31, 32, 33, 34]]


def meant_by(node: ir.Node, slot: int) -> Array:
    """float64 [N, K], the numbers of a weight, from ONNX Runtime's documentation. slot: the index of the levels."""
    bits = node.attributes.get_int("bits", 0)
    order = (slot, 2, 3)
    constants = [node.inputs[index].const_value for index in order]  # type: ignore[union-attr]
    levels, scales, zeros = (tensor.numpy() for tensor in constants if tensor is not None)
    rows = len(levels)
    levels = unpacked(levels.reshape(rows, -1), bits)
    scales = scales.reshape(rows, -1).astype(np.float64)
    zeros = unpacked(zeros.reshape(rows, -1), bits)[:, : scales.shape[1]]
    centred = levels.astype(np.float64) - np.repeat(zeros, BLOCK, 1)
    return centred * np.repeat(scales, BLOCK, 1)


def unpacked(packed: Array, bits: int) -> Array:
    numbers = packed[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
    return numbers.reshape(len(packed), -1)


def bake(decoder: Decoder, name: str, folder: Path) -> tuple[Path, dict[str, Array]]:
    """A baked package of a file `model_{name}.onnx`, and the weights that this file means."""
    source, _ = decoder("community_gqa")
    layout = folder / "layout"
    shutil.copytree(source, layout, ignore=shutil.ignore_patterns("onnx"))
    wide = "model_q4f16.onnx" if name.endswith("f16") else "model_q4.onnx"
    file = layout / "onnx" / f"model_{name}.onnx"
    meant = write_low_bits(source / "onnx" / wide, file, signs=name.startswith("q1"))
    with pytest.warns(UserWarning, match="compared with this file alone"):
        qsample.bake(layout, folder / "baked")
    return folder / "baked", meant


@pytest.mark.ci
@pytest.mark.parametrize("name", ["q2", "q2f16", "q1", "q1f16"])
def test_a_package_has_the_numbers_of_the_file(
    name: str, decoder: Decoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, meant = bake(decoder, name, tmp_path)
    graph = ir.load(path / "decoder.onnx").graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert len(products) == len(meant)
    for node in products:
        scales = str(node.inputs[2].name)  # type: ignore[union-attr]
        assert node.attributes.get_int("bits", 0) == 2
        if node.inputs[1].producer() is None:  # type: ignore[union-attr]
            np.testing.assert_array_equal(meant_by(node, 1), meant[scales.removesuffix("_scales")])
    (table,) = (node for node in graph if node.op_type == "GatherBlockQuantized")
    assert table.attributes.get_int("bits", 0) == (4 if name.startswith("q1") else 2)
    np.testing.assert_array_equal(meant_by(table, 0), meant["embedding"])
    # What is looked up is a constant, and what is only reshaped stays shared.
    reshaped = [node for node in products if node.inputs[1].producer() is not None]  # type: ignore[union-attr]
    assert len(reshaped) == (0 if name.startswith("q1") else 1)
    assert not any("unpack_lut" in constant for constant in graph.initializers)

    assert run(["inspect", str(path)]) == 0
    assert f"{len(meant)} matrices of the checkpoint, 2 bits" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q2", "q1f16"])
def test_a_package_compiles(name: str, decoder: Decoder, tmp_path: Path) -> None:
    path, meant = bake(decoder, name, tmp_path)
    baked = AutoModelForCausalLM.from_pretrained(path)
    assert isinstance(baked, PackagedModel)
    compiled = baked.compile(tmp_path / "cpu", ctx_len=64, max_divergence=1.0)
    quantization = compiled.package.manifest.compilation.quantization
    assert quantization["packed_matrices"] == len(meant)
    assert quantization["divergence"]["kl"]["value"] < 1e-3
    nodes = ir.load(compiled.package.path / "decoder.onnx").graph
    levels = [node.inputs[1] for node in nodes if node.op_type == "MatMulNBits"]
    assert all(value is not None and value.const_value is not None for value in levels)
    greedy = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": ()}
    assert all(len(row) == 8 for row in compiled.generate(PROMPTS, **greedy).token_ids)


def lookup(*, reads_input: bool = False) -> ir.Model:
    """A row of a table whose levels are looked up."""
    rng = np.random.default_rng(0)
    constants = {
        "lut": rng.integers(0, 256, (256, 4)).astype(np.uint8),
        "packed": rng.integers(0, 256, (5, 4)).astype(np.uint8),
        "scales": rng.random((5, 1)).astype(np.float32),
        "shape": np.array([5, 16]),
    }
    source = "given" if reads_input else "packed"
    return small_graph(
        f"""table (int64[n] ids, uint8[5,4] given, uint8[256,4] lut, uint8[5,4] packed, float[5,1] scales,
            int64[2] shape) => (float[n,32] rows) {{
            bytes = Cast <to = 6> ({source})
            found = Gather (lut, bytes)
            levels = Reshape (found, shape)
            rows = com.microsoft.GatherBlockQuantized
                <bits = 4, block_size = 32, gather_axis = 0, quantize_axis = 1> (levels, ids, scales)
        }}""",
        constants=constants,
    )


def test_levels_are_computed_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = {"ids": np.array([0, 4, 4]), "given": np.zeros((5, 4), np.uint8)}
    (before,) = results(lookup(), feeds)
    model = lookup()
    monkeypatch.setattr("qsample.addons.bake.unpacked.GraphPart", None)
    assert unpack_levels(model)
    monkeypatch.undo()
    node = model.graph[-1]
    assert node.inputs[0].shape == ir.Shape((5, 16))  # type: ignore[union-attr]
    assert not unpack_levels(model)  # a second time, there is nothing to do
    (after,) = results(model, feeds)
    np.testing.assert_array_equal(after, before)


def test_levels_that_an_input_decides_stay() -> None:
    model = lookup(reads_input=True)
    assert not unpack_levels(model)
    assert model.graph[-1].inputs[0].producer() is not None  # type: ignore[union-attr]
