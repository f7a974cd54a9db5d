"""The int8 cache: its scales, the numbers that attention reads back, and packages that hold one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.quantize.kv_cache import measure_ranges, quantize_kv_cache
from qsample.errors import CompileError
from qsample.graph.runner import GraphRunner
from qsample.package.package import Package, read_package

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
    model = ir.from_onnx_text(ATTENTION.replace("past_key_values.0.", "past_").replace("present.0.", "present_"))
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.name = value.name.replace("past_", "past_key_values.0.").replace("present_", "present.0.")
    return model


def test_attention_reads_back_what_the_scales_allow() -> None:
    """Keys and values of whole multiples of the scales survive exactly, others to half a scale."""
    rng = np.random.default_rng(0)
    scales = {
        f"past_key_values.0.{kind}": rng.uniform(0.01, 0.03, (KV_HEADS, SIZE)).astype(np.float32)
        for kind in ("key", "value")
    }
    model = attention()
    quantize_kv_cache(model, {name: scale * np.float32(127 / 1.2) for name, scale in scales.items()})
    plain, quantized = (
        ort.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
        for graph in (attention(), model)
    )
    new = {"k": scales["past_key_values.0.key"].ravel(), "v": scales["past_key_values.0.value"].ravel()}
    feeds = {"q": rng.standard_normal((1, 9, HEADS * SIZE), np.float32), "seen": np.array([8], np.int32)}
    feeds |= {
        name: scale * rng.integers(-127, 128, (1, 9, len(scale))).astype(np.float32) for name, scale in new.items()
    }
    shape = (1, KV_HEADS, CAPACITY, SIZE)
    float_feeds = feeds | {name: np.zeros(shape, np.float32) for name in scales}
    int8_feeds = feeds | {name: np.zeros(shape, np.int8) for name in scales}

    wanted, got = plain.run(None, float_feeds), quantized.run(None, int8_feeds)
    np.testing.assert_allclose(got[0], wanted[0], atol=2e-3)  # the kernel also rounds queries or weights of keys
    for state, exact, scale in zip(got[1:], wanted[1:], scales.values(), strict=True):
        assert state.dtype == np.int8
        np.testing.assert_allclose(state * scale[None, :, None], exact, atol=1e-5)


def test_a_channel_of_zeros_and_one_beyond_its_range() -> None:
    model = attention()
    ranges = {f"past_key_values.0.{kind}": np.zeros((KV_HEADS, SIZE), np.float32) for kind in ("key", "value")}
    quantize_kv_cache(model, ranges)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    state = np.zeros((1, KV_HEADS, CAPACITY, SIZE), np.int8)
    ones = np.ones((1, 1, KV_HEADS * SIZE), np.float32)
    feeds = {
        "q": np.ones((1, 1, HEADS * SIZE), np.float32),
        "k": 2 * ones,
        "v": -1000 * ones,
        "seen": np.zeros(1, np.int32),
    }
    _, keys, values = session.run(None, feeds | dict.fromkeys(ranges, state))
    assert (keys[0, :, 0] == 2).all()  # scale 1
    assert (values[0, :, 0] == -128).all()  # clipped, not wrapped around


@pytest.fixture(scope="module")
def compiled(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "package"
    compile_package(read_package(llama_package), path, CompileOptions(batch_size=4, ctx_len=96, kv_cache_dtype="int8"))
    return path


@pytest.mark.ci
def test_manifest(compiled: Path) -> None:
    manifest = read_package(compiled).manifest
    figures = manifest.compilation.quantization
    assert figures["kv_cache_dtype"] == manifest.interface.kv_cache_dtype == "int8"
    assert {spec.dtype for spec in manifest.interface.cache_states} == {"int8"}
    assert "matrices" not in figures  # the weights are as they were
    # 8 bits a channel change a trained or random model by far less than 4-bit weights do.
    assert 0 < figures["divergence"]["kl"] < 0.01
    assert figures["divergence"]["agreement"] > 0.9


def test_generates_in_place_and_in_chunks(compiled: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(compiled)
    prompts = [[5, 6, 7, 8], [9], list(range(10, 40))]
    options = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 24, "seed": 3}
    wanted = model.generate(prompts, **options).token_ids
    assert model.generate(prompts, **options, prefill_chunk_size=7).token_ids[:2] == wanted[:2]


def test_ranges_are_those_of_the_cache(llama_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = read_package(llama_package)
    states: list[Any] = []
    plain = GraphRunner.start

    def start(self: GraphRunner, rows: int) -> Any:
        states.append(plain(self, rows))
        return states[-1]

    monkeypatch.setattr(GraphRunner, "start", start)
    done: list[float] = []
    ranges = measure_ranges(package.path, package.interface, 32, done.append)
    assert list(ranges) == [spec.name for spec in package.interface.cache_states]
    (state,) = states
    for name, largest in ranges.items():
        assert largest.shape == (2, 16), name
        assert (largest > 0).all()
        assert not state[name][:, :, 31].any(), "31 tokens were written"
        # Of all rows and tokens: none is the whole of it.
        np.testing.assert_array_equal(largest, np.abs(state[name]).max(axis=(0, 2)))
        assert all((np.abs(row).max(axis=1) < largest).any() for row in state[name])
    assert done == [step / 31 for step in range(1, 32)]


def test_a_cache_that_is_too_far_off(small: Package, tmp_path: Path) -> None:
    strict = CompileOptions(ctx_len=32, kv_cache_dtype="int8", max_divergence=1e-12)
    with pytest.raises(CompileError, match=r"an int8 cache change the model too much: .*own dtype for the cache"):
        compile_package(small, tmp_path / "out", strict)
    assert not (tmp_path / "out").exists()
