"""Compiling with weights that are fitted to a text, and with mixed precision: what the package holds, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample import AutoModelForCausalLM
from qsample.compiler.options import CompileOptions
from qsample.compiler.quantize.calibration import Calibration, Wanted, calibrated_levels
from qsample.compiler.quantize.gptq import gptq
from qsample.compiler.quantize.rounding import WeightQuantization
from qsample.errors import CompileError, PackageError
from qsample.evaluation import evaluate
from tests.compiler.quantize.test_gptq import levels
from tests.helpers.small_graphs import small_graph

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the morning comes. "


def test_each_matrix_is_fitted_to_what_the_quantized_ones_before_it_compute(tmp_path: Path) -> None:
    """ids → Gather → first → Relu → second, beside the same in NumPy."""
    rng = np.random.default_rng(0)
    arrays = {
        "table": rng.normal(size=(50, 64)),
        "first": rng.normal(size=(64, 32)),
        "second": rng.normal(size=(32, 48)),
    }
    model = small_graph(
        """g (int64[B,S] input_ids, float[50,64] table, float[64,32] first, float[32,48] second)
            => (float[B,S,48] result) {
            x = Gather (table, input_ids)
            hidden = MatMul (x, first)
            active = Relu (hidden)
            result = MatMul (active, second)
        }""",
        {"x": ["B", "S", 64], "hidden": ["B", "S", 32], "active": ["B", "S", 32], "result": ["B", "S", 48]},
    )
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    constants = {}
    for value in list(model.graph.inputs)[1:]:
        assert value.name is not None
        model.graph.inputs.remove(value)
        value.const_value = ir.Tensor(arrays[value.name], name=value.name)
        model.graph.register_initializer(value)
        constants[value.name] = value
    way = WeightQuantization(4, 32, "gptq")
    nodes = {node.outputs[0].name: node for node in model.graph}
    wanted = [
        Wanted(constants["first"], nodes["hidden"], False, way),
        Wanted(constants["second"], nodes["result"], False, way),
    ]
    sequences = [rng.integers(0, 50, length) for length in (30, 17, 30)]
    told: list[float] = []
    found = calibrated_levels(model, wanted, Calibration(sequences, {}, tmp_path, told.append))

    x = arrays["table"][np.concatenate(sequences)].astype(np.float64)
    first = gptq(arrays["first"], x.T @ x, way)
    numbers = levels(first[0].reshape(32, 2, -1), 4) - first[2].reshape(32, 2, 1).astype(np.int64)
    active = np.maximum(x @ (numbers * first[1].reshape(32, 2, 1)).reshape(32, 64).T, 0)
    second = gptq(arrays["second"], active.T @ active, way)
    for value, expected in ((constants["first"], first), (constants["second"], second)):
        same = levels(np.asarray(found[value][0]), 4) == levels(expected[0], 4)
        assert same.mean() > 0.99  # moments in float32 may round a level to the other side
    assert told == [0.5, 1.0]
    assert len(list(tmp_path.iterdir())) <= 6 + 3, "levels, and what the last part read"
    assert constants["first"].const_value is not None, "the model stays as it is"


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
            quantization_method="gptq",
            calibration_text=[TEXT * 4],
            progress=lambda stage, _: stages.append(stage),
        )
    assert "fitting weights to the text" not in stages
    assert list(tmp_path.iterdir()) == []


def test_a_package_fitted_to_a_text(llama_package: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_package)
    stages: list[str] = []
    options: dict[str, Any] = {"ctx_len": 64, "weights": "int4_mixed", "quantization_method": "gptq"}
    fitted = model.compile(
        tmp_path / "fitted", calibration_text=[TEXT * 4], progress=lambda stage, _: stages.append(stage), **options
    )
    assert "fitting weights to the text" in stages
    assert [path.name for path in tmp_path.iterdir()] == ["fitted"], "nothing is left beside it"
    compilation = fitted.package.manifest.compilation
    assert compilation is not None
    figures = compilation.quantization
    assert figures is not None
    assert (figures["dtype"], figures["method"], figures["mixed"], figures["bits"]) == ("int4_mixed", "gptq", True, 4)
    # Two layers, and both are outer ones: only the embedding has 4 bits.
    assert figures["wide_matrices"] == figures["matrices"] - 1
    nodes = ir.load(fitted.package.path / "decoder.onnx").graph.all_nodes()
    bits = {(node.op_type, node.attributes.get_int("bits", 0)) for node in nodes if "bits" in node.attributes}
    assert bits == {("MatMulNBits", 8), ("GatherBlockQuantized", 4)}
    assert evaluate(fitted, TEXT, against=model).packages[0].comparisons[0].kl.value < 0.05
    assert fitted.generate("The quick", max_new_tokens=3, do_sample=False).token_ids[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4", "quantization_method": "gptq"}, "give it as calibration_text="),
        ({"weights": "int4", "calibration_text": TEXT}, "calibration_text is only read with"),
        ({"quantization_method": "gptq", "calibration_text": TEXT}, "calibration_text is only read with"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        CompileOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration_text": "too short"}, r"calibration_text has 10 tokens; give at least 128"),
        ({"calibration_text": ""}, "calibration_text is empty"),
        ({"calibration_text": 5}, "calibration_text is 5; give a text"),
        ({"calibration_text": TEXT, "provider": "cuda"}, "provider is 'cuda'; take 'hqq'"),
    ],
)
def test_texts_that_nothing_can_be_fitted_to(
    options: dict[str, Any], message: str, llama_package: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_package)
    with pytest.raises(CompileError, match=message):
        model.compile(tmp_path / "out", weights="int4", quantization_method="gptq", ctx_len=64, **options)
    assert list(tmp_path.iterdir()) == []
