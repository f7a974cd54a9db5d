"""The self-test: a graph that chooses other tokens is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample.compiler import agreement
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.passes import several_tokens
from qsample.compiler.pipeline import graph_pass
from qsample.compiler.targets import cpu
from qsample.compiler.trial import Call
from qsample.contract.interface import Features, ImageShape, Interface, KeyValueShape
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
    # The sampler of the fake has no filters, and that of a graph with guesses is a real one.
    sampled = {"temperature": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1}
    off = dict.fromkeys(agreement._PARAMETERS[1])
    off = {name: 1.0 if name == "top_p" else 0.0 for name in off}
    monkeypatch.setattr(agreement, "_PARAMETERS", ({}, off | sampled))
    options = CompileOptions(
        ctx_len=32, kv_cache_dtype="int8", num_speculative_tokens=4, max_divergence=100
    )
    right = compile_package(small, tmp_path / "right", options)
    assert right.interface.features.num_speculative_tokens == 4
    assert any(node.op_type == "GatherND" for node in ir.load(right.path / "decoder.onnx").graph)
    monkeypatch.setattr(several_tokens, "SEQLENS_K", several_tokens.STEP_LENGTHS)
    with pytest.raises(CompileError, match="self-test failed"):
        compile_package(small, tmp_path / "wrong", options)


INTERFACE = Interface(50, (KeyValueShape(1, 8),))


def plan_of(interface: Interface = INTERFACE, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "source": SimpleNamespace(interface=interface, path=Path("/portable")),
        "interface": interface,
        "batch_size": None,
        "ctx_len": 32,
        "dtype": "float32",
        "options": SimpleNamespace(weights=None),
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(("batch_size", "rows"), [(None, 4), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_rows_of_a_batch(batch_size: int | None, rows: int) -> None:
    assert agreement._rows_per_batch(plan_of(batch_size=batch_size)) == rows


def test_every_second_row_is_sampled_with_a_little_of_everything() -> None:
    found = agreement._parameters(plan_of(), range(3))
    off = {spec.name: spec.off for spec in INTERFACE.parameters}
    assert {name: values.tolist() for name, values in found.items()} == {
        "temperature": [0.0, 0.9, 0.0],
        "top_k": [off["top_k"], 40, off["top_k"]],
        "top_p": [off["top_p"], 0.95, off["top_p"]],
        "min_p": [off["min_p"], 0.02, off["min_p"]],
        "repetition_penalty": [off["repetition_penalty"], 1.1, off["repetition_penalty"]],
        "presence_penalty": [off["presence_penalty"], 0.1, off["presence_penalty"]],
        "frequency_penalty": [off["frequency_penalty"], 0.1, off["frequency_penalty"]],
    }
    single = agreement._parameters(plan_of(), [1])
    assert single["top_k"].tolist() == [40]


@pytest.mark.parametrize(
    ("width", "call", "rows", "expected"),
    [
        (3, 0, range(4), [[0, 1, -1], [1, -1, -1], [-1] * 3, [-1] * 3]),
        (1, 0, range(4), [[0], [0], [-1], [-1]]),
        (3, 2, range(4), [[-1]] * 4),  # later calls are of a token, of text
        (3, 0, [1], [[1, -1, -1]]),
    ],
)
@pytest.mark.parametrize("axial", [False, True])
def test_images_of_the_first_call(
    axial: bool, width: int, call: int, rows: Any, expected: list[list[int]]
) -> None:
    interface = replace(INTERFACE, image=ImageShape(6, axial=axial))
    inputs = agreement._images(plan_of(interface), rows, width, call)
    assert inputs["image_rows"].tolist() == expected
    assert inputs["image_rows"].dtype == np.int32
    features = inputs["image_features"]
    assert (features.shape, features.dtype) == ((min(width, 2), 6), np.float32)
    again = agreement._images(plan_of(interface), rows, width, call + 1)
    np.testing.assert_array_equal(again["image_features"], features)
    assert ("position_offsets" in inputs) == axial
    if axial:
        offsets = inputs["position_offsets"]
        assert offsets.shape == (*np.shape(expected), 3)
        assert set(offsets.reshape(-1).tolist()) <= {0, 1, 2}
    assert agreement._images(plan_of(), rows, width, call) == {}


def call_of(*logits: float) -> Call:
    return Call(np.zeros((1, 1)), np.ones(1), np.zeros(1), np.array([logits]))


def test_logits_that_are_numbers() -> None:
    """-inf are masks, if one token is not masked; the message counts calls over all texts."""
    fine, masked, none = call_of(1, 2), call_of(-np.inf, 2), call_of()
    agreement._check_numbers([[fine, masked], [none._replace(logits=np.empty(0))]], "portable")
    for wrong in ((np.nan, 1), (np.inf, 1), (-np.inf, -np.inf)):
        with pytest.raises(
            CompileError, match="the compiled graph's logits in call 2 are not numbers"
        ):
            agreement._check_numbers([[fine, masked], [call_of(*wrong)]], "compiled")


def test_how_far_logits_may_differ() -> None:
    """A thousandth of the largest, at least of 1; of calls that have logits."""
    none = call_of()._replace(logits=np.empty(0))
    agreement._compare_logits([[none]], [[call_of(1, 2)]])
    for got, wanted, passes in (
        ((0.5, 0.0), (0.5, 0.0009), True),
        ((0.5, 0.0), (0.5, 0.0011), False),
        ((8.0, 0.0), (8.0, 0.0079), True),
        ((8.0, 0.0), (8.0, 0.0081), False),
        ((8.0, -np.inf), (8.0, -np.inf), True),
    ):
        texts = [[call_of(1, 1), none], [call_of(*got)]]
        others = [[call_of(1, 1), call_of(9, 9)], [call_of(*wanted)]]
        if passes:
            agreement._compare_logits(texts, others)
        else:
            with pytest.raises(CompileError, match="logits differ from the portable graph's by"):
                agreement._compare_logits(texts, others)


@pytest.mark.parametrize("rows", [1, 4])
def test_scores_that_are_not_those_of_the_logits(rows: int) -> None:
    """A thousandth of the largest logit may differ, and NaN must not pass."""

    def device(error: float) -> Any:
        def step(ids: Any, lengths: Any, state: Any, given: Any) -> dict[str, Any]:
            assert (state, lengths.tolist()) == (rows, [3, 1, 1, 3][:rows])
            assert given["scored_places"].tolist() == [2, 3, 6, 11][:rows]
            logits = np.zeros((rows, 50), np.float32)
            logits[:, 7] = 20.0
            wanted = np.where(given["scored_ids"] == 7, 0.0, -20.0)[:, None]
            return {"logits": logits, "prompt_logprobs": wanted + error}

        return SimpleNamespace(start=lambda rows: rows, step=step)

    agreement._check_scores(device(0.019), plan_of(), rows)
    for error in (0.021, np.nan):
        with pytest.raises(
            CompileError, match=r"prompt_logprobs differ .* more than 0\.02; export"
        ):
            agreement._check_scores(device(error), plan_of(), rows)


def test_without_a_sampler_the_largest_logit_counts() -> None:
    found = agreement._sampled([call_of(1, 5, 2), call_of(7, 5, 2)], plan_of(), None, [0])
    assert [tokens.tolist() for tokens in found] == [[1], [0]]


@pytest.mark.parametrize(("weights", "named"), [(None, "bfloat16"), ("int4", "int4")])
def test_a_difference_of_several_tokens_names_the_weights(weights: str | None, named: str) -> None:
    plan = plan_of(dtype="bfloat16", options=SimpleNamespace(weights=weights))
    agreement._compare(plan, "logits of row 1", np.array([1.0, 2.0]), [1.0, 2.0])
    with pytest.raises(
        CompileError, match=f"the logits of row 1 differ .* kernels for {named} weights round"
    ):
        agreement._compare(plan, "logits of row 1", np.array([1.0]), np.array([1.0 + 1e-12]))


class Bound:
    """The stepper of a package whose graph reads an id and a temperature, and returns the id."""

    def __init__(self, sessions: Any, rows: int, capacity: int, **options: Any) -> None:
        self.made = (sessions, rows, capacity, options)
        self.specs = [
            SimpleNamespace(name=name)
            for name in (
                "input_ids",
                "lengths",
                "temperature",
                "top_k",
                "emit",
                "searched_rows",
                "noise",
            )
        ]
        self.outputs = ["next_ids"]
        self.written: dict[str, Any] = {}
        self.events: list[str] = []

    def write(self, name: str, value: Any) -> None:
        self.written[name] = np.array(value).tolist()

    def reset(self) -> None:
        self.events.append("reset")

    def run(self) -> None:
        self.events.append("run")

    def advance(self) -> None:
        self.events.append("advance")

    def read(self, name: str) -> Any:
        return (name, self.written["input_ids"])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("sampler", [False, True])
def test_a_published_package_is_driven_like_a_graph(
    sampler: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph may not keep the lengths, if it has no sampler; runs after the first are replays."""
    opened: list[Any] = []
    sessions = SimpleNamespace(replays="some" if captured else None)
    monkeypatch.setattr(agreement, "Stepper", Bound)
    monkeypatch.setattr(
        agreement, "open_sessions", lambda package, logits: opened.append(logits) or sessions
    )
    interface = replace(INTERFACE, features=Features(sampler=sampler))
    package: Any = SimpleNamespace(
        interface=interface,
        manifest=SimpleNamespace(compilation=SimpleNamespace(ctx_len=12)),
    )
    published = agreement.Published(package, 2, logits=True)
    stepper: Any = published._stepper
    assert opened == [True]
    assert stepper.made == (sessions, 2, 12, {"captured": True, "logits": True})
    state = published.start(2)
    assert state["lengths"].tolist() == [0, 0]
    assert state["lengths"].dtype == np.int32
    assert (stepper.written["emit"], stepper.written["searched_rows"]) == (True, [0, 1])
    assert np.shape(stepper.written["noise"]) == (2, 12)
    assert stepper.written["noise"][0] != stepper.written["noise"][1], "of a seed each"
    assert published.replays == 0
    ones = np.ones(2, np.int64)
    for number in range(3):
        ids = np.array([[number], [number + 10]])
        results = published.step(ids, ones, state, {"top_k": [4, 5]} if number else None)
        assert results == {"next_ids": ("next_ids", [[number], [number + 10]])}
        assert state["lengths"].tolist() == [number + 1] * 2
        assert stepper.written["temperature"] == 0.0
        assert stepper.written.get("lengths") == (None if sampler else [number] * 2)
    assert stepper.written["top_k"] == [4, 5]
    assert stepper.events == ["reset", *["run", "advance"] * 3]
    assert published.replays == (2 if captured else 0)
    published.step(ids, ones, state, {"temperature": [0.5, 0.5]})
    assert stepper.written["temperature"] == [0.5, 0.5]
