"""Batches as Arrow tables: their own columns stay as they are. Needs pyarrow, which Ray Data brings."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qsample.ray.engine_actor import EngineActor
from qsample.ray.processor import QsampleProcessorConfig

pa = pytest.importorskip("pyarrow")

ADDED = {
    "generated_text": pa.string(),
    "generated_tokens": pa.list_(pa.int64()),
    "finish_reason": pa.string(),
    "seed": pa.int64(),
    "num_input_tokens": pa.int64(),
    "num_generated_tokens": pa.int64(),
    "__inference_error__": pa.string(),
}


@pytest.fixture
def actor(bundled_package: Path) -> Iterator[EngineActor]:
    config = QsampleProcessorConfig(
        package=str(bundled_package), slots=2, sampling_params={"max_new_tokens": 3}, should_continue_on_error=True
    )
    actor = EngineActor(config, None)
    yield actor
    actor._engine.close()


def run(actor: EngineActor, batch: Any) -> Any:
    async def every() -> list[Any]:
        return [table async for table in actor(batch)]

    (table,) = asyncio.run(every())
    return table


def test_columns_stay_as_they_are(actor: EngineActor) -> None:
    batch = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "prompt": ["In the beginning", None],
            "score": pa.array([0.5, None], pa.float32()),
            "when": pa.array([datetime.datetime(2024, 5, 1), None], pa.timestamp("ns")),
            "kind": pa.array(["a", "a"]).dictionary_encode(),
            "raw": pa.array([b"\xff", b""], pa.binary()),
            "pairs": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
            "generated_text": [1, 2],
        }
    )
    done = run(actor, batch)
    assert done.select([name for name in batch.column_names if name not in ADDED]).equals(
        batch.drop_columns(["generated_text"])
    )
    assert {name: done.schema.field(name).type for name in ADDED} == ADDED
    assert done.column("num_generated_tokens").to_pylist() == [3, None]
    assert [bool(error) for error in done.column("__inference_error__").to_pylist()] == [False, True]


@pytest.mark.parametrize("rows", [0, 2])
def test_types_do_not_depend_on_the_rows(actor: EngineActor, rows: int) -> None:
    """A batch without rows, and one whose rows all fail."""
    done = run(actor, pa.table({"text": pa.array(["x"] * rows, pa.string())}))
    assert done.num_rows == rows
    assert {name: done.schema.field(name).type for name in ADDED} == ADDED
