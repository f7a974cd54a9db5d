"""Guesses from an expected text: while the row follows it, where the row leaves it, and where the row
finds it again."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.runtime.sequence import Prediction

EXPECTED_TOKENS = [10, 11, 12, 13, 14, 15, 11, 12, 16, 17]


@pytest.mark.parametrize(
    ("sampled", "guesses"),
    [
        ([], [10, 11, 12]),
        ([10], [11, 12, 13]),
        ([10, 11, 12, 13, 14, 15, 11, 12], [16, 17]),  # its end
        (EXPECTED_TOKENS, [-1]),
        ([9], [-1]),  # another beginning
        ([9, 10], [-1]),  # a single token may stand anywhere
        ([9, 10, 11], [12, 13, 14]),
        ([9, 11, 12], [13, 14, 15]),  # of two places, the first
        ([10, 11, 12, 13, 14, 9, 11, 12], [16, 17]),  # after the last that was known
        ([10, 11, 12, 13, 14, 15, 11, 12, 16, 9, 10, 11], [12, 13, 14]),  # or any
        ([9, 15, 11, 12], [16, 17]),  # the longest
        (EXPECTED_TOKENS * 2, [-1]),
    ],
)
def test_guesses_follow_the_expected_tokens(sampled: list[int], guesses: list[int]) -> None:
    for step in (1, 3):  # however many tokens come at once
        prediction = Prediction(np.array(EXPECTED_TOKENS))
        for count in [*range(0, len(sampled), step), len(sampled)]:
            found = prediction.draft(sampled[:count], 3)
        assert (found.tolist(), found.dtype) == (guesses, np.int32)


def test_the_longest_of_eight_tokens_counts() -> None:
    """Where the row leaves the text, it goes on behind the first place with its last eight tokens, not behind an
    earlier one with seven, nor behind a later one with nine."""
    tokens = [*range(1, 10)]
    text = [50, *tokens[:8], 60, *tokens[2:], 70, 0, *tokens[1:], 80, 0, *tokens, 90]
    found = Prediction(np.array(text)).draft([50, *tokens], 1)
    assert found.tolist() == [80]
