"""An engine in an actor of Ray Data: batches overlap in its slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qsample.ort.options import NO_SPINNING
from qsample.ray.archives import open_archive
from qsample.ray.rows import Row, columns_of, request_of
from qsample.runtime import Engine, EngineClosedError, RequestOutput, load

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
        self._model = load(
            path,
            config.provider,
            ctx_len=config.ctx_len,
            intra_op_num_threads=max(1, int(config.num_cpus)),
            session_config=NO_SPINNING,
        )
        self._engine = self._make_engine()

    def _make_engine(self) -> Engine:
        config = self._config
        return Engine(
            self._model,
            slots=config.slots,
            max_waiting=config.batch_size * config.max_concurrent_batches,
            prefill_chunk_size=config.prefill_chunk_size,
        )

    async def __call__(self, batch: pyarrow.Table) -> AsyncIterator[pyarrow.Table]:
        """`batch`, its own columns as they are, and those of what was generated."""
        needed = [name for name in columns_of(self._config.id_column) if name in batch.column_names]
        rows = batch.select(needed).to_pylist() if needed else [{}] * batch.num_rows
        done = await asyncio.gather(*(self.generate(row) for row in rows))
        for name, column in self._arrays(done).items():
            place = batch.schema.get_field_index(name)
            batch = batch.append_column(name, column) if place < 0 else batch.set_column(place, name, column)
        yield batch

    async def generate(self, row: Row) -> dict[str, Any]:
        """The columns that a row gets."""
        error = {_ERROR_COLUMN: ""} if self._config.should_continue_on_error else {}
        try:
            output = await self._run(row)
        except EngineClosedError:  # this is no fault of the row's, and the next ones would have it, too
            raise
        except Exception as problem:
            if not self._config.should_continue_on_error:
                raise
            return {**_columns(None), _ERROR_COLUMN: f"{type(problem).__name__}: {problem}"}
        return {**_columns(output), **error}

    async def _run(self, row: Row) -> RequestOutput:
        """What a row gives. Where the engine fails, once more in a new one: its tokens follow from its seed."""
        inputs, options = request_of(row, self._config.sampling_params, self._config.id_column)
        try:
            return await self._engine.add_request(inputs, **options)
        except EngineClosedError:
            if self._engine.closed:  # no other row has replaced it
                self._engine = self._make_engine()
            return await self._engine.add_request(inputs, **options)

    def _arrays(self, rows: list[dict[str, Any]]) -> dict[str, pyarrow.Array]:
        """What was generated for the rows of a batch, by column; the types do not depend on the rows."""
        import pyarrow

        types = {
            "generated_text": pyarrow.string(),
            "generated_tokens": pyarrow.list_(pyarrow.int64()),
            "finish_reason": pyarrow.string(),
            "seed": pyarrow.int64(),
            "num_input_tokens": pyarrow.int64(),
            "num_generated_tokens": pyarrow.int64(),
        }
        if self._config.should_continue_on_error:
            types[_ERROR_COLUMN] = pyarrow.string()
        return {name: pyarrow.array([row[name] for row in rows], kind) for name, kind in types.items()}


def _columns(output: RequestOutput | None) -> dict[str, Any]:
    """None: of a row that failed."""
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
