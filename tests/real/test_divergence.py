"""What compile says of a real model in fewer bits, beside what a user measures on a page and on answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import qsample
from qsample.package.divergence import CHATS, Divergence
from qsample.package.package import read_package
from tests.real.conftest import ROOT, Reference

pytestmark = pytest.mark.real

QUESTIONS = (
    "What is the capital of France?",
    "Give me three tips for better sleep.",
    "Explain photosynthesis.",
)


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_the_figure_is_what_a_user_measures(
    weights: str, compiled: Callable[[str], Path], float_package: Path, reference: Reference
) -> None:
    """Between half and twice the mean of a page and of answers; docs/benchmarks/quality.md has longer texts."""
    path = compiled(weights)
    found = Divergence.of(read_package(path))
    assert found is not None
    assert found.text == CHATS
    assert found.tokens > 400, "the tokens that the template spells do not count"
    page = reference.encoded((ROOT / "docs" / "architecture.md").read_text("utf-8")[:3000])
    answers = []
    for question in QUESTIONS:
        prompt = reference.chat([{"role": "user", "content": question}])
        answers.append(prompt + reference.greedy(prompt, 80))
    measured = [
        qsample.evaluate(path, texts, against=float_package).packages[0].comparisons[0].kl.value
        for texts in ([page], answers)
    ]
    mean = sum(measured) / len(measured)
    print(
        f"{weights}: compile {found.kl.value:.4f}, page {measured[0]:.4f}, answers {measured[1]:.4f}"
    )
    assert mean / 2 < found.kl.value < 2 * mean
