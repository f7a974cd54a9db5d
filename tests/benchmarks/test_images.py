"""The benchmark of image models: its tables, and a run on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def test_the_tables(benchmark: Callable[[str], ModuleType]) -> None:
    images = benchmark("images")
    # Two copies, three turns; the machine halves its speed after the first turn.
    times = {
        "qwen3": [[10.0, 20.0, 20.0]] * 2,
        "qwen3_vl": [[10.3, 20.6, 20.6], [10.1, 20.2, 20.2]],
    }
    _, (line,) = images.step_rows(times)
    assert line == ["qwen3_vl", "qwen3", "20.20", "20.00", "1.020", "1.010 to 1.030", "250"]
    found = {
        "ms": {"first token": [300.0, 500.0, 400.0], "tower": [100.0, 90.0, 95.0]},
        "ratio": [2.0, 1.5, 1.0],
    }
    header, lines = images.first_token_rows(found)
    assert dict(zip(header, lines[0], strict=True)) == {
        "first token, ms": "400",
        "tower, ms": "95",
        "transformers / qsample": "1.50x",
    }


@pytest.mark.slow
def test_a_whole_run_on_tiny_models(run: Callable[..., tuple[Any, str]]) -> None:
    models = ["qwen3_vl", "llava", "gemma3"]
    data, page = run("images", "--tiny", "--rounds", "2", "--images", "1", "--model", *models)
    assert data["steps"].keys() == {*models, "qwen3", "gemma3_text"} == data["nodes"].keys()
    for turns in data["steps"].values():
        assert [len(copy) for copy in turns] == [2, 2]
    nodes = data["nodes"]
    assert nodes["llava"]["nodes"] - nodes["qwen3"]["nodes"] <= 8
    assert nodes["qwen3_vl"]["RotaryEmbedding"] == 2 * nodes["qwen3"]["GroupQueryAttention"]
    assert nodes["gemma3"]["If"] - nodes["gemma3_text"]["If"] == 3  # masks, and two layers
    first = data["first_token"]
    assert sum(first["ms"][name][0] for name in ("pixels", "tower", "prefill")) == pytest.approx(
        first["ms"]["first token"][0]
    )
    assert "| qwen3_vl | qwen3 |" in page
