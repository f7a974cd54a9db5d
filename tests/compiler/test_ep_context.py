"""Graphs whose model part a provider compiles ahead of time: a compiler that changes nothing stands in for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from qsample.compiler import compile as compile_module
from qsample.compiler import ep_context as context
from qsample.compiler.compile import compile_package
from qsample.compiler.ep_context import publish_compiled
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.compiler.targets.openvino import OpenVinoTarget
from qsample.errors import CompileError
from qsample.ort.providers import compile_context
from qsample.package import Package
from qsample.runtime import load
from tests.helpers.sampling_cases import generate

CAPACITY = 48


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


def test_a_kernel_provider_compiles_to_the_same_graph(tmp_path: Path) -> None:
    """The call of ONNX Runtime's compiler itself: the CPU provider has nothing to compile ahead of time."""
    model = ir.from_onnx_text(STATE_OF_ITS_OWN)
    ir.save(model, tmp_path / "in.onnx")
    compile_context(tmp_path / "in.onnx", tmp_path / "out.onnx", ("CPUExecutionProvider",), {})
    compiled = onnx.load(tmp_path / "out.onnx")
    assert sorted(node.op_type for node in compiled.graph.node) == ["Cos", "Sin"]
