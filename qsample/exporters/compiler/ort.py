"""An ONNX file enters; ONNX Runtime's own optimisation of it for a provider, saved offline, and its placement leave."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime as ort

from qsample.exporters.compiler.placement import Placement
from qsample.runtime.session.options import session_options


def optimize_offline(
    source: Path, destination: Path, providers: Sequence[str], level: ort.GraphOptimizationLevel
) -> Placement:
    """Optimise `source` for `providers`, write the result to `destination` (weights in `DESTINATION.data`) and return
    which provider runs which nodes."""
    options = session_options(
        {
            "session.optimized_model_external_initializers_file_name": f"{destination.name}.data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
            "session.record_ep_graph_assignment_info": "1",
            "session.disable_prepacking": "1",  # nothing runs here, so the kernels need no copies of the weights
        }
    )
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(destination)
    session = ort.InferenceSession(source, options, providers=list(providers))
    return _placement(session, destination)


def _placement(session: ort.InferenceSession, optimized: Path) -> Placement:
    """Count nodes by provider. ONNX Runtime reports the graph before its last fusions, so the operators come from the
    saved file and the provider of each from the report; a fused node runs where the session's first provider is."""
    provider_of = {
        node.name: subgraph.ep_name
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    }
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for node in onnx.load(optimized, load_external_data=False).graph.node:
        counts[provider_of.get(node.name, session.get_providers()[0])][node.op_type] += 1
    return Placement({provider: dict(sorted(operators.items())) for provider, operators in counts.items()})
