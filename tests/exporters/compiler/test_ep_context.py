"""The targets that compile ahead of time: the graphs that OpenVINO and TensorRT are given, and what becomes of them.

Where the OpenVINO plugin is installed and finds an Intel processor, a package is compiled, loaded and run; elsewhere a
compiler that changes nothing stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.errors import CompileError
from qsample.exporters.compiler import compile as compile_module
from qsample.exporters.compiler import ep_context as context
from qsample.exporters.compiler.compile import compile_package, optimize
from qsample.exporters.compiler.ep_context import publish_compiled
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.plan import CompilePlan, make_plan
from qsample.exporters.compiler.quantize.weights import quantization_report
from qsample.exporters.compiler.targets import find_target, target_names
from qsample.exporters.compiler.targets.openvino import OpenVinoTarget
from qsample.exporters.compiler.targets.tensorrt import TensorRtTarget
from qsample.exporters.graph.join import split_at_logits
from qsample.package import Package, read_package
from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.session.providers import available_providers, compile_context, is_plugin, plugin_devices
from tests.helpers.sampling_cases import PARAMETERS

CAPACITY = 48
PROMPTS = [[5, 6, 7, 8], [9], list(range(10, 19)), [20, 21], [22, 23, 24], [25]]
CONTROL_FLOW = {"If", "Loop", "Scan"}


def generate(model: CausalLM, **options: Any) -> list[list[int]]:
    rows = [SamplingParams(**row, max_new_tokens=20, eos_token_id=(3, 250)) for row in PARAMETERS]
    return model.generate(PROMPTS, rows, seed=4, **options).new_token_ids


def test_the_targets_are_found_by_name() -> None:
    assert {"cpu", "cuda", "openvino", "tensorrt"} <= set(target_names())
    assert find_target("openvino").name == "openvino"
    assert find_target("tensorrt").execution_providers[0] == "TensorrtExecutionProvider"


@pytest.fixture(scope="module")
def llama(llama_package: Path) -> Package:
    return read_package(llama_package)


def test_openvino_is_given_the_model_without_the_sampler(llama: Package) -> None:
    target = OpenVinoTarget()
    model, _ = optimize(make_plan(llama, CompileOptions(provider="openvino", ctx_len=CAPACITY)), target)
    assert quantization_report(model) is None
    assert not CONTROL_FLOW & {node.op_type for node in model.graph.all_nodes()}
    assert [value.name for value in model.graph.inputs[:3]] == ["input_ids", "input_lengths", "lengths"]
    assert [value.name for value in model.graph.outputs] == [
        "logits",
        *(f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")),
    ]
    writers = {value.producer().op_type for value in model.graph.outputs[1:] if value.producer() is not None}
    assert writers == {"GroupQueryAttention"}
    assert not any(value.dtype == ir.DataType.DOUBLE for node in model.graph for value in node.outputs)


def test_tensorrt_is_given_fixed_shapes_and_plain_operators(llama: Package) -> None:
    target = TensorRtTarget()
    plan = make_plan(llama, CompileOptions(provider="tensorrt", batch_size=1, ctx_len=CAPACITY, dtype="float16"))
    interface = target.interface(plan)
    assert (interface.dtype, interface.captured) == ("float16", False)
    model, _ = optimize(plan, target)
    assert not CONTROL_FLOW & {node.op_type for node in model.graph.all_nodes()}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert all(isinstance(dim, int) for dim in value.shape), value.name
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(attentions) == 2
    assert {node.op_type for node in model.graph if node.domain} == {"GroupQueryAttention"}
    for node in attentions:
        total = node.inputs[6]
        assert total is not None
        assert total.const_value is not None
        assert total.const_value.numpy() == CAPACITY
    dtypes = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    assert dtypes["past_key_values.0.key"] == dtypes["present.1.value"] == ir.DataType.FLOAT16
    assert dtypes["logits"] == ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        ("openvino", {"dtype": "float16"}, "the openvino target computes in float32"),
        ("openvino", {"weights": "float16"}, "weights is 'float16', which is for the cpu target"),
        ("tensorrt", {}, "batch_size is None, and TensorRT's engines are built for fixed shapes"),
        ("tensorrt", {"batch_size": 1}, "dtype is 'float32'; the tensorrt target takes 'float16'"),
        ("tensorrt", {"batch_size": 1, "dtype": "float16", "weights": "int4"}, "none of ONNX Runtime's quantized"),
    ],
)
def test_refused_before_any_work(
    provider: str, options: dict[str, Any], message: str, llama: Package, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=message):
        compile_package(llama, tmp_path / "out", CompileOptions(provider=provider, ctx_len=32, **options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        ("openvino", {}, r"has no OpenVINOExecutionProvider; .*`pip install qsample\[openvino\]` brings OpenVINO"),
        ("tensorrt", {"batch_size": 1, "dtype": "float16"}, r"has no TensorrtExecutionProvider.*bring TensorRT"),
    ],
)
def test_a_provider_that_is_not_installed(
    provider: str, options: dict[str, Any], message: str, llama: Package, tmp_path: Path
) -> None:
    if find_target(provider).execution_providers[0] in available_providers():
        pytest.skip("it is installed here")
    with pytest.raises(CompileError, match=message):
        compile_package(llama, tmp_path / "out", CompileOptions(provider=provider, ctx_len=32, **options))
    assert not (tmp_path / "out").exists()


class OnCpu(OpenVinoTarget):
    """The same graphs, on the provider that is here."""

    execution_providers = ("CPUExecutionProvider",)
    provider_options: Mapping[str, str] = {}

    def check(self, plan: CompilePlan) -> None:
        return


def write_unchanged(source: Path, destination: Path, *_: Any) -> None:
    """In place of a compiler: the model as it was, with the domains that a build of ONNX Runtime adds."""
    model = onnx.load(source)
    model.opset_import.append(onnx.helper.make_opsetid("com.ms.internal.nhwc", 20))
    onnx.save(model, destination, save_as_external_data=True, location=f"{destination.name}.data", size_threshold=0)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "find_target", lambda name: OnCpu())
    monkeypatch.setattr(context, "compile_context", write_unchanged)


@pytest.mark.usefixtures("on_cpu")
def test_the_whole_sampler_follows_what_was_compiled(
    llama: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "CONTEXT", "MatMul")  # what the stand-in leaves
    package = compile_package(llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY))
    assert package.interface == llama.interface
    assert {path.name for path in package.path.iterdir()} == {path.name for path in llama.path.iterdir()}
    graph = onnx.load(package.file("decoder.onnx"), load_external_data=False)
    assert {entry.domain for entry in graph.opset_import} == {"", "com.microsoft"}
    assert any(node.op_type == "If" for node in graph.graph.node)
    assert generate(load(package.path)) == generate(load(llama.path))


@pytest.mark.usefixtures("on_cpu")
def test_a_provider_that_compiles_nothing_is_refused(llama: Package, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="compiled no part of this model"):
        compile_package(llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY))
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails(llama: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(compile_module, "find_target", lambda name: OnCpu())
    monkeypatch.setattr(context, "compile_context", fail)
    with pytest.raises(CompileError, match="CPUExecutionProvider cannot compile the model: no memory"):
        compile_package(llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY))
    assert list(tmp_path.iterdir()) == []


STATE_OF_ITS_OWN = """
<ir_version: 10, opset_import: ["" : 20]>
decode (float[B,4] past) => (float[B,4] logits, float[B,4] present)
{
    logits = Sin (past)
    present = Cos (past)
}
"""


def test_a_state_that_the_provider_would_write_is_refused(llama: Package, tmp_path: Path) -> None:
    model = ir.from_onnx_text(STATE_OF_ITS_OWN)
    plan = make_plan(llama, CompileOptions(ctx_len=8))
    with pytest.raises(CompileError, match=r"would update 1 states of this model by itself \(present"):
        publish_compiled(model, None, plan, tmp_path, ("CPUExecutionProvider",), {})
    assert list(tmp_path.iterdir()) == []


def test_the_model_part_of_a_package_without_the_sampler(exported: Callable[..., Path]) -> None:
    package = read_package(exported("llama", include_sampler=False))
    model, sampler = split_at_logits(ir.load(package.path / "decoder.onnx"), package.interface)
    assert model.graph.outputs[0].name == "logits"
    assert sampler is None


def test_a_kernel_provider_compiles_to_the_same_graph(tmp_path: Path) -> None:
    """The call of ONNX Runtime's compiler itself: the CPU provider has nothing to compile ahead of time."""
    model = ir.from_onnx_text(STATE_OF_ITS_OWN)
    ir.save(model, tmp_path / "in.onnx")
    compile_context(tmp_path / "in.onnx", tmp_path / "out.onnx", ("CPUExecutionProvider",), {})
    compiled = onnx.load(tmp_path / "out.onnx")
    assert sorted(node.op_type for node in compiled.graph.node) == ["Cos", "Sin"]


def openvino_devices() -> list[str]:
    """The devices of the OpenVINO plugin, [] where it is not installed."""
    provider = OpenVinoTarget.execution_providers[0]
    if not is_plugin(provider) or provider in ort.get_available_providers():
        return []
    return [str(device.ep_metadata.get("ov_device")) for device in plugin_devices(provider)]


@pytest.mark.skipif(
    "CPU" not in openvino_devices(),
    reason="needs the plugin onnxruntime-ep-openvino and a processor that it takes",
)
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"weights": "int8"}], ids=str)
def test_openvino_end_to_end(options: dict[str, Any], llama: Package, tmp_path: Path) -> None:
    package = compile_package(llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY, **options))
    compilation = package.manifest.compilation
    assert compilation is not None
    assert compilation.placement["OpenVINOExecutionProvider"] == {"EPContext": 3}
    assert compilation.placement["CPUExecutionProvider"]["GroupQueryAttention"] == 2
    if "weights" in options:
        assert generate(load(package.path), flush_every=4) == generate(load(package.path))
        return
    assert compilation.self_test["agreeing"] == compilation.self_test["tokens"]
    wanted, model = generate(load(llama.path)), load(package.path)
    assert generate(model) == wanted
    for chosen in ({"flush_every": 4}, {"prefill_chunk_size": 3}, {"double_buffering": False}, {"in_place": False}):
        assert generate(model, **chosen) == wanted
