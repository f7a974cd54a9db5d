"""A graph as torch translated it enters; the same computation in fewer nodes leaves.

It stands in for `torch.onnx.export(optimize=True)`, which takes a number for 0 within 1e-8 and for 1 within 1e-5, and
drops what adds or multiplies by it: the eps of a norm, a scale close to 1. Here, only what changes nothing goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.pattern import Constant, RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules

_ROUNDS: Final = 2  # a rule makes constants, and folding these makes work for rules

# onnxscript's rules without those that round: batch norms into their neighbours, and its own of the no-ops below.
_RULES: Final = (
    rules.dropout_zero_rule,
    rules.dropout_inference_rule,
    rules.two_reshapes_matmul_reshape_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.min_min_rule,
    rules.max_max_rule,
    rules.min_max_rule,
    rules.max_min_rule,
    rules.successive_clip_relu_rule,
    rules.successive_relu_clip_rule,
    rules.successive_relu_rule,
    rules.successive_clip_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.flatten_to_reshape_rule,
    rules.reshape_reshape_rule,
    rules.slice_split_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.normalize_pad_format_conv_rule,
    rules.fuse_pad_into_conv_rule,
)


def simplify(model: ir.Model, output_names: list[str]) -> None:
    """Fold constants and remove what computes nothing, in place; the outputs are given their names.

    The names come last: an output that is an input, or another output, gets a node of its own on the way.
    """
    passes.InlinePass()(model)
    rewrite = RewritePass(RewriteRuleSet([*_exact_no_ops(), *_RULES]))
    for _ in range(_ROUNDS):
        folded = optimizer.fold_constants_ir(model, onnx_shape_inference=True).modified
        rewritten = rewrite(model).modified
        passes.RemoveUnusedNodesPass()(model)
        if not folded and not rewritten:
            break
    ir.passes.Sequential(
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)
    for value, name in zip(model.graph.outputs, output_names, strict=True):
        value.name = name


def _exact_no_ops() -> Iterator[RewriteRule]:
    """Sums with 0, differences with 0, products with 1 and quotients by 1: those numbers and no others."""

    def keep(op: Any, x: Any, **unused: Any) -> Any:
        return op.Identity(x)

    def rule(pattern: Callable[[Any, Any], Any]) -> RewriteRule:
        return RewriteRule(pattern, keep)

    zero, one = (Constant(number, rel_tol=0.0, abs_tol=0.0) for number in (0, 1))
    yield from rule(lambda op, x: x + zero).commute()
    yield from rule(lambda op, x: x * one).commute()
    yield rule(lambda op, x: x - zero)
    yield rule(lambda op, x: x / one)
