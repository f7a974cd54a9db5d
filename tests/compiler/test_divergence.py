"""The divergence: of equal graphs, of different ones, and of graphs with a fixed batch."""

from __future__ import annotations

import shutil
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import agreement, divergence, trial
from qsample.compiler.compile import compile_package
from qsample.compiler.divergence import measure_divergence, softmax
from qsample.compiler.options import CompileOptions
from qsample.errors import CompileError
from qsample.graph.runner import GraphRunner
from qsample.package.divergence import Divergence
from qsample.package.manifest import Compilation
from qsample.package.package import Package, read_package


@pytest.mark.ci
def test_divergence_of_equal_and_of_different_graphs(llama_package: Path, tmp_path: Path) -> None:
    package = read_package(llama_package)
    same = measure_divergence(package, package.path, package.interface, 32)
    assert same.kl.value == pytest.approx(0.0, abs=1e-7)
    assert same.agreement.value == 1.0
    assert same.perplexity_ratio.value == pytest.approx(1)

    model = ir.load(package.file("decoder.onnx"))
    head = next(
        node
        for node in reversed(list(model.graph))
        if node.op_type == "MatMul" and node.inputs[1].is_initializer()
    )  # type: ignore[union-attr]
    tensor = head.inputs[1].const_value  # type: ignore[union-attr]
    head.inputs[1].const_value = ir.Tensor(tensor.numpy() * np.float32(3), name=tensor.name)  # type: ignore[union-attr]
    ir.save(model, tmp_path / "decoder.onnx", external_data="decoder.onnx.data")
    shutil.copy(package.file("initial_state.onnx"), tmp_path)
    other = measure_divergence(package, tmp_path, package.interface, 32)
    assert other.kl.value > 0.1
    assert other.kl.low < other.kl.value < other.kl.high
    assert other.perplexity_ratio.value > 1


def test_a_distribution_is_that_of_float64() -> None:
    logits = np.random.default_rng(0).normal(0, 9, (3, 5000)).astype(np.float32)
    logits[:, ::7] = -np.inf
    exact = np.exp(logits.astype(np.float64))
    found = softmax(logits)
    np.testing.assert_allclose(found.p, exact / exact.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(found.normalizer, np.log(exact.sum(-1, keepdims=True)), rtol=1e-7)


def test_the_gates_open_one_graph_at_a_time(
    small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert [path == small.path for path, _ in opened] == [False, True, True, False]


def test_figures_are_those_of_numpy(small: Package, tmp_path: Path) -> None:
    """The longer way round, in float64: both graphs read the text again; every place that the model chose counts."""
    options = CompileOptions(ctx_len=24, weights="int4", max_divergence=100)
    package = compile_package(small, tmp_path / "int4", options)
    found = Divergence.of(package)
    assert found is not None
    text = divergence._written(small, 24, lambda fraction: None)
    readers = [
        GraphRunner(trial.logits_of(one.path, one.interface), one.path, one.interface, 24)
        for one in (small, package)
    ]
    states = [reader.start(len(text.prompt)) for reader in readers]
    ids, kl, same, ratio = text.rows, [], [], []
    for column in range(ids.shape[1] - 1):
        lengths = np.ones(len(ids), np.int64)
        results = [
            reader.step(ids[:, column : column + 1], lengths, state)["logits"].astype(np.float64)
            for reader, state in zip(readers, states, strict=True)
        ]
        step = column - (text.prompt.shape[1] - 1)
        if step < 0:
            continue
        x, y = (one - np.log(np.exp(one).sum(-1, keepdims=True)) for one in results)
        chosen = text.scored[step]
        kl += list((np.exp(x) * (x - y)).sum(-1)[chosen])
        same += list((x.argmax(-1) == y.argmax(-1))[chosen])
        following = ids[:, column + 1 : column + 2]
        ratio += list(np.take_along_axis(x - y, following, -1)[chosen, 0])
    assert found.tokens == len(kl)
    assert found.kl.value == pytest.approx(np.mean(kl), rel=1e-4)
    assert found.agreement.value == np.mean(same)
    assert found.perplexity_ratio.value == pytest.approx(np.exp(np.mean(ratio)), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_package_for_few_rows_is_measured_on_the_same_text(
    batch_size: int, small: Package, tmp_path: Path
) -> None:
    found = []
    for size in (batch_size, None):
        options = CompileOptions(batch_size=size, ctx_len=24, weights="int8")
        found.append(Divergence.of(compile_package(small, tmp_path / str(size), options)))
    assert found[0].tokens == found[1].tokens
    assert found[0].kl.value == pytest.approx(found[1].kl.value, rel=0.02)
    assert 0 < found[0].kl.value < 0.01


def test_divergence_of_manifests(small: Package) -> None:
    """None without a quantization, and for the figures of older versions."""
    assert Divergence.of(small) is None
    old = {
        "tokens": 256,
        "kl": 0.07,
        "kept_kl": 0.1,
        "agreement": 0.8,
        "perplexity": 2.0,
        "quantized_perplexity": 2.1,
    }
    compilation = Compilation(
        "cpu", ("CPUExecutionProvider",), None, 24, {}, {}, quantization={"divergence": old}
    )
    assert (
        Divergence.of(
            replace(small, manifest=replace(small.manifest, kind="device", compilation=compilation))
        )
        is None
    )


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
    with pytest.raises(CompileError, match="float16 weights change the model too much: KL nan"):
        compile_package(replace(package, path=source), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


SURE = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
OTHER = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))


def test_figures_of_a_token() -> None:
    """By hand: the divergence of (1/4, 1/2, 1/4) from (1/2, 1/4, 1/4); logits are no probabilities yet."""
    for shift in (0.0, 7.0):
        kl, same, ratio = divergence._figures(SURE + shift, OTHER, np.array([[0]]))
        np.testing.assert_allclose(kl, [0.25 * np.log(2)], atol=1e-6)
        assert same.tolist() == [False]
        np.testing.assert_allclose(ratio, [np.log(2)], atol=1e-6)
    _, same, ratio = divergence._figures(SURE, OTHER, np.array([[1]]))
    np.testing.assert_allclose(ratio, [-np.log(2)], atol=1e-6)
    kl, same, ratio = divergence._figures(SURE, SURE - 1, np.array([[2]]))
    assert kl[0] >= 0
    np.testing.assert_allclose([kl[0], ratio[0]], 0, atol=1e-6)
    assert same.tolist() == [True]
    masked = np.array([[0.0, -np.inf, 0.0]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kl, _, _ = divergence._figures(masked, masked, np.array([[0]]))
    assert kl.tolist() == [0.0], "what both mask does not differ, and is no cause to warn"


def own_text(rows: int, opening: int, tokens: int) -> Any:
    """A text of those sizes, whose logits are sure; the last row's second token is the host's."""
    scored = [np.ones(rows, bool) for _ in range(tokens)]
    scored[1][-1] = False
    return SimpleNamespace(
        opening=SimpleNamespace(text="documents"),
        prompt=np.arange(rows * opening).reshape(rows, opening),
        ids=[np.full((rows, 1), number % 3) for number in range(tokens)],
        scored=scored,
        logits=[np.repeat(SURE, rows, 0)] * tokens,
    )


@pytest.mark.parametrize("at_once", [True, False])
def test_a_text_is_read_token_by_token(at_once: bool) -> None:
    """The opening in one call, or as the rest; the last token is not read. Only the rows of the part are."""
    text = own_text(rows=4, opening=3, tokens=3)
    calls: list[Any] = []

    def step(ids: Any, lengths: Any) -> dict[str, Any]:
        calls.append((ids.tolist(), lengths.tolist()))
        return {"logits": np.repeat(OTHER, len(ids), 0)}

    places = list(divergence._read(step, text, slice(2, 4), at_once=at_once))
    opening = (
        [([[6, 7, 8], [9, 10, 11]], [3, 3])]
        if at_once
        else [([[6 + n], [9 + n]], [1, 1]) for n in range(3)]
    )
    assert calls == [*opening, ([[0], [0]], [1, 1]), ([[1], [1]], [1, 1])]
    assert [place.row for place in places] == [2, 3, 2, 2, 3]
    assert [round(place.ratio / float(np.log(2))) for place in places] == [1, 1, -1, 0, 0]
    assert not any(place.same for place in places)


@pytest.mark.parametrize(
    ("rows", "parts", "expected"),
    [(None, 1, [0.4, 0.8, 1.0]), (16, 2, [0.4, 0.8, 0.9, 1.0])],
)
def test_what_reads_and_how_far_it_is(
    rows: int | None, parts: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of the folder, in the kernels' own layout; or what the caller makes, a token a call."""
    text, made, read = own_text(32, 2, 2), list[Any](), list[Any]()

    def written(source: Any, capacity: int, progress: Any) -> Any:
        assert capacity == 24
        progress(0.5)
        progress(1.0)
        return text

    class Runner:
        def __init__(self, *given: Any) -> None:
            made.append(given)

        def start(self, rows: int) -> int:
            return rows

        def step(self, ids: Any, lengths: Any, state: int) -> dict[str, Any]:
            assert state == len(ids)
            read.append(ids.shape[1])
            return {"logits": np.repeat(SURE, len(ids), 0)}

    nibbles: list[Any] = []
    monkeypatch.setattr(divergence, "_written", written)
    monkeypatch.setattr(divergence, "GraphRunner", Runner)
    monkeypatch.setattr(divergence, "logits_of", lambda folder, interface: (folder, interface))
    monkeypatch.setattr(divergence, "in_nibbles", nibbles.append)
    nothing: Any = None
    for providers in (("CPUExecutionProvider",), ("Device", "CPUExecutionProvider")):
        told: list[float] = []
        given: Any = (nothing, Path("/quantized"), "interface", 24, providers)
        found = measure_divergence(*given, told.append, rows=rows)
        assert told == pytest.approx(expected)
        assert made.pop() == (
            (Path("/quantized"), "interface"),
            Path("/quantized"),
            "interface",
            24,
            providers,
        )
        assert (found.text, found.tokens, found.agreement.value) == ("documents", 63, 1.0)
        assert found.perplexity_ratio.value == pytest.approx(1.0)
    assert nibbles == [(Path("/quantized"), "interface")], "for the CPU"
    assert read == [2, 1] * parts * 2
    read.clear()
    asked: list[int] = []

    def runner(rows: int) -> Runner:
        asked.append(rows)
        return Runner()

    measure_divergence(nothing, Path("/quantized"), nothing, 24, rows=rows, runner=runner)
    assert asked == [rows or 32]
    assert read == [1, 1, 1] * parts
