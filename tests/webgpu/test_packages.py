"""Packages on WebGPU: tokens of the CPU, placements, what crosses to the host, states in place, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from qsample import SamplingParams
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.tensors import HOST_AXES
from qsample.errors import CompileError
from qsample.ort.options import session_options
from qsample.ort.providers import WEBGPU, open_session
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import read_package
from qsample.runtime import load
from tests.webgpu.conftest import HOST_OPERATORS

Compiled = Callable[..., Path]
PROMPTS = ["In the beginning", "And it came to pass in those days"]
ROWS = [
    SamplingParams(temperature=0, max_new_tokens=6),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, max_new_tokens=9, seed=3),
]


def test_texts_are_those_of_the_cpu(compiled: Compiled, bundled_package: Path) -> None:
    """Rows of different lengths, a prompt of which is read while the other row waits; then a row alone."""
    expected = load(bundled_package).generate(PROMPTS, ROWS)
    model = load(compiled())
    assert model.generate(PROMPTS, ROWS).texts == expected.texts
    assert model.generate(PROMPTS[1:], ROWS[1:]).texts == expected.texts[1:]


def test_only_shapes_are_on_the_host(compiled: Compiled) -> None:
    package = read_package(compiled())
    compilation = package.manifest.compilation
    assert compilation is not None
    placement = {provider: set(operators) for provider, operators in compilation.placement.items()}
    assert placement.pop("CPUExecutionProvider") <= HOST_OPERATORS
    assert list(placement) == [WEBGPU]
    assert {"GroupQueryAttention", "TopK", "If"} <= placement[WEBGPU]
    assert compilation.self_test["agreeing"] == compilation.self_test["tokens"]


def test_nothing_but_tokens_crosses_to_the_host(compiled: Compiled, tmp_path: Path) -> None:
    """ONNX Runtime copies with nodes that it adds, which its profile shows."""
    options = session_options()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    package = read_package(compiled())
    assert package.manifest.compilation is not None
    given = package.manifest.compilation.provider_options
    session = open_session(package.path / "decoder.onnx", options, [WEBGPU], given)
    sizes: dict[str, int] = {**package.interface.sizes, **dict.fromkeys(HOST_AXES, 1)}
    sizes |= {"B": 2, "S": 1, "T": 32, "R": 1, "R.processed": 2, "R.vocabulary": 2}
    spec = package.interface.decoder
    feeds = {
        one.name: np.full(one.shape(sizes), one.off or 0, one.dtype)
        for one in (*spec.inputs, *spec.states)
    }
    feeds |= {"input_lengths": np.ones(2, np.int32), "temperature": np.ones(2, np.float32)}
    feeds |= {name: np.arange(2) for name in ("processed_rows", "vocabulary_rows")}
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    copies = [
        event["args"]["op_name"]
        for event in events
        if "Memcpy" in event.get("args", {}).get("op_name", "")
    ]
    # To the host: none. To the device: sizes of a few bytes, for which nobody waits.
    assert "MemcpyToHost" not in copies
    assert all(memory.name == "WebGPU_Buf" for memory in session.get_output_memory_infos())
    assert all(memory.name == "WebGPU_Buf" for memory in session.get_input_memory_infos())


def test_the_cache_is_updated_in_place_and_grows(compiled: Compiled) -> None:
    """Each step writes the key of its own position, and no other; any capacity will do."""
    sessions = open_sessions(read_package(compiled()))
    for capacity in (16, 40):
        stepper = Stepper(sessions, 1, capacity)
        for step in range(2):
            stepper.write("input_ids", [[7 + step]])
            stepper.run()
            stepper.advance()
        key = stepper.read("past_key_values.0.key")
        assert key.shape[2] == capacity
        assert np.flatnonzero(key[0, 0].any(axis=1)).tolist() == [0, 1]
        assert stepper.read("present.0.key").tolist() == key.tolist()


@pytest.mark.slow
def test_quantized_weights(compiled: Compiled, bundled_package: Path) -> None:
    """In blocks of 32, activations in float32, as a package for the web has them on the CPU."""
    for weights in ("int8", "int4"):
        package = read_package(compiled(weights=weights, max_divergence=1.0))
        nodes = [
            node
            for node in ir.load(package.path / "decoder.onnx").graph
            if node.op_type == "MatMulNBits"
        ]
        assert {node.attributes["accuracy_level"].as_int() for node in nodes} == {1}
        assert package.manifest.compilation is not None
        figures = package.manifest.compilation.quantization
        assert figures is not None
        assert figures["divergence"]["kl"]["value"] < (0.2 if weights == "int4" else 0.01)
        web = CompileOptions(provider="web", ctx_len=96, weights=weights, max_divergence=1.0)  # type: ignore[arg-type]
        host = compile_package(
            read_package(bundled_package), package.path.with_name(f"web-{weights}"), web
        )
        texts = [load(path).generate(PROMPTS, ROWS[0]).texts for path in (package.path, host.path)]
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3", "lfm2"])
def test_other_models(exported: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """compile's self-test compares the tokens with those of the portable graph on the CPU. LFM2 is a hybrid."""
    package = compile_package(
        read_package(exported(family)),
        tmp_path / "out",
        CompileOptions(provider="webgpu", ctx_len=48),
    )
    assert package.manifest.compilation is not None
    assert package.manifest.compilation.self_test["tokens"] > 0


@pytest.mark.slow
def test_operators_without_a_kernel_are_named(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(
        CompileError,
        match=r"2 nodes have no kernel on WebGpu.*MoE .*Compile the model for cpu or web",
    ):
        compile_package(
            read_package(exported("gpt_oss")),
            tmp_path / "out",
            CompileOptions(provider="webgpu", ctx_len=48),
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"num_speculative_tokens": 4}, "num_speculative_tokens"),
        ("llama", {"kv_cache_dtype": "int8"}, "cache"),
    ],
)
def test_refusals(
    exported: Callable[..., Path],
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(CompileError, match=message):
        compile_package(
            read_package(exported(family)),
            tmp_path / "out",
            CompileOptions(provider="webgpu", ctx_len=48, **options),
        )
    assert not (tmp_path / "out").exists()
