"""The targets for browsers, as far as they show without WebGPU: activations, parts of weights, refusals, shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from qsample.compiler import write as publish
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.compiler.targets import Capability
from qsample.compiler.targets import web as web_module
from qsample.compiler.targets.webgpu import TARGET, host_shapes
from qsample.package.package import read_package
from qsample.runtime import load
from tests.helpers.building import build

PART = 40_000


@pytest.fixture(scope="module")
def web(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish.cut_weights, "__defaults__", (PART,))
        out = tmp_path_factory.mktemp("web") / "package"
        options = CompileOptions(provider="web", ctx_len=48, weights="int8", max_divergence=9)
        compile_package(read_package(llama_package), out, options)
    return out


def test_weights_lie_in_parts_of_a_limited_size(web: Path) -> None:
    """Each tensor lies in a single file, and each file is listed with its own hash."""
    package = read_package(web, verify=True)
    names = sorted(name for name in package.manifest.files if name.endswith(".onnx.data"))
    assert len(names) > 2
    assert {"decoder.onnx.data", "decoder-2.onnx.data"} <= set(names)
    graph = ir.load(web / "decoder.onnx").graph
    tensors = [value.const_value for value in graph.initializers.values()]
    external = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    assert {tensor.location for tensor in external} == set(names)
    for name in names:
        largest = max(tensor.nbytes for tensor in external if tensor.location == name)
        size = package.manifest.files[name].bytes
        assert size == (web / name).stat().st_size
        assert size <= max(PART, largest)
        ends = [
            (tensor.offset or 0) + tensor.nbytes for tensor in external if tensor.location == name
        ]
        assert max(ends) <= size


def test_activations_stay_in_float32(web: Path, llama_package: Path) -> None:
    nodes = [
        node
        for node in ir.load(web / "decoder.onnx").graph.all_nodes()
        if node.op_type == "MatMulNBits"
    ]
    assert {node.attributes["accuracy_level"].as_int() for node in nodes} == {1}
    expected = (
        load(llama_package).generate([[1, 2, 3]], do_sample=False, max_new_tokens=4).token_ids
    )
    assert load(web).generate([[1, 2, 3]], do_sample=False, max_new_tokens=4).token_ids == expected


def planned(path: Path, **options: Any) -> CompilePlan:
    plan = make_plan(read_package(path), CompileOptions(provider="webgpu", ctx_len=48, **options))
    return replace(plan, interface=TARGET.interface(plan))


def test_the_graph_for_webgpu(llama_package: Path, tmp_path: Path) -> None:
    """The capacity is free, and the host keeps the shapes that kernels read there: the cache's for the attention."""
    made = build(planned(llama_package), TARGET, tmp_path, until="save")
    model = made.model
    inputs = {value.name: value for value in model.graph.inputs}
    assert str(inputs["past_key_values.0.key"].shape[2]) == "T"
    assert list(inputs)[:3] == ["input_ids", "input_lengths", "emit"]
    assert {"processed_rows", "vocabulary_rows", "searched_rows"} <= inputs.keys()
    # One for each of the first two lists, and one for each search.
    branches = [node.op_type for node in model.graph.all_nodes() if node.op_type in ("If", "Loop")]
    assert branches == ["If"] * 4
    named = host_shapes(model).split(" ")
    attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    totals = {node.inputs[6].producer() for node in attentions}
    assert {node.name for node in totals} <= set(named)
    assert all(node.op_type != "Shape" for node in model.graph if node.name in named)
    assert dict(made.provider_options) == {"forceCpuNodeNames": " ".join(named)}


def test_what_browsers_take() -> None:
    target = web_module.TARGET
    assert (target.name, target.execution_providers) == ("web", ("CPUExecutionProvider",))
    assert (target.weight_bits, target.kv_cache_dtypes) == ((4, 8), ("int8",))
    assert target.capabilities == {
        Capability.FLOAT16_WEIGHTS,
        Capability.CALIBRATION,
        Capability.ADAPTERS,
        Capability.IMAGE_BLOCKS,
        Capability.CPU_SELF_TEST,
    }
