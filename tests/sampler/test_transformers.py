"""The distributions of rows, against transformers' own processors on the same logits, in Hugging Face's order."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, PARAMETERS
from tests.helpers.sampler_cases import expected_step, make_inputs, sampler
from tests.helpers.transformers_processors import PROCESSORS, WARPERS, draw, padded, scores

EXTRA = ("typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "bad_words_ids")


SIZES = [(5, 60, 64), (100, 60, 2), (1000, 60, 64), (5000, 30, 2)]
MORE_SIZES = [
    (5, 60, 2),
    (10, 60, 64),
    (100, 60, 64),
    (1000, 60, 2),
    (5000, 30, 64),
    (32_000, 16, 64),
    (32_000, 16, 2),
]


def check_logprobs(row: dict[str, np.ndarray], probs: np.ndarray) -> None:
    """The log-probabilities of a row that draws are those after the processors."""
    with np.errstate(divide="ignore"):
        expected = np.log(probs)
    likeliest = np.sort(expected)[::-1][:5]
    np.testing.assert_allclose(row["logprobs"][0], expected[row["next_ids"][0]], atol=1e-4)
    np.testing.assert_allclose(row["top_logprobs"], likeliest, atol=1e-4)
    ids = row["top_logprob_ids"]
    np.testing.assert_array_equal(ids >= 0, likeliest > -np.inf)
    np.testing.assert_allclose(expected[ids[ids >= 0]], likeliest[ids >= 0], atol=1e-4)


@pytest.mark.parametrize(
    ("vocab", "rows", "num_candidates"),
    [*SIZES, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in MORE_SIZES)],
)
def test_distribution(vocab: int, rows: int, num_candidates: int) -> None:
    rng = np.random.default_rng(vocab)
    parameters = [draw(rng, WARPERS if row % 2 else PROCESSORS | WARPERS) for row in range(rows)]
    # No two equal: among ties transformers' top-p keeps any few, the contract all or none.
    logits = np.stack([np.linspace(-1, 1, vocab)[rng.permutation(vocab)] for _ in range(rows)])
    logits = (
        logits * rng.uniform(0.5, 8, (rows, 1)) + rng.normal(size=(rows, vocab)) * 1e-3
    ).astype(np.float32)
    history = rng.integers(0, min(vocab, 4), (rows, 6))

    features = Features(
        probs=True,
        logprobs=True,
        top_logprobs=5,
        logprobs_mode="processed_logprobs",
        filters=EXTRA,
    )
    face = Interface(vocab, (), features=features)
    specs = {
        spec.name: spec
        for spec in (*PARAMETERS, *(spec for name in EXTRA for spec in EXTRA_PARAMETERS[name]))
    }
    values = {
        name: [row.get(name, specs[name].off) for row in parameters]
        for name in (PROCESSORS | WARPERS).keys() - {"bad_words_ids"}
    }
    words = np.stack([padded(row.get("bad_words_ids", [[]] * 3)) for row in parameters])
    inputs = make_inputs(
        face, rows, sequence=6, bad_words=(3, 3), input_ids=history, bad_words_ids=words, **values
    )
    got = sampler(face, num_candidates=num_candidates)(logits, inputs)
    reference = expected_step(face, logits, inputs, num_candidates)
    compared = 0
    for row, given in enumerate(parameters):
        if reference["edge"][row] > 1e-5:
            expected = scores(logits[row], history[row], given).softmax(-1).numpy()
            np.testing.assert_array_equal(got["probs"][row] > 0, expected > 0, err_msg=str(given))
            np.testing.assert_allclose(
                got["probs"][row], expected, rtol=2e-5, atol=1e-9, err_msg=str(given)
            )
            check_logprobs({name: values[row] for name, values in got.items()}, expected)
            compared += 1
    assert compared > 0.7 * rows
