"""A decoder in parts: the tokens of the whole graph, bit for bit, whatever reads it, and parts that run at a time.

The oracle is the same package compiled for one device, and a host of a few lines that runs the files one by one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.cli.inspect import show
from qsample.errors import CompileError, PackageError
from qsample.graph.edit import all_initializers
from qsample.ort import parts as parts_module
from qsample.ort.bound_graph import BoundGraph
from qsample.ort.buffers import Buffer
from qsample.ort.session import open_sessions
from qsample.runtime import CausalLM, Engine, load
from tests.conftest import made_once
from tests.helpers.adapters import random_adapter
from tests.helpers.sessions import with_prompt_calls

CTX_LEN = 128
PROMPTS = [[1, 5, 6, 7, 8], [1, 9, 4], [1, *range(20, 119)], [1, 77]]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=8),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, max_new_tokens=8, seed=1),
    SamplingParams(temperature=3.0, max_new_tokens=8, seed=2),
    SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=8, seed=3),
]


def with_short_pieces(model: CausalLM) -> CausalLM:
    return CausalLM(
        model.package, with_prompt_calls(model.sessions, piece_size=16, late_piece_size=None)
    )


@pytest.fixture(scope="module")
def package(exported: Callable[..., Path], shared_folder: Path) -> Callable[[int], Path]:
    """num_devices → a small Llama for the CPU."""

    def compiled(count: int) -> Path:
        source = AutoModelForCausalLM.from_pretrained(exported("llama"))
        return made_once(
            shared_folder / f"llama-in-{count}",
            lambda path: source.compile(path, ctx_len=CTX_LEN, num_devices=count),
        )

    return compiled


@pytest.fixture(scope="module")
def models(package: Callable[[int], Path]) -> list[CausalLM]:
    """Whole, and in two parts."""
    return [with_short_pieces(load(package(count))) for count in (1, 2)]


def run_files(folder: Path, files: list[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
    """What docs/contract.md says of parts: each reads the inputs that it names, and what earlier parts returned."""
    known = dict(feeds)
    for file in files:
        session = ort.InferenceSession(folder / file, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        results = session.run(
            names, {value.name: known[value.name] for value in session.get_inputs()}
        )
        known |= zip(names, results, strict=True)
    return {name: value for name, value in known.items() if name not in feeds}


def test_files_run_one_by_one(package: Callable[[int], Path]) -> None:
    folder = package(2)
    compilation = load(folder).package.manifest.compilation
    assert compilation is not None
    files = [part.file for part in compilation.parts]
    assert files == ["decoder-1-of-2.onnx", "decoder-2-of-2.onnx"]
    assert [part.layers for part in compilation.parts] == [(0, 1), (1, 2)]
    initial = ort.InferenceSession(
        folder / "initial_state.onnx", providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in initial.get_outputs()]
    feeds = dict(
        zip(
            names,
            initial.run(names, {"seed": np.arange(2), "capacity": np.array(CTX_LEN)}),
            strict=True,
        )
    )
    feeds |= {
        "input_ids": np.array([[1, 5, 6], [1, 9, 9]]),
        "input_lengths": np.array([3, 2], np.int32),
    }
    whole = ort.InferenceSession(folder / "decoder.onnx", providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
    off = {
        "repetition_penalty": 1,
        "top_p": 1,
        "max_length": 99,
        "stop_ids": -1,
        "emit": 1,
        "temperature": 1,
    }
    for value in whole.get_inputs():
        if value.name not in feeds:
            shape = [2, 1] if value.name == "stop_ids" else [2]
            feeds[value.name] = np.full(shape, off.get(value.name, 0), kinds[value.type])
    wanted = run_files(folder, ["decoder.onnx"], feeds)
    got = run_files(folder, files, feeds)
    hidden = got.keys() - wanted.keys()
    assert (
        sorted(got[name].shape for name in hidden) == [(2, 3, 64)] * 2
    )  # the residual stream and its norm
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value)


def test_weights_of_each_part(package: Callable[[int], Path]) -> None:
    compilation = load(package(2)).package.manifest.compilation
    assert compilation is not None
    loaded = list[set[tuple[str, int]]]()
    for part in compilation.parts:
        graph = onnx.load(package(2) / part.file, load_external_data=False).graph
        weights = all_initializers(ir.load(package(2) / part.file).graph)  # those of branches, too
        assert (
            sum(one.const_value.nbytes for one in weights if one.const_value is not None)
            == part.weight_bytes
        )
        places = (
            {entry.key: entry.value for entry in one.external_data} for one in graph.initializer
        )
        loaded.append({(place["offset"], int(place["length"])) for place in places if place})
    assert sum(size for _, size in loaded[0] & loaded[1]) < 10_000  # tables of positions
    sizes = [sum(size for _, size in one) for one in loaded]
    assert max(sizes) < 0.6 * sum(sizes)
    data = (package(2) / "decoder.onnx.data").stat().st_size
    assert 0.95 * data < sum(sizes) < 1.05 * data


def test_inspect_shows_parts(
    package: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    show(load(package(2)).package)
    assert re.search(
        r"devices +0: layers 0 to 0, \d+\S* \w+ of weights; 1: layers 1 to 1, ",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize("chunk", [None, 16, 48])
def test_tokens_of_the_whole_graph(models: list[CausalLM], chunk: int | None) -> None:
    whole, parted = (
        [model.generate(PROMPTS, PARAMS, prefill_chunk_size=chunk).token_ids]
        + [
            model.generate(*row, prefill_chunk_size=chunk).token_ids
            for row in zip(PROMPTS, PARAMS, strict=True)
        ]
        for model in models
    )
    assert parted == whole


def test_tokens_through_an_engine(models: list[CausalLM]) -> None:
    results = []
    for model in models:
        with Engine(model, slots=2, prefill_chunk_size=16) as engine:
            requests = [
                engine.add_request(*row) for row in zip(PROMPTS * 2, PARAMS * 2, strict=True)
            ]
            results.append([request.result(60).token_ids for request in requests])
    assert results[0] == results[1]


def test_pieces_overlap(models: list[CausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part reads the second piece while the second part waits with the first."""
    second_piece = threading.Event()
    threads: dict[str, list[int]] = {}
    run = BoundGraph.run

    def noted(self: BoundGraph, *, wait: bool = True) -> None:
        name = threading.current_thread().name
        calls = threads.setdefault(name, [])
        calls.append(len(calls))
        if name == "qsample-part-1" and len(calls) == 2:
            second_piece.set()
        if name == "qsample-part-2" and len(calls) == 1:
            assert second_piece.wait(120)
        run(self, wait=wait)

    wanted = models[0].generate(PROMPTS[2], PARAMS[2]).token_ids
    monkeypatch.setattr(BoundGraph, "run", noted)
    assert models[1].generate(PROMPTS[2], PARAMS[2]).token_ids == wanted
    assert set(threads) == {"qsample-part-1", "qsample-part-2"}


def test_a_part_that_fails(models: list[CausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error arrives, and what comes after it is right."""
    wanted = models[0].generate(PROMPTS[2], PARAMS[2]).token_ids
    run = parts_module._Lane.run

    def failing(self: Any, number: int, *arguments: Any) -> None:
        if number == 0:
            raise MemoryError("a part")
        run(self, number, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(parts_module._Lane, "run", failing)
        with pytest.raises(MemoryError, match="a part"):
            models[1].generate(PROMPTS[2], PARAMS[2])
    assert models[1].generate(PROMPTS[2], PARAMS[2]).token_ids == wanted


def test_refusals(
    exported: Callable[..., Path], package: Callable[[int], Path], tmp_path: Path
) -> None:
    source = AutoModelForCausalLM.from_pretrained(exported("llama"))
    with pytest.raises(CompileError, match="num_devices is 3, and the model has 2 layers"):
        source.compile(tmp_path / "no", num_devices=3)
    with pytest.raises(
        CompileError, match="graphs for web are for one device; compile for cpu or cuda"
    ):
        source.compile(tmp_path / "no", num_devices=2, provider="web")
    with pytest.raises(CompileError, match="as many tokens as were guessed"):
        source.compile(
            tmp_path / "no", num_devices=2, num_speculative_tokens=3, kv_cache_dtype="int8"
        )
    with pytest.raises(CompileError, match="num_devices is -1; give the number of devices"):
        source.compile(tmp_path / "no", num_devices=-1)
    opened = load(package(2)).package
    assert opened.manifest.compilation is not None
    without_last = replace(opened.manifest.compilation, parts=opened.manifest.compilation.parts[:1])
    with pytest.raises(
        PackageError, match="the decoder in parts does not follow the decode contract: it lacks"
    ):
        open_sessions(replace(opened, manifest=replace(opened.manifest, compilation=without_last)))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"weights": "int4", "kv_cache_dtype": "int8"}),
        ("llama", {"weights": "float16", "batch_size": 1}),
        ("llama on the host", {}),
        ("mixtral", {"weights": "int4"}),
        ("lfm2", {}),
    ],
)
def test_other_graphs(
    exported: Callable[..., Path], tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """Quantized weights and caches, mixtures, recurrent states, a sampler on the host."""
    host = {"include_sampler": False} if family.endswith("on the host") else {}
    source = AutoModelForCausalLM.from_pretrained(
        exported(family.partition(" ")[0], **host), **host
    )
    results = []
    for count in (1, 2):
        path = tmp_path / str(count)
        source.compile(path, ctx_len=CTX_LEN, num_devices=count, max_divergence=100, **options)
        model = with_short_pieces(load(path))
        results.append(
            [
                model.generate(PROMPTS, PARAMS).token_ids,
                model.generate(PROMPTS[2], PARAMS[2]).token_ids,
            ]
        )
    assert results[0] == results[1]


@pytest.mark.ci
def test_all_that_servers_use(bundled_package: Path, tmp_path: Path) -> None:
    """Log-probabilities to the last bit, masks, and a prefix on the disk; in three parts."""
    from qsample.contract.interface import Features
    from qsample.package.package import read_package
    from tests.helpers.tiny_models import with_features

    with_features(read_package(bundled_package), tmp_path / "portable", Features().for_serving())
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "portable")
    text, params = (
        "And the LORD spake unto Moses, saying, " * 6,
        SamplingParams(temperature=1.0, seed=3),
    )
    results = []
    for count in (1, 3):
        path = tmp_path / str(count)
        source.compile(path, ctx_len=256, num_devices=count)
        model = with_short_pieces(load(path))
        assert model.save_prefix(text, tmp_path / f"prefix-{count}") == 48  # in three pieces
        mask = np.packbits(np.arange(model.interface.vocab_size) % 3 > 0, bitorder="little").view(
            np.int32
        )
        with Engine(model, slots=2, prefixes=[tmp_path / f"prefix-{count}"]) as engine:
            requests = [
                engine.add_request(f"{text}Speak", replace(params, max_new_tokens=8)),
                engine.add_request(
                    "In the beginning", replace(params, max_new_tokens=8), allowed_tokens=mask
                ),
            ]
            outputs = [request.result(60) for request in requests]
        results.append([(one.token_ids, one.outputs) for one in outputs])
    for (ids, values), (other_ids, other_values) in zip(*results, strict=True):
        assert ids == other_ids
        for name, value in values.items():
            np.testing.assert_array_equal(value, other_values[name])


@pytest.mark.ci
def test_adapters(adapted: Callable[..., Path], tmp_path: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(adapted("llama", max_loras=2))
    results = []
    for count in (1, 2):
        source.compile(tmp_path / str(count), ctx_len=CTX_LEN, num_devices=count)
        model = load(tmp_path / str(count))
        for name in ("one", "two"):
            folder = tmp_path / f"{name}-{count}"
            model.load_adapter(name, random_adapter(folder, model.interface, seed=len(name)))
        rows = [
            replace(one, adapter=name)
            for one, name in zip(PARAMS, (None, "one", "two", "one"), strict=True)
        ]
        results.append(model.generate(PROMPTS, rows).token_ids)
    assert results[0] == results[1]


def test_lengths_of_rows_behind_unfinished_runs() -> None:
    """They are added up here; without such runs, those in the memory count, on a device row by row."""

    def memory(*lengths: int) -> Any:
        return SimpleNamespace(shape=(len(lengths),), read_row=lambda row: lengths[row])

    pipeline = parts_module.Pipeline([])
    host = Buffer.of(np.array([2, 1], np.int32), "cpu")
    buffers = {"lengths": memory(3, 4), "input_lengths": host}
    found = []
    for running in (0, 0, 1, 1, 0):
        pipeline.running.extend([Future()] * running)
        found.append(pipeline.lengths(buffers).tolist())
        if not running:
            pipeline.running.clear()
    assert found == [[3, 4], [3, 4], [5, 5], [7, 6], [9, 7]]
