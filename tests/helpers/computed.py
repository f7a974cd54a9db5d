"""What a function on the graph's tensors computes: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as common_passes

from qsample.sampler.build import OPSET
from qsample.sampler.tensor import Tensor, Tensors, building, op

Array = np.ndarray


def graph_of(function: Callable[..., Tensor | Tensors], *arrays: Array) -> ir.Model:
    """A graph with what `function` adds: inputs of the arrays' dtypes and shapes, the first axis of any size."""
    values = [
        ir.Value(
            name=f"input_{index}",
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape([f"N{index}", *array.shape[1:]] if array.ndim else []),
        )
        for index, array in enumerate(arrays)
    ]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": OPSET}, name="computed")
    with building(graph):
        found = function(*(Tensor(value) for value in values))
        results = found if isinstance(found, tuple) else (found,)
        graph.outputs.extend(op("Identity", result).value for result in results)
    model = ir.Model(graph, ir_version=10)
    common_passes.NameFixPass()(model)
    return model


def computed(function: Callable[..., Tensor | Tensors], *arrays: Array) -> list[Array]:
    """What `function` gives for `arrays`."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 2
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    proto = ir.to_proto(graph_of(function, *arrays))
    onnx.checker.check_model(proto, full_check=True)
    session = ort.InferenceSession(
        proto.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, {f"input_{index}": array for index, array in enumerate(arrays)}))
