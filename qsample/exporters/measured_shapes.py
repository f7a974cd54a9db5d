"""Records the shape and dtype of every value of a graph, told by running it at several sizes; what is computed from
shapes and always the same becomes a constant.

For graphs that came without shapes, as TorchScript's exporter writes them: shape inference does not follow sizes
through Shape, Gather and Concat, and a fusion knows a pattern by its shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as common_passes

from qsample.contract import BATCH, CAPACITY, INPUT_LENGTHS, SEQUENCE
from qsample.graph.edit import constant, initializer, reads
from qsample.graph.evaluate import with_outputs, zeros
from qsample.ort.options import FOLDER_OF_WEIGHTS, NO_PREPACKING, session_options
from qsample.ort.providers import CPU
from qsample.tensors import Array

# No two axes have the same sizes in all of them; several rows with several tokens are a first prefill.
_SIZES: Final = ((2, 3, 37), (3, 5, 41), (1, 1, 7), (1, 4, 300))
_MOST_NUMBERS: Final = 16  # of a constant that comes from shapes


def record_shapes(model: ir.Model, folder: Path) -> int:
    """Give every value of the main graph its shape and dtype, in place; return how many became constants.

    model: of `Interface.model`. folder: where its external data is.
    """
    runs = [_run(model, folder, dict(zip((BATCH, SEQUENCE, CAPACITY), each, strict=True))) for each in _SIZES]
    from_shapes = _from_shapes(model.graph)
    constants = 0
    for node in model.graph:
        for value in node.outputs:
            name = str(value.name)
            if not value.name or name not in runs[0]:
                continue
            found = [run[name] for run in runs]
            value.type = ir.TensorType(ir.DataType.from_numpy(found[0].dtype))
            value.shape = _shape(found)
            numbers = _always(found)
            if value in from_shapes and not value.is_graph_output() and numbers is not None:
                value.replace_all_uses_with(initializer(model.graph, f"{name}.fixed", numbers))
                constants += 1
    for node in model.graph:
        if node.op_type == "Reshape" and not node.domain:
            _fix_target(model.graph, node, runs)
    common_passes.RemoveUnusedNodesPass()(model)
    return constants


class _Found(NamedTuple):
    """What a run found. numbers: None = too many."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    numbers: Array | None


def _run(model: ir.Model, folder: Path, axes: Mapping[str, int]) -> dict[str, _Found]:
    """The values of the main graph by name, with tokens 0 in empty caches; not those that constants alone make."""
    graph = model.graph
    feeds = {str(value.name): zeros(value, axes) for value in graph.inputs}
    feeds[INPUT_LENGTHS.name] += axes[SEQUENCE]
    options = session_options({FOLDER_OF_WEIGHTS: str(folder), **NO_PREPACKING})
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    fixed = _from_constants(graph)
    values = [value for node in graph for value in node.outputs if value.name and value not in fixed]
    session = ort.InferenceSession(with_outputs(model, values), options, providers=[CPU])
    names = [output.name for output in session.get_outputs()]
    arrays = zip(names, session.run(names, feeds), strict=True)
    return {
        name: _Found(array.shape, array.dtype, array if array.size <= _MOST_NUMBERS else None) for name, array in arrays
    }


def _from_constants(graph: ir.Graph) -> set[ir.Value]:
    """Values that constants alone make, weights that are transposed say."""
    found: set[ir.Value] = set()
    for node in graph:
        read = reads(node)
        if read and all(value in found or constant(value) is not None for value in read):
            found.update(node.outputs)
    return found


def _from_shapes(graph: ir.Graph) -> set[ir.Value]:
    """Values that shapes alone decide, not what the inputs hold."""
    found: set[ir.Value] = set()
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        inner = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
        known = all(value in found or constant(value) is not None for value in read)
        if node.op_type in ("Shape", "Size") or (known and read and not inner):
            found.update(node.outputs)
    return found


def _always(found: Sequence[_Found]) -> Array | None:
    """The numbers that all runs found; None where they differ."""
    first = found[0].numbers
    if first is None or any(other.numbers is None or not np.array_equal(first, other.numbers) for other in found[1:]):
        return None
    return first


def _shape(found: Sequence[_Found]) -> ir.Shape | None:
    """Named axes where the sizes are theirs in all runs."""
    if len({len(each.shape) for each in found}) > 1:
        return None
    named = dict(zip(zip(*_SIZES, strict=True), (BATCH, SEQUENCE, CAPACITY), strict=True))
    dims = list(zip(*(each.shape for each in found), strict=True))
    return ir.Shape([each[0] if len(set(each)) == 1 else named.get(each) for each in dims])


def _fix_target(graph: ir.Graph, node: ir.Node, runs: Sequence[Mapping[str, _Found]]) -> None:
    """Let a Reshape keep the axes that it does keep (0), so that its target is a constant."""
    data, target = node.inputs[0], node.inputs[1]
    assert data is not None
    assert target is not None
    takes_zero = node.attributes.get_int("allowzero", 0) == 1
    if constant(target) is not None or takes_zero or str(data.name) not in runs[0]:
        return
    targets = [run[str(target.name)].numbers for run in runs]
    if any(numbers is None for numbers in targets):
        return
    wanted = list(zip(*(numbers.tolist() for numbers in targets if numbers is not None), strict=True))
    given = list(zip(*(run[str(data.name)].shape for run in runs), strict=True))
    numbers: list[int] = []
    for index, found in enumerate(wanted):
        if len(set(found)) == 1:
            numbers.append(int(found[0]))
        elif index < len(given) and found == given[index]:
            numbers.append(0)
        else:
            numbers.append(-1)
    if numbers.count(-1) <= 1:
        name = "target_" + "_".join(map(str, numbers))
        node.replace_input_with(1, initializer(graph, name, np.array(numbers, np.int64)))
