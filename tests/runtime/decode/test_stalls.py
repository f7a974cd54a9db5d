"""Rows that a captured graph stalls, and functions that write the mask of each next token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.runtime import Engine, SamplingParams, load
from qsample.runtime.decode.searched_rows import SearchedRows
from qsample.runtime.decode.slots import Slots
from tests.helpers.capturing import capturing, compile_captured

PROMPTS = [[5, 6, 7], [9, 20, 31, 4, 5], [17]]
# A wide nucleus: the candidates seldom settle a row.
PARAMS = SamplingParams(temperature=2.0, top_p=0.98, max_new_tokens=12, eos_token_id=())


@pytest.fixture(autouse=True)
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row but the first is searched, so that they stall, as they do where a search fails."""
    monkeypatch.setattr(SearchedRows, "_needs_search", lambda self: np.zeros(self._count, bool))


@pytest.fixture(scope="module")
def captured(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    portable = exported("llama", allowed_tokens=True)
    return compile_captured(portable, tmp_path_factory.mktemp("captured") / "package", 48)


class Alternating:
    """Allows the tokens with an even id, then those with an odd one, and so on, for each row on its own."""

    def __init__(self) -> None:
        self.turns: list[int] = []

    def __call__(self, step: Any, mask: np.ndarray) -> None:
        if step is None:
            self.turns = [0] * len(mask)
        else:
            self.turns = [turn + int(emitted) for turn, emitted in zip(self.turns, step.emitted, strict=True)]
        for row, turn in enumerate(self.turns):
            mask[row] = (0x55555555, -0x55555556)[turn % 2]


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_guided_row_that_stalls_gets_its_next_mask_in_time(
    double_buffering: bool,
    replays: bool,
    captured: Path,
    exported: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resumed: list[int] = []
    plain = Slots.resume
    monkeypatch.setattr(Slots, "resume", lambda self: (resumed.append(1), plain(self))[1])
    options: dict[str, Any] = {"seed": 4, "double_buffering": double_buffering}
    wanted = load(exported("llama", allowed_tokens=True)).generate(
        PROMPTS, PARAMS, seed=4, allowed_tokens=Alternating()
    )
    assert not resumed
    for row in wanted.token_ids:
        assert [token % 2 for token in row] == [0, 1] * 6
    model = capturing(load(captured))[0] if replays else load(captured)
    got = model.generate(PROMPTS, PARAMS, allowed_tokens=Alternating(), **options)
    assert got.token_ids == wanted.token_ids
    assert len(resumed) > 3
    assert got.timing.stalls >= len(resumed)
    with Engine(model, slots=2, double_buffering=double_buffering) as engine:
        requests = [
            engine.add_request(prompt, PARAMS, seed=4 + row, allowed_tokens=Alternating())
            for row, prompt in enumerate(PROMPTS)
        ]
        results = [request.result(60) for request in requests]
    assert [result.token_ids for result in results] == wanted.token_ids
    stalled = [result.usage.stalled_tokens for result in results]
    assert sum(stalled) > 3
    assert max(stalled) <= 12
