"""Compile: device packages, their placement and self-test, the registry of targets, and bad options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import qsample
from qsample import AutoModelForCausalLM
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.errors import CompileError, PackageError
from qsample.package.package import Package, read_package
from qsample.progress import Stage

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]


def input_dims(path: Path) -> dict[str, list[int | str]]:
    graph = onnx.load(path, load_external_data=False).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.input
    }


@pytest.fixture(scope="module")
def compiled(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "package"
    compile_package(read_package(llama_package), path, CompileOptions(batch_size=4, ctx_len=96))
    return path


def test_capacity_is_fixed_and_the_batch_bounded(compiled: Path) -> None:
    dims = input_dims(compiled / "decoder.onnx")
    assert dims["tokens"] == ["B", 96]
    assert dims["past_key_values.0.key"] == ["B", 2, 96, 16]
    assert dims["input_ids"] == ["B", "S"]


def test_a_batch_of_one_is_fixed(llama_package: Path, tmp_path: Path) -> None:
    compile_package(
        read_package(llama_package), tmp_path / "one", CompileOptions(batch_size=1, ctx_len=64)
    )
    dims = input_dims(tmp_path / "one" / "decoder.onnx")
    assert dims["input_ids"] == [1, "S"]
    assert dims["noise"] == [1, 64]
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "one").generate(
        [PROMPTS[0]], do_sample=False, max_new_tokens=9
    )
    portable = AutoModelForCausalLM.from_pretrained(llama_package)
    assert (
        out.token_ids
        == portable.generate([PROMPTS[0]], do_sample=False, max_new_tokens=9).token_ids
    )


def test_provider_fusions_ran(llama_package: Path, compiled: Path) -> None:
    def operators(path: Path) -> list[str]:
        return [
            node.op_type
            for node in onnx.load(path / "decoder.onnx", load_external_data=False).graph.node
        ]

    before, after = operators(llama_package), operators(compiled)
    assert after.count("GroupQueryAttention") == before.count("GroupQueryAttention") == 2
    assert after.count("SkipSimplifiedLayerNormalization") == 4
    assert "RotaryEmbedding" not in after
    assert len(after) < len(before)


def test_manifest_says_where_every_node_runs(compiled: Path) -> None:
    package = read_package(compiled)
    compilation = package.manifest.compilation
    assert package.manifest.kind == "device"
    assert (compilation.provider, compilation.batch_size, compilation.ctx_len) == ("cpu", 4, 96)
    nodes = list(ir.load(compiled / "decoder.onnx").graph.all_nodes())
    assert set(compilation.placement) == {"CPUExecutionProvider"}
    assert sum(compilation.placement["CPUExecutionProvider"].values()) == len(nodes)
    assert compilation is not None
    assert compilation.self_test == {"tokens": 16, "agreeing": 16, "replayed": 0}
    assert compilation.options == {"batch_size": 4, "ctx_len": 96}
    assert compilation.versions == {"qsample": qsample.__version__, "onnxruntime": ort.__version__}
    assert compilation.execution_providers == ("CPUExecutionProvider",)
    assert (compilation.provider_options, compilation.parts) == ({}, ())
    assert (compilation.quantization, compilation.least_onnxruntime) == (None, None)


@pytest.mark.parametrize(
    "model_type",
    ["llama", *(pytest.param(t, marks=pytest.mark.slow) for t in ("gemma3_text", "gpt_oss"))],
)
def test_compiled_and_portable_graphs_give_the_same_tokens(
    model_type: str, exported: Callable[..., Path], tmp_path: Path
) -> None:
    portable = AutoModelForCausalLM.from_pretrained(exported(model_type))
    device = portable.compile(tmp_path / "device", provider="cpu", batch_size=3, ctx_len=80)
    sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
    for options in ({"do_sample": False}, sampled):
        wanted = portable.generate(PROMPTS, max_new_tokens=40, **options).token_ids
        assert device.generate(PROMPTS, max_new_tokens=40, **options).token_ids == wanted


def test_host_sampling_package_compiles(exported: Callable[..., Path], tmp_path: Path) -> None:
    portable = AutoModelForCausalLM.from_pretrained(
        exported("llama", include_sampler=False), include_sampler=False
    )
    device = portable.compile(tmp_path / "device", ctx_len=64)
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_new_tokens": 12}
    assert (
        device.generate(PROMPTS, **options).token_ids
        == portable.generate(PROMPTS, **options).token_ids
    )


def test_a_device_package_cannot_be_compiled_again(compiled: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="already compiled"):
        compile_package(read_package(compiled), tmp_path / "again", CompileOptions())


@pytest.mark.slow
def test_a_checkpoint_is_exported_in_the_dtype_that_it_is_compiled_for(
    checkpoint: Callable[[str], Path],
) -> None:
    half = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).compile(
        dtype="float16", ctx_len=32
    )
    assert half.package.interface.dtype == "float16"
    tokens = half.generate([PROMPTS[0]], do_sample=False, max_new_tokens=4).token_ids
    assert np.shape(tokens) == (1, 4)


def test_a_quantized_package_and_its_stages(small: Package, tmp_path: Path) -> None:
    """What is there already stays, the package's own source above all."""
    told: list[tuple[str, float]] = []
    options = CompileOptions(ctx_len=24, weights="int8", kv_cache_dtype="int8")
    compiled = compile_package(
        small, tmp_path / "out", options, progress=lambda *given: told.append(given)
    )
    stages = [Stage.OPTIMISING, Stage.MEASURING_CACHE, Stage.WRITING_GRAPH, Stage.TESTING]
    stages += [Stage.DIVERGENCE, Stage.PUBLISHING, Stage.DONE]
    assert list(dict.fromkeys(stage for stage, _ in told)) == stages
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert compiled.manifest.compilation is not None
    figures = compiled.manifest.compilation.quantization
    assert figures is not None
    assert figures["divergence"]["tokens"] > 0
    assert figures["kv_cache_dtype"] == "int8"
    for path, message in ((tmp_path / "out", "already holds"), (small.path, "is made from")):
        with pytest.raises(PackageError, match=message):
            compile_package(small, path, options, overwrite=path == small.path)
