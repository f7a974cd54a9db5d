"""Passes of the target for WebGPU that show without a device: products, total lengths. More: tests/webgpu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.compiler import targets
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import make_plan
from qsample.compiler.targets import webgpu
from qsample.compiler.targets.webgpu import (
    TARGET,
    host_shapes,
    plain_products,
    take_total_from_shape,
)
from qsample.contract.interface import Features, Interface, KeyValueShape
from qsample.errors import CompileError
from qsample.package.package import Package
from tests.helpers.small_graphs import check_same, small_graph
from tests.helpers.small_packages import manifest


@pytest.mark.parametrize(
    ("flags", "left", "right", "operators"),
    [
        ("transB = 1", "B,1,6", "5,6", ["Squeeze", "Gemm", "Unsqueeze"]),  # a head
        ("transB = 1", "B,3,6", "5,6", ["Transpose", "MatMul"]),
        ("transB = 1", "B,3,6", "B,5,6", ["Transpose", "MatMul"]),
        ("transA = 1", "B,6,3", "6,5", ["Transpose", "MatMul"]),
        ("transA = 1, transB = 1", "B,6,3", "5,6", ["Transpose", "Transpose", "MatMul"]),
        ("transB = 0", "B,3,6", "6,5", ["MatMul"]),
        ("alpha = 0.5", "B,3,6", "6,5", ["FusedMatMul"]),  # it stays
        ("alpha = 0.0", "B,3,6", "6,5", ["FusedMatMul"]),
        ("transBatchA = 1", "3,B,6", "3,6,5", ["FusedMatMul"]),
    ],
)
def test_products_without_flags(flags: str, left: str, right: str, operators: list[str]) -> None:
    text = f"""
        products (float[{left}] x, float[{right}] w) => (float[B,S,5] y) {{
            y = com.microsoft.FusedMatMul <{flags}> (x, w)
        }}"""
    plain, model = small_graph(text), small_graph(text)
    assert plain_products(model) == (operators != ["FusedMatMul"])
    assert [node.op_type for node in model.graph] == operators
    rng = np.random.default_rng(0)
    sizes = [
        [2 if size == "B" else int(size) for size in shape.split(",")] for shape in (left, right)
    ]
    feeds = {
        name: rng.normal(size=size).astype(np.float32)
        for name, size in zip("xw", sizes, strict=True)
    }
    if flags != "transBatchA = 1":
        check_same(model, plain, feeds, rtol=1e-5, atol=1e-6)


def test_the_total_length_is_the_capacity() -> None:
    text = """
        attention (float[B,S,8] q, float[B,S,8] k, float[B,S,8] v, float[B,1,T,8] pk, float[B,1,T,8] pv,
            int32[B] last, int32 longest) => (float[B,S,8] y, float[B,1,T,8] nk, float[B,1,T,8] nv) {
            y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1>
                (q, k, v, pk, pv, last, longest)
        }"""
    plain, model = small_graph(text), small_graph(text)
    assert take_total_from_shape(model)
    assert not model.graph.inputs[6].uses()
    rng = np.random.default_rng(0)
    shapes = {
        "q": (2, 1, 8),
        "k": (2, 1, 8),
        "v": (2, 1, 8),
        "pk": (2, 1, 12, 8),
        "pv": (2, 1, 12, 8),
    }
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    feeds |= {"last": np.array([3, 6], np.int32), "longest": np.array(12, np.int32)}
    check_same(model, plain, feeds, rtol=1e-6)
    assert not take_total_from_shape(
        small_graph("empty (float[2] x) => (float[2] y) { y = Neg (x) }")
    )


def test_products_that_share_a_model() -> None:
    """A product that stays does not keep later ones from being changed; without shapes, nothing is known."""
    model = small_graph(
        """products (float[B,3,6] x, float[5,6] w, float[B,1,6] row)
            => (float[B,3,5] a, float[B,3,5] b, float[B,1,5] c) {
            a = com.microsoft.FusedMatMul <alpha = 2.0, transB = 1> (x, w)
            b = com.microsoft.FusedMatMul <transB = 1> (x, w)
            c = com.microsoft.FusedMatMul <transB = 1> (row, w)
        }"""
    )
    assert plain_products(model)
    found = {node.op_type: node for node in model.graph}
    assert [node.op_type for node in model.graph] == [
        "FusedMatMul",
        "Transpose",
        "MatMul",
        "Squeeze",
        "Gemm",
        "Unsqueeze",
    ]
    assert list(found["Squeeze"].outputs[0].shape or ()) == ["B", 6]
    assert list(found["Gemm"].outputs[0].shape or ()) == ["B", 5]
    assert list(found["Transpose"].outputs[0].shape or ()) == [6, 5]

    unknown = small_graph(
        """products (float[B,3,6] x, float[5,6] w) => (float[B,3,5] y) {
            z = Neg (x)
            y = com.microsoft.FusedMatMul <transB = 1> (z, w)
        }"""
    )
    assert not plain_products(unknown)


def test_shapes_are_computed_on_the_host() -> None:
    """What lies between a shape and an input that a kernel reads there; also the bounds of Clip, and conditions."""
    model = small_graph(
        """g (float[B,S] x, int64[1] one, float low) => (float[B,S] y, float[B,S] z) {
            sizes = Shape (x)
            half = Div (sizes, one)
            y = Reshape (x, half)
            length = Gather (sizes, one)
            wide = Cast <to = 1> (length)
            bound = Squeeze (wide)
            z = Clip (x, low, bound)
            apart = Neg (sizes)
        }""",
        constants={"one": np.array([1]), "low": np.array(0, np.float32)},
    )
    assert host_shapes(model) == "bound half length wide"
    assert host_shapes(small_graph("g (float[2] x) => (float[2] y) { y = Neg (x) }")) == ""


def test_what_packages_for_webgpu_declare() -> None:
    package = Package(Path("/nowhere"), manifest(interface=Interface(9, (KeyValueShape(1, 8),))))
    plan = make_plan(package, CompileOptions(provider="webgpu", dtype="float16"))
    assert TARGET.interface(plan) == replace(plan.interface, dtype="float16", captured=True)
    without = replace(plan, interface=replace(plan.interface, features=Features(sampler=False)))
    assert not TARGET.interface(without).captured
    assert TARGET.execution_providers == ("WebGpuExecutionProvider", "CPUExecutionProvider")
    assert dict(TARGET.provider_options) == {"enableInt64": "1"}
    assert dict(TARGET.default_options) == {"weights": "int4"}
    assert (TARGET.dtypes, TARGET.weight_bits) == (("float32", "float16"), (4, 8))
    assert TARGET.kv_cache_dtypes == ()
    assert set(TARGET.capabilities) == {targets.Capability.DTYPE_CONVERSION}
    phases: dict[str, Any] = {phase.name: phase.run for phase in TARGET.phases(plan)}
    assert phases["join-flat-sampler"].keywords == {"for_webgpu": True}
    assert phases["place"].keywords == {
        "providers": TARGET.execution_providers,
        "provider_options": TARGET.provider_options,
    }
    assert TARGET.fixed_axes(replace(plan, options=CompileOptions(batch_size=1))) == {"B": 1}
    build: Any = SimpleNamespace(
        model=small_graph("g (float[B] x) => (int64[1] y) { y = Shape (x) }")
    )
    webgpu.keep_shapes_on_host(build)
    assert build.provider_options == {"forceCpuNodeNames": ""}


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "check_available", lambda providers: None)
    asked: list[str] = []

    def devices(provider: str) -> list[str]:
        asked.append(provider)
        return ["a GPU"] * (len(asked) - 1)

    monkeypatch.setattr(webgpu, "plugin_devices", devices)
    with pytest.raises(CompileError, match="WebGpuExecutionProvider finds no GPU here"):
        TARGET.check_installed()
    TARGET.check_installed()
    assert asked == ["WebGpuExecutionProvider"] * 2


def placed(
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[str],
    memories: dict[str, str],
    experts: bool = False,
) -> Any:
    """A build after `place`, whose session reports misplaced nodes, and the memory of each input and output."""
    values = [SimpleNamespace(name=name) for name in memories]
    infos = [SimpleNamespace(name=memory) for memory in memories.values()]
    session = SimpleNamespace(
        get_inputs=lambda: values[:1],
        get_outputs=lambda: values[1:],
        get_input_memory_infos=lambda: infos[:1],
        get_output_memory_infos=lambda: infos[1:],
    )
    text = "g (float[B,6] x, float[B,4] r, uint8[4,12,8] w) => (float[B,6] y) { y = com.microsoft.QMoE (x, r, w) }"
    if not experts:
        text = "g (float[2] x) => (float[2] y) { y = Neg (x) }"
    build: Any = SimpleNamespace(model=small_graph(text), placement=None)
    given: list[Any] = []

    def load_written(*arguments: Any) -> Any:
        given.extend(arguments)
        return session

    monkeypatch.setattr(webgpu, "load_written", load_written)
    monkeypatch.setattr(
        webgpu,
        "misplaced_nodes",
        lambda build, got, provider: list(nodes) if got is session else [provider],
    )
    monkeypatch.setattr(webgpu, "placement_of", lambda got: {"of": got is session})
    webgpu.place(build, ["WebGpuExecutionProvider"], {"an": "option"})
    assert given == [build, ["WebGpuExecutionProvider"], {"an": "option"}]
    return build


ON_DEVICE = {"x": "WebGPU_Buffer", "y": "WebGPU_Buffer"}


def test_everything_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, [], ON_DEVICE).placement == {"of": True}


@pytest.mark.parametrize(
    ("nodes", "memories", "message"),
    [
        (
            ["n1"],
            ON_DEVICE,
            "1 nodes have no kernel on WebGpuExecutionProvider, .* every step: n1. Compile",
        ),
        (list("abcde"), ON_DEVICE, "5 nodes .*: a, b, c, d, e. Compile"),
        (
            list("abcdef"),
            ON_DEVICE,
            "6 nodes .*: a, b, c, d, e …. Compile the model for cpu or web",
        ),
        ([], {**ON_DEVICE, "x": "Cpu"}, "1 nodes .*: x. Compile"),
        ([], {**ON_DEVICE, "y": "Cpu"}, "1 nodes .*: y. Compile"),
        (["n"], {"x": "Cpu", "y": "Cpu"}, "3 nodes .*: n, x, y. Compile"),
    ],
)
def test_what_waits_for_the_device(
    nodes: list[str], memories: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompileError, match=message):
        placed(monkeypatch, nodes, memories)


def test_quantized_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match=r"1 layers of experts become QMoE \(y …\)"):
        placed(monkeypatch, [], ON_DEVICE, experts=True)
