"""Runs the part of a graph that computes some of its values, on given numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.contract.arrays import Array
from qsample.ort.options import session_options
from qsample.ort.providers import CPU


class GraphPart:
    """The part of `model` between the values `given` and the values `wanted`, as a session.

    Attributes:
        inputs: the graph inputs that the part reads, by name.
    """

    def __init__(
        self, model: ir.Model, wanted: Iterable[ir.Value], given: Iterable[ir.Value] = ()
    ) -> None:
        wanted = list(wanted)
        self._given = list(given)
        self.inputs = inputs_of(wanted, self._given)
        part = ir.convenience.extract(model.graph, [*self._given, *self.inputs.values()], wanted)
        for value in self._given:
            # A given constant would stay an initializer.
            part.initializers.pop(str(value.name), None)
        for value in part.initializers.values():
            # Constants are copied, because a model in memory has no files next to it.
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
        """Compute the wanted values.

        Args:
            feeds: the given values and inputs by name; missing inputs are zeros.
            axes: the size of each named axis.
            in_place: arrays for some of the wanted values, by name; they may be feeds, too.
        """
        readable = {str(value.name) for value in self._given} | self.inputs.keys()
        arrays = {name: array for name, array in feeds.items() if name in readable}
        for name, value in self.inputs.items():
            if name not in feeds:
                arrays[name] = zeros(value, axes)
        in_place = in_place or {}
        # ONNX Runtime reads and writes the arrays themselves, so they live until the run is over.
        inputs = {name: _on_cpu(np.ascontiguousarray(array)) for name, array in arrays.items()}
        outputs = {name: _on_cpu(array) for name, array in in_place.items()}
        names = [output.name for output in self._session.get_outputs()]
        binding = self._session.io_binding()
        for name, ort_value in inputs.items():
            binding.bind_ortvalue_input(name, ort_value)
        for name in names:
            if name in outputs:
                binding.bind_ortvalue_output(name, outputs[name])
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        results: list[Array] = []
        for name, ort_value in zip(names, binding.get_outputs(), strict=True):
            results.append(in_place[name] if name in in_place else ort_value.numpy())
        return results


def _on_cpu(array: Array) -> ort.OrtValue:
    """A view of the array for ONNX Runtime; the array has to live as long."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def with_outputs(model: ir.Model, values: Iterable[ir.Value]) -> bytes:
    """`model`, serialized with `values` among its outputs; the model itself does not change."""
    graph = model.graph
    before = list(graph.outputs)
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
    """The graph inputs, by name, from which `values` are computed if `given` are known."""
    inputs: dict[str, ir.Value] = {}
    waiting = list(values)
    seen = set(given)
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
