"""What a graph computes, node by node, whatever its values are called and wherever its constants are."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import onnx_ir as ir

from qsample.graph.edit import constant


def fingerprint(model: ir.Model) -> dict[str, object]:
    """Output name → a hash of all that it is computed from, dtypes and shapes included; and the nodes of each kind."""
    known = {value: f"input {value.name} {_type(value)}" for value in model.graph.inputs}
    outputs = _outputs(model.graph, known)
    names = [value.name for value in model.graph.outputs]
    counts = Counter(f"{node.domain}.{node.op_type}" for node in model.graph.all_nodes())
    return {
        **dict(zip(names, outputs, strict=True)),
        "nodes": counts,
        "inputs": [v.name for v in model.graph.inputs],
    }


def _outputs(graph: ir.Graph, known: dict[ir.Value, str]) -> list[str]:
    for node in graph:
        parts = [
            node.domain,
            node.op_type,
            *map(_type, node.outputs),
        ]  # of outputs that nothing reads, too
        for value in node.inputs:
            parts.append("" if value is None else _value(value, known))
        for name, attribute in sorted(node.attributes.items()):
            inner = attribute.value
            parts.append(
                f"{name} {_outputs(inner, known) if isinstance(inner, ir.Graph) else inner}"
            )
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        for index, output in enumerate(node.outputs):
            known[output] = f"{digest} {index} {_type(output)}"
    return [_value(value, known) for value in graph.outputs]


def _value(value: ir.Value, known: dict[ir.Value, str]) -> str:
    array = constant(value)
    if array is None:
        return known[value]
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def _type(value: ir.Value) -> str:
    """Sizes that depend on data are numbered by when they were met."""
    dims = (
        []
        if value.shape is None
        else [re.sub(r"\bu\d+\b", "u", str(getattr(dim, "value", dim))) for dim in value.shape]
    )
    return f"{value.dtype} {dims}"
