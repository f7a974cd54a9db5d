"""The text that a model writes itself: where rows begin, and what it is good for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.compiler import calibration
from qsample.compiler.calibration import own_text
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.own_text import Opening, random_starts
from qsample.compiler.plan import make_plan
from qsample.contract.interface import Interface
from qsample.package.divergence import CHATS
from qsample.package.package import read_package

STOP = 1  # of the bundled model


@pytest.mark.parametrize(("template", "kinds"), [(True, 2), (False, 1)])
def test_half_of_the_text_is_of_another_kind_than_chats(
    template: bool, kinds: int, bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_TEXT_TOKENS", 240)
    source = read_package(bundled_package)
    chat = Opening(CHATS, (3, 4, 5), (STOP,), 0.8, ((6,), (7, 8)))
    monkeypatch.setattr(
        calibration,
        "opening_of",
        lambda package, capacity: chat if template else random_starts(package),
    )
    plan = make_plan(source, CompileOptions(weights="int4", preset="speed", ctx_len=24))
    told: list[float] = []
    rows = own_text(plan, told.append)
    assert told[-1] == 1.0
    assert told == sorted(told)
    tokens = sum(map(len, rows))
    assert 230 <= tokens <= 300
    chats = [row for row in rows if row[:3].tolist() == [3, 4, 5]]
    assert abs(len(chats) - len(rows) / 2) <= 1 if kinds == 2 else not chats
    assert len({tuple(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("template", [True, False])
def test_a_row_that_stops_goes_on_as_its_kind_does(
    template: bool, bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat with the next turn, a text after random tokens with any token. The model stops at every third token."""
    monkeypatch.setattr(calibration, "_TEXT_TOKENS", 240)
    source = read_package(bundled_package)
    assert source.manifest.token_ids.eos == (STOP,)
    chat = Opening(CHATS, (3, 4, 5), (STOP,), 0.8, ((6,), (7, 8)))
    monkeypatch.setattr(
        calibration,
        "opening_of",
        lambda package, capacity: chat if template else random_starts(package),
    )
    monkeypatch.setattr(calibration, "GraphRunner", StopsEachThird)
    plan = make_plan(source, CompileOptions(weights="int4", preset="speed", ctx_len=24))
    rows = own_text(plan, lambda fraction: None)
    chats = [row.tolist() for row in rows if row[:3].tolist() == [3, 4, 5]]
    others = [row.tolist() for row in rows if row[:3].tolist() != [3, 4, 5]]
    assert bool(chats) == template
    for row in chats:
        # The model's own tokens are 9, and every third is a stop; the host begins the turns.
        turns = [9, 9, 6, 9, 9, 7, 8, 9, 6, 9, 9, 7, 8, 9, 6, 9, 9, 7, 8, 9, 6]
        assert row == [3, 4, 5, *turns]
    for row in others:
        assert row[1:] == ([9, 9, STOP] * 8)[: len(row) - 1]


class StopsEachThird:
    """A model that is sure: of 9, and at every third of its steps of a stop."""

    def __init__(self, model: object, folder: Path, interface: Interface, *_: Any, **__: Any):
        self._vocab_size = interface.vocab_size
        self._steps = 0

    def start(self, rows: int) -> dict[str, Any]:
        self._steps = 0
        return {}

    def step(self, ids: Any, lengths: Any, state: object) -> dict[str, Any]:
        self._steps += 1
        logits = np.full((len(ids), self._vocab_size), -1e9, np.float32)
        logits[:, STOP if self._steps % 3 == 0 else 9] = 0
        return {"logits": logits}


@pytest.mark.ci
def test_a_fit_to_it_is_closer_than_rounding(bundled_package: Path, tmp_path: Path) -> None:
    source, found, stages = read_package(bundled_package), dict[str, float](), list[str]()
    for preset in ("quick", "speed"):
        given: dict[str, Any] = {"weights": {"*": "int4:32"}, "preset": preset, "ctx_len": 256}
        made = compile_package(
            source,
            tmp_path / preset,
            CompileOptions(**given),
            progress=lambda stage, _: stages.append(stage),
        )
        assert made.manifest.compilation is not None
        assert made.manifest.compilation.quantization is not None
        found[preset] = made.manifest.compilation.quantization["divergence"]["kl"]["value"]
    assert found["speed"] < 0.8 * found["quick"]
    names = list(dict.fromkeys(stages))
    assert names.index("writing the text to fit to") < names.index("fitting weights to the text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quick", "speed"], (
        "nothing is left beside them"
    )
