"""Ray Data: rows of a dataset through engines on the machines of a cluster, in the manner of `ray.data.llm`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from qsample.errors import shown
from qsample.ray.archives import pack
from qsample.ray.engine_actor import EngineActor
from qsample.values import check_count, is_number

if TYPE_CHECKING:
    from ray.data import Dataset

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class QsampleProcessorConfig:
    """How a dataset's rows are generated; names are those of `ray.data.llm` where it has them.

    package: a package's folder, or a tar archive of one, on a path that every machine sees. send_package: read it on
    this machine and send it with the job instead. concurrency: actors, each with an engine and a copy of the model; or
    (least, most) of them. batch_size: rows of a batch, which are handed on together. max_concurrent_batches: batches
    of one actor at once, so that its engine stays full while the last rows of a batch end. num_cpus, num_gpus: of an
    actor; as many threads as CPUs, at least one. slots, prefill_chunk_size: as in `Engine`. provider, ctx_len: as in
    `load`. sampling_params: fields of `SamplingParams` and of `generate`, which rows may override. id_column: names a
    row, whose seed follows from it where it has none. should_continue_on_error: a row that fails gets an error in
    the column `__inference_error__` instead of ending the job. runtime_env: Ray's.

    Raises ValueError where one is wrong.
    """

    package: str
    send_package: bool = False
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64
    max_concurrent_batches: int = 4
    num_cpus: float = 1
    num_gpus: float = 0
    slots: int | None = None
    prefill_chunk_size: int | None = None
    provider: str | None = None
    ctx_len: int | None = None
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    id_column: str = "id"
    should_continue_on_error: bool = False
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_concurrent_batches", "slots", "prefill_chunk_size"):
            check_count(name, getattr(self, name))
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if not is_number(value, 0):
                raise ValueError(f"{name} is {shown(value)}; give a number, 0 or more")
        actors = self.concurrency if isinstance(self.concurrency, tuple) else (self.concurrency, self.concurrency)
        if len(actors) != 2 or any(type(one) is not int for one in actors) or not 1 <= actors[0] <= actors[1]:
            raise ValueError(f"concurrency is {shown(self.concurrency)}; give a number of actors, or (least, most)")
        if "seed" in self.sampling_params:
            raise ValueError("sampling_params has a seed, which would be every row's; give each row its own, or an id")


def build_processor(
    config: QsampleProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> Callable[[Dataset], Dataset]:
    """A function of a dataset that generates a text for each of its rows.

    Args:
        config: see there.
        preprocess: what it returns is added to a row. Afterwards a row has `prompt` (a text or token ids) or
            `messages`, and may have `sampling_params` (a mapping) and `seed`. A row's tokens depend on these alone:
            without a seed it is made of the row's id, so that a row that is done again, because a machine failed,
            comes out the same. A row with neither is an error.
        postprocess: makes the final row of one that has `generated_text`, `generated_tokens`, `finish_reason`, `seed`,
            `num_input_tokens` and `num_generated_tokens`, and all that it had before.

    >>> processor = build_processor(QsampleProcessorConfig(package="tiny-cpu", concurrency=2))
    >>> processor(ray.data.from_items([{"id": 0, "prompt": "In the beginning"}])).take_all()
    """

    def process(dataset: Dataset) -> Dataset:
        import ray
        from ray.data import ActorPoolStrategy

        sent = ray.put(pack(config.package)) if config.send_package else None
        least, most = config.concurrency if isinstance(config.concurrency, tuple) else (config.concurrency,) * 2
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
    """Warn of actors that leave no CPU for reading rows: Ray Data would wait without a word.

    taken: CPUs of the actors. cpus: of the cluster, which may grow.
    """
    if taken > cpus - 1:
        warnings.warn(
            f"the actors take {taken:g} of the cluster's {cpus:g} CPUs, and reading rows takes one: unless the cluster "
            "grows, the job waits for ever; give a smaller concurrency, or smaller num_cpus",
            stacklevel=3,
        )
