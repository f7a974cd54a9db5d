"""A session that treats its runs as ONNX Runtime treats runs that it captures as CUDA graphs.

As in inference_session.cc and cuda_execution_provider.cc: the first run under a number is made three times, twice
as it is and once from the captured graph; later ones replay that graph over the memory that it was captured with,
whatever is bound; each thread has captured graphs of its own; and -1 runs without any of this.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import onnxruntime as ort

from qsample.runtime import CausalLM
from qsample.runtime.session.bound_graph import NOT_CAPTURED
from qsample.runtime.session.session import Replays


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
    """`model` anew, over a capturing session."""
    decoder = CapturingSession(model.sessions.decoder)
    sessions: Any = replace(model.sessions, decoder=decoder, replays=Replays())  # type: ignore[arg-type]
    return CausalLM(model.package, sessions), decoder
