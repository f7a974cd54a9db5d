"""The text that a model writes itself: where rows begin, and what it is good for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.compiler import calibration
from qsample.compiler.calibration import own_text
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import make_plan
from qsample.package.package import read_package


def test_rows_begin_with_the_first_token_and_again_after_a_stop_token(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_WRITTEN", 240)
    source = read_package(llama_package)
    stops = tuple(range(0, source.interface.vocab_size, 2))  # half of the vocabulary
    token_ids = replace(source.manifest.token_ids, bos=3, eos=stops)
    source = replace(source, manifest=replace(source.manifest, token_ids=token_ids))
    plan = make_plan(source, CompileOptions(weights="int4", preset="speed", ctx_len=25))
    told: list[float] = []
    rows = np.array(own_text(plan, tmp_path, told.append))
    assert rows.shape == (10, 24)
    assert (rows[:, 0] == 3).all()
    stopped = np.isin(rows[:, :-1], stops)
    assert (rows[:, 1:][stopped] == 3).all()
    assert (rows[:, 1:][~stopped] != 3).any()
    assert len(np.unique(rows, axis=0)) == 10
    assert told[-1] == 1.0


@pytest.mark.ci
def test_a_fit_to_it_is_closer_than_rounding(bundled_package: Path, tmp_path: Path) -> None:
    source, found, stages = read_package(bundled_package), dict[str, float](), list[str]()
    for preset in ("quick", "speed"):
        given: dict[str, Any] = {"weights": "int4", "block_size": 32, "preset": preset, "ctx_len": 256}
        made = compile_package(
            source, tmp_path / preset, CompileOptions(**given), progress=lambda stage, _: stages.append(stage)
        )
        assert made.manifest.compilation is not None
        assert made.manifest.compilation.quantization is not None
        found[preset] = made.manifest.compilation.quantization["divergence"]["kl"]
    assert found["speed"] < 0.8 * found["quick"]
    names = list(dict.fromkeys(stages))
    assert names.index("writing the text to fit to") < names.index("fitting weights to the text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quick", "speed"], "nothing is left beside them"
