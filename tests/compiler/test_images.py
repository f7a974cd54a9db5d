"""Packages that read images (M-RoPE, deepstack, adapters), compiled: what the self-test sees of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler import agreement
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.passes import several_tokens
from qsample.contract.tensors import IMAGE_FEATURES, IMAGE_ROWS, POSITION_OFFSETS
from qsample.errors import CompileError
from qsample.graph.evaluate import GraphPart
from qsample.package.package import Package, read_package

TYPE = "qwen3_vl"
QUANTIZED: dict[str, Any] = {"weights": "int4", "kv_cache_dtype": "int8", "max_divergence": 1e9}


@pytest.fixture(scope="module")
def adapted(image_package: Callable[..., Path]) -> Package:
    features: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 4, "filters": ["typical_p"]}
    flags = dict.fromkeys(("allowed_tokens", "logit_bias", "logprobs"), True)
    return read_package(image_package(TYPE, **features, **flags))


@pytest.mark.ci
def test_weights_cache_and_adapters_go_with_images(adapted: Package, tmp_path: Path) -> None:
    """Each layer rotates queries and keys by a table of the call; names of adapted layers are PEFT's."""
    assert {target.path.split(".layers.")[0] for target in adapted.interface.adapters} == {
        "model.language_model"
    }
    package = compile_package(adapted, tmp_path / "cpu", CompileOptions(ctx_len=64, **QUANTIZED))
    nodes = [node.op_type for node in ir.load(package.path / "decoder.onnx").graph]
    assert nodes.count("RotaryEmbedding") == 2 * nodes.count("GroupQueryAttention") == 4
    assert "Cos" in nodes
    assert package.interface.image == adapted.interface.image


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [pytest.param(IMAGE_ROWS.name, marks=pytest.mark.slow), IMAGE_FEATURES, POSITION_OFFSETS.name],
)
def test_the_self_test_sees_images(
    adapted: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A compiled graph that reads other numbers than the portable graph is refused."""
    own = agreement._device

    def other(*arguments: Any) -> Any:
        device = own(*arguments)
        step = device.step

        def changed(ids: Any, lengths: Any, state: Any, parameters: Any) -> Any:
            values = parameters[name]
            return step(ids, lengths, state, {**parameters, name: np.roll(values, 1, axis=-1)})

        device.step = changed
        return device

    monkeypatch.setattr(agreement, "_device", other)
    with pytest.raises(CompileError, match="self-test failed"):
        compile_package(adapted, tmp_path / "cpu", CompileOptions(ctx_len=64))


@pytest.mark.parametrize("rank", [2, 3])
def test_inputs_of_guesses(rank: int) -> None:
    """Guesses are text, at positions that follow the row's last token."""
    shapes = {"step_ids": ["B", "J"], "given": ["B", "S", 3][:rank]}
    types = {"step_ids": ir.DataType.INT64, "given": ir.DataType.INT32}
    ids, given = (
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(types[name]))
        for name, shape in shapes.items()
    )
    given.name = POSITION_OFFSETS.name if rank == 3 else IMAGE_ROWS.name
    last = ir.node("Identity", [given])
    graph = ir.Graph([ids, given], [], nodes=[last], opset_imports={"": 21}, name="guesses")
    graph.outputs.append(several_tokens._continued(last, given, ids))
    graph.outputs[0].type = given.type
    session = ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    numbers = np.random.default_rng(0).integers(0, 9, (2, 1, 3)[:rank]).astype(np.int32)
    (got,) = session.run(None, {"step_ids": np.zeros((2, 4), np.int64), given.name: numbers})
    more = np.repeat(numbers, 3, axis=1) if rank == 3 else np.full((2, 3), -1)
    np.testing.assert_array_equal(got, np.concatenate([numbers, more], axis=1))


@pytest.mark.ci
def test_guesses_behind_an_image(
    smolvlm_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test compares steps of several tokens with steps of one, bit by bit, behind an image."""
    options = CompileOptions(ctx_len=64, num_speculative_tokens=4, **QUANTIZED)
    compile_package(read_package(smolvlm_package), tmp_path / "good", options)
    monkeypatch.setattr(several_tokens, "IMAGE_ROWS", replace(IMAGE_ROWS, off=0))
    with pytest.raises(
        CompileError, match="differ between a step of several tokens and steps of one"
    ):
        compile_package(read_package(smolvlm_package), tmp_path / "bad", options)


@pytest.mark.ci
def test_weights_are_fitted_to_text(
    smolvlm_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    own = GraphPart.__call__

    def run(part: GraphPart, feeds: Any, *others: Any) -> Any:
        seen.append(feeds.get(IMAGE_ROWS.name))
        return own(part, feeds, *others)

    monkeypatch.setattr(GraphPart, "__call__", run)
    text = [list(range(5, 75))] * 2
    given: dict[str, Any] = {"preset": "speed", "calibration_text": text, "weights": "int4"}
    compile_package(
        read_package(smolvlm_package),
        tmp_path / "gptq",
        CompileOptions(ctx_len=64, max_divergence=1e9, **given),
    )
    rows = [rows for rows in seen if rows is not None]
    assert rows
    assert all((row == -1).all() for row in rows)
