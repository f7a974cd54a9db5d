"""Where prompts are cut."""

from __future__ import annotations

import pytest

from qsample.ort.pieces import LATE, Pieces

CPU = Pieces(64, late=256)


@pytest.mark.parametrize("pieces", [Pieces(1), Pieces(4), CPU])
@pytest.mark.parametrize("start", [0, 3, 64, 1000, LATE, LATE + 1])
@pytest.mark.parametrize("tokens", [1, 64, 1999])
def test_pieces_cover_a_prompt_and_are_counted_from_its_start(pieces: Pieces, start: int, tokens: int) -> None:
    whole, cut = pieces.cut(0, start + tokens), pieces.cut(start, start + tokens)
    assert [token for piece in cut for token in piece] == list(range(start, start + tokens))
    assert {piece.stop for piece in cut} == {piece.stop for piece in whole if piece.stop > start}
    assert all(pieces.begin(piece.start) == piece.start for piece in whole)


def test_pieces_are_longer_far_into_a_prompt() -> None:
    assert [len(piece) for piece in CPU.cut(LATE - 128, LATE + 512)] == [64, 64, 256, 256]
    assert [CPU.begin(token) for token in (63, LATE - 1, LATE, LATE + 255, LATE + 256)] == [0, 960, 1024, 1024, 1280]


@pytest.mark.parametrize(
    ("start", "tokens", "end"), [(0, 1, 64), (0, 64, 64), (0, 127, 64), (0, 128, 128), (70, 128, 192)]
)
def test_a_chunk_is_whole_pieces_and_at_least_one(start: int, tokens: int, end: int) -> None:
    assert CPU.end(start, tokens) == end


@pytest.mark.parametrize(
    ("start", "tokens", "end"),
    [(LATE, 1, LATE + 256), (LATE - 64, 128, LATE), (LATE - 64, 320, LATE + 256), (LATE, 511, LATE + 256)],
)
def test_a_late_chunk_too(start: int, tokens: int, end: int) -> None:
    assert CPU.end(start, tokens) == end
