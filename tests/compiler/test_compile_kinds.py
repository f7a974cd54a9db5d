"""Compiling what is no plain transformer: recurrent layers with states, attention through plain operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from qsample import AutoModelForCausalLM, cli
from qsample.checkpoints.checkpoint import Origin
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Features
from qsample.exporters.export import LoadedModel, export_model
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.models.model import PackagedModel
from qsample.package.package import read_package
from tests.architectures.configs import tiny_model
from tests.helpers.tiny_models import export_without_sampler, random_model

PROMPTS = [[5, 9, 31, 7, 120, 44, 3, 260, 12], [44, 3]]
# Model type → an operator that its layers are made of.
FAST = {"qwen3_5_text": "LinearAttention"}
OPERATORS = {
    **FAST,
    "lfm2": "CausalConvWithState",
    "bloom": "MatMul",
    **dict.fromkeys(
        ("kimi_linear", "olmo_hybrid", "qwen3_next", "qwen3_5_moe_text", "bailing_hybrid"),
        "LinearAttention",
    ),
    **dict.fromkeys(("mamba", "mamba2"), "LinearAttention"),
}
KINDS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in OPERATORS]


@pytest.fixture(scope="module", params=KINDS)
def portable(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    exported: Callable[..., Path],
) -> PackagedModel:
    if request.param in FAST:
        return PackagedModel(read_package(exported(request.param)))
    path = tmp_path_factory.mktemp(request.param) / "package"
    loaded = LoadedModel(tiny_model(request.param), None, Origin(request.param))
    package = export_model(loaded, path, Features())
    return PackagedModel(package)


def tokens(
    model: PackagedModel, prompts: list[list[int]] = PROMPTS, prefill_chunk_size: int | None = None
) -> list[list[int]]:
    opened = AutoModelForCausalLM.from_pretrained(model.package.path)
    options = {
        "do_sample": False,
        "max_new_tokens": 10,
        "eos_token_id": (),
        "prefill_chunk_size": prefill_chunk_size,
    }
    return opened.generate(prompts, **options).token_ids


def test_compiled_in_float_it_chooses_the_same_tokens(
    portable: PackagedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = portable.compile(tmp_path / "compiled", ctx_len=64)
    assert tokens(compiled) == tokens(portable)

    assert cli.run(["inspect", str(compiled.package.path)]) == 0
    shown = capsys.readouterr().out
    interface = compiled.package.interface
    model_type = compiled.package.manifest.source.model_type
    for word in ("Placement", "self-test", "decoder.onnx", OPERATORS[model_type]):
        assert word in shown
    if interface.recurrent:
        assert f"past_key_values.{interface.recurrent[0].layer}." in shown


@pytest.mark.slow
def test_compiled_in_four_bits_it_stays_close(portable: PackagedModel, tmp_path: Path) -> None:
    compiled = portable.compile(tmp_path / "compiled", ctx_len=64, weights="int4", block_size=16)
    compilation = compiled.package.manifest.compilation
    assert compilation.quantization["matrices"] > 0
    assert 0 < compilation.quantization["divergence"]["kl"]["value"] <= 1
    found = tokens(compiled)
    assert np.array(found).shape == (2, 10)

    # Neither the batch nor the pieces that a prompt is read in make a difference, though activations are rounded. A
    # piece of one token would, in an attention: it is another kernel's.
    assert [tokens(compiled, [prompt])[0] for prompt in PROMPTS] == found
    for size in (3, 7):
        assert tokens(compiled, prefill_chunk_size=size) == found

    # All that a token is multiplied by is quantized, in the bodies of loops as well.
    graph = ir.load(compiled.package.path / "decoder.onnx").graph
    weights = [
        node.inputs[1].const_value
        for node in graph.all_nodes()
        if node.op_type == "MatMul" and node.inputs[1]
    ]
    left = [weight.shape for weight in weights if weight is not None and weight.shape[0] % 16 == 0]
    assert left == []


@pytest.mark.slow
def test_keys_of_padding_in_heads_as_wide_as_models_have_them(tmp_path: Path) -> None:
    """They are zeros, and their norm's eps, 1e-6 over the head's width, is less than 1e-8."""
    model = random_model("qwen3_5_text", linear_key_head_dim=128)
    package = export_without_sampler(model, tmp_path / "package")
    compiled = compile_package(package, tmp_path / "compiled", CompileOptions(ctx_len=16))
    ids, logits = np.array([[5, 9, 31, 7], [120, 44, 3, 3]]), []
    for path in (package.path, compiled.path):
        runner = GraphRunner(load_graph(path / "decoder.onnx"), path, package.interface, 16)
        state = runner.start(2)
        logits.append([runner.step(ids, np.array([4, 2]), state)["logits"]])
        logits[-1].append(runner.step(ids[:, :1], np.ones(2), state)["logits"])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
