"""The list of CUDA's kernels for tests without onnxruntime-gpu, compared with onnxruntime-gpu's own."""

from __future__ import annotations

from typing import Any

import onnx.defs
import pytest
from onnxruntime.capi import _pybind_state

from tests.cuda.puppet import CUDA
from tests.helpers.cuda_kernels import KERNELS, VALUES_OF_WHERE, VERSIONS, has_kernel

OPSET = 18
NEWEST = 2**31 - 1  # the end of a kernel's versions that names none
MAIN = ("T", "T1", "T2", "Tdata")  # the type parameter of the first input that computes
# Of the condition, which is not a type parameter of the kernel; of the scales.
UNNAMED = {"Where", "And", "Or", "Not", "GatherBlockQuantized"}


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[Any]]:
    """Operator → CUDA's kernels."""
    found: dict[str, list[Any]] = {}
    for kernel in _pybind_state.get_all_opkernel_def():
        if kernel.provider == CUDA:
            found.setdefault(kernel.op_name, []).append(kernel)
    assert len(found) > 200
    return found


def serves(kernel: Any, version: int) -> bool:
    """ONNX Runtime: core/framework/kernel_registry.cc, VerifyKernelDef."""
    first, last = kernel.version_range
    return version == first or (last != NEWEST and first <= version <= last)


def dtypes(kernel: Any, *names: str) -> set[str]:
    return {
        dtype.removeprefix("tensor(").removesuffix(")")
        for name in names
        for dtype in kernel.type_constraints.get(name, ())
    }


@pytest.mark.parametrize("operator", KERNELS)
def test_every_kernel_of_the_list_is_there(operator: str, kernels: dict[str, list[Any]]) -> None:
    used = kernels[operator]
    if operator in VERSIONS:
        schema = onnx.defs.get_schema(operator, OPSET, "")
        assert has_kernel(operator, schema.since_version)
        used = [
            kernel
            for kernel in used
            if kernel.domain == "" and serves(kernel, schema.since_version)
        ]
        main: tuple[str, ...] = (schema.inputs[0].type_str,) if schema.inputs else MAIN
    else:
        main = MAIN[:1] if any("T" in kernel.type_constraints for kernel in used) else MAIN
    assert used
    if operator not in UNNAMED:
        have = set[str]().union(*(dtypes(kernel, *main) for kernel in used))
        assert KERNELS[operator] <= have


@pytest.mark.parametrize("operator", VERSIONS)
def test_every_version_of_the_list_has_a_kernel(
    operator: str, kernels: dict[str, list[Any]]
) -> None:
    first, last = VERSIONS[operator]
    used = [kernel for kernel in kernels[operator] if kernel.domain == ""]
    assert all(
        any(serves(kernel, version) for kernel in used) for version in {first, last or first}
    )


def test_the_values_of_where(kernels: dict[str, list[Any]]) -> None:
    used = [kernel for kernel in kernels["Where"] if serves(kernel, 16)]
    assert set[str]().union(*(dtypes(kernel, "T") for kernel in used)) >= VALUES_OF_WHERE
