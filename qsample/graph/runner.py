"""Runs a decode graph step by step, fed by name: for the parity gate, the self-test, measurements.

It copies every state except the cache in and out, which is simple enough to trust, and independent
of the runtime's loop. The cache is written in place, in memory that the system provides page by
page, so a few tokens of a long cache cost little.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract.arrays import DTYPES, Array, rounded, sparse_zeros
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    BATCH,
    CAPACITY,
    HOST_AXES,
    LENGTHS,
    LOGITS,
    PROMPT_LOGPROBS,
    REPLAY_ROWS,
    ROW_MULTIPLE,
    SCORED_IDS,
    SCORED_PLACES,
    SEQUENCE,
    retained_name,
)
from qsample.graph.compare import largest_difference
from qsample.graph.edit import all_initializers, ancestors
from qsample.graph.moe import QUANTIZED_OP_TYPE
from qsample.graph.operators import is_matmul_nbits
from qsample.graph.weights import relocated
from qsample.ort.options import NO_PREPACKING, WEIGHTS_FOLDER_KEY, session_options
from qsample.ort.providers import CPU, open_session

# A call may leave these out.
_OPTIONAL: Final = (SCORED_PLACES, SCORED_IDS)


class GraphRunner:
    """A decode graph and the `initial_state.onnx` of its folder, as sessions."""

    def __init__(
        self,
        model: ir.Model,
        folder: Path,
        interface: Interface,
        capacity: int,
        providers: tuple[str, ...] = (CPU,),
        *,
        weights_mapped: bool = False,
        spec: GraphSpec | None = None,
        row_multiple: int | None = None,
    ) -> None:
        """Open the sessions.

        Args:
            model: the decode graph, or a part of it, as `load_graph` reads it.
            folder: the folder of the starting state.
            interface: the interface of the whole graph.
            capacity: T, the tokens of state for each row.
            providers: the execution providers of the decode graph.
            weights_mapped: leave float weights in the mapped file, which is slower; otherwise the
                kernels copy them into another layout. Quantized weights are always copied, because
                otherwise each call would dequantize every matrix.
            spec: the tensors of `model` if it is a part, such as `interface.sampler`. Its further
                inputs belong to the state.
            row_multiple: the value of ROW_MULTIPLE; by default that of the graph.
        """
        keeps_layout = weights_mapped and not _has_quantized_weights(model)
        options = session_options(NO_PREPACKING if keeps_layout else None)
        # A single block for all values of a call takes twice the memory that is in use at a time,
        # for weights that are cast, for example.
        options.enable_mem_pattern = not weights_mapped
        # Folding would copy a weight that is cast, or transpose the table of a tied head.
        disabled = ["ConstantFolding"] if weights_mapped else None
        # ONNX Runtime reads the array in place, so it has to live as long as the session.
        self._multiple = ort.OrtValue.ortvalue_from_numpy(
            np.array(1 if row_multiple is None else row_multiple, np.int64)
        )
        if row_multiple is not None:
            options.add_initializer(ROW_MULTIPLE.name, self._multiple)
        graph, weights = serialized(model, folder)
        options.add_session_config_entry(WEIGHTS_FOLDER_KEY, str(weights))
        self._decoder = open_session(graph, options, providers, disabled_optimizers=disabled)
        self._initial_state = ort.InferenceSession(
            _without_cache(folder / "initial_state.onnx", interface),
            session_options(),
            providers=[CPU],
        )
        self._input_names = {node.name for node in self._decoder.get_inputs()}
        self._output_names = [output.name for output in self._decoder.get_outputs()]
        # The cache of a quantized graph may have another dtype than the interface says.
        names = {dtype.onnxruntime: name for name, dtype in DTYPES.items()}
        self._types = {node.name: names[node.type] for node in self._decoder.get_inputs()}
        self._caches_are_bfloat16 = "bfloat16" in self._types.values()
        self._interface = interface
        self._spec = spec or interface.decoder
        self._caches = [
            cache for cache in interface.cache_states if cache.name in self._input_names
        ]
        self._capacity = capacity

    def start(self, rows: int) -> dict[str, Array]:
        """The starting state of a number of rows; row i has seed i."""
        names = [output.name for output in self._initial_state.get_outputs()]
        feeds = {
            "seed": np.arange(rows, dtype=np.int64),
            "capacity": np.array(self._capacity, np.int64),
        }
        state = dict(zip(names, self._initial_state.run(names, feeds), strict=True))
        sizes = {**self._interface.sizes, BATCH: rows, CAPACITY: self._capacity}
        return state | {
            cache.name: sparse_zeros(cache.shape(sizes), DTYPES[self._types[cache.name]].numpy)
            for cache in self._caches
        }

    def step(
        self,
        ids: Array,
        lengths: Array,
        state: dict[str, Array],
        parameters: Mapping[str, Any] | None = None,
    ) -> dict[str, Array]:
        """Run the graph once.

        Args:
            ids: [rows, S], token ids.
            lengths: [rows], how many of them are real tokens.
            state: the state by name, which is replaced by the next state.
            parameters: sampling parameters and inputs of images by name: a number for all rows,
                [rows], or the whole array. Missing parameters are off, and the temperature is 0.

        Returns:
            Every output by name. The next step overwrites those of the cache.
        """
        given = {"emit": True, "temperature": 0.0} | dict(parameters or {})
        feeds = self._feeds(ids, lengths, state, given)
        in_place = {retained_name(cache.name): feeds[cache.name] for cache in self._caches}
        binding = self._decoder.io_binding()
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, self._element(array), array.shape, array.ctypes.data)
        for name in self._output_names:
            if name in in_place:
                array = in_place[name]
                binding.bind_output(
                    name, "cpu", 0, self._element(array), array.shape, array.ctypes.data
                )
            else:
                binding.bind_output(name)
        self._decoder.run_with_iobinding(binding)
        results = dict(in_place)
        for name, value in zip(self._output_names, binding.get_outputs(), strict=True):
            if name not in in_place:
                results[name] = value.numpy()
        for name in state:
            state[name] = results.get(retained_name(name), state[name])
        if retained_name(LENGTHS.name) not in results:
            state["lengths"] = (state["lengths"] + lengths).astype(np.int32)
        return results

    def _element(self, array: Array) -> Any:
        """The element type of an array for a binding; NumPy holds bfloat16 as uint16."""
        if array.dtype == np.uint16 and self._caches_are_bfloat16:
            return DTYPES["bfloat16"].onnx
        return array.dtype.type

    def _feeds(
        self, ids: Array, lengths: Array, state: Mapping[str, Array], parameters: Mapping[str, Any]
    ) -> dict[str, Array]:
        """The inputs of the graph by name."""
        rows = len(ids)
        sizes = {
            **self._interface.sizes,
            BATCH: rows,
            SEQUENCE: ids.shape[1],
            CAPACITY: self._capacity,
        }
        sizes |= dict.fromkeys(HOST_AXES, 1)
        given = {
            **state,
            "input_ids": ids.astype(np.int64),
            "input_lengths": lengths.astype(np.int32),
        }
        given |= {spec.name: np.arange(rows, dtype=np.int64) for spec in REPLAY_ROWS}
        feeds: dict[str, Array] = {}
        for tensor in (*self._spec.inputs, *self._spec.states):
            if tensor.name not in self._input_names:
                # A graph that ends at its logits has fewer inputs.
                continue
            if tensor.name in given:
                feeds[tensor.name] = given[tensor.name]
            else:
                value = parameters.get(tensor.name, tensor.off or 0)
                is_whole = np.ndim(value) == len(tensor.axes)
                shape = np.shape(value) if is_whole else tensor.shape(sizes)
                feeds[tensor.name] = np.full(shape, rounded(value, self._types[tensor.name]))
        # A session does not name inputs that a call may leave out.
        feeds |= {spec.name: parameters[spec.name] for spec in _OPTIONAL if spec.name in parameters}
        return feeds


def scores_of_last_tokens(ids: Array, lengths: Array, scored_ids: Array) -> dict[str, Array]:
    """The parameters of a step that scores a token after the last token of each row.

    Args:
        ids: [rows, S], the token ids of the step.
        lengths: [rows], how many of them are real tokens.
        scored_ids: [rows], the tokens to score.
    """
    rows, width = ids.shape
    places = np.arange(rows) * width + lengths - 1
    return {
        SCORED_PLACES.name: places.astype(SCORED_PLACES.dtype),
        SCORED_IDS.name: scored_ids.astype(SCORED_IDS.dtype),
    }


def error_of_scores(results: Mapping[str, Array], scored_ids: Array) -> float:
    """The largest difference between the scores of a step with `scores_of_last_tokens` and the
    log-softmax of the logits that the step returned."""
    logits = results[LOGITS.name].astype(np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
    wanted = np.take_along_axis(logprobs, scored_ids[:, None], axis=-1)
    # Tokens that the model masks have equal infinities.
    return largest_difference(results[PROMPT_LOGPROBS.name], wanted)


def serialized(model: ir.Model, folder: Path) -> tuple[bytes, Path]:
    """`model` as bytes, and the folder to which the names of its external data are relative.

    This is `folder`, or if data lie elsewhere, the nearest folder that contains all of them.
    """
    values: list[ir.Value] = []
    tensors: list[ir.ExternalTensor] = []
    for value in all_initializers(model.graph):
        if isinstance(value.const_value, ir.ExternalTensor):
            values.append(value)
            tensors.append(value.const_value)
    paths = [tensor.path for tensor in tensors]
    real = Path(os.path.realpath(folder))
    if any(real not in Path(os.path.realpath(path)).parents for path in paths):
        # ONNX Runtime does not open links that lead out of the folder.
        paths = [os.path.realpath(path) for path in paths]
        folder = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    for value, tensor, path in zip(values, tensors, paths, strict=True):
        value.const_value = relocated(tensor, os.path.relpath(path, folder), folder)
    content: bytes = ir.to_proto(model).SerializeToString()
    for value, tensor in zip(values, tensors, strict=True):
        value.const_value = tensor
    return content, folder


def _has_quantized_weights(model: ir.Model) -> bool:
    return any(
        is_matmul_nbits(node) or node.op_type == QUANTIZED_OP_TYPE
        for node in model.graph.all_nodes()
    )


def _without_cache(initial_state: Path, interface: Interface) -> bytes:
    """The graph of the starting state without the cache, whose zeros are made directly."""
    model = ir.load(initial_state)
    graph = model.graph
    caches = {spec.name for spec in interface.cache_states}
    graph.outputs[:] = [value for value in graph.outputs if value.name not in caches]
    needed = ancestors(graph.outputs)
    graph.remove([node for node in graph if node not in needed], safe=False)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized
