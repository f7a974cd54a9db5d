"""Of a decoder file it is told what it is, and whether bake takes it, without running it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from qsample.addons.bake import attention
from qsample.addons.bake.conventions import ForeignGraph, refusal
from qsample.addons.bake.describe import _operators, describe
from qsample.cli import run
from qsample.errors import QsampleError
from tests.helpers.foreign import GROUPED, MOBIUS, PLAIN, TRANSFORMERS, edited

Decoder = Callable[[str], tuple[Path, str | None]]


@pytest.mark.parametrize(
    ("kind", "layers", "operators"),
    [
        (
            "genai_cpu_int4",
            "2 attend through GroupQueryAttention, a cache that grows, 2 heads of 16",
            "MatMulNBits",
        ),
        (
            "optimum_gpt2",
            "2 attend through plain operators, a cache that grows, 4 heads of 8",
            "Softmax",
        ),
        (
            "mobius_gemma3",
            "2 attend through ONNX's Attention, a cache that grows, 2 heads of 16",
            "Attention",
        ),
        (
            "mobius_static_qwen3",
            "2 attend through ONNX's Attention, a cache of 48 tokens, 2 heads",
            "TensorScatter",
        ),
        (
            "mobius_qwen3_next",
            "1 attend through ONNX's Attention, a cache that grows",
            "LinearAttention",
        ),
    ],
)
def test_what_a_file_is(kind: str, layers: str, operators: str, decoder: Decoder) -> None:
    (description,) = describe(decoder(kind)[0])
    assert description.layers.startswith(layers)
    assert operators in description.operators
    assert description.refusal is None
    assert (description.dtype, description.vocab_size) == ("float32", 128)
    assert description.states == (2 if kind == "mobius_qwen3_next" else 0)
    assert description.bits == ((4,) if kind == "genai_cpu_int4" else ())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*GROUPED, *PLAIN, *MOBIUS, *TRANSFORMERS])
def test_what_is_baked_is_not_refused(kind: str, decoder: Decoder) -> None:
    folder, file = decoder(kind)
    assert [each.refusal for each in describe(folder / file if file else folder)] == [None]


def test_the_files_of_a_folder(
    decoder: Decoder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, _ = decoder("community_gqa/onnx/model.onnx")
    assert run(["inspect", str(folder), "--json"]) == 0
    files = {Path(each["file"]).stem: each for each in json.loads(capsys.readouterr().out)}
    assert len(files) == 7
    assert [name for name, each in files.items() if each["refusal"]] == ["model_quantized"]
    assert "a row would depend on the rest of its batch" in files["model_quantized"]["refusal"]

    (folder_of_one := tmp_path / "one").mkdir()
    (folder_of_one / "broken.onnx").write_bytes(b"no")
    assert run(["inspect", str(folder_of_one)]) == 0
    assert "not an ONNX file" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(QsampleError, match="not an ONNX file"):
        describe(folder_of_one / "broken.onnx")


def test_constants_with_defaults_are_no_inputs(decoder: Decoder, tmp_path: Path) -> None:
    folder, _ = decoder("genai_cpu_int4")
    changed = edited(
        folder,
        tmp_path / "changed",
        lambda model: model.graph.inputs.extend(model.graph.initializers.values()),
    )
    (plain,) = describe(folder)
    (description,) = describe(changed)
    assert description.refusal is None
    assert description.inputs == plain.inputs


DECISIVE = (
    "GroupQueryAttention MultiHeadAttention PagedAttention Softmax LinearAttention CausalConvWithState TensorScatter "
    "MoE QMoE MatMulNBits MatMulBnb4 MatMulInteger Scan Loop If Attention"
)


def test_the_operators_that_decide_how_a_file_is_baked() -> None:
    nodes = [ir.node(name, []) for name in (*DECISIVE.split(), "Softmax", "MatMul", "Add")]
    nodes.append(ir.node("Attention", [], domain="com.microsoft"))
    model = ir.Model(ir.Graph([], [], nodes=nodes), ir_version=10)
    assert [*_operators(model)] == [*DECISIVE.split(), "Softmax", "com.microsoft.Attention"]


def test_an_attention_that_bake_refuses_is_said(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(foreign: ForeignGraph) -> None:
        raise refusal(foreign.path, "its attention is not causal")

    monkeypatch.setattr(attention, "check_attentions", refuse)
    (found,) = describe(decoder("genai_cpu_int4")[0])
    assert (found.refusal, found.layers) == ("its attention is not causal", "")
