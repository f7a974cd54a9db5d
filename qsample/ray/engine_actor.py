"""An engine in an actor of Ray Data: batches overlap in its slots."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qsample.errors import QsampleError
from qsample.ray.archives import open_archive
from qsample.runtime import Engine, Request, RequestOutput, load

if TYPE_CHECKING:
    import pyarrow

    from qsample.ray.processor import QsampleProcessorConfig

_ERROR_COLUMN: Final = "__inference_error__"  # the name of ray.data.llm


class EngineActor:
    """Generates batches of rows. Ray calls it for several batches at once: a slot that one leaves is another's."""

    def __init__(self, config: QsampleProcessorConfig, sent: Any) -> None:
        """sent: a reference to the package's archive; None = it is opened where `config` says."""
        self._config = config
        if sent is not None:
            import ray

            path = open_archive(ray.get(sent))
        else:
            path = Path(config.package)
            path = open_archive(path) if path.is_file() else path
        # Ray sets OMP_NUM_THREADS to 1 for its workers; ONNX Runtime has to be told.
        model = load(
            path,
            config.provider,
            ctx_len=config.ctx_len,
            intra_op_num_threads=max(1, int(config.num_cpus)),
            session_config={"session.intra_op.allow_spinning": "0"},
        )
        self._engine = Engine(
            model,
            slots=config.slots,
            max_waiting=config.batch_size * config.max_concurrent_batches,
            prefill_chunk_size=config.prefill_chunk_size,
        )

    async def __call__(self, batch: pyarrow.Table) -> AsyncIterator[pyarrow.Table]:
        """The rows of `batch` with what was generated, in their order."""
        import pyarrow

        rows = [_plain(row) for row in batch.to_pylist()]
        done = await asyncio.gather(*(self._generate(row) for row in rows))
        yield pyarrow.Table.from_pylist(done)

    async def _generate(self, row: dict[str, Any]) -> dict[str, Any]:
        error = {_ERROR_COLUMN: ""} if self._config.should_continue_on_error else {}
        try:
            output = await self._add(row)
        except (ValueError, QsampleError) as problem:
            if not self._config.should_continue_on_error:
                raise
            return {**row, **_columns(None), _ERROR_COLUMN: f"{type(problem).__name__}: {problem}"}
        return {**row, **_columns(output), **error}

    def _add(self, row: dict[str, Any]) -> Request:
        given = {name: value for name, value in (row.get("sampling_params") or {}).items() if value is not None}
        options = {**self._config.sampling_params, **given}
        seed = options.pop("seed", None)
        seed = row.get("seed") if seed is None else seed
        if seed is None:
            seed = seed_of(row, self._config.id_column)
        inputs = row.get("messages") or row.get("prompt")
        if inputs is None:
            raise ValueError(f"a row has neither prompt nor messages, but {', '.join(row)}; make them in preprocess")
        return self._engine.add_request(inputs, seed=int(seed), **options)


def seed_of(row: dict[str, Any], id_column: str) -> int:
    """A seed that follows from a row's id. Raises ValueError for a row without one."""
    if row.get(id_column) is None:
        raise ValueError(
            f"a row has no seed and no {id_column!r}; give it one of them, so that it comes out the same when it is "
            "done again, or name another id_column"
        )
    text = json.dumps(row[id_column], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 2**63


def _columns(output: RequestOutput | None) -> dict[str, Any]:
    if output is None:
        names = ("generated_text", "finish_reason", "seed", "num_input_tokens", "num_generated_tokens")
        return {**dict.fromkeys(names), "generated_tokens": []}
    return {
        "generated_text": output.text,
        "generated_tokens": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "num_input_tokens": output.usage.prompt_tokens,
        "num_generated_tokens": output.usage.completion_tokens,
    }


def _plain(value: Any) -> Any:
    """Without NumPy's types, which Ray makes of columns of numbers."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
