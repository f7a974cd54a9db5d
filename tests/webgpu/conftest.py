"""WebGPU through ONNX Runtime's plugin, on a GPU or a Vulkan driver that computes on the CPU; see scripts/check_webgpu.

The numbers are those of WebGPU's kernels in WGSL. None of it shows a GPU's speed, float16, or other drivers' rounding.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes import common as common_passes

from qsample.compiler.passes.float_ids import ids_as_floats, own_constants
from qsample.compiler.targets.webgpu import TARGET, host_shapes
from qsample.compiler.write import RECORD, placement_of
from qsample.contract.interface import Interface
from qsample.ort.options import session_options
from qsample.ort.providers import (
    CPU,
    HOST_NODES_OPTION,
    WEBGPU,
    check_available,
    open_session,
    plugin_devices,
)
from qsample.sampler import build_sampler
from tests.conftest import made_once
from tests.helpers.sampler_cases import PAD, Step

HERE = Path(__file__).parent
ASKED = "QSAMPLE_WEBGPU" in os.environ
HOST_OPERATORS = {
    "Cast",
    "Concat",
    "Greater",
    "Mul",
    "Reshape",
    "Shape",
    "Squeeze",
    "Sub",
}  # of shapes
Array = np.ndarray


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Only scripts/check_webgpu provides the plugin and a driver."""
    return True if not ASKED and collection_path.is_relative_to(HERE) else None


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    check_available(TARGET.execution_providers)
    assert plugin_devices(WEBGPU), "QSAMPLE_WEBGPU is set, but the plugin finds no device"


def on_webgpu(model: ir.Model, severity: int | None = None) -> ort.InferenceSession:
    """A session of a graph after the passes of the target, opened as `load` opens it. severity: the lowest of the
    messages that ONNX Runtime logs."""
    ids_as_floats(model)
    own_constants(model)
    common_passes.RemoveUnusedNodesPass()(model)
    serialized = ir.to_proto(model).SerializeToString()
    options = {**TARGET.provider_options, HOST_NODES_OPTION: host_shapes(model)}
    opening = session_options(RECORD)
    if severity is not None:
        opening.log_severity_level = severity
    return open_session(serialized, opening, TARGET.execution_providers, options)


@pytest.fixture(scope="session")
def sampler() -> Callable[[Interface], Step]:
    """A step of the sampler on WebGPU, of an interface with `captured`."""

    @functools.cache
    def make(face: Interface) -> Step:
        session = on_webgpu(build_sampler(face, PAD, for_webgpu=True))
        assert set(placement_of(session)[CPU]) <= HOST_OPERATORS
        memories = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        # The sampler reads no ids of the call: `tokens` has them.
        used = {memory.name for value, memory in memories if value.name != "input_ids"}
        assert used == {"WebGPU_Buf"}
        assert {memory.name for memory in session.get_output_memory_infos()} == {"WebGPU_Buf"}
        names = [output.name for output in session.get_outputs()]
        known = {value.name for value in session.get_inputs()}

        def step(logits: Array, inputs: Mapping[str, Array]) -> dict[str, Array]:
            given = {
                name: array for name, array in {"logits": logits, **inputs}.items() if name in known
            }
            return dict(zip(names, session.run(names, given), strict=True))

        return step

    return make


@pytest.fixture(scope="session")
def compiled(bundled_package: Path, shared_folder: Path) -> Callable[..., Path]:
    """The bundled model compiled for WebGPU, with options of compile."""

    def make(**options: object) -> Path:
        from qsample.compiler.compile import compile_package
        from qsample.compiler.options import CompileOptions
        from qsample.package.package import read_package

        name = "-".join(["webgpu", *(f"{key}-{value}" for key, value in options.items())])
        given = CompileOptions(provider="webgpu", ctx_len=96, **options)  # type: ignore[arg-type]
        return made_once(
            shared_folder / name,
            lambda path: compile_package(read_package(bundled_package), path, given),
        )

    return make
