"""A model's answers to questions, and how far packages are from its float package on the tokens of these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

import qsample
from qsample.addons.evaluate.quality import log_probabilities, read_windows
from qsample.addons.evaluate.windows import Window
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import read_package
from qsample.package.statistics import Estimate, estimate_means

ROWS: Final = 16  # that are read at once
ANSWER_TOKENS: Final = 120
QUESTIONS: Final = (
    "Give me three tips for better sleep.",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "How do I boil an egg?",
    "Name five animals that live in Africa.",
    "Write a Python function that reverses a string.",
    "What is the difference between weather and climate?",
    "Write a polite e-mail that cancels a meeting.",
    "Why is the sky blue?",
    "Summarize the story of Romeo and Juliet in three sentences.",
    "Convert 25 degrees Celsius to Fahrenheit, step by step.",
)


class Chat(NamedTuple):
    """Token ids of a question in the model's chat template, and of an answer."""

    prompt: list[int]
    answer: list[int]


def chats_of(package: Path) -> list[Chat]:
    """QUESTIONS with a package's own greedy answers."""
    model, chats = qsample.AutoModelForCausalLM.from_pretrained(package), []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        output = model.generate(messages, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        chats.append(
            Chat(output.sequences[0, : output.prompt_lengths[0]].tolist(), output.token_ids[0])
        )
    return chats


def on_answers(
    packages: Sequence[Path], chats: Sequence[Chat], ctx_len: int
) -> dict[str, dict[str, Estimate]]:
    """Package → KL and top-1 on the tokens of the answers, relative to the last package."""
    windows, tokens = [], 0
    for prompt, answer in chats:
        windows.append(Window(np.array([*prompt, *answer]), len(prompt), tokens))
        tokens += len(answer)
    sessions = [open_sessions(read_package(path), logits=True) for path in packages]
    steppers = [Stepper(one, ROWS, ctx_len, logits=True) for one in sessions]
    kl, same = np.zeros((len(packages), tokens)), np.zeros((len(packages), tokens))
    for place, _, logits in read_windows(steppers, windows, ROWS):
        found = np.stack(
            [
                log_probabilities(row, path, place)
                for row, path in zip(logits, packages, strict=True)
            ]
        )
        reference = found[-1]
        kl[:, place] = (np.exp(reference) * (reference - found)).sum(-1)
        same[:, place] = found.argmax(-1) == reference.argmax()
    return {
        path.name: estimate_means({"kl chat": kl[index], "top1 chat": same[index]})
        for index, path in enumerate(packages[:-1])
    }
