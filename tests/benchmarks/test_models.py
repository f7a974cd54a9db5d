"""The benchmark of hybrids and mixtures: which cells are left to measure, its tables, and the bytes of a step."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoConfig

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("models")


def test_tables(report: ModuleType, tmp_path: Path) -> None:
    results = report.ModelResults(tmp_path / "models.json", "machine")
    results.add_cell("tiny", 64, 1, "greedy", "qsample", [9.0, 9.0], [1.0, 2.0])
    results.add_cell("tiny", 64, 1, "greedy", "llama.cpp", [9.0, 9.0], [2.0, 4.0])
    for name in ("qsample", "llama.cpp"):
        results.add_system("tiny", name, "1.0", 3_000_000, 1.0, {"anonymous": 5_000_000, "mapped": 0})
    results.set_missing("tiny", "genai", "The /srv/models/checkpoint model | is not supported")
    header, rows = report.time_rows(results, "tiny")
    assert header == ["", "qsample", "onnxruntime-genai", "llama.cpp"]
    assert rows[0] == ["first token, 64 tokens", "9.0", "no", "9.0 (1.00x)"]
    assert rows[2] == ["step, 1 row", "1.5", "no", "3.0 (2.00x)"]
    assert rows[3] == ["step, 4 rows", "", "no", ""]
    assert rows[-1] == ["memory, MB: own + mapped files", "5 + 0", "no", "5 + 0"]
    assert report.missing_lines(results, "tiny") == [
        "onnxruntime-genai does not run it: The checkpoint model / is not supported"
    ]

    # 2 MB at 4 GB/s take 0.5 ms; half as fast in the second round, in which the step takes twice as long.
    results.set_active("tiny", 64, 2_000_000)
    results.add_speed("tiny", 64, [4e9, 2e9])
    assert report.floor_rows(results)[1] == [["tiny", "64", "2.0", "3.0", "0.67", "1.50", "2.00"]]


@pytest.mark.ci
def test_the_bytes_of_a_step(llama_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All matrices but the table of embeddings, and the keys and values."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    active_bytes = importlib.import_module("memory_speed").active_bytes
    config = AutoConfig.from_pretrained(llama_package)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    width = config.num_key_value_heads * hidden // config.num_attention_heads
    layer = 2 * hidden * hidden + 2 * hidden * width + 3 * hidden * inner
    weights = 4 * (layers * layer + hidden * config.vocab_size)
    for history in (1, 100):
        expected = weights + 4 * layers * 2 * width * history
        assert expected <= active_bytes(llama_package, 0, history) < expected + 4096  # norms, constants
