"""Placement: nodes counted by provider and operator, from a session's report and from a file."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from qsample.compiler.placement import RECORD, assigned_nodes, placement_in_file, placement_of
from qsample.ort.options import session_options
from qsample.ort.providers import open_session

GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
three (float[N] x) => (float[N] y)
{
    a = Sin (x)
    b = Sin (a)
    y = Cos (b)
}
"""
CPU = "CPUExecutionProvider"


def saved(path: Path) -> Path:
    model = ir.from_onnx_text(GRAPH)
    for index, node in enumerate(model.graph):
        node.name = f"node{index}"
    ir.save(model, path)
    return path


def test_what_a_session_reports(tmp_path: Path) -> None:
    session = open_session(saved(tmp_path / "graph.onnx"), session_options(RECORD), (CPU,))
    assert placement_of(session) == {CPU: {"Cos": 1, "Sin": 2}}
    assert {(provider, node.name) for provider, node in assigned_nodes(session)} == {
        (CPU, f"node{index}") for index in range(3)
    }


def test_a_file_whose_nodes_a_session_has_reported(tmp_path: Path) -> None:
    path = saved(tmp_path / "graph.onnx")
    known = {"node0": "Other", "node2": CPU, "gone": CPU}
    assert placement_in_file(path, known, default=CPU) == {"Other": {"Sin": 1}, CPU: {"Cos": 1, "Sin": 1}}


def test_a_file_with_control_flow(tmp_path: Path) -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 20]>
        branch (bool p, float[N] x) => (float[N] y)
        {
            y = If (p) <then_branch = less () => (float[N] a) { a = Neg (x) },
                        else_branch = more () => (float[N] b) { b = Exp (x) }>
        }""")
    ir.save(model, tmp_path / "graph.onnx")
    assert placement_in_file(tmp_path / "graph.onnx", {}, default=CPU) == {CPU: {"Exp": 1, "If": 1, "Neg": 1}}
