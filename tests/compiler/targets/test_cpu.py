"""The CPU target's graph: the operators that a layer is left with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.compiler import pipeline
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import make_plan
from qsample.compiler.targets import cpu
from qsample.compiler.targets.cpu import TARGET
from qsample.graph.join import cut_at_logits
from qsample.package.package import read_package
from tests.helpers.building import build

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

    def check_guesses(model: object, *, pack: bool, pad_token_id: int, **_: object) -> bool:
        assert pad_token_id == 5
        got.append(pack)
        return False

    monkeypatch.setattr(cpu, "check_guesses", check_guesses)
    monkeypatch.setattr(cpu.CpuTarget, "interface", lambda self, plan: None)
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
