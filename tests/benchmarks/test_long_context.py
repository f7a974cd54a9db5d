"""The benchmark of long histories: its table, the participants, and a run on a tiny model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Benchmark = Callable[[str], ModuleType]
INT8 = "qsample, int8 cache"


def test_the_table(benchmark: Benchmark) -> None:
    long, cells = benchmark("long_context"), list[dict[str, Any]]()

    def add(
        rows: int, system: str, steps: list[float], together: str | bool, first: float | None = None
    ) -> None:
        facts = {
            "first_token_s": first,
            "step_ms": steps,
            "memory": {"anonymous": 2_500_000_000, "mapped": 0},
        }
        facts |= {"cache_bytes": 1_200_000_000, "version": "onnxruntime 1", "together": together}
        cells.append(long.Cell("tiny", 4096, rows).key(system) | facts)

    # The machine halves its speed after the first round.
    add(1, long.FLOAT32, [10.0, 20.0, 20.0], "12:00", first=12.34)
    add(1, INT8, [5.0, 10.0, 11.0], "12:00", first=15.0)
    add(1, "llama.cpp, f16", [5.0, 10.0, 11.0], "12:30")  # another run
    add(4, long.FLOAT32, [40.0], False)
    add(4, INT8, [20.0], False)
    cells.append(long.Cell("tiny", 4096, 4).key("genai") | {"missing": "not | enough memory here"})
    assert long.table_rows(cells, "tiny")[1] == [
        ["4,096", "1", long.FLOAT32, "12.3", "20.0", "1.00x", "2.50", "1.20"],
        ["4,096", "1", INT8, "15.0", "10.0", "0.50x", "2.50", "1.20"],
        ["4,096", "1", "llama.cpp, f16", "", "10.0", "", "2.50", "1.20"],
        ["4,096", "4", long.FLOAT32, "", "40.0", "", "2.50", "1.20"],
        ["4,096", "4", INT8, "", "20.0", "", "2.50", "1.20"],
        ["4,096", "4", "genai", "not / enough memory here", "", "", "", ""],
    ]


def test_who_reads_and_who_is_filled(benchmark: Benchmark) -> None:
    long = benchmark("long_context")
    models = dict.fromkeys(long.SYSTEMS, Path())
    first, longer, wider = (long.Cell("tiny", *key) for key in ((4096, 1), (16384, 1), (4096, 4)))
    assert (
        long.taking_part(longer, models, 16640)
        == long.taking_part(wider, models, 16640)
        == list(models)
    )
    assert "genai" not in long.taking_part(long.Cell("tiny", 16384, 4), models, 16640)
    assert "genai" not in long.taking_part(longer, models, 4096)
    assert long.read_tokens(argparse.Namespace(history=[16384, 1024, 64, 4096])) == 1024
    making, reading = (
        argparse.Namespace(history=[4096, 16384], fill=fill) for fill in (True, False)
    )
    for system in long.SYSTEMS:
        can_be_filled = system != "genai"
        assert not long.is_filled(system, first, making)
        assert not long.is_filled(system, longer, reading)
        assert long.is_filled(system, longer, making) == can_be_filled
        assert long.is_filled(system, wider, reading) == can_be_filled


def test_memory_of_caches_of_a_window(benchmark: Benchmark) -> None:
    long = benchmark("long_context")
    sizes = [
        long.Cell("gemma-3-270m", 16384, 2).cache_bytes(name)
        for name in (long.WHOLE, long.FLOAT32, INT8)
    ]
    # Keys and values of 256 numbers of 4 bytes; 15 of 18 layers hold 512 + 511 tokens.
    assert sizes == [
        2 * 2048 * 18 * 16512,
        2 * 2048 * (3 * 16512 + 15 * 1023),
        2 * 512 * (3 * 16512 + 15 * 1023),
    ]


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model(
    benchmark: Benchmark, run: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    systems = [benchmark("long_context").FLOAT32, INT8]
    options = [
        "--shape",
        "tiny",
        "--system",
        *systems,
        "--history",
        "200",
        "1300",
        "--rows",
        "1",
        "2",
    ]
    options += ["--rounds", "2", "--new-tokens", "4"]
    data, page = run("long_context", *options)
    keys = [(cell["history"], cell["rows"], cell["system"]) for cell in data["cells"]]
    assert keys == [
        (history, rows, system) for history in (200, 1300) for rows in (1, 2) for system in systems
    ]
    for cell in data["cells"]:
        assert len(cell["step_ms"]) == 2
        assert (cell["first_token_s"] is None) == (cell["rows"] > 1 or cell["history"] > 200)
    assert "| 1,300 | 2 | qsample, int8 cache |" in page
    before = (tmp_path / "out" / "long_context.json").stat().st_mtime_ns
    run("long_context", *options)
    assert (
        tmp_path / "out" / "long_context.json"
    ).stat().st_mtime_ns == before  # nothing is left to measure
