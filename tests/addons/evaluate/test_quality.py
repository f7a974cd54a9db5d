"""Perplexity, KL divergence and top-1 agreement beside transformers' own logits in float64, and wrong input."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qsample.addons.evaluate import Evaluation, evaluate
from qsample.contract.arrays import Array
from qsample.errors import PackageError, QsampleError
from qsample.package.package import Package, read_package
from tests.helpers.capturing import compile_captured
from tests.helpers.fake_package import (
    POISON,
    byte_tokenizer,
    compilation,
    fake_interface,
    fake_package,
)
from tests.helpers.tiny_models import VOCAB_SIZE

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps under a tree until the morning comes."
IDS = np.random.default_rng(7).integers(4, VOCAB_SIZE, 75)


def log_probabilities(
    checkpoint: Path, documents: Sequence[Array], max_length: int, stride: int
) -> tuple[Array, Array]:
    """[tokens, V] of each scored token in order, and which came; the windows are those of the guide."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).double().eval()
    rows, targets = [], []
    for ids in documents:
        previous = 0
        for begin in range(0, len(ids), stride):
            end = min(begin + max_length, len(ids))
            with torch.no_grad():
                log_p = torch.log_softmax(
                    model(torch.tensor(ids[None, begin:end])).logits[0], -1
                ).numpy()
            for position in range(max(previous, begin + 1), end):
                rows.append(log_p[position - 1 - begin])
                targets.append(ids[position])
            previous = end
            if end == len(ids):
                break
    return np.stack(rows), np.array(targets)


def perplexity_of(log_p: Array, targets: Array) -> float:
    return float(np.exp(-log_p[np.arange(len(targets)), targets].mean()))


@pytest.mark.parametrize(
    ("model_type", "max_length", "stride"),
    [
        ("llama", 16, 5),
        ("llama", 20, 20),
        pytest.param("qwen3_5_text", 24, 10, marks=pytest.mark.ci),
        pytest.param("gemma2", 32, 16, marks=pytest.mark.slow),
        pytest.param("gpt2", 96, 96, marks=pytest.mark.slow),
    ],
)
def test_perplexity_is_transformers_own(
    model_type: str,
    max_length: int,
    stride: int,
    exported: Callable[..., Path],
    checkpoint: Callable[[str], Path],
) -> None:
    documents = [IDS, IDS[40:45], IDS[10:60]]
    log_p, targets = log_probabilities(checkpoint(model_type), documents, max_length, stride)
    found = evaluate(
        exported(model_type), documents, max_length=max_length, stride=stride, batch_size=3
    )
    assert (found.tokens, found.documents) == (len(targets), 3)
    (one,) = found.packages
    assert one.perplexity.value == pytest.approx(perplexity_of(log_p, targets), rel=1e-4)
    assert one.perplexity.low < one.perplexity.value < one.perplexity.high
    assert one.comparisons == ()


@pytest.mark.ci
def test_divergence_and_agreement_are_those_of_transformers_logits(
    exported: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    """Of two different models, each against the other: the divergence is not symmetric."""
    log_p, targets = log_probabilities(checkpoint("llama"), [IDS], 24, 12)
    log_q, _ = log_probabilities(checkpoint("qwen3_5_text"), [IDS], 24, 12)
    llama, hybrid = exported("llama"), exported("qwen3_5_text")
    found = evaluate([llama, hybrid], IDS, against=[llama, hybrid], max_length=24, stride=12)
    assert [one.path for one in found.packages] == [str(llama), str(hybrid)]
    for one, (own, other) in zip(found.packages, ((log_p, log_q), (log_q, log_p)), strict=True):
        (comparison,) = one.comparisons  # with itself there is none
        assert comparison.kl.value == pytest.approx(
            float((np.exp(other) * (other - own)).sum(-1).mean()), rel=1e-4
        )
        assert comparison.agreement.value == pytest.approx(
            float((own.argmax(-1) == other.argmax(-1)).mean())
        )
        ratio = perplexity_of(own, targets) / perplexity_of(other, targets)
        assert comparison.perplexity_ratio.value == pytest.approx(ratio, rel=1e-4)
        assert comparison.kl.low < comparison.kl.value < comparison.kl.high
    assert found.packages[0].comparisons[0].reference == str(hybrid)


def test_with_and_without_the_sampler_in_the_graph(fake: Callable[..., Package]) -> None:
    ways = [fake(), fake(sampler=False), fake(logprobs=True)]
    values = [
        evaluate(package, IDS, max_length=20).packages[0].perplexity.value for package in ways
    ]
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)


@pytest.mark.ci
def test_a_captured_graph(llama_package: Path, tmp_path: Path) -> None:
    captured = compile_captured(llama_package, tmp_path / "captured", 48)
    found = evaluate(captured, [IDS, IDS[:9]], against=llama_package, max_length=20, batch_size=3)
    (comparison,) = found.packages[0].comparisons
    assert comparison.kl.value < 1e-6
    assert comparison.agreement.value == 1
    assert comparison.perplexity_ratio.value == pytest.approx(1, abs=1e-5)


@pytest.mark.ci
def test_a_compiled_package_against_the_portable_one(llama_package: Path, tmp_path: Path) -> None:
    from qsample import AutoModelForCausalLM as Models
    from qsample import evaluate as public

    portable = Models.from_pretrained(llama_package)
    quantized = portable.compile(tmp_path / "int4", weights="int4", ctx_len=32, batch_size=1)
    found = public(quantized, TEXT, against=portable, step_time=True)
    assert (found.max_length, found.stride) == (32, 16)  # what the smaller of them holds
    first, reference = found.packages
    assert (first.label, reference.label) == ("int4, rtn, blocks of 32", "float32")
    assert first.comparisons[0].kl.value > 1e-3
    assert reference.comparisons == ()
    assert all(one.step_ms is not None and one.step_ms > 0 for one in found.packages)
    size = sum(
        path.stat().st_size for path in (tmp_path / "int4").iterdir() if path.name != "qsample.json"
    )
    assert first.bytes == size


def test_windows_read_together_or_alone(llama_package: Path) -> None:
    ways = [
        evaluate(llama_package, [IDS, IDS[:9]], max_length=16, stride=7, batch_size=rows)
        for rows in (1, 2, 50)
    ]
    values = [found.packages[0].perplexity.value for found in ways]
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)


def test_a_text_is_tokenized_as_a_prompt_is(llama_package: Path) -> None:
    ids = byte_tokenizer().encode(TEXT).ids
    assert ids[0] == 1
    assert evaluate(llama_package, TEXT, max_length=32) == evaluate(
        llama_package, [ids], max_length=32
    )


def test_only_a_few_numbers_of_a_token_are_kept(tmp_path: Path) -> None:
    """The distributions of all tokens would be 3,000 x 331 numbers a package."""
    package = fake_package(tmp_path / "package")
    ids = np.random.default_rng(0).integers(4, 60, 3000)
    evaluate(package, ids[:100])  # loads what is loaded once
    tracemalloc.start()
    evaluate(package, ids)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The resamples of the intervals take the most.
    assert peak < 3000 * 331 * 8 * 8


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    told: list[tuple[str, float]] = []
    evaluate(package, TEXT, progress=lambda stage, fraction: told.append((stage, fraction)))
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0, 1)
    assert {"loading package", "reading the text"} <= {stage for stage, _ in told}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "text is empty"),
        ([], {}, "text is empty"),
        (["", ""], {}, "text is empty"),
        ([[5]], {}, "no token to score"),
        ([1.5, 2.5], {}, r"give a text, token ids"),
        (7, {}, "give a text, token ids"),
        ([5, 331], {}, "give integers from 0 to 330"),
        ([5, -1], {}, "give integers from 0 to 330"),
        (np.array([0.5, 2.0]), {}, "give integers from 0 to 330"),
        ("half \ud800", {}, "lone surrogate"),
        (TEXT, {"max_length": 49}, "max_length is 49 and .*package holds 48"),
        (TEXT, {"max_length": 1}, "max_length is 1"),
        (TEXT, {"max_length": 10, "stride": 11}, "stride is 11 and max_length 10"),
        (TEXT, {"stride": 0}, "stride is 0"),
        (TEXT, {"batch_size": 0}, "batch_size is 0"),
        (TEXT, {"confidence": 95}, "confidence is 95"),
        (TEXT, {"against": 3}, "3 is not a reference"),
        (TEXT, {"against": "package"}, "the package itself; give another one to compare it with"),
        (
            TEXT,
            {"against": ["link", "package"]},
            "the package itself; give another one to compare it with",
        ),
        (TEXT, {"intra_op_num_threads": 0}, "intra_op_num_threads is 0"),
    ],
)
def test_what_is_refused(
    text: Any,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = fake_package(tmp_path / "package", compilation=compilation())
    (tmp_path / "link").symlink_to(package.path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        evaluate(package, text, **options)


def test_packages_that_do_not_go_together(tmp_path: Path) -> None:
    first = fake_package(tmp_path / "first")
    bare = fake_package(tmp_path / "bare", tokenizer=False)
    with pytest.raises(QsampleError, match=r"bare has no tokenizer, and a text was given"):
        evaluate(first, TEXT, against=bare)
    assert evaluate(first, IDS, against=bare).packages[0].comparisons[0].agreement.value == 1

    other = byte_tokenizer()
    other.add_tokens(["<another>"])
    package = fake_package(tmp_path / "other", files={"tokenizer.json": other.to_str()})
    with pytest.raises(QsampleError, match="another tokenizer than"):
        evaluate(first, TEXT, against=package)
    written_again = byte_tokenizer().to_str(pretty=True)
    alike = fake_package(tmp_path / "alike", files={"tokenizer.json": written_again})
    assert evaluate(first, TEXT, against=alike).packages[0].comparisons[0].kl.value == 0

    larger = fake_package(tmp_path / "larger", interface=replace(fake_interface(), vocab_size=2048))
    with pytest.raises(QsampleError, match=r"a vocabulary of 331 tokens and .* one of 2048"):
        evaluate(larger, TEXT, against=first)
    with pytest.raises(
        QsampleError, match=r"first gives logits that are not numbers, at scored token 3;"
    ):
        evaluate(first, [5, 6, 7, POISON, 8])
    with pytest.raises(PackageError, match="missing"):
        evaluate(first, TEXT, against=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no package was given"):
        evaluate([], TEXT)


def test_the_same_package_twice_is_one(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    other = fake_package(tmp_path / "other")
    found = evaluate(
        [package, str(package.path)], TEXT, against=[read_package(package.path), other]
    )
    assert isinstance(found, Evaluation)
    assert [len(one.comparisons) for one in found.packages] == [1, 0]
