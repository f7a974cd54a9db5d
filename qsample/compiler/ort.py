"""ONNX Runtime's own graph optimisation, run offline and saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnxruntime as ort

from qsample.compiler.placement import RECORD, assigned_nodes
from qsample.ort.options import NO_PREPACKING, session_options


def optimize_offline(
    source: Path, destination: Path, providers: Sequence[str], level: ort.GraphOptimizationLevel
) -> dict[str, str]:
    """Optimise `source` for `providers` and write the result to `destination`, its weights to `DESTINATION.data`.

    Returns node name → provider, as ONNX Runtime reports it: of the graph before its last fusions.
    """
    options = session_options(
        {
            **RECORD,
            "session.optimized_model_external_initializers_file_name": f"{destination.name}.data",
            "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
            **NO_PREPACKING,  # nothing runs here
        }
    )
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(destination)
    session = ort.InferenceSession(source, options, providers=list(providers))
    return {node.name: provider for provider, node in assigned_nodes(session)}
