"""The OpenVINO target: the graph that it is given; and, where the plugin finds an Intel processor, a whole package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import make_plan
from qsample.compiler.quantize.blocks import quantization_report
from qsample.compiler.targets.openvino import OpenVinoTarget
from qsample.contract.interface import Interface, KeyValueShape
from qsample.ort.providers import is_plugin, plugin_devices
from qsample.package.package import Package
from qsample.runtime import load
from tests.helpers.building import build, run_on
from tests.helpers.sampling_cases import generate
from tests.helpers.small_graphs import small_graph
from tests.helpers.small_packages import manifest

CAPACITY = 48
CONTROL_FLOW = {"If", "Loop", "Scan"}


def test_openvino_is_given_the_model_without_the_sampler(llama: Package, tmp_path: Path) -> None:
    target = OpenVinoTarget()
    plan = make_plan(llama, CompileOptions(provider="openvino", ctx_len=CAPACITY))
    model = build(plan, target, tmp_path, until="check-states").model
    assert quantization_report(model) is None
    assert not CONTROL_FLOW & {node.op_type for node in model.graph.all_nodes()}
    assert [value.name for value in model.graph.inputs[:3]] == [
        "input_ids",
        "input_lengths",
        "lengths",
    ]
    assert [value.name for value in model.graph.outputs] == [
        "logits",
        *(f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")),
    ]
    writers = {
        value.producer().op_type
        for value in model.graph.outputs[1:]
        if value.producer() is not None
    }
    assert writers == {"GroupQueryAttention"}
    assert not any(
        value.dtype == ir.DataType.DOUBLE for node in model.graph for value in node.outputs
    )


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
    package = compile_package(
        llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY, **options)
    )
    compilation = package.manifest.compilation
    assert compilation.placement["OpenVINOExecutionProvider"] == {"EPContext": 3}
    assert compilation.placement["CPUExecutionProvider"]["GroupQueryAttention"] == 2
    if "weights" in options:
        assert generate(load(package.path), flush_every=4) == generate(load(package.path))
        return
    assert compilation.self_test["agreeing"] == compilation.self_test["tokens"]
    wanted, model = generate(load(llama.path)), load(package.path)
    assert generate(model) == wanted
    for chosen in ({"flush_every": 4}, {"prefill_chunk_size": 3}, {"double_buffering": False}):
        assert generate(model, **chosen) == wanted


def test_what_openvino_declares() -> None:
    target = OpenVinoTarget()
    assert target.name == "openvino"
    assert target.execution_providers == ("OpenVINOExecutionProvider", "CPUExecutionProvider")
    assert dict(target.provider_options) == {
        "device_type": "CPU",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    assert (target.dtypes, target.capabilities) == (("float32",), frozenset())
    assert (target.weight_bits, target.kv_cache_dtypes) == ((4, 8), ("int8",))
    package = Package(
        Path("/models/one"), manifest(interface=Interface(50, (KeyValueShape(1, 8),)))
    )
    options = CompileOptions(provider="openvino", ctx_len=CAPACITY, batch_size=1)
    phases: Any = {phase.name: phase.run for phase in target.phases(make_plan(package, options))}
    given = {"providers": target.execution_providers, "provider_options": target.provider_options}
    assert phases["compile-ahead"].keywords == given
    assert phases["place-compiled"].keywords == given
    assert phases["check-states"].keywords == {"provider": "OpenVINOExecutionProvider"}
    assert phases["check"].keywords == {"copies": 2}, "it reads a graph and writes another"
    model = small_graph("g (float[B,T] x) => (float[B,T] y) { y = Neg (x) }")
    run_on(
        model,
        [phase for phase in target.phases(make_plan(package, options)) if phase.name == "fix-axes"],
    )
    assert list(model.graph.inputs[0].shape or ()) == [1, CAPACITY]
