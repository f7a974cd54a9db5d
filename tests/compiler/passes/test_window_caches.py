"""Caches of a window's size: what they compute is what caches of all tokens compute, and what transformers does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from qsample.checkpoints.checkpoint import Origin
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.passes.window_caches import SLACK, slide_windows
from qsample.compiler.plan import make_plan
from qsample.compiler.targets import find_target
from qsample.contract.arrays import Array
from qsample.contract.interface import Features, ImageShape
from qsample.exporters.export import LoadedModel, export_model
from qsample.graph.gqa import attentions
from qsample.package.package import Package, read_package
from qsample.runtime import Engine, SamplingParams, load
from tests.conftest import made_once
from tests.helpers.plain_host import PlainHost
from tests.helpers.small_graphs import small_graph
from tests.helpers.tiny_models import byte_tokenizer, random_model

CTX_LEN = 2048
WINDOW = 32
GRAPH = """
decode (float[B,S,32] q, float[B,S,16] k, float[B,S,16] v, float[B,1,2048,16] past_key,
        float[B,1,2048,16] past_value, int32[B] lengths, int32[B] status, int32[B] input_lengths,
        int32[B] seqlens, int32 total)
    => (float[B,S,32] result, float[B,1,2048,16] present_key, float[B,1,2048,16] present_value{more})
{{
    result, present_key, present_value =
        com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, local_window_size = {window}{attributes}>
        (q, k, v, past_key, past_value, seqlens, total)
    {nodes}
}}
"""


def graph(window: int = WINDOW, attributes: str = "", nodes: str = "", more: str = "") -> ir.Model:
    shapes = {f"present_{kind}": ("B", 1, 2048, 16) for kind in ("key", "value")}
    text = GRAPH.format(window=window, attributes=attributes, nodes=nodes, more=more)
    return small_graph(text, {**shapes, "result": ("B", "S", 32)})


class Rows:
    """Two rows of a graph, updated in place."""

    def __init__(self, model: ir.Model) -> None:
        self._session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
        )
        capacity = next(
            value.shape[2] for value in self._session.get_inputs() if value.name == "past_key"
        )
        self.caches = [np.zeros((2, 1, capacity, 16), np.float32) for _ in range(2)]

    def run(
        self,
        rows: slice,
        new: list[Array],
        lengths: list[int],
        running: list[bool],
        real: list[int],
    ) -> Array:
        count, seen = new[0].shape[1], np.array(lengths, np.int32)
        total = CTX_LEN if len(seen) == 1 or count == 1 else count
        fed = dict(zip(("q", "k", "v"), new, strict=True)) | {
            "lengths": seen,
            "status": 1 - np.int32(running),
            "input_lengths": np.int32(real),
            "seqlens": seen + np.int32(count - 1),
            "total": np.int32(total),
        }
        binding = self._session.io_binding()
        for name, array in fed.items():
            binding.bind_cpu_input(name, np.asarray(array))
        binding.bind_output("result")
        for kind, cache in zip(("key", "value"), self.caches, strict=True):
            place = "cpu", 0, np.float32, cache[rows].shape, cache[rows].ctypes.data
            binding.bind_input(f"past_{kind}", *place)
            binding.bind_output(f"present_{kind}", *place)
        self._session.run_with_iobinding(binding)
        result: Array = binding.get_outputs()[0].numpy()
        return result


@pytest.mark.parametrize(
    ("window", "attributes"), [(WINDOW, ""), (600, ""), (WINDOW, ", softcap = 20.0")]
)
def test_a_cache_that_slides_computes_what_one_of_all_tokens_does(
    window: int, attributes: str
) -> None:
    """Padded first pieces of two rows, pieces of any size, steps beside a row that waits: these bit by bit. Pieces are
    summed in blocks whose size depends on the processor."""
    model, capacity = graph(window, attributes), window + SLACK - 1
    whole = Rows(model)
    assert slide_windows(model, CTX_LEN) == {"past_key": capacity}
    slides = Rows(model)
    random, lengths = np.random.default_rng(0), [0, 0]

    def read(row: int | None, real: list[int], columns: int, running: list[bool]) -> None:
        rows = slice(0, 2) if row is None else slice(row, row + 1)
        new = [
            random.standard_normal((len(real), columns, size), np.float32) for size in (32, 16, 16)
        ]
        both = [one.run(rows, new, lengths[rows], running, real) for one in (whole, slides)]
        for number, (count, runs) in enumerate(zip(real, running, strict=True)):
            if runs:
                exact = columns == 1 and not attributes
                np.testing.assert_allclose(
                    *(result[number, :count] for result in both), 0, 0 if exact else 1e-6
                )
                lengths[number if row is None else row] += count

    read(None, [40, 7], 40, [True, True])
    for row, counts in enumerate(
        ([300, 512, 400, 33], [1096])
    ):  # over both edges of the cache, and longer than it
        for count in counts:
            read(row, [count], count, [True])
    for _ in range(
        20
    ):  # the second row waits at 1,111 tokens, too, where one more would move a cache of 600 onto itself
        read(None, [1, 1], 1, [True, True])
        read(None, [1, 1], 1, [True, False])
    assert lengths == [1325, 1123]
    for cache, other in zip(
        whole.caches, slides.caches, strict=True
    ):  # the contract's rule of what is held
        for row, length in enumerate(lengths):
            held = length - SLACK * -(-max(0, length - capacity) // SLACK)
            np.testing.assert_array_equal(
                other[row, :, :held], cache[row, :, length - held : length]
            )


def test_layers_that_keep_all_tokens() -> None:
    reader = "sum = ReduceSum <keepdims = 0> ({})"
    others = [
        graph(window=-1),
        graph(window=1026),  # and its slack: more than three quarters of the context
        graph(
            nodes=reader.format("present_key"), more=", float sum"
        ),  # another layer attends to them
        graph(nodes=reader.format("past_value"), more=", float sum"),
        graph(nodes="size = Shape <start = 2, end = 3> (past_key)", more=", int64[1] size"),
    ]
    for model in others:
        assert slide_windows(model, CTX_LEN) == {}
        (node,) = attentions(model.graph)
        assert "sliding_window_cache" not in node.attributes
    assert slide_windows(graph(window=1025), CTX_LEN)
    assert slide_windows(
        graph(nodes="rows = Shape <end = 1> (past_key)", more=", int64[1] rows"), CTX_LEN
    )


@pytest.mark.parametrize(
    ("slides", "provider", "options", "change"),
    [
        (True, "cpu", {}, {}),
        (False, "cpu", {"sliding_window_cache": False}, {}),
        (False, "cpu", {"num_speculative_tokens": 7, "kv_cache_dtype": "int8"}, {}),
        (False, "cpu", {}, {"image": ImageShape(8, blockwise=True)}),
        (True, "cpu", {}, {"image": ImageShape(8)}),
        (False, "cpu", {}, {"features": Features(sampler=False)}),
        (False, "web", {}, {}),
    ],
)
def test_what_needs_whole_caches(
    slides: bool, provider: str, options: dict[str, Any], change: dict[str, Any], small: Package
) -> None:
    source = replace(
        small, manifest=replace(small.manifest, interface=replace(small.interface, **change))
    )
    plan, target = (
        make_plan(source, CompileOptions(provider=provider, **options)),
        find_target(provider),
    )
    assert ("slide-caches" in [phase.name for phase in target.phases(plan)]) is slides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "__version__", "1.31.2")
        assert "slide-caches" not in [phase.name for phase in target.phases(plan)]


# Windows in every other layer, in all of them, and beside attention sinks.
KINDS = [
    "gemma3_text",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mistral", "gpt_oss")),
]
SIZES = {"sliding_window": WINDOW, "max_position_embeddings": 4096}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packages(kind: str, shared_folder: Path) -> Callable[..., Path]:
    """Options of compile → a package."""
    portable = made_once(
        shared_folder / f"{kind}-of-windows",
        lambda path: export_model(
            LoadedModel(random_model(kind, **SIZES), byte_tokenizer(), Origin("tiny")),
            path,
            Features(),
        ),
    )

    def make(**options: Any) -> Path:
        name = "-".join(f"{key}-{value}" for key, value in options.items())
        return made_once(
            shared_folder / f"{kind}-of-windows-{name}",
            lambda path: compile_package(
                read_package(portable), path, CompileOptions(ctx_len=CTX_LEN, **options)
            ),
        )

    return make


def prompts() -> list[list[int]]:
    """Of about 50, 20 and 2 windows, and shorter than one."""
    random = np.random.default_rng(0)
    return [random.integers(3, 300, length).tolist() for length in (1600, 700, 70, 9)]


GREEDY = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": []}


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}])
def test_tokens_are_those_of_whole_caches_and_of_transformers(
    options: dict[str, Any], kind: str, packages: Callable[..., Path]
) -> None:
    slides, whole = load(packages(**options)), load(packages(sliding_window_cache=False, **options))
    held = {shape.capacity for shape in slides.interface.key_values}
    assert held == ({WINDOW + SLACK - 1} if kind == "mistral" else {WINDOW + SLACK - 1, None})
    assert (slides.package.manifest.contract_version, whole.package.manifest.contract_version) == (
        "2.3",
        "2.0",
    )
    tokens = slides.generate(prompts(), **GREEDY).token_ids
    assert tokens == whole.generate(prompts(), **GREEDY).token_ids
    assert tokens == [slides.generate([prompt], **GREEDY).token_ids[0] for prompt in prompts()]
    if not options:
        model = random_model(kind, **SIZES)
        for prompt, new in zip(prompts(), tokens, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == list(new)


@pytest.mark.ci
def test_requests_that_begin_alike(packages: Callable[..., Path]) -> None:
    """A conversation goes on from saved caches, whatever was read in its slot meanwhile; and so does a file's."""
    model = load(packages())
    random, settings = (
        np.random.default_rng(1),
        SamplingParams(temperature=1.0, max_new_tokens=30, eos_token_id=()),
    )
    talks = [random.integers(3, 300, length).tolist() for length in (900, 620)]
    reused = []
    with Engine(model, slots=2) as engine:
        for turn in range(6):
            talk = talks[turn % 2]
            output = engine.add_request(talk, settings, seed=turn).result(300)
            assert output.token_ids == model.generate(talk, settings, seed=turn).token_ids[0]
            reused.append(output.usage.cached_tokens)
            talk += [*output.token_ids, *random.integers(3, 300, 40).tolist()]
        start = random.integers(3, 300, 200).tolist()
        for tokens, cached in (
            ([*start, 5], 0),
            ([*start[:130], 6, 7], 128),
        ):  # shorter than a cache: from any piece
            output = engine.add_request(tokens, settings, seed=9).result(300)
            assert output.token_ids == model.generate([tokens], settings, seed=9).token_ids[0]
            assert output.usage.cached_tokens == cached
    assert reused[:2] == [0, 0]
    assert min(reused[2:]) > 500


@pytest.mark.ci
def test_a_prefix_file_has_the_window(packages: Callable[..., Path], tmp_path: Path) -> None:
    model, start = load(packages()), prompts()[1]
    model.save_prefix(start, tmp_path / "start.prefix")
    settings = SamplingParams(temperature=0.0, max_new_tokens=20, eos_token_id=())
    with Engine(model, slots=1, prefixes=[tmp_path / "start.prefix"]) as engine:
        output = engine.add_request([*start, 5, 6, 7], settings).result(300)
    assert output.usage.cached_tokens > 500
    assert output.token_ids == model.generate([[*start, 5, 6, 7]], settings).token_ids[0]


@pytest.mark.ci
def test_a_host_feeds_states_back_as_they_are(packages: Callable[..., Path]) -> None:
    """It gets their sizes from initial_state.onnx; rows that have ended keep their cache."""
    package, (long, short) = packages(), prompts()[:2]
    host, model = PlainHost(package), load(package)
    state = host.start([0, 0], CTX_LEN)
    rows = []
    for row, prompt in enumerate((long[:1100], short[:500])):
        part = {name: value[row : row + 1] for name, value in state.items()}
        for begin in range(0, len(prompt), 64):
            piece = prompt[begin : begin + 64]
            outputs = host.call(part, [piece], emit=[begin + 64 >= len(prompt)])
            part = host.after(part, outputs)
        rows.append((part, [int(outputs["next_ids"][0, 0])]))
    state = {name: np.concatenate([part[name] for part, _ in rows]) for name in state}
    tokens = [new for _, new in rows]
    for _ in range(25):
        outputs = host.call(state, [[new[-1]] for new in tokens], max_length=[2000, 510])
        state = host.after(state, outputs)
        for row, new in enumerate(tokens):
            if row == 0 or len(new) < 10:
                new.append(int(outputs["next_ids"][row, 0]))
    for prompt, new in zip((long[:1100], short[:500]), tokens, strict=True):
        assert new == list(
            model.generate([prompt], **{**GREEDY, "max_new_tokens": len(new)}).token_ids[0]
        )
    again = host.call(
        {**state, "status": np.int32([1, 0])}, [[new[-1]] for new in tokens]
    )  # the second row goes on
    wanted = model.generate([short[:500]], **{**GREEDY, "max_new_tokens": 11}).token_ids[0]
    assert int(again["next_ids"][1, 0]) == wanted[10]
