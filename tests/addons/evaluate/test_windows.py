"""Windows over documents, beside the loop of transformers' guide to perplexity."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qsample.addons.evaluate.windows import cut_windows


def guide(length: int, max_length: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, end, first scored position of the document), as labels of -100 and the shift inside the model make it."""
    found, previous = [], 0
    for begin in range(0, length, stride):
        end = min(begin + max_length, length)
        targets = end - previous
        first = max(
            end - targets, begin + 1
        )  # the model predicts nothing for a window's first token
        if first < end:
            found.append((begin, end, first))
        previous = end
        if end == length:
            break
    return found


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(2, 12), st.data())
def test_every_token_is_scored_as_in_the_guide(
    lengths: list[int], max_length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, max_length))
    documents = [np.arange(length) + 1000 * number for number, length in enumerate(lengths)]
    windows = cut_windows(documents, max_length, stride)
    expected = [
        (1000 * number + begin, 1000 * number + end, 1000 * number + first)
        for number, length in enumerate(lengths)
        for begin, end, first in guide(length, max_length, stride)
    ]
    found = [(int(w.ids[0]), int(w.ids[-1]) + 1, int(w.ids[w.first])) for w in windows]
    assert found == expected
    assert [w.offset for w in windows] == [
        sum(v.scored for v in windows[:index]) for index in range(len(windows))
    ]
    if stride < max_length:
        assert sum(w.scored for w in windows) == sum(max(length - 1, 0) for length in lengths)
