"""Rewrite rules for a traced sampler graph: three operations without the nodes that torch's translation adds.

A node costs ONNX Runtime most of a microsecond on the CPU, and a launch on a GPU, however little it computes; and the
sampler is a long chain of tiny ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult, RewriteRuleClassBase, RewriteRuleSet

from qsample.exporters.graph.edit import constant, initializer


def simplify(model: ir.Model, *, bool_maximum: bool) -> None:
    """Apply the rules to `model`, in place, and remove the nodes that are then unused.

    bool_maximum: False leaves `any` as it is; ONNX Runtime's CUDA provider has no maximum of bools.
    """
    rules = [DivideIntegers, ReadScalar, *([MaximumOfBools] if bool_maximum else [])]
    RewriteRuleSet([rule.rule() for rule in rules]).apply_to_model(model)  # type: ignore[no-untyped-call]


class _Rule(RewriteRuleClassBase):
    """A rule that leaves the inner nodes: the optimizer may have merged them with those of another operation."""

    def __init__(self) -> None:
        super().__init__(remove_nodes=False)


class MaximumOfBools(_Rule):
    """`any` is translated as the maximum of integers made from bools; opset 20 has the maximum of bools itself."""

    def pattern(self, op: Any, flags: Any) -> Any:
        maximum = op.ReduceMax(op.Cast(flags), _allow_other_inputs=True, _outputs=["maximum"])
        return op.Cast(maximum, to=ir.DataType.BOOL)

    def check(self, op: Any, flags: ir.Value, **unused: Any) -> MatchResult:
        return _match_if(flags.dtype == ir.DataType.BOOL, "a maximum of numbers")

    def rewrite(self, op: Any, flags: ir.Value, maximum: ir.Value) -> Any:
        node = maximum.producer()
        assert node is not None
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        return op.ReduceMax(flags, *node.inputs[1:], **attributes)


class DivideIntegers(_Rule):
    """An integer division that rounds is translated by way of floats.

    What the sampler divides is never negative, where ONNX's integer division rounds down, too.
    """

    def pattern(self, op: Any, dividend: Any, divisor: Any) -> Any:
        return op.Cast(op.Floor(op.Div(op.Cast(dividend), divisor)), to=ir.DataType.INT64)

    def check(self, op: Any, dividend: ir.Value, divisor: ir.Value, **unused: Any) -> MatchResult:
        is_integer = dividend.dtype == ir.DataType.INT64 and constant(divisor) is not None
        return _match_if(is_integer, "not integers, or a divisor that is computed")

    def rewrite(self, op: Any, dividend: ir.Value, divisor: ir.Value, **unused: Any) -> Any:
        number = constant(divisor)
        assert number is not None
        assert dividend.graph is not None
        # Not `op.initializer`: where two have one name it drops the first, which nodes read already.
        integer = initializer(dividend.graph, f"divisor_{int(number)}", np.array(int(number), dtype=np.int64))
        return op.Div(dividend, integer)


class ReadScalar(_Rule):
    """Reading the number in a scalar is translated as reshaping the scalar and gathering an element: itself."""

    def pattern(self, op: Any, scalar: Any, shape: Any, index: Any) -> Any:
        return op.Gather(op.Reshape(scalar, shape), index)

    def check(self, op: Any, scalar: ir.Value, index: ir.Value, **unused: Any) -> MatchResult:
        are_scalars = all(value.shape is not None and len(value.shape) == 0 for value in (scalar, index))
        # A value gets the name of the one that it replaces, which an input must not.
        return _match_if(are_scalars and not scalar.is_graph_input(), "not a scalar that is computed")

    def rewrite(self, op: Any, scalar: ir.Value, **unused: Any) -> Any:
        return scalar


def _match_if(condition: bool, reason: str) -> MatchResult:
    """A match, or why there is none."""
    result = MatchResult()
    return result if condition else result.fail(reason)
