"""Runs the part of a graph that computes some of its values, on numbers of the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract.arrays import Array
from qsample.ort.options import session_options
from qsample.ort.providers import CPU


class GraphPart:
    """The part of `model` between `given` and `wanted`, its constants copied. inputs: graph inputs that it reads."""

    def __init__(
        self, model: ir.Model, wanted: Iterable[ir.Value], given: Iterable[ir.Value] = ()
    ) -> None:
        wanted, self._given = list(wanted), list(given)
        self.inputs = inputs_of(wanted, self._given)
        part = ir.convenience.extract(model.graph, [*self._given, *self.inputs.values()], wanted)
        for value in self._given:  # constants among them stay initializers otherwise
            part.initializers.pop(str(value.name), None)
        for value in part.initializers.values():  # a model given as bytes has no files next to it
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy(), name=value.name)
        self._session = ort.InferenceSession(
            ir.to_proto(ir.Model(part, ir_version=model.ir_version)).SerializeToString(),
            session_options(),
            providers=[CPU],
        )

    def __call__(
        self,
        feeds: Mapping[str, Array],
        axes: Mapping[str, int],
        in_place: Mapping[str, Array] | None = None,
    ) -> list[Array]:
        """The values wanted. feeds: values by name, by default zeros. axes: the size of each named axis. in_place:
        arrays that take some of the values wanted, by name; they may be feeds, too."""
        rest = {
            name: zeros(value, axes) for name, value in self.inputs.items() if name not in feeds
        }
        wanted = {str(value.name) for value in self._given} | self.inputs.keys()
        given = {name: array for name, array in feeds.items() if name in wanted}
        own = in_place or {}
        inputs = {
            name: _on_cpu(np.ascontiguousarray(array)) for name, array in (given | rest).items()
        }
        outputs = {name: _on_cpu(array) for name, array in own.items()}
        binding, names = (
            self._session.io_binding(),
            [output.name for output in self._session.get_outputs()],
        )
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            if name in outputs:
                binding.bind_ortvalue_output(name, outputs[name])
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        results = zip(names, binding.get_outputs(), strict=True)
        return [own[name] if name in own else value.numpy() for name, value in results]


def _on_cpu(array: Array) -> ort.OrtValue:
    """The array itself, as ONNX Runtime takes it; it has to be kept as long."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def with_outputs(model: ir.Model, values: Iterable[ir.Value]) -> bytes:
    """`model`, serialized with `values` among its outputs; it is left as it was."""
    graph, before = model.graph, list(model.graph.outputs)
    graph.outputs.extend(value for value in dict.fromkeys(values) if value not in before)
    try:
        serialized: bytes = ir.to_proto(model).SerializeToString()
    finally:
        graph.outputs[:] = before
    return serialized


def zeros(value: ir.Value, axes: Mapping[str, int]) -> Array:
    """Zeros of the dtype and shape of `value`; KeyError names an axis that `axes` lacks."""
    return np.zeros(sizes(value, axes), value.dtype.numpy() if value.dtype is not None else None)


def sizes(value: ir.Value, axes: Mapping[str, int]) -> list[int]:
    """The shape of `value`; KeyError names an axis that `axes` lacks."""
    return [dim if isinstance(dim, int) else axes[str(dim)] for dim in value.shape or ()]


def inputs_of(values: Iterable[ir.Value], given: Iterable[ir.Value] = ()) -> dict[str, ir.Value]:
    """The inputs of the graph that `values` are computed from, if `given` are known, by name."""
    inputs: dict[str, ir.Value] = {}
    waiting, seen = list(values), set(given)
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_graph_input():
            inputs[str(value.name)] = value
        node = value.producer()
        if node is not None:
            waiting += [source for source in node.inputs if source is not None]
    return inputs
