"""A session whose inputs and outputs are bound to buffers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import onnxruntime as ort

from qsample.interface import GraphSpec
from qsample.ort.buffers import Buffer
from qsample.ort.device_thread import DeviceThread

NOT_CAPTURED: Final = -1  # ONNX Runtime's annotation of a run that is neither captured nor replayed


class BoundGraph:
    """A session with every input and output bound; `run` reads and writes that memory."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        buffers: Mapping[str, Buffer],
        device: str,
        capture: int | None = None,
        thread: DeviceThread | None = None,
    ) -> None:
        """buffers: every input and output of `spec`, by name. device: where the session runs. capture: for a session
        that captures CUDA graphs, the number under which the first run is captured and later ones replay it, over the
        same memory; or NOT_CAPTURED. thread: of those runs; see `session.Replays`."""
        self._session = session
        self._thread = thread
        self._options = {wait: _run_options(capture, device, wait=wait) for wait in (True, False)}
        self._binding: Any = session.io_binding()
        self._buffers = {name: buffers[name] for name in (*spec.input_names, *spec.output_names)}  # kept alive
        # ONNX Runtime copies an input from other memory when it is bound, not when the graph runs.
        foreign = _foreign_inputs(session) if device == "cpu" else set()
        self._copied = [name for name in spec.input_names if buffers[name].device != device or name in foreign]
        for name in spec.input_names:
            buffers[name].bind_input(self._binding, name)
        for name in spec.output_names:
            buffers[name].bind_output(self._binding, name)

    def bind_input(self, name: str, buffer: Buffer) -> None:
        """Read an input from other memory from now on; an input that the graph does not have is passed over."""
        if name in self._buffers and self._buffers[name] != buffer:
            self._buffers[name] = buffer
            buffer.bind_input(self._binding, name)

    def run(self, *, wait: bool = True) -> None:
        """wait: for the device to finish; False where more runs follow before anything is read."""
        for name in self._copied:
            self._buffers[name].bind_input(self._binding, name)
        if self._thread is None:
            self._session.run_with_iobinding(self._binding, self._options[wait])
        else:
            self._thread.submit(partial(self._session.run_with_iobinding, self._binding, self._options[wait])).result()


def _foreign_inputs(session: ort.InferenceSession) -> set[str]:
    """Inputs that a provider on the CPU wants in memory of its own kind, as OpenVINO does."""
    memories = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return {value.name for value, memory in memories if memory.name != "Cpu"}


def _run_options(capture: int | None, device: str, *, wait: bool) -> ort.RunOptions | None:
    if device == "cpu" and capture is None:
        return None
    options = ort.RunOptions()
    if capture is not None:
        options.add_run_config_entry("gpu_graph_id", str(capture))
    if not wait and device != "cpu":
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
