"""Quantized weights in words, and as a table, of manifests that are written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qsample.cli.quantized import (
    divergence_in_words,
    note_divergence,
    quantization_in_words,
    table_of_bits,
)
from qsample.errors import QsampleError
from qsample.package.divergence import FAR
from qsample.package.package import Package
from tests.helpers.fake_package import compilation

MIB = 2**20
WEIGHTS = {
    "dtype": "int4",
    "matrices": 14,
    "bytes_before": 40 * MIB,
    "bytes_after": 5.5 * MIB,
}
ESTIMATE = {"value": 0.25, "low": 0.2, "high": 0.3}
FIGURES = {
    "text": "own",
    "tokens": 100,
    "kl": ESTIMATE,
    "agreement": ESTIMATE,
    "perplexity_ratio": ESTIMATE,
}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({}, ""),
        (WEIGHTS, "int4 weights, 14 matrices, 5.5 MiB, 40.0 as float"),
        (
            WEIGHTS | {"block_size": 32, "preset": "quick", "method": "rtn"},
            "int4 weights in blocks of 32 (quick, rtn), 14 matrices, 5.5 MiB, 40.0 as float",
        ),
        (
            WEIGHTS | {"block_size": 32, "block_sizes": [32, 64], "method": "rtn"},
            "int4 weights in blocks of 32 and 64 (rtn), 14 matrices, 5.5 MiB, 40.0 as float",
        ),
        (
            WEIGHTS | {"block_size": 32, "block_sizes": [], "preset": "quick"},
            "int4 weights in blocks of 32 (quick), 14 matrices, 5.5 MiB, 40.0 as float",
        ),
        (
            WEIGHTS | {"block_size": 32, "method": "rtn", "experts": 8, "expert_block_size": 32},
            "int4 weights in blocks of 32 (rtn), 14 matrices and 8 experts, 5.5 MiB, 40.0 as float",
        ),
        (
            WEIGHTS | {"block_size": 32, "method": "rtn", "experts": 8, "expert_block_size": 16},
            "int4 weights in blocks of 32 (rtn), 14 matrices and 8 experts (blocks of 16), 5.5 MiB, 40.0 as float",
        ),
        (WEIGHTS | {"experts": 0}, "int4 weights, 14 matrices, 5.5 MiB, 40.0 as float"),
        (
            WEIGHTS | {"float_bytes": 2.25 * MIB, "kv_cache_dtype": "int8"},
            "int4 weights, 14 matrices, 5.5 MiB, 40.0 as float; 2.2 MiB still float; int8 keys and values",
        ),
        (
            WEIGHTS | {"float_bytes": 0, "packed_matrices": 3},
            "int4 weights, 14 matrices, 5.5 MiB, 40.0 as float; 3 matrices as the checkpoint packed them",
        ),
        ({"kv_cache_dtype": "int8"}, "int8 keys and values"),
    ],
)
def test_quantizations(figures: dict[str, Any], words: str) -> None:
    assert quantization_in_words(figures) == words


def with_quantization(fake: Callable[..., Package], figures: Any) -> Package:
    return fake(compilation=compilation(quantization=figures))


def test_the_table_of_bits(fake: Callable[..., Package]) -> None:
    table = {"lm_head": "int4:32"}
    assert table_of_bits(with_quantization(fake, {"bits": table})) == table
    for package in (
        fake(),
        fake(compilation=compilation()),
        with_quantization(fake, {"kv_cache_dtype": "int8"}),
        with_quantization(fake, {"bits": {}}),
        with_quantization(fake, {"bits": [4]}),
    ):
        with pytest.raises(QsampleError, match=f"{package.path} has no table of bits: compile"):
            table_of_bits(package)


def test_divergences(fake: Callable[..., Package], capsys: pytest.CaptureFixture[str]) -> None:
    near = with_quantization(fake, {"divergence": {**FIGURES, "kl": ESTIMATE | {"value": FAR}}})
    far = with_quantization(fake, {"divergence": {**FIGURES, "kl": ESTIMATE | {"value": 2 * FAR}}})
    old = with_quantization(fake, {"divergence": {"kl": 0.1}})
    for package, words, warns in (
        (near, f"KL {FAR:g} nats", False),
        (far, f"KL {2 * FAR:g} nats", True),
    ):
        assert divergence_in_words(package).startswith(words)
        note_divergence(package)
        said = " ".join(capsys.readouterr().err.split())
        assert said.startswith(f"beside its float model: {words}")
        assert (f"this is far: above a KL of {FAR:g}, answers may" in said) is warns
    for package, words in (
        (old, "unknown: measured by an older version; compile the package again"),
        (fake(), ""),
        (fake(compilation=compilation()), ""),
    ):
        assert divergence_in_words(package) == words
        note_divergence(package)
        assert capsys.readouterr() == ("", "")
