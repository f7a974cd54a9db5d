"""A decode graph with its logits among its outputs, for those who want to see what the sampler sees.

The package onnx is not there at run time. None is needed: where a field of a protobuf message comes twice, its parser
joins the two messages (https://protobuf.dev/programming-guides/encoding/#last-one-wins), so an output is written behind
the file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnxruntime as ort

from qsample.contract import LOGITS
from qsample.interface import GraphSpec
from qsample.ort.options import FOLDER_OF_WEIGHTS
from qsample.ort.small_graphs import one_more_output
from qsample.tensors import DTYPES


def with_logits(spec: GraphSpec) -> GraphSpec:
    """`spec` with the logits among its outputs, where it lacks them."""
    return spec if LOGITS in spec.outputs else replace(spec, outputs=(*spec.outputs, LOGITS))


def graph_with_logits(path: Path, options: ort.SessionOptions) -> bytes:
    """The file at `path` with the output `logits`, as a session takes it; `options` tell that session where the file's
    weights are."""
    options.add_session_config_entry(FOLDER_OF_WEIGHTS, str(path.parent))
    return path.read_bytes() + one_more_output(LOGITS.name, DTYPES[LOGITS.dtype].onnx)
