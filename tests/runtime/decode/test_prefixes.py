"""Beginnings of prompts: their cuts, the tokens that two share, and the states that are saved, used and given away."""

from __future__ import annotations

import numpy as np
import pytest

from qsample.runtime.decode.prefixes import LATE, Pieces, SavedStates, reusable_prefix, shared_prefix

CPU = Pieces(64, late=256)
TEXT = np.arange(4096)


@pytest.mark.parametrize("pieces", [Pieces(1), Pieces(4), CPU])
@pytest.mark.parametrize("start", [0, 3, 64, 1000, LATE, LATE + 1])
@pytest.mark.parametrize("tokens", [1, 64, 1999])
def test_pieces_cover_a_prompt_and_are_counted_from_its_start(pieces: Pieces, start: int, tokens: int) -> None:
    whole, cut = pieces.cut(TEXT, 0, start + tokens), pieces.cut(TEXT, start, start + tokens)
    assert [token for piece in cut for token in piece] == list(range(start, start + tokens))
    assert {piece.stop for piece in cut} == {piece.stop for piece in whole if piece.stop > start}
    assert all(pieces.begin(TEXT, piece.start) == piece.start for piece in whole)


def test_pieces_are_longer_far_into_a_prompt() -> None:
    assert [len(piece) for piece in CPU.cut(TEXT, LATE - 128, LATE + 512)] == [64, 64, 256, 256]
    assert [CPU.begin(TEXT, token) for token in (63, LATE - 1, LATE, LATE + 255, LATE + 256)] == [
        0,
        960,
        1024,
        1024,
        1280,
    ]


@pytest.mark.parametrize(
    ("start", "tokens", "end"), [(0, 1, 64), (0, 64, 64), (0, 127, 64), (0, 128, 128), (70, 128, 192)]
)
def test_a_chunk_is_whole_pieces_and_at_least_one(start: int, tokens: int, end: int) -> None:
    assert CPU.cut(TEXT, start, len(TEXT), tokens)[-1].stop == end


@pytest.mark.parametrize(
    ("start", "tokens", "end"),
    [(LATE, 1, LATE + 256), (LATE - 64, 128, LATE), (LATE - 64, 320, LATE + 256), (LATE, 511, LATE + 256)],
)
def test_a_late_chunk_too(start: int, tokens: int, end: int) -> None:
    assert CPU.cut(TEXT, start, len(TEXT), tokens)[-1].stop == end


@pytest.mark.parametrize(
    ("kept", "prompt", "shared"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 5, 3], [1, 2], 1),
    ],
)
def test_shared_prefix(kept: list[int], prompt: list[int], shared: int) -> None:
    assert shared_prefix(np.array(kept, dtype=np.int64), np.array(prompt, dtype=np.int64)) == shared


@pytest.mark.parametrize(
    ("start", "end", "cut"),
    [
        (0, 4, [range(4)]),
        (0, 1, [range(1)]),
        (0, 9, [range(4), range(4, 8), range(8, 9)]),
        (4, 9, [range(4, 8), range(8, 9)]),
        (6, 9, [range(6, 8), range(8, 9)]),
        (6, 8, [range(6, 8)]),
    ],
)
def test_pieces(start: int, end: int, cut: list[range]) -> None:
    assert Pieces(4).cut(TEXT, start, end) == tuple(cut)


@pytest.mark.parametrize(
    ("held", "prompt", "whole", "tail"),
    [
        ([], [1, 2], 0, 0),
        ([1, 2, 3], [1, 2, 3, 4, 5], 0, 0),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 4, 4),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], 4, 4),
        ([1, 2, 3, 4, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8], 4, 4),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], 4, 4),  # it was read as part of a longer piece
        ([1, 2, 3], [1, 2, 3], 0, 1),  # and here the pieces end alike
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 4, 4),
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], 4, 5),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8], 4, 6),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4], 0, 2),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 4, 4),  # its last piece has one token
        ([1], [1], 0, 0),
    ],
)
def test_reusable_prefix(held: list[int], prompt: list[int], whole: int, tail: int) -> None:
    arrays = np.array(held, dtype=np.int64), np.array(prompt, dtype=np.int64)
    assert reusable_prefix(*arrays, Pieces(4), None) == whole
    assert reusable_prefix(*arrays, Pieces(4), 2) == tail


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def anything(beginning: np.ndarray) -> bool:
    return True


def test_the_one_used_longest_ago_is_given_away() -> None:
    saved = SavedStates(2)
    first, second, third = tokens(1), tokens(1, 2), tokens(1, 2, 3)
    assert [saved.add(one, anything) for one in (first, second)] == [0, 1]
    assert saved.add(first, anything) is None  # it is there already, and used
    assert saved.add(third, anything) == 1
    assert [saved.use(one) for one in (first, second, third)] == [0, None, 1]
    assert saved.add(second, lambda one: len(one) != 3) == 1  # of no use to anybody, though used last
    assert [saved.longest(tokens(1, 2, 3, 4), most) for most in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert saved.longest(tokens(2, 1), 2) == 0
    assert SavedStates(0).add(first, anything) is None


def test_what_is_saved_is_a_copy() -> None:
    saved, beginning = SavedStates(1), tokens(1, 2)
    saved.add(beginning, anything)
    beginning[0] = 9
    assert saved.use(tokens(1, 2)) == 0
