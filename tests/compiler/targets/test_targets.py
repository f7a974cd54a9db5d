"""The registry of targets, and what all of them refuse before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.compiler import targets
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.compiler.targets import cpu, find_target, target_names
from qsample.errors import CompileError
from qsample.ort.providers import available_providers
from qsample.package import Package, read_package


def test_the_targets_are_found_by_name() -> None:
    assert {"cpu", "cuda", "openvino", "tensorrt"} <= set(target_names())
    assert find_target("openvino").name == "openvino"
    assert find_target("tensorrt").execution_providers[0] == "TensorrtExecutionProvider"


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


def test_unknown_provider_lists_the_targets(llama_package: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"no compile target 'tpu'; choose one of .*cpu"):
        compile_package(read_package(llama_package), tmp_path / "device", CompileOptions(provider="tpu"))


def test_an_entry_point_adds_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "mine"

        def load(self) -> Any:
            return cpu

    monkeypatch.setattr(targets, "entry_points", lambda group: [Point()] if group == "qsample.targets" else [])
    assert targets.target_names() == ["cpu", "cuda", "mine", "openvino", "tensorrt"]
    assert targets.find_target("mine") is cpu.TARGET
