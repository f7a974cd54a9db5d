"""`qsample bench` with a fake runtime: what is measured, and how it is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from qsample.cli.measure import WorkloadOptions
from qsample.cli.opening import LoadOptions
from qsample.request.sampling_params import SamplingParams
from qsample.runtime import bench


@dataclass
class Measured:
    rows: int = 1
    first_token_ms: float = 12.34
    prefill_tokens_per_second: float = 567.8
    decode_ms: float = 3.456
    decode_ms_p90: float = 4.567
    tokens_per_second: float = 89.12
    tokens_per_step: float = 1.0
    prompt_tokens: int = 64
    new_tokens: int = 32
    image_tokens: int = 0
    vision_ms: float = 0.0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measurements to give, and what `measure` was asked for."""
    state = SimpleNamespace(calls=[], results=Measured(), rounding=None)

    def measure(model: Any, rows: int, *given: Any) -> Measured:
        state.calls.append((rows, *given))
        return replace(state.results, rows=rows)

    files = {"a": SimpleNamespace(bytes=1_500_000), "b": SimpleNamespace(bytes=500_000)}
    package = SimpleNamespace(path=Path("package"), manifest=SimpleNamespace(files=files))

    def load(self: LoadOptions, opened: Any) -> Any:
        sessions = SimpleNamespace(rounding=state.rounding)
        return SimpleNamespace(package=package, sessions=sessions, adapters={"a": "adapter"})

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "peak_memory_bytes", lambda: 3_000_000_000)
    monkeypatch.setattr(LoadOptions, "open", lambda self, model: model)
    monkeypatch.setattr(LoadOptions, "load", load)
    monkeypatch.setenv("COLUMNS", "200")
    return state


def test_the_workload_by_default(measured: Any, run: Any) -> None:
    assert run("bench", "package")[0] == 0
    params = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
    assert measured.calls == [(1, 64, 64, params, 3, ["adapter"], None)]


def test_every_option_reaches_the_measurement(measured: Any, run: Any) -> None:
    line = (
        "bench package --batch 2 --batch 1 --prompt-tokens 5 --new-tokens 6 --repetitions 7 "
        "--image 640x480 --temperature 0.5 --top-k 3"
    )
    assert run(*line.split())[0] == 0
    params = SamplingParams(temperature=0.5, top_k=3, top_p=1, min_p=0, repetition_penalty=1)
    assert measured.calls == [(rows, 5, 6, params, 7, ["adapter"], (640, 480)) for rows in (2, 1)]


def rows_of(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines() if line.strip()]


def test_the_table(measured: Any, run: Any) -> None:
    _, shown, _ = run("bench", "package", "--batch", "1", "--batch", "8")
    title, head, _, first, second, last = rows_of(shown)
    assert " ".join(title) == "package: 64 prompt tokens, 32 decode steps"
    columns = "rows TTFT, ms prefill, tok/s step, ms p90, ms decode, tok/s"
    assert " ".join(head) == columns
    assert first == ["1", "12.3", "568", "3.46", "4.57", "89.1"]
    assert second == ["8", *first[1:]]
    assert " ".join(last[:2]) == "loaded in"
    assert " ".join(last[4:]) == "2.0 MB on disk, 3.0 GB of memory at the peak"


def test_guesses_images_and_rounding_have_their_columns(measured: Any, run: Any) -> None:
    measured.results = Measured(tokens_per_step=1.25, image_tokens=9, vision_ms=45.67)
    measured.rounding = SimpleNamespace(described=lambda: "rounds to float16")
    _, shown, _ = run("bench", "package")
    title, head, _, row, _, last = rows_of(shown)
    assert " ".join(title) == "package: 64 prompt tokens, 9 of an image, 32 decode steps"
    assert " ".join(head).endswith("decode, tok/s tok/step vision, ms")
    assert row[-2:] == ["1.25", "45.7"]
    assert last == ["rounds", "to", "float16"]
    measured.results = Measured(image_tokens=1)
    assert "64 prompt tokens, 1 of an image, 32" in run("bench", "package")[1]


def test_the_document(measured: Any, run: Any) -> None:
    _, shown, _ = run("bench", "package", "--json", "--batch", "2")
    document = json.loads(shown)
    assert document.pop("load_seconds") >= 0
    assert document == {
        "package": "package",
        "package_bytes": 2_000_000,
        "rounding": None,
        "peak_memory_bytes": 3_000_000_000,
        "measurements": [vars(Measured(rows=2))],
    }
    assert '\n  "package"' in shown
    measured.rounding = SimpleNamespace(described=lambda: "rounds to float16")
    assert json.loads(run("bench", "package", "--json")[1])["rounding"] == "rounds to float16"


@pytest.mark.parametrize(
    ("given", "size"), [(None, None), ("640x480", (640, 480)), ("1x99999", (1, 99_999))]
)
def test_sizes_of_images(given: str | None, size: tuple[int, int] | None) -> None:
    assert WorkloadOptions(image=given).image_size() == size


@pytest.mark.parametrize("given", ["640", "0x480", "640x0", "100000x1", "640x480x3", "axb", ""])
def test_sizes_of_images_that_are_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="give a width and a height in pixels"):
        WorkloadOptions(image=given).image_size()


@pytest.mark.parametrize("option", ["--batch", "--prompt-tokens", "--new-tokens", "--repetitions"])
def test_counts_begin_with_1(option: str, measured: Any, run: Any) -> None:
    assert run("bench", "package", option, "1")[0] == 0
    status, _, err = run("bench", "package", option, "0")
    assert status == 2
    assert option in err


def test_sampling_that_is_refused(measured: Any, run: Any) -> None:
    status, _, err = run("bench", "package", "--temperature", "-1")
    assert (status, "--temperature is -1" in err) == (2, True)
