"""onnxscript's rewrite rules in large graphs, in less time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, SimplePatternMatcher


@contextmanager
def operators_first() -> Iterator[None]:
    """While open, a rule's pattern looks at the operator of a node before anything else.

    A pattern is tried at every node of a graph, and hardly any node has the operator that it ends with. onnxscript
    finds that out late: a pattern with several results sorts all nodes of the graph by operator first, at every node.
    The matches are the same.
    """
    match = SimplePatternMatcher.match
    failed = MatchResult()
    failed.fail("another operator")

    def match_operator_first(
        self: SimplePatternMatcher, model: ir.Model, graph: ir.Graph | ir.Function, node: ir.Node, **options: Any
    ) -> MatchResult:
        wanted = self.pattern.output_nodes[0].op_identifier()  # None if it takes several
        if wanted is not None and wanted[1] != node.op_type:
            return failed
        return match(self, model, graph, node, **options)

    SimplePatternMatcher.match = match_operator_first  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        SimplePatternMatcher.match = match  # type: ignore[method-assign]
