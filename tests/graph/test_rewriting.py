"""Rewrite rules find what they find without the shortcut, and try fewer nodes."""

from __future__ import annotations

import threading
from collections import Counter

import onnx_ir as ir
import pytest
from onnxscript.rewriter import pattern
from onnxscript.rewriter.pattern import SimplePatternMatcher

from qsample.graph.rewriting import operators_first

GRAPH = """
<ir_version: 10, opset_import: ["" : 20]>
chain (float[N] x) => (float[N] y, float[N] z)
{
    a = Sin (x)
    b = Neg (a)
    c = Cos (b)
    d = Neg (x)
    e = Sin (d)
    y = Neg (e)
    z = Tanh (c)
}
"""
OF_ONE = pattern.RewriteRule(lambda op, x: op.Neg(op.Sin(x)), lambda op, x: op.Sin(op.Neg(x)))
OF_TWO = pattern.RewriteRule(
    lambda op, x: (op.Cos(x), op.Tanh(op.Cos(x))), lambda op, x: (op.Exp(x), op.Abs(x))
)
# One that allows several operators, by the start of their names.
OF_SEVERAL = pattern.RewriteRule(
    lambda op, x: op.submodule("Ne")(op.Sin(x)), lambda op, x: op.Abs(x)
)


def rewritten(rule: pattern.RewriteRule) -> Counter[str]:
    model = ir.from_onnx_text(GRAPH)
    rule.apply_to_model(model)
    return Counter(
        f"{node.op_type}({', '.join(str(v.name) for v in node.inputs if v)})"
        for node in model.graph
    )


@pytest.mark.parametrize("rule", [OF_ONE, OF_TWO, OF_SEVERAL])
def test_the_same_nodes_match(rule: pattern.RewriteRule) -> None:
    expected = rewritten(rule)
    with operators_first():
        assert rewritten(rule) == expected
    assert expected != rewritten(
        pattern.RewriteRule(lambda op, x: op.Exp(x), lambda op, x: op.Abs(x))
    )


def test_nodes_of_other_operators_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    match = SimplePatternMatcher.match

    def noted(
        self: SimplePatternMatcher,
        model: ir.Model,
        graph: ir.Graph,
        node: ir.Node,
        **options: object,
    ) -> object:
        looked_at.append(node.op_type)
        return match(self, model, graph, node, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SimplePatternMatcher, "match", noted)
    with operators_first():
        rewritten(OF_TWO)
    assert set(looked_at) == {"Cos"}
    assert SimplePatternMatcher.match is noted


def test_two_threads_leave_the_matcher_as_it_was() -> None:
    before, opened, closed = SimplePatternMatcher.match, threading.Event(), threading.Event()

    def fuse() -> None:
        with operators_first():
            opened.set()
            closed.wait(120)

    thread = threading.Thread(target=fuse)
    thread.start()
    opened.wait(120)
    threading.Timer(0.1, closed.set).start()
    with operators_first():
        assert closed.is_set()
    thread.join()
    assert SimplePatternMatcher.match is before
