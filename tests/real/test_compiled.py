"""A real model compiled to fewer bits, and with guesses: what it says, and how close it stays to transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qsample
from qsample.runtime import CausalLM, load
from tests.real.conftest import Reference

pytestmark = pytest.mark.real

FACT = "The capital of France is"
PROSE = """\
The heart is a muscle that pumps blood through the body. It has four chambers: two atria, which receive blood, and two
ventricles, which push it out. Blood that has given up its oxygen returns to the right side and is sent to the lungs;
from there it comes back to the left side, which sends it through the aorta to all other organs. A healthy adult's heart
beats about seventy times a minute at rest, and more often when the body works.
"""
CODE = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0
"""
# The largest perplexity of a text over the float model's.
MOST = {"int8": 1.05, "int4": 1.5}


@pytest.mark.parametrize("weights", MOST)
def test_fewer_bits_keep_what_the_model_knows(
    weights: str, compiled: Callable[[str], Path], reference: Reference
) -> None:
    path = compiled(weights)  # compile refuses what diverges too far
    model = load(path)
    output = model.generate(FACT, max_new_tokens=6, do_sample=False)
    assert output.texts is not None
    assert output.texts[0].startswith(" Paris")
    ids = reference.encoded(PROSE)
    with torch.no_grad():
        inputs = torch.tensor([ids])
        expected = math.exp(reference.model(inputs, labels=inputs).loss)
    ratio = qsample.evaluate(path, [ids]).packages[0].perplexity.value / expected
    print(f"{weights}: perplexity {ratio:.3f} times that of float32, {expected:.2f}")
    assert 0.9 < ratio < MOST[weights]


@pytest.fixture(scope="module")
def guessing(guessing_package: Path) -> CausalLM:
    return load(guessing_package)


@pytest.mark.parametrize(
    ("kind", "question", "least"),
    [
        (
            "code",
            f"Write this class again, with a docstring in each method:\n\n```python\n{CODE}```",
            1.3,
        ),
        ("chat", "Give me three tips for better sleep.", None),
    ],
)
def test_guesses_save_steps_and_change_no_token(
    kind: str,
    question: str,
    least: float | None,
    guessing: CausalLM,
    record_property: Callable[[str, object], None],
) -> None:
    chat = [{"role": "user", "content": question}]
    options: dict[str, Any] = {"max_new_tokens": 120, "do_sample": False}
    plain = guessing.generate(chat, **options)
    guessed = guessing.generate(chat, prompt_lookup_num_tokens=7, **options)
    assert guessed.token_ids == plain.token_ids
    assert plain.timing.drafts.tokens_per_step == 1
    rate = guessed.timing.drafts.tokens_per_step
    record_property(f"tokens_per_step_{kind}", rate)
    print(f"{kind}: {rate:.2f} tokens a step")
    # An answer that repeats nothing may save no step: its tokens alone are checked.
    assert least is None or rate >= least
    sampled: dict[str, Any] = {
        "max_new_tokens": 60,
        "do_sample": True,
        "temperature": 0.8,
        "seed": 5,
    }
    assert (
        guessing.generate(chat, prompt_lookup_num_tokens=7, **sampled).token_ids
        == guessing.generate(chat, **sampled).token_ids
    )
