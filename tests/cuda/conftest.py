"""CUDA without a GPU: ONNX Runtime's real CUDA provider over libraries that compute nothing; see scripts/check_cuda.

It loads, places every node by its own kernels, captures and replays. The stubs refuse calls that CUDA forbids in a
capture, and record all calls. No numbers are computed: tests/gpu compares them on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM
from qsample.package.package import Package
from qsample.runtime.decode.slots import Slots
from tests.conftest import made_once
from tests.cuda.trace import TRACE, Trace

HERE = Path(__file__).parent
ASKED = "QSAMPLE_CUDA_STUBS" in os.environ
CUDA = "CUDAExecutionProvider"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Only scripts/check_cuda provides the libraries of these tests."""
    return True if not ASKED and collection_path.is_relative_to(HERE) else None


@pytest.fixture(scope="session", autouse=True)
def stubs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sessions on CUDA leave a trace of their calls."""
    assert CUDA in ort.get_available_providers(), "QSAMPLE_CUDA_STUBS is set, but this is not onnxruntime-gpu"
    # The stubs open the file at the first call of any of them.
    os.environ[TRACE] = str(tmp_path_factory.mktemp("trace") / "calls")
    # The stub of cuDNN builds no graphs, which its attention would want.
    os.environ["ORT_ENABLE_CUDNN_FLASH_ATTENTION"] = "0"
    plain: Any = ort.InferenceSession

    class Session(plain):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # Without constant folding the device would compute shapes from constants, and the stubs compute nothing.
            options.pop("disabled_optimizers", None)
            super().__init__(*arguments, **options)

    ort.InferenceSession = Session


@pytest.fixture(scope="session", autouse=True)
def without_numbers(stubs: None) -> None:
    """compile without the tests that compare numbers."""
    from qsample.compiler import compile as compile_module
    from qsample.compiler.agreement import SelfTest
    from qsample.compiler.divergence import Divergence

    def measured(*_: Any, **__: Any) -> Divergence:
        return Divergence(kl=0.0, kept_kl=0.0, perplexity=1.0, quantized_perplexity=1.0, agreement=1.0, tokens=1)

    compile_module.run_self_test = lambda *_: SelfTest(tokens=0, agreeing=0)
    compile_module.measure_divergence = measured


@pytest.fixture(scope="session")
def portable(exported: Callable[..., Path], shared_folder: Path) -> Callable[..., Path]:
    """(model_type, **features) → a portable package. Qwen3 has heads of 128, for which CUDA's attention has kernels."""

    def wide_heads(path: Path) -> None:
        from tests.helpers.tiny_models import save_checkpoint

        checkpoint = save_checkpoint(shared_folder / "qwen3-wide-heads-checkpoint", "qwen3", head_dim=128)
        AutoModelForCausalLM.from_pretrained(checkpoint).export(path)

    def make(family: str = "llama", **features: Any) -> Path:
        if family == "qwen3":
            return made_once(shared_folder / "qwen3-wide-heads-package", wide_heads)
        return exported(family, **features)

    return make


@pytest.fixture
def trace() -> Trace:
    return Trace()


def compiled(portable: Path, path: Path, **options: Any) -> Package:
    chosen: dict[str, Any] = {"dtype": "float16", "ctx_len": 64, "max_divergence": 100, **options}
    return AutoModelForCausalLM.from_pretrained(portable).compile(path, provider="cuda", **chosen).package


def started(slots: Slots, interface: Any, rows: int, **given: Any) -> Slots:
    """Slots whose rows have read a prompt in two chunks, and whose step is prepared; given: of every row."""
    parameters = {spec.name: np.array(spec.off, spec.dtype) for spec in interface.parameters if len(spec.axes) == 1}
    parameters |= {name: parameters[name].dtype.type(value) for name, value in given.items()}
    parameters["stop_ids"] = np.array([1, 2], np.int32)
    for row in range(rows):
        slots.begin(row, np.arange(4, 9), row, parameters)
        slots.prefill(row, np.arange(4, 7), emit=False)
        slots.prefill(row, np.arange(7, 9), emit=True)
    if not slots.prepared:
        slots.prepare()
    return slots
