"""A decode graph on disk and its interface enter; a driver that feeds it by name, for gates and self-tests, leaves.

It copies every state in and out: simple enough to trust, and independent of the runtime's in-place loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract import BATCH, BIASES, CAPACITY, LENGTHS, STOPS, Interface, retained_name

Array = npt.NDArray[Any]


class GraphRunner:
    """`decoder.onnx` and `initial_state.onnx` on one execution provider, with `capacity` tokens of state a row."""

    def __init__(
        self,
        decoder: Path | ir.Model,
        initial_state: Path,
        interface: Interface,
        capacity: int,
        providers: tuple[str, ...] = ("CPUExecutionProvider",),
        *,
        folder: Path | None = None,
    ) -> None:
        """folder: where a decoder that is given as a model has its external data."""
        options = ort.SessionOptions()
        options.log_severity_level = 3  # the runtime's warnings are about its own optimisations
        graph: Path | bytes
        if isinstance(decoder, ir.Model):
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
            graph = ir.to_proto(decoder).SerializeToString()
        else:
            graph = decoder
        self._decoder = ort.InferenceSession(graph, options, providers=list(providers))
        self._initial_state = ort.InferenceSession(initial_state, options, providers=["CPUExecutionProvider"])
        self._input_names = {node.name for node in self._decoder.get_inputs()}
        self._output_names = [output.name for output in self._decoder.get_outputs()]
        self._interface = interface
        self._capacity = capacity

    def start(self, rows: int) -> dict[str, Array]:
        """The starting state of `rows` rows, row i with seed i."""
        names = self._interface.initial_state.output_names
        feeds = {"seed": np.arange(rows, dtype=np.int64), "capacity": np.array(self._capacity, np.int64)}
        return dict(zip(names, self._initial_state.run(names, feeds), strict=True))

    def step(
        self, ids: Array, lengths: Array, state: dict[str, Array], parameters: Mapping[str, float] | None = None
    ) -> dict[str, Array]:
        """Run once and move `state` on.

        ids: [rows, S]. lengths: [rows], the real tokens. parameters: sampling parameters for every row by input name;
        those not given are off, and temperature is 0. Returns every output by name.
        """
        feeds = self._feeds(ids, lengths, state, {"emit": True, "temperature": 0.0} | dict(parameters or {}))
        results = dict(zip(self._output_names, self._decoder.run(self._output_names, feeds), strict=True))
        for name in state:
            state[name] = results.get(retained_name(name), state[name])
        if retained_name(LENGTHS.name) not in results:
            state["lengths"] = (state["lengths"] + lengths).astype(np.int32)
        return results

    def _feeds(
        self, ids: Array, lengths: Array, state: Mapping[str, Array], parameters: Mapping[str, float]
    ) -> dict[str, Array]:
        spec, rows = self._interface.decoder, len(ids)
        sizes = {**self._interface.sizes, BATCH: rows, CAPACITY: self._capacity, STOPS: 1, BIASES: 1}
        given = {**state, "input_ids": ids.astype(np.int64), "input_lengths": lengths.astype(np.int32)}
        feeds: dict[str, Array] = {}
        for tensor in (*spec.inputs, *spec.states):
            if tensor.name not in self._input_names:  # a graph cut off at its logits has fewer
                continue
            if tensor.name in given:
                feeds[tensor.name] = given[tensor.name]
            else:
                value = parameters.get(tensor.name, tensor.off)
                feeds[tensor.name] = np.full(tensor.shape(sizes), value, dtype=tensor.dtype)
        return feeds
