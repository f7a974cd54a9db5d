"""CUDA without a GPU: ONNX Runtime's real CUDA provider over libraries that compute nothing; see scripts/check_cuda.

It loads, places every node by its own kernels, captures and replays. The stubs refuse calls that CUDA forbids in
a capture and record all calls; the puppet has the CPU compute the numbers. None of it shows a CUDA kernel's numbers,
a missing synchronisation, or speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from tests.conftest import made_once
from tests.cuda import puppet
from tests.cuda.trace import TRACE, Trace

HERE = Path(__file__).parent
ASKED = "QSAMPLE_CUDA_STUBS" in os.environ


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Only scripts/check_cuda provides the libraries of these tests."""
    return True if not ASKED and collection_path.is_relative_to(HERE) else None


@pytest.fixture(scope="session", autouse=True)
def stubs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sessions on CUDA get their numbers from the CPU, and leave a trace of their calls."""
    assert puppet.CUDA in ort.get_available_providers(), (
        "QSAMPLE_CUDA_STUBS is set, but this is not onnxruntime-gpu"
    )
    # The stubs open the file at the first call of any of them.
    os.environ[TRACE] = str(tmp_path_factory.mktemp("trace") / "calls")
    # The stub of cuDNN builds no graphs, which its attention would want.
    os.environ["STUB_DEVICES"] = "2"
    os.environ["ORT_ENABLE_CUDNN_FLASH_ATTENTION"] = "0"
    puppet.install()


@pytest.fixture(scope="session")
def portable(exported: Callable[..., Path], shared_folder: Path) -> Callable[[str], Path]:
    """model_type → a portable package. Qwen3 has heads of 128, for which CUDA's attention has kernels of its own."""

    def wide_heads(path: Path) -> None:
        from qsample import AutoModelForCausalLM
        from tests.helpers.tiny_models import save_checkpoint

        checkpoint = save_checkpoint(
            shared_folder / "qwen3-wide-heads-checkpoint", "qwen3", head_dim=128
        )
        AutoModelForCausalLM.from_pretrained(checkpoint).export(path)

    return lambda family: (
        made_once(shared_folder / "qwen3-wide-heads-package", wide_heads)
        if family == "qwen3"
        else exported(family)
    )


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """compile for a dtype that the CPU has no kernels for: without the tests that compare numbers."""
    from qsample.compiler import compile as compile_module
    from qsample.compiler.agreement import SelfTest
    from qsample.package.divergence import DOCUMENTS, Divergence
    from qsample.package.statistics import Estimate

    def measured(*_: Any, **__: Any) -> Divergence:
        return Divergence(
            DOCUMENTS, 1, *(Estimate(value, value, value) for value in (0.0, 1.0, 1.0))
        )

    monkeypatch.setattr(compile_module, "run_self_test", lambda *_: SelfTest(tokens=0, agreeing=0))
    monkeypatch.setattr(compile_module, "measure_divergence", measured)
    monkeypatch.setattr(compile_module, "compare_vision", lambda *_: {})
