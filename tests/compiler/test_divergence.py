"""The divergence: of equal graphs, of different ones, and of graphs with a fixed batch."""

from __future__ import annotations

import shutil
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import agreement, divergence, trial
from qsample.compiler.compile import compile_package
from qsample.compiler.divergence import ROWS, measure_divergence, softmax
from qsample.compiler.options import CompileOptions
from qsample.errors import CompileError
from qsample.graph.runner import GraphRunner
from qsample.package.package import Package, read_package


@pytest.mark.ci
def test_divergence_of_equal_and_of_different_graphs(llama_package: Path, tmp_path: Path) -> None:
    package = read_package(llama_package)
    same = measure_divergence(package.path, package.path, package.interface, 32)
    assert same.kl == pytest.approx(0.0, abs=1e-7)
    assert same.kept_kl == pytest.approx(0.0, abs=1e-7)
    assert same.agreement == 1.0
    assert same.perplexity == pytest.approx(same.quantized_perplexity)
    # No token is worse than uniform.
    assert 1 < same.perplexity < package.interface.vocab_size

    model = ir.load(package.file("decoder.onnx"))
    head = next(
        node for node in reversed(list(model.graph)) if node.op_type == "MatMul" and node.inputs[1].is_initializer()
    )  # type: ignore[union-attr]
    tensor = head.inputs[1].const_value  # type: ignore[union-attr]
    head.inputs[1].const_value = ir.Tensor(tensor.numpy() * np.float32(3), name=tensor.name)  # type: ignore[union-attr]
    ir.save(model, tmp_path / "decoder.onnx", external_data="decoder.onnx.data")
    shutil.copy(package.file("initial_state.onnx"), tmp_path)
    other = measure_divergence(package.path, tmp_path, package.interface, 32)
    assert other.kl > 0.1
    assert other.kept_kl > 0.1
    assert other.quantized_perplexity > other.perplexity


def test_a_distribution_is_that_of_float64() -> None:
    logits = np.random.default_rng(0).normal(0, 9, (3, 5000)).astype(np.float32)
    logits[:, ::7] = -np.inf
    exact = np.exp(logits.astype(np.float64))
    found = softmax(logits)
    np.testing.assert_allclose(found.p, exact / exact.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(found.normalizer, np.log(exact.sum(-1, keepdims=True)), rtol=1e-7)


def test_the_gates_open_one_graph_at_a_time(small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint fills the memory of a machine that its package will run on: both do not fit."""
    opened: list[tuple[Path, weakref.ref[GraphRunner]]] = []

    def open_alone(*arguments: Any, **options: Any) -> GraphRunner:
        assert [path for path, runner in opened if runner() is not None] == []
        runner = GraphRunner(*arguments, **options)
        opened.append((arguments[1], weakref.ref(runner)))
        return runner

    for gate in (agreement, divergence, trial):
        monkeypatch.setattr(gate, "GraphRunner", open_alone)
    compile_package(small, tmp_path / "device", CompileOptions(ctx_len=24, weights="int8"))
    assert [path == small.path for path, _ in opened] == [False, True, False, True]


def test_a_graph_that_leads_its_text_astray() -> None:
    """It nearly always writes token 0, after which the float graph writes that, too: only the first place shows it."""
    reference, quantized = np.zeros((32, 8, 50), np.float32), np.zeros((32, 8, 50), np.float32)
    reference[1:, :, 0] = quantized[:, :, 0] = 8.0
    zeros = np.zeros(8, int)
    figures = divergence._score([[trial.Call(zeros[:, None], zeros + 1, zeros, own) for own in quantized]], [reference])
    assert figures.kl < 0.3
    assert figures.kept_kl > 2


def test_a_text_of_the_float_graph_has_the_same_divergence(small: Package, tmp_path: Path) -> None:
    """The longer way round: the float graph writes, and the quantized graph reads call by call."""
    options = CompileOptions(ctx_len=24, weights="int4", max_divergence=100)
    package = compile_package(small, tmp_path / "int4", options)
    figures = (package.manifest.compilation.quantization or {})["divergence"]
    rng, prompt = np.random.default_rng(0), np.arange(8)[:, None]
    writer = GraphRunner(trial.logits_of(small.path, small.interface), small.path, small.interface, 24)
    step = partial(writer.step, state=writer.start(8))
    text = list(trial.write(step, prompt, np.ones(8, int), 23, divergence.sampled(rng)))
    reader = GraphRunner(trial.logits_of(package.path, small.interface), package.path, package.interface, 24)
    state = reader.start(8)
    kl = []
    for call in text:
        wanted, got = call.logits, reader.step(call.ids, call.lengths, state)["logits"]
        x, y = softmax(wanted), softmax(got)
        kl.append((x.p * (wanted - x.normalizer - got + y.normalizer)).sum(-1))
    assert np.mean(kl) == pytest.approx(figures["kl"], rel=0.3)


def test_a_graph_that_has_the_logits_of_its_last_token_only_is_read_token_by_token(
    small: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = measure_divergence(small.path, small.path, small.interface, 24)
    monkeypatch.setattr(trial, "return_all_logits", lambda model: False)
    by_token = measure_divergence(small.path, small.path, small.interface, 24)
    assert by_token.perplexity == pytest.approx(at_once.perplexity)
    assert by_token.kl == 0.0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_package_for_few_rows_is_measured_on_as_many_tokens(batch_size: int, small: Package, tmp_path: Path) -> None:
    options = CompileOptions(batch_size=batch_size, ctx_len=24, weights="int8")
    package = compile_package(small, tmp_path / "out", options)
    figures = package.manifest.compilation.quantization["divergence"]
    assert figures["tokens"] == ROWS * 23
    assert 0 < figures["kl"] < 0.01


def test_weights_that_float16_cannot_hold_are_refused(llama_package: Path, tmp_path: Path) -> None:
    """One of them is infinite then, the distributions are no numbers, and no number is larger than the limit."""
    source = tmp_path / "source"
    shutil.copytree(llama_package, source)
    model = ir.load(llama_package / "decoder.onnx")
    table = next(node for node in model.graph if node.op_type == "Gather").inputs[0]
    rows = table.const_value.numpy().copy()
    rows[:, 0] = 1e5
    table.const_value = ir.Tensor(rows, name=table.name)
    ir.save(model, source / "decoder.onnx", external_data="decoder.onnx.data")
    package = read_package(llama_package)
    options = CompileOptions(ctx_len=24, weights="float16")
    with pytest.raises(CompileError, match="float16 weights change the model too much: nan nats"):
        compile_package(replace(package, path=source), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
