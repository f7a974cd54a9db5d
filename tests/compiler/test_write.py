"""Placement: nodes counted by provider and operator, from a session's report and from a graph."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from qsample import AutoModelForCausalLM
from qsample.compiler import compile as compile_module
from qsample.compiler import write as context
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.pipeline import DECODER, WEIGHTS
from qsample.compiler.targets.openvino import OpenVinoTarget
from qsample.compiler.write import (
    RECORD,
    ahead_of_time_phases,
    assigned_nodes,
    load_written,
    misplaced_nodes,
    placement_in_graph,
    placement_of,
)
from qsample.errors import CompileError, PackageError
from qsample.graph import save
from qsample.ort.options import session_options
from qsample.ort.providers import compile_context, open_session
from qsample.package import package as package_module
from qsample.package.package import Package, read_package
from qsample.runtime import load
from tests.helpers.building import run_on
from tests.helpers.sampling_cases import generate
from tests.helpers.small_graphs import small_graph

GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
three (float[N] x) => (float[N] y)
{
    a = Sin (x)
    b = Sin (a)
    y = Cos (b)
}
"""
CPU = "CPUExecutionProvider"


def saved(path: Path) -> Path:
    model = ir.from_onnx_text(GRAPH)
    for index, node in enumerate(model.graph):
        node.name = f"node{index}"
    ir.save(model, path)
    return path


def test_what_a_session_reports(tmp_path: Path) -> None:
    session = open_session(saved(tmp_path / "graph.onnx"), session_options(RECORD), (CPU,))
    assert placement_of(session) == {CPU: {"Cos": 1, "Sin": 2}}
    assert {(provider, node.name) for provider, node in assigned_nodes(session)} == {
        (CPU, f"node{index}") for index in range(3)
    }


def test_a_graph_whose_nodes_a_session_has_reported(tmp_path: Path) -> None:
    path = saved(tmp_path / "graph.onnx")
    known = {"node0": "Other", "node2": CPU, "gone": CPU}
    assert placement_in_graph(ir.load(path), known, default=CPU) == {
        "Other": {"Sin": 1},
        CPU: {"Cos": 1, "Sin": 1},
    }


def test_a_graph_with_control_flow() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        branch (bool p, float[N] x) => (float[N] y)
        {
            y = If (p) <then_branch = less () => (float[N] a) { a = Neg (x) },
                        else_branch = more () => (float[N] b) { b = Exp (x) }>
        }""")
    assert placement_in_graph(model, {}, default=CPU) == {CPU: {"Exp": 1, "If": 1, "Neg": 1}}


def test_weights_are_hashed_while_they_are_written(
    small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not read again, and a byte that changes later is found."""
    read: list[str] = []
    own = package_module.sha256_of
    monkeypatch.setattr(
        package_module, "sha256_of", lambda path: read.append(path.name) or own(path)
    )
    package = compile_package(small, tmp_path / "out", CompileOptions(ctx_len=16))
    assert "decoder.onnx" in read
    assert WEIGHTS not in read
    weights = package.path / WEIGHTS
    assert read_package(package.path).manifest.files[WEIGHTS].bytes == weights.stat().st_size
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(PackageError, match=r"decoder.onnx.data was altered"):
        read_package(package.path)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_full_disk_or_an_interruption_while_weights_are_written(
    error: BaseException, small: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: save.WeightFile, data: bytes | memoryview) -> None:
        raise error

    monkeypatch.setattr(save.WeightFile, "_append", fail)
    with pytest.raises((PackageError, KeyboardInterrupt)) as caught:
        compile_package(small, tmp_path / "out", CompileOptions(ctx_len=16))
    assert isinstance(error, KeyboardInterrupt) or "is full; nothing was written" in str(
        caught.value
    )
    assert list(tmp_path.iterdir()) == []


def test_nodes_off_the_device_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path / DECODER)
    build: Any = SimpleNamespace(model=ir.load(path), folder=tmp_path, provider_options={})
    session = load_written(build, (CPU,), {})
    assert misplaced_nodes(build, session, CPU) == []
    assert sorted(misplaced_nodes(build, session, "Device")) == [
        "Cos node2",
        "Sin node0",
        "Sin node1",
    ]
    path.write_bytes(b"no graph")
    with pytest.raises(
        CompileError, match="ONNX Runtime cannot load the compiled graph for CPUExecutionProvider: "
    ):
        load_written(build, (CPU,), {})


CAPACITY = 48


class OnCpu(OpenVinoTarget):
    """The same graphs, on the provider that is here."""

    execution_providers = ("CPUExecutionProvider",)
    provider_options: Mapping[str, str] = {}


def write_unchanged(source: Path, destination: Path, *_: Any) -> None:
    """In place of a compiler: the model as it was, with the domains that a build of ONNX Runtime adds."""
    model = onnx.load(source)
    model.opset_import.append(onnx.helper.make_opsetid("com.ms.internal.nhwc", 20))
    onnx.save(
        model,
        destination,
        save_as_external_data=True,
        location=f"{destination.name}.data",
        size_threshold=0,
    )


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "find_target", lambda name: OnCpu())
    monkeypatch.setattr(context, "compile_context", write_unchanged)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.ci
def test_the_whole_sampler_follows_what_was_compiled(
    llama: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "CONTEXT", "MatMul")  # what the stand-in leaves
    package = compile_package(
        llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY)
    )
    assert package.interface == llama.interface
    assert {path.name for path in package.path.iterdir()} == {
        path.name for path in llama.path.iterdir()
    }
    graph = onnx.load(package.file("decoder.onnx"), load_external_data=False)
    assert {entry.domain for entry in graph.opset_import} == {"", "com.microsoft"}
    assert any(node.op_type == "If" for node in graph.graph.node)
    assert generate(load(package.path)) == generate(load(llama.path))


@pytest.mark.usefixtures("on_cpu")
def test_a_provider_that_compiles_nothing_is_refused(llama: Package, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="compiled no part of this model"):
        compile_package(
            llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY)
        )
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails(
    llama: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(compile_module, "find_target", lambda name: OnCpu())
    monkeypatch.setattr(context, "compile_context", fail)
    with pytest.raises(
        CompileError, match="CPUExecutionProvider cannot compile the model: no memory"
    ):
        compile_package(
            llama, tmp_path / "out", CompileOptions(provider="openvino", ctx_len=CAPACITY)
        )
    assert list(tmp_path.iterdir()) == []


STATE_OF_ITS_OWN = """
<ir_version: 10, opset_import: ["" : 20]>
decode (float[B,4] past) => (float[B,4] logits, float[B,4] present)
{
    logits = Sin (past)
    present = Cos (past)
}
"""


def test_a_state_that_the_provider_would_write_is_refused() -> None:
    model = ir.from_onnx_text(STATE_OF_ITS_OWN)
    with pytest.raises(
        CompileError, match=r"would update 1 states of this model by itself \(present"
    ):
        run_on(model, ahead_of_time_phases(("CPUExecutionProvider",), {}))


def test_a_kernel_provider_compiles_to_the_same_graph(tmp_path: Path) -> None:
    """The call of ONNX Runtime's compiler itself: the CPU provider has nothing to compile ahead of time."""
    model = ir.from_onnx_text(STATE_OF_ITS_OWN)
    ir.save(model, tmp_path / "in.onnx")
    compile_context(tmp_path / "in.onnx", tmp_path / "out.onnx", ("CPUExecutionProvider",), {})
    compiled = onnx.load(tmp_path / "out.onnx")
    assert sorted(node.op_type for node in compiled.graph.node) == ["Cos", "Sin"]


@pytest.mark.ci
def test_a_tied_table_is_stored_once(
    bundled_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scales, which the head and the lookup want in other shapes; this model's are small."""
    monkeypatch.setattr(save, "_MIN_COMPARED_BYTES", 1 << 12)
    package = (
        AutoModelForCausalLM.from_pretrained(bundled_package)
        .compile(tmp_path / "int4", ctx_len=64, weights="int4")
        .package
    )
    places: dict[tuple[int, int], list[str]] = {}
    for value in ir.load(package.path / "decoder.onnx").graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= 1 << 12:
            places.setdefault((tensor.offset or 0, tensor.nbytes), []).append(str(value.name))
    contents = {
        (package.path / "decoder.onnx.data").read_bytes()[at : at + size] for at, size in places
    }
    assert len(contents) == len(places)
    assert any(len(names) > 1 for names in places.values())


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1000, [96]),
        (96, [96]),  # the whole is no longer than a part may be
        (95, [64, 32]),
        (48, [48, 48]),
        (47, [32, 32, 32]),
        (31, [32, 16, 16, 32]),  # a tensor is never cut
    ],
)
def test_weights_are_cut_between_tensors(most: int, sizes: list[int], tmp_path: Path) -> None:
    """The first file keeps its name; two constants of the same place stay one."""
    numbers = np.arange(24, dtype=np.float32)
    parts = {"a": (0, 8), "b": (8, 12), "c": (12, 16), "again": (12, 16), "d": (16, 24)}
    given = ", ".join(f"float[{stop - start}] {name}" for name, (start, stop) in parts.items())
    model = small_graph(
        f"g (float[8] x, {given}) => (float[8] y) {{ y = Neg (x) }}",
        constants={name: numbers[slice(*place)] for name, place in parts.items()},
    )
    (tmp_path / WEIGHTS).write_bytes(numbers.tobytes())
    for name, (start, stop) in parts.items():
        model.graph.initializers[name].const_value = ir.ExternalTensor(
            WEIGHTS,
            4 * start,
            4 * (stop - start),
            ir.DataType.FLOAT,
            shape=ir.Shape([stop - start]),
            name=name,
            base_dir=tmp_path,
        )
    ir.save(model, tmp_path / DECODER)
    build: Any = SimpleNamespace(
        model=model, folder=tmp_path, decoder=tmp_path / DECODER, weights_sha256="ab"
    )
    context.cut_weights(build, most)
    names = [WEIGHTS, *(f"decoder-{number}.onnx.data" for number in range(2, len(sizes) + 1))]
    assert {path.name: path.stat().st_size for path in tmp_path.glob("*.data")} == dict(
        zip(names, sizes, strict=True)
    )
    assert build.weights_sha256 == (None if len(sizes) > 1 else "ab")
    for name, value in ir.load(tmp_path / DECODER).graph.initializers.items():
        assert value.const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), numbers[slice(*parts[name])])
