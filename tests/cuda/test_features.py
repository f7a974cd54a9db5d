"""Optional inputs and outputs of the sampler on CUDA: captured like the rest, with the CPU's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.request.structured.automaton import automaton_of
from qsample.request.structured.tables import token_grammar
from qsample.request.structured.vocabulary import TokenVocabulary
from qsample.runtime import Engine, Step, load
from tests.cuda import puppet
from tests.cuda.trace import Trace

FEATURES: dict[str, Any] = {
    "logit_bias": True,
    "allowed_tokens": True,
    "grammars": True,
    "logprobs": True,
    "top_logprobs": 3,
    "return_pdfs": True,
}
PROMPTS = [[1, 5, 6, 7, 8], [1, 9, 4], [1, 200, 201, 202]]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=8, logit_bias={40: 4.0, 41: float("-inf")}),
    SamplingParams(temperature=1.0, max_new_tokens=8, seed=1),
    SamplingParams(
        temperature=3.0, top_p=0.95, max_new_tokens=8, seed=2, logit_bias={7: -2.0}
    ),  # it is searched
]
WORDS = 10  # of 32 tokens, for a vocabulary of 320


@pytest.fixture(scope="module")
def package(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features") / "cuda"
    model = AutoModelForCausalLM.from_pretrained(exported("llama", **FEATURES))
    return model.compile(path, provider="cuda", dtype="float16", ctx_len=64).package.path


def even_tokens_in_one(step: Step | None, mask: Any) -> None:
    """A function for allowed_tokens."""
    mask[1] = 0x55555555


@pytest.mark.parametrize("masks", ["fixed", "function"])
def test_every_feature_is_captured(package: Path, trace: Trace, masks: str) -> None:
    allowed: Any = even_tokens_in_one
    if masks == "fixed":
        allowed = np.full((len(PROMPTS), WORDS), -1, np.int32)
        allowed[1] = 0x55555555
    model = load(package)
    compilation = model.package.manifest.compilation
    assert compilation is not None
    assert not any(
        name.startswith("Memcpy") for placed in compilation.placement.values() for name in placed
    )

    trace.clear()
    before = puppet.COUNTS["replays"]
    got = model.generate(PROMPTS, PARAMS, allowed_tokens=allowed)
    assert puppet.COUNTS["replays"] > before
    assert trace.captures() > 0
    assert not trace.problems()
    assert not trace.captured_reads_of_the_host()

    wanted = load(package, [puppet.CPU]).generate(PROMPTS, PARAMS, allowed_tokens=allowed)
    assert got.token_ids == wanted.token_ids
    assert all(token % 2 == 0 for token in got.token_ids[1])
    assert 41 not in got.token_ids[0]
    for name in ("logprobs", "top_logprob_ids", "top_logprobs", "probs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))


def test_grammars_are_captured(package: Path, trace: Trace) -> None:
    """Two grammars and none in a batch: nothing is read on the host between two tokens."""
    pytest.importorskip("outlines_core")
    letters = [bytes([token]) if token < 256 else b"" for token in range(320)]
    vocabulary = TokenVocabulary.of_tokens(letters, {})
    grammars = [
        token_grammar(automaton_of("[a-f]{3,5}x"), vocabulary),
        None,
        token_grammar(automaton_of("(yes|no)!*"), vocabulary),
    ]
    rows = [replace(row, max_new_tokens=8, logit_bias=None) for row in PARAMS]
    model = load(package)
    trace.clear()
    got = model.generate(PROMPTS, rows, grammar=grammars)
    assert trace.captures() > 0
    assert not trace.problems()
    assert not trace.captured_reads_of_the_host()
    wanted = load(package, [puppet.CPU]).generate(PROMPTS, rows, grammar=grammars)
    assert got.token_ids == wanted.token_ids
    assert re.fullmatch("[a-f]{3,5}x", bytes(got.token_ids[0][:-1]).decode())
    assert re.fullmatch("(yes|no)!*", bytes(got.token_ids[2][:-1]).decode())


def test_an_engine_hands_out_log_probabilities(package: Path) -> None:
    wanted = [
        load(package, [puppet.CPU]).generate([prompt], row)
        for prompt, row in zip(PROMPTS, PARAMS, strict=True)
    ]
    with Engine(load(package), slots=2) as engine:
        requests = [
            engine.add_request(prompt, row) for prompt, row in zip(PROMPTS, PARAMS, strict=True)
        ]
        for request, alone in zip(requests, wanted, strict=True):
            output = request.result(120)
            assert list(output.token_ids) == alone.token_ids[0]
            assert alone.logprobs is not None
            np.testing.assert_array_equal(output.outputs["logprobs"].ravel(), alone.logprobs[0])
