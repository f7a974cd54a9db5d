"""Ray Data: the rows of a dataset through engines on the machines of a cluster, in the manner of `ray.data.llm`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qsample.addons.ray.archives import open_archive, pack
from qsample.checks import check_fields, checked, integer, is_integer, number, refuse
from qsample.errors import EngineClosedError
from qsample.images.messages import with_images
from qsample.ort.options import NO_SPINNING
from qsample.request.sampling_params import NUM_DRAWN_SEEDS
from qsample.runtime import Engine, RequestOutput, load
from qsample.runtime.call import is_chat

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

Row = Mapping[str, Any]
# Names of ray.data.llm.
_ERROR_COLUMN: Final = "__inference_error__"
_COLUMNS: Final[Mapping[str, Callable[[RequestOutput], Any]]] = {
    "generated_text": lambda output: output.text,
    "generated_tokens": lambda output: output.token_ids,
    "finish_reason": lambda output: output.finish_reason,
    "seed": lambda output: output.seed,
    "num_input_tokens": lambda output: output.usage.prompt_tokens,
    "num_generated_tokens": lambda output: output.usage.completion_tokens,
}


def _concurrency(name: str, value: Any) -> int | tuple[int, int]:
    least, most = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    if not (is_integer(least, 1) and is_integer(most, least)):
        refuse(name, value, "a number of actors, or (least, most)")
    return (least, most) if isinstance(value, tuple) else least


@dataclass(frozen=True, kw_only=True)
class QsampleProcessorConfig:
    """How the rows of a dataset are continued; names as in `ray.data.llm` if it has them.

    Args:
        package: a package's folder, or its tar archive, on a path that every machine sees.
        send_package: read it on this machine and send it with the job instead.
        concurrency: actors, each with an engine and a copy of the model; or (least, most) of them.
        batch_size: rows of a batch.
        max_concurrent_batches: batches of an actor at once, to keep its engine full while the last rows of a batch end.
        num_cpus, num_gpus: of an actor. It has a thread for each CPU, at least 1.
        slots, prefill_chunk_size: as in `Engine`.
        provider, ctx_len: as in `load`.
        loras: name → the folder of a LoRA adapter, on a path that every machine sees; the sampling_params of a row, or
            of all, choose one as `adapter`.
        sampling_params: fields of `SamplingParams` and options of `generate`; rows may override them.
        id_column: the column with a row's id. A row without a seed gets the seed that follows from its id.
        should_continue_on_error: a row that fails gets an error in the column `__inference_error__`; otherwise it ends
            the job.
        runtime_env: Ray's.

    Raises ValueError for a wrong value.
    """

    package: str
    send_package: bool = False
    concurrency: int | tuple[int, int] = checked(1, _concurrency)
    batch_size: int = integer(64, 1, math.inf, "an integer >= 1")
    max_concurrent_batches: int = integer(4, 1, math.inf, "an integer >= 1")
    num_cpus: float = number(1, 0, math.inf, "a number, 0 or more")
    num_gpus: float = number(0, 0, math.inf, "a number, 0 or more")
    slots: int | None = integer(None, 1, math.inf, "an integer >= 1, or None")
    prefill_chunk_size: int | None = integer(None, 1, math.inf, "an integer >= 1, or None")
    provider: str | None = None
    ctx_len: int | None = None
    loras: Mapping[str, str] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    id_column: str = "id"
    should_continue_on_error: bool = False
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if "seed" in self.sampling_params:
            raise ValueError(
                "sampling_params has a seed, which every row would get; give each row its own, or an id"
            )


def build_processor(
    config: QsampleProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> Callable[[Dataset], Dataset]:
    """A function of a dataset that continues the prompt of each of its rows.

    Args:
        config: the package, its actors, and how they run it.
        preprocess: its result is added to a row. Then a row has `prompt` (a text or token ids) or `messages`, and may
            have `images` (a list: the bytes of files, paths, arrays, mappings with bytes or path), `sampling_params` (a
            mapping) and `seed`. Its tokens depend on these alone: a row without a seed gets
            the seed of its id, so it comes out the same if it runs again because a machine failed. A row with neither
            is an error.
        postprocess: makes the final row from a row with `generated_text`, `generated_tokens`, `finish_reason`, `seed`,
            `num_input_tokens`, `num_generated_tokens` and its earlier columns.

    >>> processor = build_processor(QsampleProcessorConfig(package="tiny-cpu", concurrency=2))
    >>> processor(ray.data.from_items([{"id": 0, "prompt": "In the beginning"}])).take_all()
    """

    def process(dataset: Dataset) -> Dataset:
        import ray
        from ray.data import ActorPoolStrategy

        sent = ray.put(pack(config.package)) if config.send_package else None
        least, most = (
            config.concurrency
            if isinstance(config.concurrency, tuple)
            else (config.concurrency,) * 2
        )
        if ray.is_initialized():  # otherwise the first run starts it
            warn_where_full(least * config.num_cpus, ray.cluster_resources().get("CPU", 0))
        if preprocess is not None:
            dataset = dataset.map(lambda row: {**row, **preprocess(row)})
        dataset = dataset.map_batches(
            EngineActor,
            fn_constructor_args=(replace(config, runtime_env=None), sent),
            batch_size=config.batch_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                min_size=least,
                max_size=most,
                max_tasks_in_flight_per_actor=2 * config.max_concurrent_batches,
                max_concurrent_calls_per_actor=config.max_concurrent_batches,
            ),
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            runtime_env=None if config.runtime_env is None else dict(config.runtime_env),
        )
        return dataset if postprocess is None else dataset.map(postprocess)

    return process


def warn_where_full(taken: float, cpus: float) -> None:
    """Warn if the actors' CPUs (`taken`) leave no CPU for reading rows: Ray Data would wait silently."""
    if taken > cpus - 1:
        warnings.warn(
            f"the actors take {taken:g} of the cluster's {cpus:g} CPUs, and reading rows takes one: unless the cluster "
            "grows, the job waits for ever; give a smaller concurrency, or smaller num_cpus",
            stacklevel=3,
        )


class EngineActor:
    """An engine in an actor. Ray calls it for several batches at once; they overlap in the engine's slots."""

    def __init__(self, config: QsampleProcessorConfig, sent: Any) -> None:
        """`sent`: a reference to the package's archive; by default it is opened from `config.package`."""
        self._config = config
        if sent is not None:
            import ray

            path = open_archive(ray.get(sent))
        else:
            path = Path(config.package)
            path = open_archive(path) if path.is_file() else path
        self._model = load(
            path,
            config.provider,
            ctx_len=config.ctx_len,
            intra_op_num_threads=max(
                1, int(config.num_cpus)
            ),  # Ray sets OMP_NUM_THREADS to 1 for its workers
            session_config=NO_SPINNING,
        )
        for name, folder in config.loras.items():
            self._model.load_adapter(name, folder)
        self._threads = ThreadPoolExecutor(config.max_concurrent_batches)
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
        """The batch with its columns unchanged, and the generated columns."""
        import pyarrow

        columns = (
            "prompt",
            "messages",
            "images",
            "sampling_params",
            "seed",
            self._config.id_column,
        )
        needed = [name for name in dict.fromkeys(columns) if name in batch.column_names]
        rows = batch.select(needed).to_pylist() if needed else [{}] * batch.num_rows
        done = await self.generate(rows)
        types = {  # they do not depend on the rows
            "generated_tokens": pyarrow.list_(pyarrow.int64()),
            **dict.fromkeys(("seed", "num_input_tokens", "num_generated_tokens"), pyarrow.int64()),
        }
        for name in (
            *_COLUMNS,
            *([_ERROR_COLUMN] if self._config.should_continue_on_error else []),
        ):
            column = pyarrow.array([row[name] for row in done], types.get(name, pyarrow.string()))
            place = batch.schema.get_field_index(name)
            batch = (
                batch.append_column(name, column)
                if place < 0
                else batch.set_column(place, name, column)
            )
        yield batch

    async def generate(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The generated columns of each row. If the engine fails, the rows run once more in a new engine: their tokens
        follow from their seeds."""
        requests, loop = [self._request(row) for row in rows], asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._run, self._engine, requests)
        except EngineClosedError:
            if self._engine.closed:  # no other batch has replaced it
                self._engine = self._make_engine()
            return await loop.run_in_executor(self._threads, self._run, self._engine, requests)

    def _request(self, row: Row) -> tuple[Any, dict[str, Any]] | ValueError:
        try:
            return request_of(row, self._config.sampling_params, self._config.id_column)
        except ValueError as error:
            if not self._config.should_continue_on_error:
                raise
            return error

    def _run(
        self, engine: Engine, requests: Sequence[tuple[Any, dict[str, Any]] | ValueError]
    ) -> list[dict[str, Any]]:
        valid = [request for request in requests if not isinstance(request, ValueError)]
        outputs = engine.map(
            (inputs for inputs, _ in valid),
            each=(options for _, options in valid),
            outputs=(),
            return_errors=self._config.should_continue_on_error,
        )
        results = [
            request if isinstance(request, ValueError) else next(outputs) for request in requests
        ]
        return [self._columns(result) for result in results]

    def _columns(self, result: RequestOutput | Exception) -> dict[str, Any]:
        if isinstance(result, Exception):
            error = f"{type(result).__name__}: {result}"
            return {**dict.fromkeys(_COLUMNS), "generated_tokens": [], _ERROR_COLUMN: error}
        return {**{name: value(result) for name, value in _COLUMNS.items()}, _ERROR_COLUMN: ""}


def _plain(value: Any) -> Any:
    """Without NumPy's types, and without the nulls that Arrow inserts for the keys of other rows' mappings. The
    `content` of a message stays, because it may be None by itself."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {
            name: _plain(item)
            for name, item in value.items()
            if item is not None or name == "content"
        }
    return [_plain(item) for item in value] if isinstance(value, list) else value


def request_of(row: Row, defaults: Mapping[str, Any], id_column: str) -> tuple[Any, dict[str, Any]]:
    """The prompt or messages of a row, and its request's arguments: `sampling_params` on top of `defaults`, and the
    seed. Raises ValueError for a row that has neither prompt nor messages, or neither seed nor id."""
    options = {**defaults, **_plain(row.get("sampling_params") or {})}
    seed = _number(options.pop("seed", None))
    seed = _number(row.get("seed")) if seed is None else seed
    options["seed"] = seed_of(row, id_column) if seed is None else seed
    if images := _images(row.get("images")):
        options["images"] = images
    messages = _plain(row.get("messages"))
    if is_chat(messages):
        messages = with_images(messages, _image)
    inputs = _plain(row.get("prompt")) if messages in (None, []) else messages
    if inputs is None:
        raise ValueError(
            f"a row has neither prompt nor messages, but {', '.join(row)}; make them in preprocess"
        )
    return inputs, options


def _images(given: Any) -> list[Any]:
    """The images of a column's value: of a list, or a single one."""
    if given is None:
        return []
    single = isinstance(given, bytes | str | Mapping) or (
        isinstance(given, np.ndarray) and given.ndim == 3
    )
    return [_image(image) for image in ([given] if single else given)]


def _image(given: Any) -> Any:
    """An image as `generate` takes it; lists of numbers are pixels, and a mapping has bytes or a path, as in Hugging
    Face's datasets."""
    if isinstance(given, Mapping):
        given = given.get("bytes") or given.get("path")
    if isinstance(given, list | np.ndarray):
        return np.array(given, dtype=np.uint8)
    return given


def seed_of(row: Row, id_column: str) -> int:
    """A seed that follows from a row's id. Raises ValueError for a row without an id."""
    given = _number(row.get(id_column))
    if given is None:
        raise ValueError(
            f"a row has no seed and no {id_column!r}; give it either, so that it comes out the same if it runs again, "
            "or name another id_column"
        )
    text = json.dumps(_plain(given), sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % NUM_DRAWN_SEEDS


def _number(value: Any) -> Any:
    """None for a missing number: pandas has NaN for it, and floats for the other numbers of its column."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        if np.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return value
