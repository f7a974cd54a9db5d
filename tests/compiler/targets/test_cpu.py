"""The CPU target's graph: the operators that a layer is left with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from qsample.compiler import pipeline
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.compiler.targets import Capability, cpu, web
from qsample.compiler.targets.cpu import TARGET
from qsample.contract.interface import (
    Features,
    ImageShape,
    Interface,
    KeyValueShape,
    RecurrentShape,
)
from qsample.errors import CompileError, QsampleError
from qsample.graph.join import cut_at_logits
from qsample.package.package import Package, read_package
from tests.helpers.building import build
from tests.helpers.small_packages import manifest

CAPACITY = 48
LAYERS = 2  # of every tiny model

LLAMA_LAYER = Counter(
    MatMul=4, GroupQueryAttention=1, SkipSimplifiedLayerNormalization=2, Split=1, QuickGelu=1, Mul=1
)
# Queries and keys are normed a head each, so they leave the packed projection and are seen as heads.
QWEN3_LAYER = LLAMA_LAYER + Counter(Split=1, Reshape=4, SimplifiedLayerNormalization=2)
# The embedding, the first norm, the last token, the head, and the operator's count of tokens, once a step.
ONCE = Counter(
    Gather=1,
    SimplifiedLayerNormalization=1,
    GatherElements=1,
    MatMul=1,
    Squeeze=3,
    Shape=2,
    Cast=6,
    Equal=2,
    Or=1,
) + Counter(Where=1, Add=2, ReduceMax=1, Sub=2, Unsqueeze=1, Expand=1)


# Its queries, keys and values have biases; half of each head is rotated, neighbours as pairs.
GLM_LAYER = LLAMA_LAYER + Counter(Add=1)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model_type", "layer"),
    [
        ("llama", LLAMA_LAYER),
        ("qwen3", QWEN3_LAYER),
        pytest.param("glm", GLM_LAYER, marks=pytest.mark.slow),
    ],
)
def test_operators_of_a_layer(
    exported: Callable[..., Path], tmp_path: Path, model_type: str, layer: Counter[str]
) -> None:
    package = read_package(exported(model_type))
    plan = make_plan(package, CompileOptions(batch_size=4, ctx_len=CAPACITY))
    decoder = cut_at_logits(build(plan, TARGET, tmp_path).model, package.interface)
    found = Counter(node.op_type for node in decoder.graph)
    assert found == Counter({operator: LAYERS * count for operator, count in layer.items()}) + ONCE


@pytest.mark.parametrize(
    ("guesses", "batch_size", "packs"),
    [(0, 4, []), (3, 1, [False]), (3, 2, [True]), (3, None, [True])],
)
def test_several_rows_read_their_guesses_packed(
    guesses: int, batch_size: int | None, packs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single row has no padding."""
    got: list[bool] = []

    def check_guesses(model: object, *, interface: str, pack: bool, pad_token_id: int) -> bool:
        assert (interface, pad_token_id) == ("its interface", 5)
        got.append(pack)
        return False

    monkeypatch.setattr(cpu, "check_guesses", check_guesses)
    monkeypatch.setattr(cpu.CpuTarget, "interface", lambda self, plan: "its interface")
    plan: Any = SimpleNamespace(
        options=SimpleNamespace(num_speculative_tokens=guesses),
        batch_size=batch_size,
        pad_token_id=5,
    )
    build: Any = SimpleNamespace(model=None)
    monkeypatch.setattr(pipeline, "apply", lambda model, run: run(model))
    for phase in cpu.TARGET._speculation(plan):
        phase.run(build)
    assert got == packs


INTERFACE = Interface(50, (KeyValueShape(1, 8),))


def plan_of(interface: Interface = INTERFACE, **options: Any) -> CompilePlan:
    package = Package(Path("/models/one"), manifest(interface=interface))
    return make_plan(package, CompileOptions(ctx_len=32, **options))


@pytest.mark.parametrize(
    ("changes", "options", "version", "slides"),
    [
        ({}, {}, True, True),
        ({}, {"sliding_window_cache": False}, True, False),
        ({}, {}, False, False),  # an older ONNX Runtime
        ({"features": Features(sampler=False)}, {}, True, False),
        ({}, {"num_speculative_tokens": 1, "kv_cache_dtype": "int8"}, True, False),
        ({"image": ImageShape(8)}, {}, True, True),
        ({"image": ImageShape(8, blockwise=True)}, {}, True, False),
    ],
)
def test_when_layers_may_forget_old_tokens(
    changes: dict[str, Any],
    options: dict[str, Any],
    version: bool,
    slides: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cpu, "is_version", lambda least: asked.append(least) or version)
    plan = plan_of(replace(INTERFACE, **changes), **options)
    assert TARGET._slides(plan) == slides
    assert set(asked) <= {"1.32"}
    monkeypatch.setattr(cpu, "is_version", lambda least: True)
    assert not web.TARGET._slides(plan), "its runtimes have no such attention"


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"recurrent": (RecurrentShape(1, "conv_state", 0, (4,), "float32"),)},
            {},
            "num_speculative_tokens=3: this model has 1 states of a fixed size, which cannot return to the token",
        ),
        (
            {"features": Features(max_loras=2, max_lora_rank=4)},
            {"kv_cache_dtype": "int8"},
            r"num_speculative_tokens=3: the package takes adapters \(max_loras=2\), whose float products",
        ),
        (
            {"image": ImageShape(8, blockwise=True)},
            {"kv_cache_dtype": "int8"},
            "num_speculative_tokens=3: in this model the tokens of an image see each other",
        ),
        (
            {},
            {},
            "num_speculative_tokens=3 needs kv_cache_dtype='int8': over a cache in float32, attention",
        ),
        (
            {"features": Features(sampler=False)},
            {"kv_cache_dtype": "int4"},
            "3 needs a package that samples in the graph, and this one returns logits, and samples on the host",
        ),
        (
            {"features": Features(probs=True)},
            {"kv_cache_dtype": "int8"},
            r"3 needs a package .* this one returns the distributions of single tokens \(probs\)",
        ),
    ],
)
def test_packages_in_which_nothing_is_guessed(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    interface = replace(INTERFACE, **changes)
    with pytest.raises(CompileError, match=message):
        TARGET.check(plan_of(interface, num_speculative_tokens=3, **options))
    TARGET.check(plan_of(interface, **options))


def test_guesses_need_a_version_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(least: str) -> None:
        raise QsampleError(f"it needs {least}")

    plan = plan_of(num_speculative_tokens=3, kv_cache_dtype="int8")
    blocks = replace(INTERFACE, image=ImageShape(8))
    monkeypatch.setattr(cpu, "check_version", lambda least: None)
    TARGET.check(plan)
    TARGET.check(plan_of(blocks, num_speculative_tokens=3, kv_cache_dtype="int4"))
    monkeypatch.setattr(cpu, "check_version", refuse)
    with pytest.raises(CompileError, match=r"num_speculative_tokens=3: it needs 1\.32"):
        TARGET.check(plan)
    TARGET.check(plan_of(kv_cache_dtype="int8"))


def names(phases: Any) -> list[str]:
    return [phase.name for phase in phases]


def test_phases_that_only_some_plans_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_version", lambda least: False)
    plain = names(TARGET.phases(plan_of()))
    halved = names(TARGET.phases(plan_of(weights="float16")))
    assert not {"store-as-float16", "save", "check-guesses", "slide-caches"} & {*plain}
    # ONNX Runtime would undo the storage in float16.
    assert halved == [*plain[:-2], "store-as-float16", "save", *plain[-2:]]
    optimize = {
        weights: next(
            phase
            for phase in TARGET.phases(plan_of(weights=weights))
            if phase.name == "optimize-offline"
        )
        for weights in (None, "float16")
    }
    for weights, phase in optimize.items():
        given: Any = phase.run
        assert given.keywords["final"] == (weights is None)
        assert given.keywords["providers"] == ("CPUExecutionProvider",)
        assert given.keywords["level"] == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    found: dict[str, Any] = {
        phase.name: phase.run for phase in TARGET.phases(plan_of(weights="int4"))
    }
    assert found["quantize-matrices"].keywords == {"pads": True}
    assert found["place-optimized"].keywords == {"default": "CPUExecutionProvider"}
    guessing = names(TARGET.phases(plan_of(num_speculative_tokens=2, kv_cache_dtype="int8")))
    assert "check-guesses" in guessing
    monkeypatch.setattr(cpu, "is_version", lambda least: True)
    sliding = names(TARGET.phases(plan_of()))
    assert [name for name in sliding if name != "slide-caches"] == plain
    assert "slide-caches" in sliding
    assert "round-activations" in plain
    # Activations stay in float32 in browsers; its weights are cut at the end.
    of_web = names(web.TARGET.phases(plan_of(provider="web", weights="int4")))
    assert "round-activations" not in of_web
    assert of_web[-1] == "cut-weights"
    assert of_web.index("keep-activations") == of_web.index("check") + 1


def test_what_the_cpu_takes() -> None:
    assert (TARGET.name, TARGET.execution_providers) == ("cpu", ("CPUExecutionProvider",))
    assert (TARGET.dtypes, TARGET.weight_bits) == (("float32", "float16"), (2, 4, 8))
    assert TARGET.kv_cache_dtypes == ("int8", "int4")
    assert TARGET.capabilities == {*Capability} - {Capability.DTYPE_CONVERSION}
    assert [TARGET.fixed_axes(plan_of(batch_size=size)) for size in (1, 2, None)] == [
        {"B": 1},
        {},
        {},
    ]
    assert TARGET.interface(plan_of(kv_cache_dtype="int4")).kv_cache_dtype == "int4"
