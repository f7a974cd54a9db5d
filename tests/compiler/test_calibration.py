"""The text that a model writes itself: where rows begin, and what it is good for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.compiler import calibration
from qsample.compiler.calibration import own_text
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.own_text import Opening, random_starts
from qsample.compiler.plan import make_plan
from qsample.package.divergence import CHATS
from qsample.package.package import read_package


@pytest.mark.parametrize(("template", "kinds"), [(True, 2), (False, 1)])
def test_half_of_the_text_is_of_another_kind_than_chats(
    template: bool, kinds: int, bundled_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_TEXT_TOKENS", 240)
    source = read_package(bundled_package)
    chat = Opening(CHATS, (3, 4, 5), source.manifest.token_ids.eos, 0.8, ((6,), (7, 8)))
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
