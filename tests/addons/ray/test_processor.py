"""Rows through engines: what a row gives, without a cluster."""

from __future__ import annotations

import asyncio
import datetime
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest

from qsample.addons.ray import processor
from qsample.addons.ray.processor import (
    EngineActor,
    QsampleProcessorConfig,
    build_processor,
    request_of,
    seed_of,
    warn_if_full,
)
from qsample.addons.ray.server import serve_app
from qsample.addons.serve import ServeSettings
from qsample.addons.serve.app import make_app
from qsample.addons.serve.models import ServedModels
from qsample.checks import is_number
from qsample.errors import QsampleError
from qsample.request.sampling_params import OFF_VALUES, SamplingParams
from qsample.runtime import Engine, EngineClosedError, load
from tests.helpers.adapters import random_adapter

PROMPT = "And the LORD spake"


def run(
    config: QsampleProcessorConfig,
    rows: list[dict[str, Any]],
    disturb: Callable[[EngineActor], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """disturb: called with the actor as soon as it has an engine."""
    actor = EngineActor(config, None)

    async def every() -> list[dict[str, Any]]:
        disturb(actor)
        return await actor.generate(rows)

    try:
        return asyncio.run(every())
    finally:
        actor._engine.close()


def test_rows_are_what_generate_gives(bundled_package: Path) -> None:
    config = QsampleProcessorConfig(
        package=str(bundled_package), slots=2, sampling_params={"max_new_tokens": 8}
    )
    rows: list[dict[str, Any]] = [
        {"prompt": PROMPT, "seed": 3},
        {
            "prompt": PROMPT,
            "id": "a",
            "sampling_params": {"temperature": 0.5, "max_new_tokens": 5, "top_p": None},
        },
        {"prompt": [5, 6, 7], "seed": 1, "sampling_params": {"seed": 9, "temperature": 1.0}},
    ]
    done = run(config, rows)
    model = load(bundled_package)
    expected = [
        model.generate(PROMPT, seed=3, max_new_tokens=8),
        model.generate(PROMPT, seed=seed_of({"id": "a"}, "id"), max_new_tokens=5, temperature=0.5),
        model.generate([5, 6, 7], seed=9, max_new_tokens=8, temperature=1.0),
    ]
    assert [row["generated_text"] for row in done] == [
        (output.texts or [""])[0] for output in expected
    ]
    assert [row["generated_tokens"] for row in done] == [output.token_ids[0] for output in expected]
    assert [row["num_generated_tokens"] for row in done] == [
        len(output.token_ids[0]) for output in expected
    ]
    assert [row["seed"] for row in done] == [output.seeds[0] for output in expected]


@pytest.mark.ci
def test_rows_choose_their_adapters(adapted: Callable[..., Path], tmp_path: Path) -> None:
    package = adapted("llama", logprobs=True, max_loras=2, max_lora_rank=4)
    model, greedy = load(package), {"max_new_tokens": 6, "temperature": 0}
    for seed, name in enumerate("ab"):
        model.load_adapter(name, random_adapter(tmp_path / name, model.interface, seed, rank=4))
    loras = {name: str(tmp_path / name) for name in "ab"}
    config = QsampleProcessorConfig(
        package=str(package), slots=3, loras=loras, sampling_params=greedy
    )
    rows = [
        {"prompt": [5, 6], "seed": 1, "sampling_params": {"adapter": name}}
        for name in ("a", "b", None)
    ]
    wanted = [
        model.generate([[5, 6]], adapter=name, **greedy).token_ids[0] for name in ("a", "b", None)
    ]
    assert [row["generated_tokens"] for row in run(config, rows)] == wanted
    assert len({tuple(tokens) for tokens in wanted}) == 3


NESTED = reduce(lambda inner, _: [inner], range(5000), [])  # type: ignore[arg-type, return-value]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"id": 1, "prompt": PROMPT, "sampling_params": {"temperature": -1}}, "temperature is -1"),
    ({"id": 1, "prompt": PROMPT, "sampling_params": {"temprature": 1}}, "temprature"),
    ({"id": 1, "prompt": PROMPT, "sampling_params": {"stop_strings": 5}}, "stop_strings"),
    ({"id": 1, "prompt": [5] * 5000}, "5000"),
    ({"id": 1, "prompt": [5, -3]}, "-3"),
    ({"id": 1, "messages": 5}, "int"),
    ({"prompt": PROMPT}, "no seed and no 'id'"),
    ({"prompt": PROMPT, "id": None}, "no seed and no 'id'"),
    ({"prompt": PROMPT, "id": float("nan")}, "no seed and no 'id'"),
    ({"prompt": PROMPT, "seed": 1.5}, "seed is 1.5"),
    ({"prompt": PROMPT, "seed": "1"}, "seed is '1'"),
    ({"prompt": PROMPT, "seed": -1}, "seed is -1"),
    ({"id": 3, "text": PROMPT}, "neither prompt nor messages"),
    ({"id": 3, "messages": []}, "neither prompt nor messages"),
    ({"id": 3, "prompt": None}, "neither prompt nor messages"),
    ({"id": 3, "prompt": 5}, "inputs is a int"),
    ({"id": 3, "prompt": {"a": 1}}, "inputs is a dict"),
    ({"id": 3, "prompt": b"x"}, "inputs is a bytes"),
    ({"id": 3, "prompt": "x " * 5000}, "tokens and the context length"),
    ({"id": 3, "prompt": PROMPT, "sampling_params": 5}, "sampling_params is a mapping"),
    ({"id": 3, "prompt": PROMPT, "sampling_params": "top_k=1"}, "sampling_params is a mapping"),
    ({"id": 3, "prompt": PROMPT, "sampling_params": {"x": NESTED}}, "columns that cannot be read"),
    ({"id": 3, "prompt": PROMPT, "images": 5}, "columns that cannot be read"),
    ({"id": 3, "prompt": PROMPT, "images": [[[-1]]]}, "columns that cannot be read"),
    ({"id": {"a": 1, 2: 3}, "prompt": PROMPT}, "columns that cannot be read"),
]


def test_rows_that_fail_say_so_or_end_the_job(bundled_package: Path) -> None:
    config = QsampleProcessorConfig(
        package=str(bundled_package), slots=2, sampling_params={"max_new_tokens": 2}
    )
    right = {"id": 0, "prompt": PROMPT}
    continuing = replace(config, should_continue_on_error=True)
    first, *failed, last = run(continuing, [right, *(row for row, _ in WRONG), right])
    assert first == last
    assert first["__inference_error__"] == ""
    assert len(first["generated_tokens"]) == 2
    for columns, (_, message) in zip(failed, WRONG, strict=True):
        assert message in columns["__inference_error__"]
        assert columns.keys() == first.keys()
        assert columns["generated_text"] is None
    for row, message in (WRONG[0], WRONG[-1]):
        with pytest.raises(ValueError, match=message):
            run(config, [right, row])


def test_rows_are_done_again_where_an_engine_fails(bundled_package: Path) -> None:
    config = QsampleProcessorConfig(
        package=str(bundled_package), slots=2, sampling_params={"max_new_tokens": 40}
    )
    rows = [{"id": index, "prompt": PROMPT} for index in range(5)]
    engines: list[Engine] = []

    def fail(actor: EngineActor) -> None:
        engines.append(actor._engine)
        break_engine(actor._engine)

    done = run(config, rows, fail)
    assert engines[0].closed
    assert done == run(config, rows)


def test_an_engine_that_fails_again_ends_the_job(bundled_package: Path) -> None:
    """Otherwise all the rest of a dataset would become errors."""
    config = QsampleProcessorConfig(
        package=str(bundled_package), slots=2, should_continue_on_error=True
    )

    def fail(actor: EngineActor) -> None:
        make = actor._make_engine

        def broken() -> Engine:
            engine = make()
            break_engine(engine)
            return engine

        actor._make_engine = broken  # type: ignore[method-assign]
        break_engine(actor._engine)

    with pytest.raises(EngineClosedError, match="planted"):
        run(config, [{"id": 0, "prompt": PROMPT}], fail)


def break_engine(engine: Engine) -> None:
    """Let its next step fail, as a graph does that runs out of memory."""

    def step() -> None:
        raise RuntimeError("planted")

    assert engine._loop is not None
    engine._loop.step = step  # type: ignore[method-assign]


def test_what_arrow_and_pandas_make_of_rows() -> None:
    """Arrow gives all mappings of a column the same keys, and pandas' missing numbers make the others floats."""
    tools = [{"function": {"name": "f", "parameters": {"a": 1, "b": None}}, "strict": None}]
    row = {
        "id": np.int64(3),
        "seed": float("nan"),
        "prompt": None,
        "messages": [
            {"role": "user", "content": "x", "name": None},
            {"role": "assistant", "content": None},
        ],
        "sampling_params": {"max_new_tokens": np.int32(3), "top_p": None, "tools": tools},
    }
    inputs, options = request_of(row, {"temperature": 0.5, "max_new_tokens": 9}, "id")
    assert inputs == [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    plain_tools = [{"function": {"name": "f", "parameters": {"a": 1}}}]
    assert options == {
        "temperature": 0.5,
        "max_new_tokens": 3,
        "tools": plain_tools,
        "seed": seed_of({"id": 3}, "id"),
    }
    assert request_of({"prompt": np.array([5, 6]), "seed": 7.0}, {}, "id") == ([5, 6], {"seed": 7})
    assert request_of({"prompt": "", "id": 1.0}, {}, "id") == (
        "",
        {"seed": seed_of({"id": 1}, "id")},
    )
    nested = np.array([np.array([5, 6]), np.array([7])], dtype=object)
    _, options = request_of(
        {"prompt": "x", "seed": 1, "sampling_params": {"bad_words_ids": nested}}, {}, "id"
    )
    assert SamplingParams(**options).bad_words_ids == ((5, 6), (7,))


@pytest.mark.parametrize("zero", [0, 0.0, np.int64(0), np.float64(0)])
def test_zeros_of_a_row(zero: Any) -> None:
    """A row's own 0 beats other sources: of its seed, and of each number in its sampling_params."""
    assert request_of({"prompt": "x", "seed": zero, "id": 3}, {}, "id").options == {"seed": 0}
    row = {"prompt": "x", "seed": 5, "sampling_params": {"seed": zero}}
    assert request_of(row, {}, "id").options == {"seed": 0}
    assert request_of({"prompt": "x", "id": zero}, {}, "id").options["seed"] == seed_of(
        {"id": 0}, "id"
    )
    names = [name for name, off in OFF_VALUES.items() if name != "seed" and is_number(off)]
    row = {"prompt": "x", "seed": 1, "sampling_params": dict.fromkeys(names, zero)}
    _, options = request_of(row, dict.fromkeys(names, 7), "id")
    assert {name: options[name] for name in names} == dict.fromkeys(names, 0)


def test_images_of_a_row() -> None:
    """As Arrow, pandas and Hugging Face's datasets hold them."""
    pixels = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    text = {"type": "text", "text": "x", "image": None}
    for given, expected in (
        ([b"x", "a.png"], [b"x", "a.png"]),
        (np.array([b"x"], dtype=object), [b"x"]),
        (b"x", [b"x"]),
        ([{"bytes": b"x", "path": "a.png"}, {"bytes": None, "path": "a.png"}], [b"x", "a.png"]),
        (pixels, [pixels]),
        ([pixels.tolist()], [pixels]),
    ):
        _, options = request_of({"id": 1, "prompt": "x", "images": given}, {}, "id")
        assert all(map(np.array_equal, options["images"], expected))
        assert len(options["images"]) == len(expected)
        if len(expected) == 1 and not isinstance(expected[0], bytes):
            part = {"type": "image", "image": given if given is pixels else given[0], "text": None}
            (message,), _ = request_of(
                {"id": 1, "messages": [{"role": "user", "content": [part, text]}]}, {}, "id"
            )
            assert message["content"][1] == {"type": "text", "text": "x"}
            assert (message["content"][0]["image"] == pixels).all()
            assert message["content"][0]["image"].dtype == np.uint8
    assert "images" not in request_of({"id": 1, "prompt": "x", "images": None}, {}, "id")[1]


@pytest.mark.ci
def test_rows_with_images(smolvlm_package: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny_vlms import picture

    picture(30, 20).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    said = [
        {
            "role": "user",
            "content": [{"type": "image", "image": content}, {"type": "text", "text": "x"}],
        }
    ]
    rows = [
        {"prompt": "x", "images": [content]},
        {"messages": said},
        {"prompt": "x", "images": [b"x"]},
        {"prompt": "x"},
    ]
    config = QsampleProcessorConfig(
        package=str(smolvlm_package),
        slots=2,
        sampling_params={"max_new_tokens": 4},
        should_continue_on_error=True,
    )
    done = run(config, [{"id": number, "seed": number, **row} for number, row in enumerate(rows)])
    assert "give a PNG, JPEG, WebP or GIF file" in done[2]["__inference_error__"]
    model = load(smolvlm_package)
    for number, inputs, images in ((0, "x", [content]), (1, said, None), (3, "x", None)):
        alone = model.generate(inputs, images=images, seed=number, max_new_tokens=4)
        assert done[number]["generated_tokens"] == alone.token_ids[0]
        assert done[number]["num_input_tokens"] == alone.prompt_lengths[0]


def test_seeds_follow_from_ids() -> None:
    seeds = [seed_of({"id": one}, "id") for one in (0, 1, "0", "a", [1, 2], 1.5)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert seed_of({"key": 1}, "key") == seed_of({"id": 1}, "id")


def test_a_replica_whose_engine_has_ended_is_not_healthy(bundled_package: Path) -> None:
    pytest.importorskip("ray")
    settings = ServeSettings(models={"tiny": str(bundled_package)})
    deployment = serve_app(settings, num_cpus=2)._bound_deployment
    assert deployment._deployment_config.graceful_shutdown_timeout_s == settings.drain_timeout
    app = make_app(settings)
    app.state.server.models = ServedModels(settings)  # as it does when it starts
    replica: Any = SimpleNamespace(app=app)
    deployment.func_or_class.check_health(replica)
    app.state.server.models.close()
    with pytest.raises(QsampleError, match="tiny have ended"):
        deployment.func_or_class.check_health(replica)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency"), ({"concurrency": (2, 1)}, "concurrency"), ({"slots": 1.5}, "slots"),
        ({"num_cpus": -1}, "num_cpus"), ({"sampling_params": {"seed": 1}}, "every row would get"),
        ({"batch_size": 0}, "batch_size"), ({"concurrency": True}, "concurrency"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QsampleProcessorConfig(package="x", **options)


@pytest.mark.parametrize(
    ("taken", "cpus", "warns"),
    [(1, 1, True), (2, 2, True), (1.5, 2, True), (1, 2, False), (0, 1, False)],
)
def test_actors_that_take_all_cpus_are_told(taken: float, cpus: float, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_full(taken, cpus)
    assert bool(caught) == warns


# Batches as Arrow tables, whose own columns stay unchanged. Needs pyarrow, which Ray Data brings.


def added(pa: Any) -> dict[str, Any]:
    return {
        "generated_text": pa.string(),
        "generated_tokens": pa.list_(pa.int64()),
        "finish_reason": pa.string(),
        "seed": pa.int64(),
        "num_input_tokens": pa.int64(),
        "num_generated_tokens": pa.int64(),
        "__inference_error__": pa.string(),
    }


@pytest.fixture
def pa() -> Any:
    return pytest.importorskip("pyarrow")


@pytest.fixture
def actor(pa: Any, bundled_package: Path) -> Iterator[EngineActor]:
    config = QsampleProcessorConfig(
        package=str(bundled_package),
        slots=2,
        sampling_params={"max_new_tokens": 3},
        should_continue_on_error=True,
    )
    actor = EngineActor(config, None)
    yield actor
    actor._engine.close()


def run_batch(actor: EngineActor, batch: Any) -> Any:
    async def every() -> list[Any]:
        return [table async for table in actor(batch)]

    (table,) = asyncio.run(every())
    return table


def test_columns_stay_as_they_are(pa: Any, actor: EngineActor) -> None:
    columns = added(pa)
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
    done = run_batch(actor, batch)
    assert done.select([name for name in batch.column_names if name not in columns]).equals(
        batch.drop_columns(["generated_text"])
    )
    assert {name: done.schema.field(name).type for name in columns} == columns
    assert done.column("num_generated_tokens").to_pylist() == [3, None]
    assert [bool(error) for error in done.column("__inference_error__").to_pylist()] == [
        False,
        True,
    ]


@pytest.mark.parametrize("rows", [0, 2])
def test_types_do_not_depend_on_the_rows(pa: Any, actor: EngineActor, rows: int) -> None:
    """A batch without rows, and one whose rows all fail."""
    columns = added(pa)
    done = run_batch(actor, pa.table({"text": pa.array(["x"] * rows, pa.string())}))
    assert done.num_rows == rows
    assert {name: done.schema.field(name).type for name in columns} == columns


@pytest.mark.parametrize("running", [False, True])
def test_a_dataset_goes_through_actors_as_the_configuration_says(
    running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cluster: what Ray Data is told."""
    ray, strategy = MagicMock(), MagicMock()
    ray.is_initialized.return_value = running
    ray.cluster_resources.return_value = {"CPU": 6.0}
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", SimpleNamespace(ActorPoolStrategy=strategy))
    monkeypatch.setattr(processor, "pack", lambda package: f"packed {package}")
    given: Any = {"batch_size": 5, "num_cpus": 2, "num_gpus": 0.5, "max_concurrent_batches": 3}
    config = QsampleProcessorConfig(
        package="p", concurrency=(3, 4), send_package=True, runtime_env={"a": 1}, **given
    )
    dataset, last = MagicMock(), MagicMock()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        after = build_processor(config, lambda row: {"prompt": row["text"]}, last)(dataset)
    assert [str(each.message)[:22] for each in said] == ["the actors take 6 of t"] * running
    (before,) = dataset.map.call_args.args
    assert before({"text": "x", "prompt": "y"}) == {"text": "x", "prompt": "x"}
    actors = dataset.map.return_value.map_batches
    assert actors.call_args == call(
        EngineActor, fn_constructor_args=(replace(config, runtime_env=None), ray.put.return_value), batch_size=5,
        batch_format="pyarrow", compute=strategy.return_value, num_cpus=2, num_gpus=0.5, runtime_env={"a": 1},
    )  # fmt: skip
    ray.put.assert_called_once_with("packed p")
    sizes = {"min_size": 3, "max_size": 4}
    limits = {"max_tasks_in_flight_per_actor": 6, "max_concurrent_calls_per_actor": 3}
    strategy.assert_called_once_with(**sizes, **limits)
    assert after == actors.return_value.map.return_value
    actors.return_value.map.assert_called_once_with(last)
    plain = MagicMock()
    assert build_processor(QsampleProcessorConfig(package="p"))(plain) == plain.map_batches()
    options = plain.map_batches.call_args_list[0].kwargs
    assert options["fn_constructor_args"] == (QsampleProcessorConfig(package="p"), None)
    assert (options["batch_size"], options["num_cpus"], options["num_gpus"]) == (64, 1, 0)
    assert (options["runtime_env"], strategy.call_args.kwargs["max_size"]) == (None, 1)
    assert strategy.call_args.kwargs["max_concurrent_calls_per_actor"] == 4
