"""Compiling what is no plain transformer: recurrent layers in a Scan with states, attention through plain operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qsample import AutoModelForCausalLM, cli
from qsample.auto_model import PackagedModel
from qsample.contract import Features
from qsample.exporters.export import export_model
from tests.architectures.configs import tiny_model

PROMPTS = [[5, 9, 31, 7, 120, 44, 3, 260, 12], [44, 3]]
KINDS = [
    "lfm2",
    "bloom",
    "qwen3_next",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("mamba", "kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "bailing_hybrid")
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackagedModel:
    path = tmp_path_factory.mktemp(request.param) / "package"
    package = export_model(tiny_model(request.param), None, path, Features(), model_id=request.param)
    return PackagedModel(package)


def tokens(model: PackagedModel) -> list[list[int]]:
    opened = AutoModelForCausalLM.from_pretrained(model.package.path)
    return opened.generate(PROMPTS, do_sample=False, max_new_tokens=10, eos_token_id=()).token_ids


def test_compiled_in_float_it_chooses_the_same_tokens(
    portable: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = portable.compile(tmp_path / "compiled", ctx_len=64)
    assert tokens(compiled) == tokens(portable)

    assert cli.run(["inspect", str(compiled.package.path)]) == 0
    shown = capsys.readouterr().out
    interface = compiled.package.interface
    for word in ("Placement", "self-test", "decoder.onnx", *(("Scan",) if interface.recurrent else ("MatMul",))):
        assert word in shown
    if interface.recurrent:
        assert f"past_key_values.{interface.recurrent[0].layer}." in shown


@pytest.mark.slow
def test_compiled_in_four_bits_it_stays_close(portable: PackagedModel, tmp_path: Path) -> None:
    compiled = portable.compile(tmp_path / "compiled", ctx_len=64, weights="int4", block_size=16)
    compilation = compiled.package.manifest.compilation
    assert compilation is not None
    assert compilation.quantization is not None
    assert compilation.quantization["matrices"] > 0
    assert 0 < compilation.quantization["divergence"]["kl"] < 0.5
    found = np.array(tokens(compiled))
    assert found.shape == (2, 10)
