"""A baked package: its tokens are drawn as the contract says, from the file's own logits; and what it says of
itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import qsample
from qsample import AutoModelForCausalLM
from qsample.addons.bake import attention
from qsample.addons.bake import bake as bakery
from qsample.addons.bake.original import Original
from qsample.addons.bake.recognise import recognise
from qsample.addons.bake.source import DecoderSource
from qsample.cli import run
from qsample.contract.interface import Features
from qsample.errors import QsampleError
from qsample.models.model import PackagedModel, SourceModel
from qsample.models.sources import CheckpointSource
from qsample.progress import Stages
from tests.conftest import made_once
from tests.helpers.foreign import read, recorded_tokens
from tests.helpers.reference import philox_uniforms, reference_step
from tests.helpers.small_decoders import attending
from tests.helpers.small_graphs import small_graph

Decoder = Callable[[str], tuple[Path, str | None]]
SETTINGS = [
    {"temperature": 1.3},
    {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 7, "frequency_penalty": 0.4},
]
PROMPTS = [[1, 17, 40, 23, 9], [1, 88], [1, 30, 31, 32, 33, 34]]
CAPACITY = 40
LEVEL = (
    "y = com.microsoft.MatMulNBits <K = 32, N = 4, bits = 4, block_size = 32, accuracy_level = {}>"
)
PACKED = "y = com.microsoft.MatMulNBits <K = 32, N = 4, bits = 4, block_size = 32>"


@pytest.fixture(scope="session")
def baked(decoder: Decoder, shared_folder: Path) -> PackagedModel:
    """The int4 file of onnxruntime-genai with the sampler in its graph."""
    folder, _ = decoder("genai_cpu_int4")
    path = made_once(
        shared_folder / "baked-int4",
        lambda path: qsample.bake(folder, path, features=Features(probs=True)),
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    assert isinstance(model, PackagedModel)
    return model


def drawn_from_the_file(
    folder: Path, prompt: list[int], seed: int, settings: dict[str, float]
) -> list[int]:
    """Tokens by the float64 reference, from the logits of the file run as its authors do; up to a draw that rounding
    could decide."""
    original = Original(read(folder))
    inputs: dict[str, np.ndarray] = {
        "input_ids": np.array([prompt]),
        "input_lengths": np.array([len(prompt)]),
        "emit": np.array([True]),
        "lengths": np.array([0]),
        "status": np.array([0]),
        "tokens": np.zeros((1, CAPACITY), np.int32),
        "output_counts": np.zeros((1, 128), np.float32),
        "noise": philox_uniforms(seed, CAPACITY)[None],
        "min_length": np.array([0]),
        "max_length": np.array([2**31 - 1]),
        "stop_ids": np.array([[-1]]),
    }
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    off |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    inputs |= {name: np.array([settings.get(name, value)]) for name, value in off.items()}
    logits, past = original.step(prompt, original.start(), 0)
    made: list[int] = []
    while len(made) < 12:
        step = reference_step(logits[None], inputs, pad_token_id=0)
        if step["margin"][0] < 1e-4:
            break
        made.append(int(step["next_ids"][0, 0]))
        done = len(prompt) + len(made) - 1
        for name in ("lengths", "status", "tokens", "output_counts"):
            inputs[name] = step[f"{name}_RetainedState"]
        inputs |= {"input_ids": np.array([made[-1:]]), "input_lengths": np.array([1])}
        logits, past = original.step(made[-1:], past, done)
    return made


def test_sampled_rows_are_the_reference_drawn_from_the_files_logits(
    baked: PackagedModel, decoder: Decoder
) -> None:
    folder, _ = decoder("genai_cpu_int4")
    seeds = [11, 12, 13]
    wanted = [
        drawn_from_the_file(folder, *row) for row in zip(PROMPTS, seeds, SETTINGS, strict=True)
    ]

    rows = [
        qsample.SamplingParams(seed=seed, max_new_tokens=12, eos_token_id=[], **settings)
        for seed, settings in zip(seeds, SETTINGS, strict=True)
    ]
    got = baked.generate(PROMPTS, rows).token_ids

    assert sum(map(len, wanted)) > 24
    for row, drawn in zip(got, wanted, strict=True):
        assert list(row[: len(drawn)]) == drawn


def test_greedy_tokens_are_those_of_onnxruntime_genai(
    baked: PackagedModel, decoder: Decoder
) -> None:
    genai = recorded_tokens(decoder("genai_cpu_int4")[0])
    got = baked.generate(genai["prompts"], do_sample=False, max_new_tokens=24).token_ids
    assert [list(row) for row in got] == genai["new_tokens"]


def test_what_the_package_says(baked: PackagedModel, decoder: Decoder) -> None:
    manifest = baked.package.manifest
    assert manifest.kind == "portable"
    assert manifest.source.model_type == "llama"
    assert manifest.source.architecture.startswith("model.onnx, a decoder by onnxruntime-genai")
    assert manifest.max_position_embeddings == 128
    assert (manifest.token_ids.pad, manifest.token_ids.bos, manifest.token_ids.eos) == (0, 1, (2,))
    assert manifest.packed_weights is not None
    assert manifest.packed_weights["bits"] == [4]
    assert manifest.packed_weights["matrices"] == 11
    assert manifest.parity is not None
    assert manifest.parity["max_error"] <= manifest.parity["tolerance"]
    assert baked.generate("ab", max_new_tokens=2, do_sample=False).texts  # the tokenizer came along


@pytest.mark.slow
def test_it_compiles(baked: PackagedModel, tmp_path: Path) -> None:
    compiled = baked.compile(tmp_path / "cpu", ctx_len=64, max_divergence=1.0)
    quantization = compiled.package.manifest.compilation.quantization
    assert quantization["divergence"]["kl"]["value"] < 0.1  # of the activations in 8 bits
    greedy = {"do_sample": False, "max_new_tokens": 8}
    assert (
        compiled.generate(PROMPTS, **greedy).token_ids
        == baked.generate(PROMPTS, **greedy).token_ids
    )


@pytest.mark.ci
def test_from_pretrained_opens_a_folder_of_decoders(decoder: Decoder) -> None:
    folder, _ = decoder("genai_cpu_fp32")
    with pytest.warns(
        UserWarning, match="holds a decoder file; it is used as `qsample bake` writes it"
    ):
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, SourceModel)
    assert isinstance(model.source, DecoderSource)
    genai = recorded_tokens(folder)
    assert [
        list(row)
        for row in model.generate(genai["prompts"], do_sample=False, max_new_tokens=24).token_ids
    ] == genai["new_tokens"]


@pytest.mark.parametrize("given", [{"dtype": "float16"}, {"adapter": "some/adapter"}])
def test_what_a_decoder_file_does_not_take(given: dict[str, str], decoder: Decoder) -> None:
    with pytest.raises(QsampleError, match=f"leave {next(iter(given))} out"):
        AutoModelForCausalLM.from_pretrained(decoder("genai_cpu_fp32")[0], **given)


def test_a_checkpoint_beside_it_is_preferred(tmp_path: Path) -> None:
    for name in ("model.onnx", "model.safetensors", "config.json"):
        (tmp_path / name).write_text("{}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(model, SourceModel)
    assert isinstance(model.source, CheckpointSource)


def test_the_window_that_a_graph_lacks_is_said(decoder: Decoder, tmp_path: Path) -> None:
    folder, _ = decoder("genai_cpu_mistral")
    with pytest.warns(
        UserWarning, match="states an attention window of 6 tokens, and the graph has none"
    ) as caught:
        qsample.bake(folder, tmp_path / "out", features=Features(sampler=False))
    assert any("compared with this file alone" in str(warning.message) for warning in caught)


def test_the_command(decoder: Decoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = decoder("community_gqa/onnx/model_q4f16.onnx")
    command = ["bake", str(folder), str(tmp_path / "out"), "--file", str(file)]
    assert run(command) == 0
    assert capsys.readouterr().out.strip().endswith("out")
    manifest = json.loads((tmp_path / "out" / "qsample.json").read_text())
    assert manifest["interface"]["dtype"] == "float16"
    assert run(command) == 1
    assert "already holds a package" in capsys.readouterr().err


@pytest.mark.ci
def test_the_readmes_file_without_torch_and_transformers(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "tiny_lm_genai"
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None\n"
        "import qsample\n"
        "package = qsample.bake(sys.argv[1], sys.argv[2])\n"
        "print(package.generate('And the LORD spake unto', do_sample=False, max_new_tokens=8).texts[0])"
    )
    command = [sys.executable, "-c", code, str(example), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Moses, saying,")


@pytest.mark.slow
def test_norms_and_rotary_embeddings_of_optimum_are_fused(decoder: Decoder, tmp_path: Path) -> None:
    baked = qsample.bake(
        decoder("optimum_qwen3")[0], tmp_path / "baked", features=Features(sampler=False)
    )
    compiled = baked.compile(tmp_path / "cpu", ctx_len=64)
    counts = Counter(node.op_type for node in ir.load(compiled.package.path / "decoder.onnx").graph)
    assert counts["RotaryEmbedding"] == 4
    assert counts["SimplifiedLayerNormalization"] == 9
    assert not counts["ReduceMean"] + counts["Slice"] + counts["Expand"]
    assert sum(counts.values()) <= 85


@pytest.mark.parametrize(
    ("inputs", "node", "arithmetic"),
    [
        ("float[B,4] x", "y = Neg (x)", "float32"),
        ("float16[B,4] x", "y = Shape (x)", "float16"),
        ("float[B,4] x", "h = Cast <to = 10> (x) y = Shape (h)", "float16"),
        ("float[B,32] x, uint8[4,1,16] w, float[4] s", f"{PACKED} (x, w, s)", "float32"),
        ("float[B,32] x, uint8[4,1,16] w, float[4] s", f"{LEVEL.format(1)} (x, w, s)", "float32"),
        ("float[B,32] x, uint8[4,1,16] w, float[4] s", f"{LEVEL.format(4)} (x, w, s)", "8-bit activations"),
        ("float16[B,32] x, uint8[4,1,16] w, float16[4] s", f"{LEVEL.format(4)} (x, w, s)", "float16"),
    ],
)  # fmt: skip
def test_the_arithmetic_of_a_graph(inputs: str, node: str, arithmetic: str) -> None:
    kind = "int64[n]" if "Shape" in node else "float[B,4]"
    model = small_graph(f"g ({inputs}) => ({kind} y) {{ {node} }}")
    for made in model.graph:
        if made.op_type == "Cast":
            made.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
    assert bakery.arithmetic_of(model) == arithmetic


@pytest.mark.parametrize(
    ("stated", "windows", "limit", "has"),
    [
        (None, [4], None, None),
        (6, [6, -1], None, None),
        (6, [-1, -1], 6, None),
        (6, [-1, 0], 7, "has none: it attends to all tokens"),
        (6, [8, 4, 8], 7, r"has of 4, 8; the baked graph"),
        (8191, [-1], None, "has none"),
        (8192, [-1], None, None),
    ],
)
def test_a_window_that_the_context_exceeds_must_be_in_the_graph(
    stated: int | None, windows: list[int], limit: int | None, has: str | None
) -> None:
    """Without a stated context, 8192 tokens are assumed."""
    foreign: Any = SimpleNamespace(path=Path("m.onnx"))
    settings: Any = SimpleNamespace(window=stated)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bakery._warn_of_windows(foreign, settings, windows, limit)
    assert len(caught) == (has is not None)
    for warning in caught:
        words = f"m.onnx: its configuration states an attention window of {stated} tokens, and the"
        assert re.match(f"{words} graph {has}", str(warning.message))


@pytest.mark.parametrize(
    ("context", "size", "longest", "compared"),
    [
        (None, None, 8192, None),
        (100, None, 100, 100),
        (100_000, None, 32768, 100_000),
        (None, 48, 48, 48),
        (40, 48, 40, 40),
        (100_000, 40_000, 32768, 40_000),
    ],
)
@pytest.mark.parametrize("changed", [False, True])
def test_how_far_a_file_is_probed_and_compared(
    context: int | None,
    size: int | None,
    longest: int,
    compared: int | None,
    changed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to its context and its caches of a fixed size; and a graph that was changed runs in memory."""
    foreign = recognise(Path("m.onnx"), attending())
    layers = (replace(foreign.layers[0], size=size),)
    foreign = replace(foreign, layers=layers, changed=changed)
    seen: list[Any] = []

    def probed(given: Any, longest: int) -> list[Any]:
        seen.append(longest)
        return []

    def stop(original: Any, vocab_size: int, limit: int | None, windows: Any) -> None:
        seen.append((original, vocab_size, limit, list(windows)))
        raise InterruptedError

    monkeypatch.setattr(attention, "drop_causal_biases", probed)
    monkeypatch.setattr(bakery, "counted_positions", probed)
    monkeypatch.setattr(bakery, "Original", lambda given, rewritten: rewritten)
    monkeypatch.setattr(bakery, "reference", stop)
    settings: Any = SimpleNamespace(context=context)
    stages = Stages(None, bakery._STAGE_SHARES)
    with pytest.raises(InterruptedError):
        bakery.rewrite(foreign, Features(), settings, None, stages)
    assert seen == [longest, longest, (changed, 7, compared, [-1])]
