"""benchmarks/quality.py: the tables, and the figures of answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import qsample

Benchmark = Callable[[str], ModuleType]
FACTS: dict[str, Any] = {
    "bytes": 90_000_000,
    "perplexity": 20.0,
    "kl": [0.25, 0.2, 0.3],
    "top1": [0.8, 0.78, 0.82],
}


def test_a_row_has_the_figures_of_both_texts(benchmark: Benchmark) -> None:
    quality = benchmark("quality")
    chat = {
        "kl chat": [0.5, 0.375, 0.625],
        "top1 chat": [0.75, 0.7, 0.8],
        "kl gate": [0.375, 0.25, 0.5],
    }
    header, _, row, reference = quality.table(
        {"float32": {"bytes": 1, "perplexity": 19.0}, "int4 quick": FACTS | chat}
    )
    titles = ["bits", "size, kB", "perplexity", "KL text, nats", "KL chat, nats", "KL compile"]
    titles += ["top-1 text, %", "top-1 chat, %"]
    assert header == f"| {' | '.join(titles)} |"
    cells = [
        "int4 quick",
        "90,000",
        "20.000",
        "0.2500 ± 0.0500",
        "0.5000 ± 0.1250",
        "0.3750 ± 0.1250",
    ]
    assert row == f"| {' | '.join([*cells, '80.0 ± 2.0', '75.0 ± 5.0'])} |"
    assert reference == "| float32 | 0 | 19.000 |  |  |  |  |  |"
    header, _, row = quality.table({"int4 quick": FACTS})
    assert header == "| bits | size, kB | perplexity | KL, nats | top-1, % |"
    assert row == "| int4 quick | 90,000 | 20.000 | 0.25000 ± 0.05000 | 80.0 ± 2.0 |"


def test_each_table_names_its_model_and_real_ones_lead(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    quality = benchmark("quality")
    common = {"machine": "machine", "tokens": 9, "widths": [64], "rows": {}, "missing": {}}
    models = {
        "tiny_lm": common,
        "dithered": common | {"chat_tokens": 1234},
        "second": common | {"chat_tokens": 7},
    }
    quality.write({"models": models}, tmp_path / "page")
    lines = (tmp_path / "page.md").read_text("utf-8").splitlines()
    titles = [line for line in lines if line.startswith("## ")]
    assert titles == ["## SmolLM2-135M-Instruct, dithered", "## tiny_lm", "## second"]
    assert "9 tokens of a page of docs and 1,234 of answers; matrices of 64 columns;" in lines
    assert "9 tokens of held-out text; matrices of 64 columns;" in lines
    assert "9 tokens of held-out text and 7 of answers; matrices of 64 columns;" in lines


def test_the_page_of_docs_is_long_enough(benchmark: Benchmark) -> None:
    quality = benchmark("quality")
    options: Any = type(
        "Options", (), {"heldout": None, "calibration_text": None, "model": Path("any")}
    )
    (text,), calibration = quality.texts(options)
    assert (len(text), calibration) == (quality.PAGE_CHARACTERS, [])


@pytest.mark.ci
def test_only_the_tokens_of_answers_count(
    benchmark: Benchmark, llama_package: Path, tmp_path: Path
) -> None:
    """Of prompts of a token, the figures are those of `qsample.evaluate`, and a longer prompt leaves its tokens out."""
    answers = benchmark("answers")
    other = tmp_path / "int8"
    qsample.AutoModelForCausalLM.from_pretrained(llama_package).compile(
        other, ctx_len=64, weights="int8"
    )
    ids = np.random.default_rng(0).integers(3, 90, (2, 20)).tolist()
    packages = [other, llama_package]

    def kl(prompt: int) -> float:
        chats = [answers.Chat(row[:prompt], row[prompt:]) for row in ids]
        return answers.on_answers(packages, chats, 64)["int8"]["kl chat"].value

    def evaluated(length: int) -> float:
        texts = [row[:length] for row in ids]
        return (
            qsample.evaluate(other, texts, against=llama_package)
            .packages[0]
            .comparisons[0]
            .kl.value
        )

    assert kl(1) == pytest.approx(evaluated(20), rel=1e-3)
    # 19 tokens of each row are those of the prompt, less one that nothing predicts, and those of the answer.
    assert 15 * kl(5) == pytest.approx(19 * evaluated(20) - 4 * evaluated(5), rel=1e-3)
