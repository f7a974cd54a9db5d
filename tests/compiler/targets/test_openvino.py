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
from qsample.ort.providers import is_plugin, plugin_devices
from qsample.package.package import Package
from qsample.runtime import load
from tests.helpers.building import build
from tests.helpers.sampling_cases import generate

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
