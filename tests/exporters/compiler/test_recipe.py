"""The runner of passes: their order, and what it cleans up."""

from __future__ import annotations

import onnx_ir as ir

from qsample.exporters.compiler import recipe

GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
twice (float[N] x) => (float[N] y)
{
    unused = Sin (x)
    doubled = Add (x, x)
    y = Identity (doubled)
}
"""


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_passes_run_in_order_and_each_meets_a_clean_graph() -> None:
    seen: list[list[str]] = []

    def skip_identity(model: ir.Model) -> bool:
        seen.append(operators(model))
        identity = next(node for node in model.graph if node.op_type == "Identity")
        identity.outputs[0].replace_all_uses_with(identity.inputs[0], replace_graph_outputs=True)
        return True

    def look(model: ir.Model) -> bool:
        seen.append(operators(model))
        return False

    model = ir.from_onnx_text(GRAPH)
    assert recipe.run(model, [look, skip_identity, look])
    assert seen == [["Sin", "Add", "Identity"], ["Sin", "Add", "Identity"], ["Add"]]


def test_passes_that_change_nothing_leave_the_graph_alone() -> None:
    model = ir.from_onnx_text(GRAPH)
    assert not recipe.run(model, [lambda model: False])
    assert not recipe.run(model, [])
    assert operators(model) == ["Sin", "Add", "Identity"]
