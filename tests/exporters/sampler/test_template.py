"""A template that is filled in is what a trace of the torch module gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract import Features
from qsample.exporters.sampler import export_sampler
from qsample.exporters.sampler.template import KINDS
from qsample.exporters.sampler.tracing import make_template, trace_sampler
from tests.helpers.fingerprints import fingerprint
from tests.helpers.reference import reference_step
from tests.helpers.sampler_cases import ALL_FEATURES, BOUNDARY, PAD, compare_step, exported, interface, random_step

ADVICE = "the sampler's templates are not what tracing gives; run `python scripts/sampler_templates.py`"
KEYWORDS: dict[str, dict[str, Any]] = {
    "control_flow": {},
    "straight": {"control_flow": False},
    "resumes": {"resumes": True},
}


def check(vocab: int, features: Features, pad_token_id: int, **options: Any) -> None:
    face = interface(vocab, features)
    filled = fingerprint(export_sampler(face, pad_token_id, **options))
    traced = fingerprint(trace_sampler(face, pad_token_id, **options))
    assert filled == traced, ADVICE


@pytest.mark.parametrize(
    ("kind", "vocab", "features", "pad"),
    [
        ("control_flow", 2560, ALL_FEATURES, 3),  # 2560 is cut without a rest, into chunks and into words
        ("straight", 3001, Features(logprobs=True), 0),
        ("resumes", 320, Features(), 0),
    ],
)
def test_a_template_gives_what_tracing_gives(kind: str, vocab: int, features: Features, pad: int) -> None:
    check(vocab, features, pad, **KEYWORDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "features", "pad", "options"),
    [
        (151_936, Features(), 5, {}),
        (262_145, Features(probs=True), 0, {}),  # one more pivot, and constants are no longer folded
        (60, Features(top_logprobs=60), 1, {"chunk_size": 7}),  # all are candidates, in one block
        (60, Features(), 0, {"num_candidates": 7}),  # one chunk
        (1000, Features(logit_bias=True, top_logprobs=1), 0, {"num_candidates": 5, "chunk_size": 64}),
        (5000, Features(allowed_tokens=True, logprobs=True), 2, {"num_candidates": 300}),
    ],
)
def test_at_any_size(kind: str, vocab: int, features: Features, pad: int, options: dict[str, int]) -> None:
    check(vocab, features, pad, **options, **KEYWORDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_what_the_script_writes(kind: str) -> None:
    from qsample.exporters.sampler import template

    assert template._text(kind) == make_template(kind), ADVICE


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 1023, 1024, 1025, 2049])
def test_odd_vocabularies(vocab: int) -> None:
    """Against the float64 reference: padding, chunks, words, candidates and samples meet their edges."""
    top = min(3, vocab)
    face = interface(vocab, Features(True, True, True, True, top, True))
    step, rng = exported(face), np.random.default_rng(vocab)
    for _ in range(4):
        logits, inputs = random_step(rng, face, 5, sequence=2)
        got, expected = step(logits, inputs), reference_step(logits, inputs, pad_token_id=PAD, top_logprobs=top)
        for row in range(5):
            assert expected["margin"][row] < BOUNDARY or not compare_step(got, expected, row)


def test_every_set_of_features_has_its_inputs_and_outputs() -> None:
    alone = [Features(logit_bias=True), Features(allowed_tokens=True), Features(logprobs=True), Features(probs=True)]
    for features in (*alone, Features(top_logprobs=3), ALL_FEATURES):
        face = interface(300, features)
        graph = export_sampler(face, 1).graph
        assert [value.name for value in graph.inputs] == face.sampler.input_names
        assert [value.name for value in graph.outputs] == face.sampler.output_names
        assert not any(node.domain == "qsample" for node in graph.all_nodes())
