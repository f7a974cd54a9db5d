"""The benchmarks of whole decoders: turns, results and tables, and runs on a tiny model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

Benchmark = Callable[[str], ModuleType]


def cell(
    mix: str, system: str, first: list[float], step: list[float], rows: int = 1
) -> dict[str, Any]:
    key = {"prompt": 64, "batch": rows, "mix": mix, "system": system}
    return key | {"first_token_ms": first, "step_ms": step}


def test_ratios_are_taken_within_a_round(benchmark: Benchmark, tmp_path: Path) -> None:
    decoders = benchmark("decoders")
    results = decoders.Results(tmp_path / "decode.json", "machine")
    # The machine halves its speed after the first round; the peer takes twice qsample's time in each.
    facts = results.shape("qwen3-0.6b")
    facts["cells"] += [cell("greedy", "qsample", [100.0, 200.0, 200.0], [10.0, 20.0, 20.0])]
    facts["cells"] += [cell("greedy", "genai", [300.0, 600.0, 600.0], [20.0, 40.0, 44.0])]
    greedy = decoders.Cell(64, 1, "greedy")
    assert decoders.ratio(facts, greedy, "genai", "step_ms") == 2.0
    assert decoders.ratio(facts, greedy, "genai", "first_token_ms") == 3.0
    assert decoders.ratio(facts, greedy, "llama.cpp", "step_ms") is None
    assert decoders.cell_rows(facts)[1] == [
        ["64", "1", "greedy", "200.0, 20.0", "600.0 (3.00x), 40.0 (2.00x)"]
    ]
    assert decoders.beside_rows(facts)[1] == []
    facts["cells"] += [cell("greedy", "qsample, speed", [90.0, 180.0, 180.0], [8.0, 16.0, 16.0])]
    header, rows = decoders.beside_rows(facts)
    assert header[3:] == ["package", "step, ms", "genai ÷ it"]
    assert [row[3:] for row in rows] == [
        ["qsample", "20.0", "2.00"],
        ["qsample, speed", "16.0", "2.50"],
    ]
    facts["overhead"]["4"] = {
        "ms": {"greedy": 20.0, "greedy_host": 0.5},
        "everything_over_greedy": 1.012,
    }
    facts["tokens"] = {"compared": 64, "equal": 63}
    assert decoders.overhead_rows(facts)[1] == [["4", "1.2%", "2.5%"]]
    assert decoders.notes(facts)[0].endswith(": 63 of 64.")
    results.save()
    assert decoders.Results(tmp_path / "decode.json", "machine").data == results.data
    assert decoders.Results(tmp_path / "decode.json", "another machine").data["shapes"] == {}


def test_a_run_goes_on_where_the_one_before_stopped(benchmark: Benchmark, tmp_path: Path) -> None:
    decoders, report = benchmark("decoders"), benchmark("report")
    results = decoders.Results(tmp_path / "decode.json", "machine")
    results.shape("tiny")["cells"] += [cell("greedy", "qsample", [9.0, 9.0], [1.0, 1.0])]
    results.save()
    results = decoders.Results(tmp_path / "decode.json", "machine")
    greedy = decoders.Cell(64, 1, "greedy")
    assert results.is_complete("tiny", greedy, ["qsample"], rounds=2)
    assert not results.is_complete("tiny", greedy, ["qsample"], rounds=3)
    assert not results.is_complete("tiny", decoders.Cell(64, 4, "greedy"), ["qsample"], rounds=2)
    assert not results.is_complete("tiny", greedy, ["qsample", "genai"], rounds=2)
    results.fail(
        "tiny",
        "genai",
        RuntimeError("first line\nValueError: no such /srv/model"),
        report.Console(quiet=True),
    )
    assert results.shape("tiny")["missing"] == {"genai": "ValueError: no such model"}
    assert results.is_complete("tiny", greedy, ["qsample", "genai"], rounds=2)

    # A cell that is measured again replaces the earlier one.
    cells = results.shape("tiny")["cells"]
    report.put(
        cells,
        {name: cells[0][name] for name in ("prompt", "batch", "mix", "system")},
        step_ms=[3.0, 4.0],
    )
    assert [one["step_ms"] for one in cells] == [[3.0, 4.0]]

    # Complete cells of the plan are left out.
    part = decoders.Part("tiny", (64,), (1, 4), ("greedy",), 2, without=("transformers",))
    assert [
        one.rows
        for _, one in decoders.remaining(results, [part], ["qsample", "transformers"], again=False)
    ] == [4]
    assert [
        one.rows for _, one in decoders.remaining(results, [part], ["qsample"], again=True)
    ] == [1, 4]


class FakeWorker:
    """Answers with its own seconds, and ends after so many questions."""

    def __init__(self, log: list[str], name: str, seconds: float, questions: int) -> None:
        self.log, self.name, self.seconds, self.questions = log, name, seconds, questions

    def ask(self, **request: Any) -> dict[str, Any]:
        self.log.append(f"{self.name} {request['prompt_tokens']} {request['new_tokens']}")
        self.questions -= 1
        if self.questions < 0:
            raise RuntimeError("the process ended")
        return {
            "first_token": 3 * self.seconds,
            "steps": [self.seconds] * (request["new_tokens"] - 1),
        }


def test_systems_take_turns_and_one_that_ends_is_out(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = benchmark("turns")
    monkeypatch.setattr(turns, "PAUSE", 0.0)
    log: list[str] = []
    failures: list[str] = []
    workers = {
        "qsample": FakeWorker(log, "qsample", 0.001, 99),
        "genai": FakeWorker(log, "genai", 0.002, 2),
    }
    first, steps = turns.take_turns(
        workers,
        turns.Cell(1024, 4, "greedy"),
        {"temperature": 0.0},
        3,
        24,
        failed=lambda name, error: failures.append(name),
        after_round=lambda: log.append("round"),
    )
    # The first system changes; the round that warms up reads a short prompt.
    assert log[:5] == ["qsample 64 4", "genai 64 4", "genai 1024 24", "qsample 1024 24", "round"]
    assert log[5:] == ["qsample 1024 24", "genai 1024 24", "round", "qsample 1024 24", "round"]
    assert failures == ["genai"]
    assert list(workers) == list(first) == ["qsample"]
    assert first["qsample"] == pytest.approx([3.0] * 3)
    assert steps["qsample"] == pytest.approx([1.0] * 3)


def test_the_plan_and_a_grid(benchmark: Benchmark) -> None:
    decode = benchmark("decode")
    options = argparse.Namespace(
        whole=False, shape=None, prompt=None, batch=None, mix=None, rounds=None
    )
    assert decode.chosen_parts(options) == list(decode.CENTRAL)
    whole = {"whole": True, "shape": ["qwen3-4b"], "rounds": 7}
    parts = decode.chosen_parts(argparse.Namespace(**vars(options) | whole))
    assert [(part.shape, part.rows, part.rounds) for part in parts] == [("qwen3-4b", (1,), 7)]
    (part,) = decode.chosen_parts(
        argparse.Namespace(**vars(options) | {"prompt": [16], "mix": ["greedy"]})
    )
    assert [str(one) for one in part.cells] == [
        "prompt 16, 1 rows, greedy",
        "prompt 16, 4 rows, greedy",
    ]


def test_the_quality_of_each_system_stands_beside_its_speed(
    benchmark: Benchmark, tmp_path: Path
) -> None:
    decode, decoders = benchmark("decode"), benchmark("decoders")
    facts = decoders.Results(tmp_path / "decode.json", "machine").shape("tiny")
    names = ("qsample", "qsample, speed, --no-batch-invariant", "genai defaults", "transformers")
    facts["systems"] = {
        name: {"version": "1", "bytes": 1, "load_seconds": 1.0, "memory": {}} for name in names
    }
    facts["cells"] += [cell("greedy", name, [9.0], [1.0]) for name in names]
    kl = {"int4 quick": 0.04, "int4 speed": 0.03, "onnxruntime-genai default": 0.05}
    rows = {bits: {"kl": [value, value, value]} for bits, value in kl.items()}
    report = {
        "models": {
            "second": {"rows": rows},
            "dithered": {"rows": {"int4 speed": rows["int4 speed"]}},
        }
    }
    (tmp_path / "quality.json").write_text(json.dumps(report))
    decode.add_quality(facts, tmp_path / "quality.json")
    header, lines = decoders.system_rows(facts)
    assert header[-2:] == ["KL of its bits, second", "KL of its bits, dithered"]
    assert [line[-2:] for line in lines] == [
        ["0.0400", ""],
        ["0.0300", "0.0300"],
        ["0.0500", ""],
        ["", ""],
    ]
    assert [name for name in decoders.cell_rows(facts)[0] if "KL" in name] == [
        f"{names[1]} (KL 0.0300): TTFT, step"
    ]


def test_tables_of_models(benchmark: Benchmark, tmp_path: Path) -> None:
    models, facts = (
        benchmark("models"),
        benchmark("decoders").Results(tmp_path / "m.json", "machine").shape("tiny"),
    )
    facts["cells"] += [cell("greedy", "qsample", [9.0, 9.0], [1.0, 2.0])]
    facts["cells"] += [cell("greedy", "llama.cpp", [9.0, 9.0], [2.0, 4.0])]
    known = {"version": "1.0", "bytes": 3_000_000, "memory": {"anonymous": 5_000_000, "mapped": 0}}
    facts["systems"] = {"qsample": known, "llama.cpp": known}
    facts["missing"]["genai"] = "The /srv/models/checkpoint model | is not supported"
    header, rows = models.time_rows(facts)
    assert header == ["", "qsample", "onnxruntime-genai", "llama.cpp"]
    assert rows[0] == ["first token, 64 tokens", "9.0", "no", "9.0 (1.00x)"]
    assert rows[2] == ["step, 1 row", "1.5", "no", "3.0 (2.00x)"]
    assert rows[3] == ["step, 4 rows", "", "no", ""]
    assert rows[-1] == ["memory, MB: own + mapped files", "5 + 0", "no", "5 + 0"]
    assert models.missing_lines(facts) == [
        "onnxruntime-genai does not run it: The checkpoint model / is not supported"
    ]
    # 2 MB at 4 GB/s take 0.5 ms; half as fast in the second round, in which the step takes twice as long.
    facts |= {"active": {"64": 2_000_000}, "speed": {"64": [4e9, 2e9]}}
    assert models.floor_rows({"tiny": facts})[1] == [
        ["tiny", "64", "2.0", "3.0", "0.67", "1.50", "2.00"]
    ]


@pytest.mark.ci
def test_the_bytes_of_a_step(benchmark: Benchmark, llama_package: Path) -> None:
    """All matrices but the table of embeddings, and the keys and values."""
    active_bytes = benchmark("memory_speed").active_bytes
    config = AutoConfig.from_pretrained(llama_package)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    width = config.num_key_value_heads * hidden // config.num_attention_heads
    layer = 2 * hidden * hidden + 2 * hidden * width + 3 * hidden * inner
    weights = 4 * (layers * layer + hidden * config.vocab_size)
    for history in (1, 100):
        expected = weights + 4 * layers * 2 * width * history
        assert (
            expected <= active_bytes(llama_package, 0, history) < expected + 4096
        )  # norms, constants


@pytest.mark.slow
def test_a_whole_run_on_a_tiny_model(run: Callable[..., tuple[Any, str]]) -> None:
    sizes = ["--batch", "1", "2", "--prompt", "16", "--rounds", "2", "--new-tokens", "4"]
    options = ["--whole", "--overhead-steps", "8", "--system", "transformers", "qsample, speed"]
    data, page = run("decode", "--shape", "tiny", *sizes, *options)
    ((title, found),) = data["shapes"].items()
    assert title.startswith("tiny, ")
    assert len(found["cells"]) == 2 * 3 * 4  # batches, systems, mixes
    assert found["tokens"]["equal"] == found["tokens"]["compared"] == 64
    assert "| 16 | 2 | greedy | qsample, speed |" in page
    assert "| 16 | 2 | greedy |" in page
