"""Beginnings of prompts: cuts, the tokens that two prompts share, and saved states."""

from __future__ import annotations

import random

import numpy as np
import pytest

from qsample.runtime.decode.prefixes import (
    LATE_START,
    Pieces,
    SavedStates,
    reusable_prefix,
    shared_pieces,
    shared_prefix,
    shared_tokens,
)

CPU = Pieces(64, late=256)
TEXT = np.arange(4096)


@pytest.mark.parametrize("pieces", [Pieces(1), Pieces(4), CPU])
@pytest.mark.parametrize("start", [0, 3, 64, 1000, LATE_START, LATE_START + 1])
@pytest.mark.parametrize("tokens", [1, 64, 1999])
def test_pieces_cover_a_prompt_and_are_counted_from_its_start(
    pieces: Pieces, start: int, tokens: int
) -> None:
    whole, cut = pieces.cut(TEXT, 0, start + tokens), pieces.cut(TEXT, start, start + tokens)
    assert [token for piece in cut for token in piece] == list(range(start, start + tokens))
    assert {piece.stop for piece in cut} == {piece.stop for piece in whole if piece.stop > start}
    assert all(pieces.begin(TEXT, piece.start) == piece.start for piece in whole)


def test_pieces_are_longer_far_into_a_prompt() -> None:
    assert [len(piece) for piece in CPU.cut(TEXT, LATE_START - 128, LATE_START + 512)] == [
        64,
        64,
        256,
        256,
    ]
    assert [
        CPU.begin(TEXT, token)
        for token in (63, LATE_START - 1, LATE_START, LATE_START + 255, LATE_START + 256)
    ] == [
        0,
        960,
        1024,
        1024,
        1280,
    ]


@pytest.mark.parametrize(
    ("start", "tokens", "end"),
    [(0, 1, 64), (0, 64, 64), (0, 127, 64), (0, 128, 128), (70, 128, 192)],
)
def test_a_chunk_is_whole_pieces_and_at_least_one(start: int, tokens: int, end: int) -> None:
    assert CPU.cut(TEXT, start, len(TEXT), tokens)[-1].stop == end


@pytest.mark.parametrize(
    ("start", "tokens", "end"),
    [
        (LATE_START, 1, LATE_START + 256),
        (LATE_START - 64, 128, LATE_START),
        (LATE_START - 64, 320, LATE_START + 256),
        (LATE_START, 511, LATE_START + 256),
    ],
)
def test_a_late_chunk_is_whole_pieces_and_at_least_one(start: int, tokens: int, end: int) -> None:
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
def test_cut(start: int, end: int, cut: list[range]) -> None:
    assert Pieces(4).cut(TEXT, start, end) == tuple(cut)


@pytest.mark.parametrize(
    ("held", "prompt", "whole", "tail"),
    [
        ([], [1, 2], 0, 0),
        ([1, 2, 3], [1, 2, 3, 4, 5], 0, 0),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 4, 4),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], 4, 4),
        ([1, 2, 3, 4, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8], 4, 4),
        (
            [1, 2, 3, 4, 5, 6, 7, 8],
            [1, 2, 3, 4, 5, 6],
            4,
            4,
        ),  # it was read as part of a longer piece
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


def is_useful(beginning: np.ndarray) -> bool:
    return True


def test_the_place_used_longest_ago_is_given_away() -> None:
    saved = SavedStates(2)
    first, second, third = tokens(1), tokens(1, 2), tokens(1, 2, 3)
    assert [saved.add(one, is_useful) for one in (first, second)] == [0, 1]
    assert saved.add(first, is_useful) is None  # it is there already, and used
    assert saved.add(third, is_useful) == 1
    assert [saved.use(one) for one in (first, second, third)] == [0, None, 1]
    assert (
        saved.add(second, lambda one: len(one) != 3) == 1
    )  # of no use to anybody, though used last
    assert [saved.longest(tokens(1, 2, 3, 4), most) for most in (0, 1, 2, 3)] == [0, 1, 2, 2]
    assert saved.longest(tokens(2, 1), 2) == 0
    assert SavedStates(0).add(first, is_useful) is None


def test_saved_beginnings_are_copies() -> None:
    saved, beginning = SavedStates(1), tokens(1, 2)
    saved.add(beginning, is_useful)
    beginning[0] = 9
    assert saved.use(tokens(1, 2)) == 0


def prompt_with_images(generator: random.Random, length: int) -> np.ndarray:
    """Runs of text and of images, few of them different."""
    row: list[int] = []
    while len(row) < length:
        kind = generator.choice([1, 2, -1, -2])
        row += [
            kind * 10 - place if kind < 0 else kind for place in range(generator.randrange(1, 7))
        ]
    return tokens(*row[:length])


def allowed_ends(prompt: np.ndarray, size: int) -> set[int]:
    """The ends of the pieces of a prompt, found token by token."""
    found = set()
    for end in range(0, len(prompt) + 1, size):
        while 0 < end < len(prompt) and prompt[end - 1] < 0 and prompt[end] < 0:
            end += 1
        found.add(end)
    return found


def test_pieces_hold_whole_runs_of_images() -> None:
    generator, pieces = random.Random(7), Pieces(4, whole_images=True)
    together = 0
    for _ in range(400):
        prompt, held = (prompt_with_images(generator, generator.randrange(1, 30)) for _ in range(2))
        same = generator.randrange(len(prompt) + 1)
        held = np.concatenate([prompt[:same], held[: generator.randrange(len(held) + 1)]])
        places, shared = allowed_ends(prompt, 4), shared_prefix(held, prompt)
        for token in range(len(prompt) + 1):
            assert pieces.begin(prompt, token) == max(place for place in places if place <= token)
        cut = pieces.cut(prompt, 0, len(prompt))
        assert [token for piece in cut for token in piece] == [*range(len(prompt))]
        assert {piece.stop for piece in cut} == (places | {len(prompt)}) - {0}
        assert pieces.cut(prompt, 0, len(prompt), 1) == cut[:1]
        both = {place for place in places & allowed_ends(held, 4) if place <= shared}
        assert shared_pieces(held, prompt, pieces) == max(both)
        count, tail = (reusable_prefix(held, prompt, pieces, size) for size in (None, 2))
        assert count == max(place for place in both if place < len(prompt))
        assert tail == count or (held[: len(prompt)] == prompt).all()
        anywhere = shared_tokens(held, prompt, pieces)
        for place in (tail, anywhere):
            assert not pieces.run(prompt, place)
            assert not pieces.run(held, place)
        together += anywhere > count
    assert together > 50
    assert pieces.cut(tokens(5, *range(-9, 0)), 0, 10, 2) == (range(10),), (
        "a run is read in one piece"
    )
    assert Pieces(4).cut(tokens(*range(-9, 0)), 0, 9) == (range(4), range(4, 8), range(8, 9))
