"""Rows through engines: what a row gives, without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from qsample.ray.engine_actor import EngineActor, seed_of
from qsample.ray.processor import QsampleProcessorConfig
from qsample.runtime import load

PROMPT = "And the LORD spake"


def run(config: QsampleProcessorConfig, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    actor = EngineActor(config, None)

    async def every() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(actor._generate(row) for row in rows)))

    try:
        return asyncio.run(every())
    finally:
        actor._engine.close()


def test_rows_are_what_generate_gives(bundled_package: Path) -> None:
    config = QsampleProcessorConfig(package=str(bundled_package), slots=2, sampling_params={"max_new_tokens": 8})
    rows: list[dict[str, Any]] = [
        {"prompt": PROMPT, "seed": 3},
        {"prompt": PROMPT, "id": "a", "sampling_params": {"temperature": 0.5, "max_new_tokens": 5, "top_p": None}},
        {"prompt": [5, 6, 7], "seed": 1, "sampling_params": {"seed": 9, "temperature": 1.0}},
    ]
    done = run(config, rows)
    model = load(bundled_package)
    expected = [
        model.generate(PROMPT, seed=3, max_new_tokens=8),
        model.generate(PROMPT, seed=seed_of({"id": "a"}, "id"), max_new_tokens=5, temperature=0.5),
        model.generate([5, 6, 7], seed=9, max_new_tokens=8, temperature=1.0),
    ]
    assert [row["generated_text"] for row in done] == [(output.texts or [""])[0] for output in expected]
    assert [row["generated_tokens"] for row in done] == [output.token_ids[0] for output in expected]
    assert [row["num_generated_tokens"] for row in done] == [len(output.token_ids[0]) for output in expected]
    assert done[1]["id"] == "a"


def test_rows_that_fail_say_so_or_end_the_job(bundled_package: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 0, "prompt": PROMPT},
        {"id": 1, "prompt": PROMPT, "sampling_params": {"temperature": -1}},
        {"prompt": PROMPT},
        {"id": 3},
    ]
    options: dict[str, Any] = {"package": str(bundled_package), "slots": 2, "sampling_params": {"max_new_tokens": 2}}
    done = run(QsampleProcessorConfig(**options, should_continue_on_error=True), rows)
    assert [row["__inference_error__"][:20] for row in done] == [
        "", "ValueError: temperat", "ValueError: a row ha", "ValueError: a row ha",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="temperature"):
        run(QsampleProcessorConfig(**options), rows)


def test_seeds_follow_from_ids() -> None:
    seeds = [seed_of({"id": one}, "id") for one in (0, 1, "0", "a", [1, 2], 1.5)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of({"key": 1}, "key") == seed_of({"id": 1}, "id")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency"), ({"concurrency": (2, 1)}, "concurrency"), ({"slots": 1.5}, "slots"),
        ({"num_cpus": -1}, "num_cpus"), ({"sampling_params": {"seed": 1}}, "every row's"),
        ({"batch_size": 0}, "batch_size"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QsampleProcessorConfig(package="x", **options)
