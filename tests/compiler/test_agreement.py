"""The self-test: a graph that chooses other tokens is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from qsample.compiler import agreement
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.passes import several_tokens
from qsample.compiler.pipeline import graph_pass
from qsample.compiler.targets import cpu
from qsample.errors import CompileError
from qsample.graph.edit import insert
from qsample.ort.bound_graph import Replays
from qsample.ort.session import Sessions, open_sessions
from qsample.package.package import Package, read_package
from tests.helpers.capturing import CapturingSession, compile_captured


def plant(monkeypatch: pytest.MonkeyPatch, bug: Callable[[ir.Model], bool]) -> None:
    """Have `bug` change every graph after the lean phases of the CPU target."""
    real = cpu.lean_phases
    monkeypatch.setattr(cpu, "lean_phases", lambda *given: [*real(*given), graph_pass(bug)])


def test_self_test_refuses_a_wrong_graph(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def negate_first_norm(model: ir.Model) -> bool:
        """Plant a bug: the first norm of the model has the wrong sign."""
        norm = next(node for node in model.graph if node.op_type == "SimplifiedLayerNormalization")
        weight = norm.inputs[1]
        weight.const_value = ir.tensor(-weight.const_value.numpy())
        return True

    plant(monkeypatch, negate_first_norm)
    with pytest.raises(CompileError, match=r"self-test failed: .* times of 16"):
        compile_package(
            read_package(llama_package), tmp_path / "device", CompileOptions(ctx_len=64)
        )
    assert os.listdir(tmp_path) == []


def test_self_test_refuses_a_weight_that_moves_no_token(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_one_weight(model: ir.Model) -> bool:
        """Plant a bug: a single weight of the head is a little larger."""
        head = next(
            node for node in reversed(list(model.graph)) if node.op_type == "MatMul"
        ).inputs[1]
        weights = head.const_value.numpy().copy()
        weights[3, 40] += 0.02
        head.const_value = ir.tensor(weights)
        return True

    plant(monkeypatch, change_one_weight)
    with pytest.raises(
        CompileError, match="self-test failed: the compiled graph's logits differ from the portable"
    ):
        compile_package(
            read_package(llama_package), tmp_path / "device", CompileOptions(ctx_len=64)
        )


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"weights": "int8"}])
def test_a_sampler_that_is_off_is_refused(
    options: dict[str, Any], llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invert_greedy(model: ir.Model) -> bool:
        """Plant a bug: the sampler reads the logits with the wrong sign."""
        logits = next(
            value for node in model.graph for value in node.outputs if value.name == "logits"
        )
        negative = ir.node("Neg", [logits])
        negative.outputs[0].type, negative.outputs[0].shape = logits.type, logits.shape
        logits.replace_all_uses_with(negative.outputs[0])
        negative.replace_input_with(0, logits)
        model.graph.insert_after(logits.producer(), negative)  # type: ignore[arg-type]
        return False

    real = cpu.merge_equal_nodes  # the first pass over model and sampler
    monkeypatch.setattr(cpu, "merge_equal_nodes", lambda model: invert_greedy(model) or real(model))
    with pytest.raises(CompileError, match=r"self-test failed: .* times of (16|8)"):
        compile_package(
            read_package(llama_package), tmp_path / "device", CompileOptions(ctx_len=64, **options)
        )


def test_self_test_refuses_a_graph_that_reads_padding(
    small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_padding(model: ir.Model) -> bool:
        """Plant a bug: every row is as long as the longest."""
        lengths = next(value for value in model.graph.inputs if value.name == "input_lengths")
        first = model.graph[0]
        longest = insert(first, "ReduceMax", [lengths], [1], {"keepdims": 1})
        alike = insert(first, "Max", [lengths, longest], ["B"])
        for node, index in lengths.uses():
            if node not in (longest.producer(), alike.producer()):
                node.replace_input_with(index, alike)
        return True

    plant(monkeypatch, forget_padding)
    with pytest.raises(CompileError, match=r"self-test failed: .* times of 16"):
        compile_package(small, tmp_path / "device", CompileOptions(ctx_len=64))


class ReplaysNothing(CapturingSession):
    """As a graph that a replay cannot repeat: the first run under a number is right, later ones change nothing."""

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        if not self.captured:
            super().run_with_iobinding(binding, options)


def open_with(
    monkeypatch: pytest.MonkeyPatch, session: type[CapturingSession]
) -> list[CapturingSession]:
    """Have the self-test's decoder captured and replayed; the list gets its sessions."""
    opened: list[CapturingSession] = []

    def capture(package: Package, **options: Any) -> Sessions:
        sessions = open_sessions(package, **options)
        opened.append(session(sessions.decoder))
        decoder: Any = opened[-1]
        return replace(sessions, decoder=decoder, replays=Replays())

    monkeypatch.setattr(agreement, "open_sessions", capture)
    return opened


def test_the_published_session_is_captured_and_replayed(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_with(monkeypatch, CapturingSession)
    compilation = read_package(
        compile_captured(llama_package, tmp_path / "device", 64)
    ).manifest.compilation
    assert dict(compilation.self_test) == {"tokens": 32, "agreeing": 32, "replayed": 28}
    assert len(opened) == 1
    assert opened[0].replayed == 7


def test_a_graph_that_is_wrong_when_replayed_is_refused(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_with(monkeypatch, ReplaysNothing)
    with pytest.raises(CompileError, match=r"self-test failed: .* times of 32"):
        compile_captured(llama_package, tmp_path / "device", 64)
    assert os.listdir(tmp_path) == []


def test_over_a_float_cache_guesses_change_the_last_bits(
    small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_check_speculation", lambda plan: None)
    options = CompileOptions(ctx_len=64, num_speculative_tokens=5)
    with pytest.raises(
        CompileError, match="self-test failed: the logits of row 0 differ between a step of several"
    ):
        compile_package(small, tmp_path / "device", options)
    assert os.listdir(tmp_path) == []


@pytest.mark.ci
def test_guesses_change_nothing_unless_the_attention_counts_wrong(
    small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CompileOptions(
        ctx_len=32, kv_cache_dtype="int8", num_speculative_tokens=4, max_divergence=100
    )
    right = compile_package(small, tmp_path / "right", options)
    assert right.interface.features.num_speculative_tokens == 4
    assert any(node.op_type == "GatherND" for node in ir.load(right.path / "decoder.onnx").graph)
    monkeypatch.setattr(several_tokens, "SEQLENS_K", several_tokens.STEP_LENGTHS)
    with pytest.raises(CompileError, match="self-test failed"):
        compile_package(small, tmp_path / "wrong", options)
