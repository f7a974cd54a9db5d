"""The figures of a divergence: to JSON and back, from a manifest, and in words."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.package.divergence import CHATS, DOCUMENTS, FAR, RANDOM_STARTS, TEXTS, Divergence
from qsample.package.statistics import Estimate

FIGURES = Divergence(
    text="chats",
    tokens=1234,
    kl=Estimate(0.012, 0.01, 0.014),
    agreement=Estimate(0.95, 0.94, 0.96),
    perplexity_ratio=Estimate(1.02, 1.01, 1.03),
)


def manifest_with(quantization: Any) -> Any:
    compilation = SimpleNamespace(quantization=quantization)
    return SimpleNamespace(manifest=SimpleNamespace(compilation=compilation))


def test_the_figures_come_back_from_json() -> None:
    figures = json.loads(json.dumps(asdict(FIGURES)))
    assert Divergence.from_json(figures) == FIGURES
    assert Divergence.of(manifest_with({"divergence": figures, "scheme": "x"})) == FIGURES


@pytest.mark.parametrize("left_out", ["text", "tokens", "kl", "agreement", "perplexity_ratio"])
def test_figures_of_an_older_version_are_none(left_out: str) -> None:
    figures = {name: value for name, value in asdict(FIGURES).items() if name != left_out}
    with pytest.raises(KeyError):
        Divergence.from_json(figures)
    assert Divergence.of(manifest_with({"divergence": figures})) is None
    assert Divergence.of(manifest_with({"divergence": None})) is None
    assert Divergence.of(manifest_with({})) is None
    assert Divergence.of(manifest_with(None)) is None
    nothing: Any = SimpleNamespace(manifest=SimpleNamespace(compilation=None))
    assert Divergence.of(nothing) is None


@pytest.mark.parametrize(
    ("value", "far"), [(0.0, False), (FAR, False), (FAR + 0.001, True), (math.nan, True)]
)
def test_a_far_divergence(value: float, far: bool) -> None:
    assert replace(FIGURES, kl=Estimate(value, 0.0, 1.0)).far is far


def test_the_figures_in_words() -> None:
    assert str(FIGURES) == (
        "KL 0.012 nats a token (0.01 to 0.014), top-1 95.0 %, perplexity ratio 1.02, on 1,234 tokens of "
        "chats that the float model wrote"
    )
    assert str(replace(FIGURES, text="my own")).endswith("on 1,234 tokens of my own")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CHATS, "chats that the float model wrote"),
        (DOCUMENTS, "documents that the float model wrote"),
        (RANDOM_STARTS, "texts that the float model wrote after random tokens"),
    ],
)
def test_the_kinds_of_texts_in_words(text: str, words: str) -> None:
    """Manifests have the kinds by name."""
    assert (CHATS, DOCUMENTS, RANDOM_STARTS) == ("chats", "documents", "random starts")
    assert str(replace(FIGURES, text=text)).endswith(f" tokens of {words}")
    assert TEXTS[text] == words


@pytest.mark.parametrize(
    ("value", "limit", "is_within"),
    [
        (0.3, 0.3, True),
        (0.3, 0.29, False),
        (0.0, 0.0, True),
        (math.inf, math.inf, False),
        (math.nan, math.inf, False),
        (-math.inf, 0.3, False),
    ],
)
def test_a_divergence_within_a_limit(value: float, limit: float, is_within: bool) -> None:
    assert FAR == 0.3  # docs/quantization.md
    assert replace(FIGURES, kl=Estimate(value, 0.0, 1.0)).is_within(limit) is is_within
