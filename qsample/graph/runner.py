"""Runs a decode graph step by step, fed by name: for the parity gate, the self-test and measurements.

It copies every state but the cache in and out: simple enough to trust, and independent of the runtime's loop. The cache
is written in place, in memory that the system hands out page by page, so a few tokens of a long cache cost little.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract.arrays import DTYPES, Array, rounded, sparse_zeros
from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    BATCH,
    CAPACITY,
    LENGTHS,
    ROW_AXES,
    ROW_MULTIPLE,
    SEQUENCE,
    retained_name,
)
from qsample.graph.edit import all_initializers, ancestors
from qsample.graph.moe import QUANTIZED_OP_TYPE
from qsample.graph.operators import is_matmul_nbits
from qsample.graph.weights import relocated
from qsample.ort.options import NO_PREPACKING, WEIGHTS_FOLDER_KEY, session_options
from qsample.ort.providers import CPU, open_session


class GraphRunner:
    """A decode graph and the `initial_state.onnx` beside it, with `capacity` tokens of state a row."""

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
        """model: the decode graph, or a part of it, as `load_graph` reads it. folder: of the starting state. interface:
        of the whole graph. spec: of `model` if it is a part, such as `interface.sampler`; the state has its further
        inputs. row_multiple: in place of the graph's.

        weights_mapped: leave float weights in the mapped file, at the cost of speed; otherwise the kernels copy them
        into another layout. Quantized weights are always copied: otherwise each call would dequantize every matrix.
        """
        options = session_options(
            NO_PREPACKING if weights_mapped and not _has_quantized_weights(model) else None
        )
        # A single block for all values of a call takes twice the memory that is in use at a time, such as weights that
        # are cast.
        options.enable_mem_pattern = not weights_mapped
        # It would copy a weight that is cast, or transpose a tied head's table.
        disabled = ["ConstantFolding"] if weights_mapped else None
        # ONNX Runtime reads it in place.
        self._multiple = ort.OrtValue.ortvalue_from_numpy(np.array(row_multiple or 1, np.int64))
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
        # A quantized graph's cache may have another dtype than the interface says.
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
        """The starting state of `rows` rows, row i with seed i."""
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
        """Run once and move `state` on.

        ids: [rows, S]. lengths: [rows], the real tokens. parameters: sampling parameters by input name, a number for
        every row, [rows] or all values, and inputs of images; those not given are off, and temperature is 0. Returns
        every output by name; the cache's are overwritten by the next step.
        """
        feeds = self._feeds(
            ids, lengths, state, {"emit": True, "temperature": 0.0} | dict(parameters or {})
        )
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
        outputs = zip(self._output_names, binding.get_outputs(), strict=True)
        results = in_place | {
            name: value.numpy() for name, value in outputs if name not in in_place
        }
        for name in state:
            state[name] = results.get(retained_name(name), state[name])
        if retained_name(LENGTHS.name) not in results:
            state["lengths"] = (state["lengths"] + lengths).astype(np.int32)
        return results

    def _element(self, array: Array) -> Any:
        return (
            DTYPES["bfloat16"].onnx
            if array.dtype == np.uint16 and self._caches_are_bfloat16
            else array.dtype.type
        )

    def _feeds(
        self, ids: Array, lengths: Array, state: Mapping[str, Array], parameters: Mapping[str, Any]
    ) -> dict[str, Array]:
        rows = len(ids)
        sizes = {
            **self._interface.sizes,
            BATCH: rows,
            SEQUENCE: ids.shape[1],
            CAPACITY: self._capacity,
        }
        sizes |= dict.fromkeys(ROW_AXES, 1)
        given = {
            **state,
            "input_ids": ids.astype(np.int64),
            "input_lengths": lengths.astype(np.int32),
        }
        given["searched_rows"] = np.arange(rows, dtype=np.int64)
        feeds: dict[str, Array] = {}
        for tensor in (*self._spec.inputs, *self._spec.states):
            if tensor.name not in self._input_names:  # a graph cut off at its logits has fewer
                continue
            if tensor.name in given:
                feeds[tensor.name] = given[tensor.name]
            else:
                value = parameters.get(tensor.name, tensor.off or 0)
                is_whole = np.ndim(value) == len(tensor.axes)
                shape = np.shape(value) if is_whole else tensor.shape(sizes)
                feeds[tensor.name] = np.full(shape, rounded(value, self._types[tensor.name]))
        return feeds


def serialized(model: ir.Model, folder: Path) -> tuple[bytes, Path]:
    """`model` as bytes, and the folder that its external data are named from: `folder`, or one that holds them all."""
    values = [
        value
        for value in all_initializers(model.graph)
        if isinstance(value.const_value, ir.ExternalTensor)
    ]
    tensors = [
        value.const_value for value in values if isinstance(value.const_value, ir.ExternalTensor)
    ]
    paths, real = [tensor.path for tensor in tensors], Path(os.path.realpath(folder))
    if any(real not in Path(os.path.realpath(path)).parents for path in paths):
        paths = [
            os.path.realpath(path) for path in paths
        ]  # ONNX Runtime opens no link that leads out
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
    """The graph of the starting state, without the cache, whose zeros need no computing."""
    model = ir.load(initial_state)
    graph, caches = model.graph, {spec.name for spec in interface.cache_states}
    graph.outputs[:] = [value for value in graph.outputs if value.name not in caches]
    needed = ancestors(graph.outputs)
    graph.remove([node for node in graph if node not in needed], safe=False)
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized
