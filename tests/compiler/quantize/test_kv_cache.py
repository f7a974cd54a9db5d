"""Caches in int8 and int4: their scales, the numbers that attention reads back, and packages that hold them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.quantize import kv_cache
from qsample.compiler.quantize.kv_cache import measure_scales, quantize_kv_cache, scales_of
from qsample.contract.interface import Interface, KeyValueShape
from qsample.errors import CompileError
from qsample.graph.runner import GraphRunner
from qsample.package.package import Package, read_package
from qsample.runtime import Engine, SamplingParams
from tests.helpers.small_graphs import small_graph

HEADS, KV_HEADS, SIZE, CAPACITY = 4, 2, 16, 24
ATTENTION = f"""
<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
decode (float[B,S,64] q, float[B,S,32] k, float[B,S,32] v, float[B,2,{CAPACITY},16] past_key_values.0.key,
        float[B,2,{CAPACITY},16] past_key_values.0.value, int32[B] seen)
    => (float[B,S,64] result, float[B,2,{CAPACITY},16] present.0.key, float[B,2,{CAPACITY},16] present.0.value)
    <int32 total = {{{CAPACITY}}}>
{{
    result, present.0.key, present.0.value = com.microsoft.GroupQueryAttention <num_heads = {HEADS}, kv_num_heads = 2>
        (q, k, v, past_key_values.0.key, past_key_values.0.value, seen, total)
}}
"""


def attention() -> ir.Model:
    # The text form has no dots in names.
    model = ir.from_onnx_text(
        ATTENTION.replace("past_key_values.0.", "past_").replace("present.0.", "present_")
    )
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.name = value.name.replace("past_", "past_key_values.0.").replace(
            "present_", "present.0."
        )
    return model


def levels_of(state: Any, bits: int) -> Any:
    """The numbers of a cache: of two in a byte the first is in the low bits, each 8 more than it is."""
    if bits == 8:
        return state.astype(int)
    return np.stack([state & 15, state >> 4], -1).reshape(*state.shape[:-1], -1).astype(int) - 8


def opened(model: ir.Model) -> ort.InferenceSession:
    return ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )


def empty(bits: int) -> Any:
    return np.zeros((1, KV_HEADS, CAPACITY, SIZE * bits // 8), np.int8 if bits == 8 else np.uint8)


@pytest.mark.parametrize("bits", [8, 4])
def test_attention_reads_back_what_the_scales_allow(bits: int) -> None:
    """Keys and values of whole multiples of the scales survive exactly, and attention is over these."""
    rng, limit = np.random.default_rng(0), 2 ** (bits - 1)
    scales = {
        f"past_key_values.0.{kind}": rng.uniform(0.01, 0.03, (KV_HEADS, SIZE)).astype(np.float32)
        * (128 / limit)
        for kind in ("key", "value")
    }
    model = attention()
    assert quantize_kv_cache(model, scales, bits)
    new = {
        "k": scales["past_key_values.0.key"].ravel(),
        "v": scales["past_key_values.0.value"].ravel(),
    }
    feeds = {
        "q": rng.standard_normal((1, 9, HEADS * SIZE), np.float32),
        "seen": np.array([8], np.int32),
    }
    feeds |= {
        name: scale * rng.integers(-limit, limit, (1, 9, len(scale))).astype(np.float32)
        for name, scale in new.items()
    }
    wanted = opened(attention()).run(
        None, feeds | dict.fromkeys(scales, np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.float32))
    )
    got = opened(model).run(None, feeds | dict.fromkeys(scales, empty(bits)))
    np.testing.assert_allclose(
        got[0], wanted[0], atol=2e-3
    )  # the kernel also rounds queries or weights of keys
    for state, exact, scale in zip(got[1:], wanted[1:], scales.values(), strict=True):
        np.testing.assert_allclose(
            (levels_of(state, bits) * scale[None, :, None])[:, :, :9], exact[:, :, :9], atol=1e-4
        )


@pytest.mark.parametrize("bits", [8, 4])
def test_a_channel_of_zeros_and_one_beyond_its_range(bits: int) -> None:
    model = attention()
    names = [f"past_key_values.0.{kind}" for kind in ("key", "value")]
    zeros = scales_of(np.zeros((1, KV_HEADS, 3, SIZE), np.float32), bits)
    np.testing.assert_array_equal(zeros, np.ones((KV_HEADS, SIZE)))
    quantize_kv_cache(model, dict.fromkeys(names, zeros), bits)
    ones = np.ones((1, 1, KV_HEADS * SIZE), np.float32)
    feeds = {
        "q": np.ones((1, 1, HEADS * SIZE), np.float32),
        "k": 2 * ones,
        "v": -1000 * ones,
        "seen": np.zeros(1, np.int32),
    }
    _, keys, values = opened(model).run(None, feeds | dict.fromkeys(names, empty(bits)))
    assert (levels_of(keys, bits)[0, :, 0] == 2).all()  # scale 1
    assert (
        levels_of(values, bits)[0, :, 0] == -(2 ** (bits - 1))
    ).all()  # clipped, not wrapped around


def test_scales() -> None:
    """In 8 bits there is room above the largest value; 4 bits clip it if the others gain more by that."""
    values = np.random.default_rng(0).normal(0, 1, (2, 3, 60, 4)).astype(np.float32)
    values[1, 2, 5, 3] = -9
    largest = np.abs(values).max(axis=(0, 2))
    np.testing.assert_array_equal(scales_of(values, 8), largest * np.float32(1.2) / 127)
    scales = scales_of(values, 4)
    for head, channel in np.ndindex(3, 4):
        column = values[:, head, :, channel].astype(np.float64)

        def error(scale: float, column: Any = column) -> float:
            return float(((np.clip(np.rint(column / scale), -8, 7) * scale - column) ** 2).sum())

        tried = [error(largest[head, channel] * factor) for factor in np.linspace(0.05, 0.3, 200)]
        assert error(scales[head, channel]) < 1.2 * min(tried), (head, channel)
    assert scales[2, 3] * 8 < 0.9 * largest[2, 3]


@pytest.fixture(scope="module", params=["int8", pytest.param("int4", marks=pytest.mark.ci)])
def compiled(
    request: pytest.FixtureRequest, llama_package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "package"
    options = CompileOptions(batch_size=4, ctx_len=96, kv_cache_dtype=request.param)
    compile_package(read_package(llama_package), path, options)
    return path


@pytest.mark.ci
def test_manifest(compiled: Path) -> None:
    manifest = read_package(compiled).manifest
    figures = manifest.compilation.quantization
    four = figures["kv_cache_dtype"] == "int4"
    assert figures["kv_cache_dtype"] == manifest.interface.kv_cache_dtype
    assert manifest.contract_version == ("2.3" if four else "2.0")
    kept = {(spec.dtype, spec.axes[-1]) for spec in manifest.interface.cache_states}
    assert kept == {("uint8", 8) if four else ("int8", 16)}
    assert "matrices" not in figures  # the weights are as they were
    # 8 bits a channel change a trained or random model by far less than 4-bit weights do.
    assert 0 < figures["divergence"]["kl"]["value"] < (0.2 if four else 0.01)
    assert figures["divergence"]["agreement"]["value"] > (0.6 if four else 0.9)


def test_generates_in_place_and_in_chunks(compiled: Path, tmp_path: Path) -> None:
    """The same tokens alone, in a batch, in pieces, and behind a prefix from a file."""
    model = AutoModelForCausalLM.from_pretrained(compiled)
    prompts = [[5, 6, 7, 8], [9], list(range(10, 40))]
    options: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "max_new_tokens": 24,
        "seed": 3,
    }
    wanted = model.generate(prompts, **options).token_ids
    assert model.generate(prompts, **options, prefill_chunk_size=7).token_ids[:2] == wanted[:2]
    long = list(range(1, 71))  # without 0, the pad token
    alone = model.generate([long], **options).token_ids[0]
    assert model.runtime.save_prefix(long, tmp_path / "prefix") == 64
    with Engine(model.runtime, slots=2, prefixes=[tmp_path / "prefix"]) as engine:
        found = engine.add_request(long, SamplingParams(**options)).result()
    assert found.usage.cached_tokens == 64
    assert list(found.token_ids) == list(alone)


def test_scales_are_of_the_whole_cache(
    llama_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = read_package(llama_package)
    states: list[Any] = []
    plain = GraphRunner.start

    def start(self: GraphRunner, rows: int) -> Any:
        states.append(plain(self, rows))
        return states[-1]

    monkeypatch.setattr(GraphRunner, "start", start)
    done: list[float] = []
    scales = measure_scales(package, 8, 32, done.append)
    assert list(scales) == [spec.name for spec in package.interface.cache_states]
    (state,) = states
    for name, scale in scales.items():
        assert not state[name][:, :, 31].any(), "31 tokens were written"
        # Of all rows and tokens: none is the whole of it.
        largest = np.abs(state[name]).max(axis=(0, 2))
        np.testing.assert_array_equal(scale, largest * np.float32(1.2) / 127)
        assert all((np.abs(row).max(axis=1) < largest).any() for row in state[name])
    assert done == [step / 31 for step in range(1, 32)]


def test_a_cache_that_is_too_far_off(small: Package, tmp_path: Path) -> None:
    strict = CompileOptions(ctx_len=32, kv_cache_dtype="int8", max_divergence=1e-12)
    with pytest.raises(
        CompileError,
        match=r"an int8 cache change the model too much: .*Take no kv_cache_dtype; max_div",
    ):
        compile_package(small, tmp_path / "out", strict)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("capacity", "opening", "tokens"),
    [(512, 3, 64), (20, 3, 17), (20, 0, 19)],  # without an opening, a first token is drawn
)
def test_scales_are_measured_on_what_the_caches_hold(
    capacity: int, opening: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of the text but the last, which no call read; what lies behind them is not counted."""
    names = ("past_key_values.0.key", "past_key_values.0.value")
    read = max(opening, 1) + tokens - 1
    state = {name: np.full((4, 1, capacity, 2), 1e6, np.float32) for name in names}
    for number, name in enumerate(names, 1):
        state[name][:, :, :read] = number
    given: list[Any] = []

    class Runner:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            given.append((arguments, options))

        def start(self, rows: int) -> dict[str, Any]:
            assert rows == 4
            return state

        def step(self, *arguments: Any, **options: Any) -> Any: ...

    def write_text(step: Any, one: Any, vocab_size: int, **options: Any) -> Any:
        assert step.keywords == {"state": state}
        assert (one.ids, vocab_size) == ((7,) * opening, 50)
        assert (options["rows"], options["tokens"], options["seed"]) == (4, tokens, 1)
        options["progress"](0.5)
        return SimpleNamespace(rows=np.zeros((4, max(opening, 1) + options["tokens"])))

    interface = Interface(50, (KeyValueShape(1, 2),))
    source: Any = SimpleNamespace(path=Path("/portable"), interface=interface)
    monkeypatch.setattr(kv_cache, "GraphRunner", Runner)
    monkeypatch.setattr(kv_cache, "logits_of", lambda path, interface: (path, "its logits"))
    monkeypatch.setattr(kv_cache, "write_text", write_text)
    monkeypatch.setattr(
        kv_cache, "opening_of", lambda source, capacity: SimpleNamespace(ids=(7,) * opening)
    )
    told: list[float] = []
    scales = measure_scales(source, 8, capacity, told.append)
    assert told == [0.5]
    assert given == [
        (((source.path, "its logits"), source.path, interface, capacity), {"weights_mapped": True})
    ]
    for number, name in enumerate(names, 1):
        np.testing.assert_allclose(scales[name], np.full((1, 2), number * 1.2 / 127), rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_graph_says_how_its_caches_are_held(bits: int) -> None:
    model = attention()
    names = [f"past_key_values.0.{kind}" for kind in ("key", "value")]
    scales = {
        name: np.full((KV_HEADS, SIZE), number, np.float32) for number, name in enumerate(names, 1)
    }
    assert quantize_kv_cache(model, scales, bits)
    (node,) = model.graph
    assert node.attributes.get_string("k_quant_type", "") == "PER_CHANNEL"
    assert node.attributes.get_string("v_quant_type", "") == "PER_CHANNEL"
    assert node.attributes.get_int("kv_cache_bit_width", 0) == bits
    for slot, number, name in ((12, 1, names[0]), (13, 2, names[1])):
        value = node.inputs[slot]
        assert value is not None
        assert value.name == f"{name}_scale"
        assert value.const_value is not None
        array = value.const_value.numpy()
        assert (array.shape, set(array.ravel())) == ((1, KV_HEADS, 1, SIZE), {number})
    dtype = ir.DataType.INT8 if bits == 8 else ir.DataType.UINT8
    states = [*model.graph.inputs[3:5], *model.graph.outputs[1:]]
    assert [(value.dtype, list(value.shape or ())[1:]) for value in states] == [
        (dtype, [KV_HEADS, CAPACITY, SIZE * bits // 8])
    ] * 4
    assert not quantize_kv_cache(
        small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }"), {}, bits
    )
