"""A session that treats its runs as ONNX Runtime treats runs that it captures as CUDA graphs.

As in inference_session.cc and cuda_execution_provider.cc: the first run under a number is made three times, twice
as it is and once from the captured graph; later ones replay that graph over the memory that it was captured with,
whatever is bound; each thread has captured graphs of its own; and -1 runs without any of this.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from qsample.compiler import compile as compile_module
from qsample.compiler.options import CompileOptions
from qsample.compiler.targets.cuda import CudaTarget
from qsample.ort.bound_graph import NOT_CAPTURED, Replays
from qsample.package.package import read_package
from qsample.runtime import CausalLM
from tests.helpers.sessions import with_step_rows


class CudaOnCpu(CudaTarget):
    """The graphs of the CUDA target, placed on the provider that is here."""

    execution_providers = ("CPUExecutionProvider",)
    provider_options: Mapping[str, str] = {}
    dtypes = ("float32",)


def compile_captured(package: Path, path: Path, ctx_len: int) -> Path:
    """`package` compiled as for CUDA, for the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "find_target", lambda name: CudaOnCpu())
        options = CompileOptions(provider="cuda", ctx_len=ctx_len)
        compile_module.compile_package(read_package(package), path, options)
    return path


class CapturingSession:
    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.captured: dict[tuple[int, int], Any] = {}
        self.replayed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: ort.RunOptions) -> None:
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if number == NOT_CAPTURED:
            self._session.run_with_iobinding(binding, options)
            return
        key = threading.get_ident(), number
        if key not in self.captured:
            for _ in range(2):
                self._session.run_with_iobinding(binding, options)
            self.captured[key] = binding
        else:
            self.replayed += 1
        self._session.run_with_iobinding(self.captured[key], options)


def capturing(model: CausalLM) -> tuple[CausalLM, CapturingSession]:
    """`model` anew, over a capturing session; its steps are over all rows, as wherever graphs are captured."""
    decoder = CapturingSession(model.sessions.decoder)
    changes: dict[str, Any] = {"decoder": decoder, "replays": Replays()}
    sessions = replace(with_step_rows(model.sessions, step=None), **changes)
    return CausalLM(model.package, sessions), decoder
