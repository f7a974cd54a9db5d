"""Compiling mixtures of experts: what is packed, that rows do not depend on their batch, and bugs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from qsample import AutoModelForCausalLM, cli
from qsample.checkpoints.checkpoint import Origin
from qsample.compiler.quantize.blocks import QuantizedWeight
from qsample.contract.arrays import Array
from qsample.contract.interface import Features
from qsample.errors import CompileError
from qsample.exporters.export import LoadedModel, export_model
from qsample.models.model import PackagedModel
from tests.helpers.mixtures import mixture

PROMPTS = [[5, 9, 31, 7, 120, 44, 3, 260, 12], [44, 3], [7, 8, 9, 10, 11, 12]]
LENGTH = {"max_new_tokens": 8, "eos_token_id": ()}


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> PackagedModel:
    path = tmp_path_factory.mktemp("mixture") / "package"
    loaded = LoadedModel(mixture("qwen2_moe"), None, Origin("mixture"))
    return PackagedModel(export_model(loaded, path, Features()))


def operators(model: PackagedModel) -> list[str]:
    return [node.op_type for node in ir.load(model.package.path / "decoder.onnx").graph]


def check_rows(model: PackagedModel) -> None:
    """Greedy and sampled, the tokens of a row alone are those that it has in a batch."""
    opened = AutoModelForCausalLM.from_pretrained(model.package.path)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "top_k": 40}):
        together = opened.generate(PROMPTS, seed=3, **LENGTH, **options).token_ids
        for row, prompt in enumerate(PROMPTS):
            alone = opened.generate([prompt], seed=3 + row, **LENGTH, **options).token_ids
            assert alone == [together[row]]


@pytest.mark.ci
@pytest.mark.parametrize("weights", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_everything_is_packed(
    weights: str, portable: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = portable.compile(tmp_path / "compiled", ctx_len=64, weights=weights, block_size=16)
    names = operators(compiled)
    assert names.count("QMoE") == 1
    assert "MoE" not in names
    compilation = compiled.package.manifest.compilation
    figures = compilation.quantization
    assert (figures["experts"], figures["expert_block_size"]) == (8, 16)
    # What scores the experts (8 of 64), norms, biases, numbers of the sampler: nothing else.
    assert 4 * 8 * 64 < figures["float_bytes"] < 4 * (8 * 64 + 512)
    assert figures["bytes_before"] > 4 * 8 * 3 * 64 * 32  # experts, and more
    assert figures["divergence"]["kl"]["value"] < {"int4": 0.2, "int8": 0.005}[weights]
    check_rows(compiled)

    assert cli.run(["inspect", str(compiled.package.path)]) == 0
    assert "and 8 experts" in " ".join(capsys.readouterr().out.split())


@pytest.mark.ci
def test_in_float_it_chooses_the_same_tokens(portable: PackagedModel, tmp_path: Path) -> None:
    compiled = portable.compile(tmp_path / "compiled", ctx_len=64)
    assert operators(compiled).count("MoE") == 1
    rows = [
        AutoModelForCausalLM.from_pretrained(model.package.path) for model in (portable, compiled)
    ]
    first, second = (model.generate(PROMPTS, do_sample=False, **LENGTH).token_ids for model in rows)
    assert first == second


@pytest.mark.slow
def test_stored_in_half_the_space_they_compute_the_same(
    portable: PackagedModel, tmp_path: Path
) -> None:
    compiled = portable.compile(tmp_path / "compiled", ctx_len=64, weights="float16")
    constants = ir.load(compiled.package.path / "decoder.onnx").graph.initializers
    dtypes = {value.dtype for name, value in constants.items() if ".experts." in name}
    assert dtypes == {ir.DataType.FLOAT16}
    compilation = compiled.package.manifest.compilation
    assert compilation.quantization["divergence"]["kl"]["value"] < 1e-4


@pytest.mark.ci
def test_the_divergence_finds_experts_in_another_order(
    portable: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = QuantizedWeight._quantize_rows

    def rolled(
        weight: QuantizedWeight, source: ir.TensorProtocol, expert: int, *rest: Any
    ) -> Array:
        return original(weight, source, (expert + 1) % (weight.experts or 1), *rest)

    monkeypatch.setattr(QuantizedWeight, "_quantize_rows", rolled)
    with pytest.raises(CompileError, match="change the model too much"):
        portable.compile(tmp_path / "compiled", ctx_len=64, weights="int8", max_divergence=0.05)
