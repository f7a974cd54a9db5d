"""Ray Data: the rows of a dataset through engines on the machines of a cluster, in the manner of
`ray.data.llm`."""

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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
# The names of these columns are those of ray.data.llm.
_ERROR_COLUMN: Final = "__inference_error__"
_GENERATED_COLUMNS: Final[Mapping[str, Callable[[RequestOutput], Any]]] = {
    "generated_text": lambda output: output.text,
    "generated_tokens": lambda output: output.token_ids,
    "finish_reason": lambda output: output.finish_reason,
    "seed": lambda output: output.seed,
    "num_input_tokens": lambda output: output.usage.prompt_tokens,
    "num_generated_tokens": lambda output: output.usage.completion_tokens,
}
# The columns that a request is made of, in addition to the row's id.
_REQUEST_COLUMNS: Final = ("prompt", "messages", "images", "sampling_params", "seed")


def _concurrency(name: str, value: Any) -> int | tuple[int, int]:
    if isinstance(value, tuple) and len(value) == 2:
        least, most = value
    else:
        least = value
        most = value
    if not (is_integer(least, 1) and is_integer(most, least)):
        refuse(name, value, "a number of actors, or (least, most)")
    return (least, most) if isinstance(value, tuple) else least


@dataclass(frozen=True, kw_only=True)
class QsampleProcessorConfig:
    """How the rows of a dataset are continued. Names are those of `ray.data.llm` if it has them.

    Args:
        package: the folder of a package, or its tar archive, on a path that every machine sees.
        send_package: whether the package is read on this machine and sent with the job instead.
        concurrency: the number of actors, each with an engine and a copy of the model, or
            (least, most).
        batch_size: the number of rows of a batch.
        max_concurrent_batches: the number of batches of an actor at once. Several batches keep its
            engine full while the last rows of a batch end.
        num_cpus, num_gpus: the CPUs and GPUs of an actor. It has a thread for each CPU, at least 1.
        slots, prefill_chunk_size: the arguments of `Engine`; see `Engine`.
        provider, ctx_len: the arguments of `load`; see `load`.
        loras: name → the folder of a LoRA adapter, on a path that every machine sees. The
            sampling_params of a row, or of all rows, choose an adapter as `adapter`.
        sampling_params: fields of `SamplingParams` and options of `generate`. Rows may override
            them.
        id_column: the column with a row's id. A row without a seed gets the seed that follows from
            its id.
        should_continue_on_error: whether a row that fails gets an error in the column
            `__inference_error__`. Otherwise, it ends the job.
        runtime_env: Ray's runtime environment of an actor.

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
                "sampling_params has a seed, which every row would get; "
                "give each row its own, or an id"
            )


def build_processor(
    config: QsampleProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> Callable[[Dataset], Dataset]:
    """A function of a dataset that continues the prompt of each of its rows.

    Args:
        config: the package, its actors, and how they run it.
        preprocess: a function of a row whose result is added to the row. Then a row has `prompt` (a
            text or token ids) or `messages`, and may have `images` (a list of bytes of files,
            paths, arrays, or mappings with bytes or path), `sampling_params` (a mapping) and
            `seed`. Its tokens depend only on these: a row without a seed gets the seed of its id,
            so it comes out the same if it runs again because a machine failed. A row with neither
            is an error.
        postprocess: a function that makes the final row from a row with `generated_text`,
            `generated_tokens`, `finish_reason`, `seed`, `num_input_tokens`, `num_generated_tokens`
            and its earlier columns.

    >>> processor = build_processor(QsampleProcessorConfig(package="tiny-cpu", concurrency=2))
    >>> processor(ray.data.from_items([{"id": 0, "prompt": "In the beginning"}])).take_all()
    """

    def process(dataset: Dataset) -> Dataset:
        import ray
        from ray.data import ActorPoolStrategy

        sent = ray.put(pack(config.package)) if config.send_package else None
        if isinstance(config.concurrency, tuple):
            least, most = config.concurrency
        else:
            least = config.concurrency
            most = config.concurrency
        # If Ray is not initialized yet, the first run starts it.
        if ray.is_initialized():
            warn_if_full(least * config.num_cpus, ray.cluster_resources().get("CPU", 0))
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


def warn_if_full(taken: float, cpus: float) -> None:
    """Warn if the actors leave no CPU for reading rows, because Ray Data would wait silently.

    Args:
        taken: the number of CPUs that the actors take.
        cpus: the number of CPUs of the cluster.
    """
    if taken > cpus - 1:
        warnings.warn(
            f"the actors take {taken:g} of the cluster's {cpus:g} CPUs, and reading rows takes "
            "one: unless the cluster grows, the job waits for ever; give a smaller concurrency, or "
            "smaller num_cpus",
            stacklevel=3,
        )


class EngineActor:
    """An engine in an actor. Ray calls it for several batches at once, which overlap in the
    engine's slots."""

    def __init__(self, config: QsampleProcessorConfig, sent: Any) -> None:
        """
        Args:
            config: the package, and how it is run.
            sent: a reference to the package's archive. If it is None, the package is opened from
                `config.package`.
        """
        self._config = config
        if sent is not None:
            import ray

            path = open_archive(ray.get(sent))
        elif Path(config.package).is_file():
            path = open_archive(Path(config.package))
        else:
            path = Path(config.package)
        # Ray sets OMP_NUM_THREADS to 1 for its workers, so the number of threads is given.
        self._model = load(
            path,
            config.provider,
            ctx_len=config.ctx_len,
            intra_op_num_threads=max(1, int(config.num_cpus)),
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

        request_columns = [*_REQUEST_COLUMNS]
        if self._config.id_column not in request_columns:
            request_columns.append(self._config.id_column)
        given_columns = [name for name in request_columns if name in batch.column_names]
        if given_columns:
            rows = batch.select(given_columns).to_pylist()
        else:
            rows = [{}] * batch.num_rows
        generated = await self.generate(rows)
        # The types of the columns must not depend on the rows.
        types = {
            "generated_tokens": pyarrow.list_(pyarrow.int64()),
            "seed": pyarrow.int64(),
            "num_input_tokens": pyarrow.int64(),
            "num_generated_tokens": pyarrow.int64(),
        }
        new_columns = [*_GENERATED_COLUMNS]
        if self._config.should_continue_on_error:
            new_columns.append(_ERROR_COLUMN)
        for name in new_columns:
            values = [row[name] for row in generated]
            column = pyarrow.array(values, types.get(name, pyarrow.string()))
            place = batch.schema.get_field_index(name)
            if place < 0:
                batch = batch.append_column(name, column)
            else:
                batch = batch.set_column(place, name, column)
        yield batch

    async def generate(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The generated columns of each row.

        If the engine fails, the rows run once more in a new engine: their tokens follow from their
        seeds.
        """
        requests = [self._request(row) for row in rows]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._run, self._engine, requests)
        except EngineClosedError:
            # Another batch may have replaced the engine already.
            if self._engine.closed:
                self._engine = self._make_engine()
            return await loop.run_in_executor(self._threads, self._run, self._engine, requests)

    def _request(self, row: Row) -> RowRequest | ValueError:
        try:
            return _checked_request(row, self._config.sampling_params, self._config.id_column)
        except ValueError as error:
            if not self._config.should_continue_on_error:
                raise
            return error

    def _run(
        self, engine: Engine, requests: Sequence[RowRequest | ValueError]
    ) -> list[dict[str, Any]]:
        """The generated columns of each request, or of its error."""
        valid = [request for request in requests if not isinstance(request, ValueError)]
        outputs = engine.map(
            (request.inputs for request in valid),
            each=(request.options for request in valid),
            outputs=(),
            return_errors=self._config.should_continue_on_error,
        )
        results = [
            request if isinstance(request, ValueError) else next(outputs) for request in requests
        ]
        return [self._columns(result) for result in results]

    def _columns(self, result: RequestOutput | Exception) -> dict[str, Any]:
        if isinstance(result, Exception):
            columns: dict[str, Any] = dict.fromkeys(_GENERATED_COLUMNS)
            columns["generated_tokens"] = []
            columns[_ERROR_COLUMN] = f"{type(result).__name__}: {result}"
            return columns
        columns = {name: value_of(result) for name, value_of in _GENERATED_COLUMNS.items()}
        columns[_ERROR_COLUMN] = ""
        return columns


def _plain(value: Any) -> Any:
    """A value without NumPy's types, and without the nulls that Arrow inserts for the keys of other
    rows' mappings. The `content` of a message stays, because it may be None by itself."""
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
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


class RowRequest(NamedTuple):
    """The request of a row.

    Attributes:
        inputs: the prompt or the messages.
        options: the arguments of the request.
    """

    inputs: Any
    options: dict[str, Any]


def _checked_request(row: Row, defaults: Mapping[str, Any], id_column: str) -> RowRequest:
    """As `request_of`. Raises ValueError for values of any other kind, too: a row is a stranger's,
    and may not end the job of the other rows."""
    try:
        return request_of(row, defaults, id_column)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"a row has columns that cannot be read ({type(error).__name__}: {error!s:.200}); sampling_params is a "
            "mapping, images a list of images, and an id what JSON can hold"
        ) from error


def request_of(row: Row, defaults: Mapping[str, Any], id_column: str) -> RowRequest:
    """The request of a row.

    Args:
        row: the row.
        defaults: the arguments of every request. The row's `sampling_params` override them.
        id_column: the column with the row's id.

    Raises:
        ValueError: the row has neither prompt nor messages, or neither seed nor id.
        TypeError, OverflowError, RecursionError: a column has values of another kind.
    """
    options = {**defaults, **_plain(row.get("sampling_params") or {})}
    seed = _number(options.pop("seed", None))
    if seed is None:
        seed = _number(row.get("seed"))
    if seed is None:
        seed = seed_of(row, id_column)
    options["seed"] = seed
    images = _images(row.get("images"))
    if images:
        options["images"] = images
    messages = _plain(row.get("messages"))
    if is_chat(messages):
        messages = with_images(messages, _image)
    inputs = _plain(row.get("prompt")) if messages in (None, []) else messages
    if inputs is None:
        raise ValueError(
            f"a row has neither prompt nor messages, but {', '.join(row)}; make them in preprocess"
        )
    return RowRequest(inputs, options)


def _images(value: Any) -> list[Any]:
    """The images of a column's value, which is a list of images or a single image."""
    if value is None:
        return []
    is_array = isinstance(value, np.ndarray) and value.ndim == 3
    if is_array or isinstance(value, bytes | str | Mapping):
        return [_image(value)]
    return [_image(image) for image in value]


def _image(value: Any) -> Any:
    """An image as `generate` takes it. Lists of numbers are pixels, and a mapping has bytes or a
    path, as in Hugging Face's datasets."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, list | np.ndarray):
        return np.array(value, dtype=np.uint8)
    return value


def seed_of(row: Row, id_column: str) -> int:
    """A seed that follows from a row's id.

    Raises:
        ValueError: the row has no id.
    """
    row_id = _number(row.get(id_column))
    if row_id is None:
        raise ValueError(
            f"a row has no seed and no {id_column!r}; give it either, so that it comes out the "
            "same if it runs again, or name another id_column"
        )
    text = json.dumps(_plain(row_id), sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % NUM_DRAWN_SEEDS


def _number(value: Any) -> Any:
    """A number of a column; None for a missing number. pandas has NaN for a missing number, and
    floats for the other numbers of its column."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, float):
        return value
    if np.isnan(value):
        return None
    return int(value) if value.is_integer() else value
