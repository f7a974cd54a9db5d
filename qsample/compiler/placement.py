"""Which execution provider runs what of a graph, counted in one way for every target."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import onnx
import onnxruntime as ort

# provider → operator type → how many
Placement = dict[str, dict[str, int]]

RECORD: Final = {"session.record_ep_graph_assignment_info": "1"}
"""The session configuration without which ONNX Runtime does not report where its nodes run."""


def assigned_nodes(session: ort.InferenceSession) -> list[tuple[str, Any]]:
    """(provider, node) of every node of a session that was opened with `RECORD`; a node has name and op_type."""
    return [(part.ep_name, node) for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()]


def placement_of(session: ort.InferenceSession) -> Placement:
    """What runs where in `session`, opened with `RECORD`."""
    return _count((provider, node.op_type) for provider, node in assigned_nodes(session))


def placement_in_file(graph: Path, provider_of: Mapping[str, str], default: str) -> Placement:
    """What runs where of the nodes in a file, those of both sides of an If included.

    provider_of: node name → provider, as a session reported it before its last fusions. default: the provider of nodes
    that are not there, which were fused or added since.
    """
    nodes = _nodes(onnx.load(graph, load_external_data=False).graph)
    return _count((provider_of.get(node.name, default), node.op_type) for node in nodes)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Those of the graphs inside it as well."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _count(nodes: Iterable[tuple[str, str]]) -> Placement:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for provider, operator in nodes:
        counts[provider][operator] += 1
    return {provider: dict(sorted(operators.items())) for provider, operators in counts.items()}
