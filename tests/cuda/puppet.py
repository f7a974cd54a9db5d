"""Lets the CPU provider compute the results of the stubbed CUDA provider, so that programs for CUDA run to their end.

    python -m tests.cuda.puppet SCRIPT.py ARGUMENTS ...        (or: -m MODULE ARGUMENTS ...)

The stubs' device memory is the host's. The CUDA session runs first, with all of its placement, bindings, captures and
replays. Then its inputs are put back, for it may have written over them, and a CPU session of the same file runs: three
times for a run that captures, and over the memory of the capture for a replay, whatever is bound, as ONNX
Runtime does (inference_session.cc, cuda_execution_provider.cc). Float16 has CPU kernels, bfloat16 has not.
"""

from __future__ import annotations

import ctypes
import math
import runpy
import sys
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
NOT_CAPTURED = -1
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

Original: Any = ort.InferenceSession
COUNTS: Counter[str] = Counter()
_BYTES = {1: 4, 2: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}
_NUMBERS = {
    "float": 1,
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "double": 11,
    "float64": 11,
    "bfloat16": 16,
}

_LISTS = ("processed_rows", "vocabulary_rows", "searched_rows")
_ROWS = np.arange(1024)

Bound = tuple[int, tuple[int, ...], int, Any]  # element type, shape, address, owner of the memory


def _element(kind: Any) -> int:
    """ONNX's number of an element type, given as such, as "tensor(float)", or as a NumPy dtype."""
    if isinstance(kind, int):
        return kind
    return _NUMBERS[kind[len("tensor(") : -1] if isinstance(kind, str) else np.dtype(kind).name]


def _memory(bound: Bound) -> range:
    """The addresses of its bytes."""
    kind, shape, address, _ = bound
    return range(address, address + math.prod(shape) * _BYTES[kind])


def _of_value(value: Any) -> Bound:
    return _element(value.data_type()), tuple(value.shape()), value.data_ptr(), value


class Binding:
    """What is bound, beside the real binding; None for an output that nobody gave memory for."""

    def __init__(self, session: Any) -> None:
        self.real = Original.io_binding(session)
        self.inputs: dict[str, Bound] = {}
        self.outputs: dict[str, Bound | None] = {}
        self.computed: dict[str, Any] = {}  # the CPU's results without bound memory

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Any,
        buffer_ptr: int,
    ) -> None:
        self.real.bind_input(name, device_type, device_id, element_type, shape, buffer_ptr)
        self.inputs[name] = _element(element_type), tuple(shape), buffer_ptr, None

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self.real.bind_cpu_input(name, array)
        self.inputs[name] = _element(array.dtype), array.shape, array.ctypes.data, array

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.real.bind_ortvalue_input(name, value)
        self.inputs[name] = _of_value(value)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:
        self.real.bind_output(name, device_type, device_id, element_type, shape, buffer_ptr)
        self.outputs[name] = (
            None if buffer_ptr is None else (_element(element_type), tuple(shape), buffer_ptr, None)
        )

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        self.real.bind_ortvalue_output(name, value)
        self.outputs[name] = _of_value(value)

    def get_outputs(self) -> list[Any]:
        if self.outputs.keys() == self.computed.keys():
            return list(self.computed.values())
        made = self.real.get_outputs()
        return [
            self.computed.get(name, value) for name, value in zip(self.outputs, made, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class Session(Original):  # type: ignore[misc]
    """An InferenceSession that computes on the CPU if it runs on CUDA."""

    def __init__(
        self,
        model: Any,
        sess_options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **more: Any,
    ) -> None:
        # Without constant folding the device would compute shapes from constants, which the stubs cannot.
        more.pop("disabled_optimizers", None)
        if list(providers or []) == [CPU]:
            model, sess_options = _for_cpu(model, _proto(model), sess_options)
        super().__init__(model, sess_options, providers, provider_options, **more)
        self._twin: list[Any] = []
        self._make_twin: Any = None
        self._lock = threading.Lock()
        if self.get_providers()[0] != CUDA:
            return
        proto = _proto(model)
        # The file may be gone by the time that the twin is made, unless it is that of weights as well.
        whole = not any(
            tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer
        )
        self._make_twin = partial(
            _on_cpu, proto.SerializeToString() if whole else model, proto, sess_options
        )
        self._captures = (provider_options or [{}])[0].get("enable_cuda_graph") == "1"
        self._captured: dict[tuple[int, int], tuple[dict[str, Bound], dict[str, Bound | None]]] = {}
        # Which side of a branch runs, and the sizes there, would follow from numbers that the device lacks.
        self._branches = any(node.op_type in ("If", "Loop", "Scan") for node in proto.graph.node)

    @property
    def twin(self) -> Any:
        """The CPU's session, made on first use; None if the CPU lacks kernels, as for bfloat16."""
        with self._lock:
            if not self._twin:
                twin = None
                with suppress(ort.capi.onnxruntime_pybind11_state.NotImplemented):
                    twin = self._make_twin() if self._make_twin is not None else None
                self._twin.append(twin)
        return self._twin[0]

    def io_binding(self) -> Any:
        return Binding(self) if self.twin is not None else super().io_binding()

    def run(self, names: Any, feeds: Any, run_options: Any = None) -> Any:
        if self.twin is None:
            return super().run(names, feeds, run_options)
        self._run_device(lambda: super(Session, self).run(names, feeds, run_options))
        lists = {
            name: _ROWS[: _least(name, len(feeds["status"]))] for name in _LISTS if name in feeds
        }
        return self.twin.run(
            names, feeds | {name: rows for name, rows in lists.items() if not len(feeds[name])}
        )

    def run_with_iobinding(self, binding: Any, run_options: Any = None) -> None:
        if self.twin is None:
            super().run_with_iobinding(binding, run_options)
            return
        times, used = 1, (dict(binding.inputs), dict(binding.outputs))
        number = _graph_number(run_options) if self._captures else NOT_CAPTURED
        if number != NOT_CAPTURED:
            key = threading.get_ident(), number
            if key not in self._captured:
                times, self._captured[key] = 3, used
                COUNTS["captures"] += 1
            else:
                used = self._captured[key]
                COUNTS["replays"] += 1
        inputs, outputs = used
        # Those alone that it may write to: another thread may write to the others meanwhile.
        written = [_memory(bound) for bound in outputs.values() if bound is not None]
        kept = [
            (memory.start, ctypes.string_at(memory.start, len(memory)))
            for memory in map(_memory, inputs.values())
            if any(memory.start < other.stop and other.start < memory.stop for other in written)
        ]
        self._run_device(lambda: Original.run_with_iobinding(self, binding.real, run_options))
        for address, content in kept:
            ctypes.memmove(address, content, len(content))
        self._run_twin(inputs, outputs, binding, times)

    def _run_device(self, run: Any) -> None:
        if not self._branches:
            run()
            COUNTS["cuda runs"] += 1

    def _run_twin(
        self,
        inputs: dict[str, Bound],
        outputs: dict[str, Bound | None],
        binding: Binding,
        times: int,
    ) -> None:
        twin = self.twin.io_binding()
        for name, (kind, shape, address, _) in inputs.items():
            if name in _LISTS and shape == (0,):
                shape, address = (_least(name, *inputs["status"][1]),), _ROWS.ctypes.data
            twin.bind_input(name, "cpu", 0, kind, shape, address)
        for name, bound in outputs.items():
            if bound is None:
                twin.bind_output(name)
            else:
                kind, shape, address, _ = bound
                twin.bind_output(name, "cpu", 0, kind, shape, address)
        for _ in range(times):
            self.twin.run_with_iobinding(twin)
        for (name, bound), value in zip(outputs.items(), twin.get_outputs(), strict=True):
            if bound is None:
                binding.computed[name] = ort.OrtValue.ortvalue_from_numpy(
                    np.array(value.numpy()), "cuda"
                )


def _least(name: str, rows: int) -> int:
    """The length of a list that is not empty: on the CPU, ONNX Runtime before 1.32 gives reductions over no rows a
    wrong shape."""
    return 1 if name == "searched_rows" else rows


def _graph_number(run_options: Any) -> int:
    try:
        return int(run_options.get_run_config_entry("gpu_graph_id"))
    except (AttributeError, RuntimeError):  # no options, or none of that name
        return 0


def _proto(model: Any) -> onnx.ModelProto:
    if isinstance(model, bytes):
        return onnx.load_model_from_string(model)
    return onnx.load(str(model), load_external_data=False)


def _on_cpu(model: Any, proto: onnx.ModelProto, options: Any) -> Any:
    model, options = _for_cpu(model, proto, options)
    return Original(model, options, providers=[CPU])


def _for_cpu(model: Any, proto: onnx.ModelProto, options: Any) -> tuple[Any, Any]:
    """Model and options for the CPU, whose attention norms no queries and keys by itself. `proto` may be changed."""
    if not any(_norms(node) for node in proto.graph.node):
        return model, options
    separate_norms(proto)
    if not isinstance(model, bytes):  # the folder of its weights
        options = copy_options(options)
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(Path(model).parent))
    return proto.SerializeToString(), options


def copy_options(options: Any) -> Any:
    """Session options to change; ONNX Runtime's own cannot be copied, and the twin needs few of them."""
    copied = ort.SessionOptions()
    copied.intra_op_num_threads = options.intra_op_num_threads if options is not None else 0
    copied.log_severity_level = 4
    return copied


def separate_norms(proto: onnx.ModelProto) -> None:
    """Put the norms of queries and keys before each GroupQueryAttention that has them inside; in place."""
    sizes = {tensor.name: list(tensor.dims) for tensor in proto.graph.initializer}
    nodes = []
    for node in proto.graph.node:
        weights = _norms(node)
        if weights:
            attributes = {attribute.name: attribute for attribute in node.attribute}
            heads, kv_heads = attributes["num_heads"].i, attributes["kv_num_heads"].i
            (size,) = sizes[weights[0]]
            names = list(node.input[:3])
            if not names[1]:  # query, key and value are joined
                widths = onnx.numpy_helper.from_array(
                    np.array([heads, kv_heads, kv_heads]) * size, f"{node.name}_widths"
                )
                packed, names = names[0], [f"{node.name}_{part}" for part in "qkv"]
                proto.graph.initializer.append(widths)
                nodes.append(onnx.helper.make_node("Split", [packed, widths.name], names, axis=-1))
            epsilon = attributes["qk_norm_epsilon"].f
            for index, (name, weight) in enumerate(zip(names[:2], weights, strict=True)):
                node.input[index] = f"{node.name}_norm{index}"
                nodes += _head_norm(proto.graph, name, weight, size, epsilon, node.input[index])
            node.input[2] = names[2]
            del node.input[14:]
            node.attribute.remove(attributes["qk_norm_epsilon"])
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)


def _norms(node: onnx.NodeProto) -> list[str]:
    """The weights of the norms inside a GroupQueryAttention: those of queries and of keys."""
    return (
        list(node.input[14:16])
        if node.op_type == "GroupQueryAttention" and any(node.input[14:16])
        else []
    )


def _head_norm(
    graph: onnx.GraphProto, value: str, weight: str, size: int, epsilon: float, result: str
) -> list[onnx.NodeProto]:
    """The RMS norm over each head of [B, S, heads * size]."""
    split = onnx.numpy_helper.from_array(np.array([0, 0, -1, size]), f"{result}_heads")
    merge = onnx.numpy_helper.from_array(np.array([0, 0, -1]), f"{result}_merged")
    graph.initializer.extend([split, merge])
    return [
        onnx.helper.make_node("Reshape", [value, split.name], [f"{result}_split"]),
        onnx.helper.make_node(
            "SimplifiedLayerNormalization",
            [f"{result}_split", weight],
            [f"{result}_normed"],
            axis=-1,
            epsilon=epsilon,
        ),
        onnx.helper.make_node("Reshape", [f"{result}_normed", merge.name], [result]),
    ]


def install() -> None:
    """From now on, sessions on CUDA have a twin on the CPU."""
    ort.InferenceSession = Session


def main() -> None:
    install()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as Python does for a script
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
