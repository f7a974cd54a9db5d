"""A torch module over named tensors enters; its ONNX graph, simplified, with the contract's names
and axes, leaves."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.pattern import Constant, RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules
from torch import Tensor, nn
from torch.onnx import OnnxExporterError

from qsample.contract.interface import GraphSpec
from qsample.contract.tensors import BATCH, CAPACITY, IMAGE_TOKENS, SEQUENCE, TensorSpec
from qsample.errors import UnsupportedModelError
from qsample.exporters.repetition import NotRepeatedError, Repetition, open_weights, repeat_layers
from qsample.graph.edit import cast, put_behind
from qsample.graph.operators import OPSET
from qsample.transforms.decoder import linear_layers_marked
from qsample.transforms.markers import ADAPTED_PATH
from qsample.transforms.repeated_layers import DecoderLayers, find_repeated_layers, standing_in

_logger = logging.getLogger(__name__)
# Every dynamic axis is traced at two or more: torch.export specialises an axis of size 1. They all
# differ, so that two axes that merely look alike are kept apart.
_TRACE_SIZES: Final = {BATCH: 2, SEQUENCE: 3, CAPACITY: 32, IMAGE_TOKENS: 5}
_MAX_REASON_CHARACTERS: Final = 400
_FLOAT: Final = ir.DataType.FLOAT
_BFLOAT16: Final = ir.DataType.BFLOAT16
# The operators that ONNX Runtime's CPU has for bfloat16.
_BFLOAT16_OPERATORS: Final = (
    "Cast",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Identity",
    "Transpose",
)
_ROUNDS: Final = 2  # a rule makes constants, and folding these makes work for rules

# onnxscript's rules except the rules that round: batch norms into their neighbours, and its version
# of `_exact_no_ops`.
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


class _InOrder(nn.Module):
    """Calls a module that maps names to tensors, and returns its results in the order of the graph.

    Attributes:
        output_names: the names of the results in order.
        copied: the names that are no inputs of the graph → the input whose tensor the module gets
            for them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.output_names: list[str] = []
        self.copied: Mapping[str, str] = {}

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        copies = {name: inputs[like] for name, like in self.copied.items()}
        results = self.module({**inputs, **copies})
        return tuple(results[name] for name in self.output_names)


def trace(
    module: nn.Module,
    spec: GraphSpec,
    sizes: Mapping[str, int],
    layers: DecoderLayers | None = None,
    *,
    adapted: bool = False,
    examples: Mapping[str, Tensor] = MappingProxyType({}),
) -> ir.Model:
    """Export `module` to an ONNX model with the inputs and outputs of `spec`; the weights stay in
    the module's memory.

    Args:
        module: a module whose `forward(inputs)` maps a dict of all `spec.input_names` to a dict of
            all `spec.output_names`.
        spec: the inputs, states and outputs of the graph.
        sizes: the size of each named axis that the model fixes (`Interface.sizes`).
        layers: the module's layers; only the first of equal layers is traced. None traces
            everything.
        adapted: whether each linear layer is followed by a marker for `lowering.adapt_layers`.
        examples: the inputs of the trace by name; named axes without an entry in `sizes` are free.

    Raises:
        UnsupportedModelError: no static graph can express the module.
    """
    root = _InOrder(module).eval()
    with linear_layers_marked(root) if adapted else nullcontext():
        model = None if layers is None else _trace_first_layers(root, spec, sizes, layers)
        if model is None:
            model = _export(root, spec, sizes, examples=examples)
            simplify(model)
    marked = marked_paths(model)
    finish(model, spec.output_names)
    compute_in_float32(model)
    # torch's notes on each node are most of the file, and name folders of this machine.
    passes.ClearMetadataAndDocStringPass()(model)
    for node, path in marked.items():
        node.metadata_props[ADAPTED_PATH] = path.removeprefix("module.")
    return model


def marked_paths(model: ir.Model) -> dict[ir.Node, str]:
    """The markers of linear layers, with the layers' names."""
    nodes = (node for node in model.graph.all_nodes() if ADAPTED_PATH in node.metadata_props)
    return {node: node.metadata_props[ADAPTED_PATH] for node in nodes}


def _trace_first_layers(
    root: _InOrder, spec: GraphSpec, sizes: Mapping[str, int], layers: DecoderLayers
) -> ir.Model | None:
    """The whole graph, from a trace of the first of equal layers; None if no layer can be a copy of
    another."""
    groups = find_repeated_layers(root, layers)
    if not groups:
        return None
    weights: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
    weights.update(root.named_buffers(remove_duplicate=False))
    repetition = Repetition(groups, layers, weights)
    copied = repetition.copied_states()
    traced = replace(spec, states=tuple(state for state in spec.states if state.name not in copied))
    try:
        with standing_in(root, groups, layers.context) as stand_ins:
            model = _export(root, traced, sizes, copied)
        if stand_ins.difference is not None:
            raise NotRepeatedError(stand_ins.difference)
        opened = open_weights(model, repetition)
        simplify(model)
        repeat_layers(model, repetition, opened, traced, spec)
    except (NotRepeatedError, UnsupportedModelError) as error:
        _logger.debug("every layer is traced: %s", error)
        return None
    # Nodes that depend only on weights become constants.
    optimizer.fold_constants_ir(model, onnx_shape_inference=False)
    return model


def _export(
    root: _InOrder,
    spec: GraphSpec,
    sizes: Mapping[str, int],
    copied: Mapping[str, str] = MappingProxyType({}),
    examples: Mapping[str, Tensor] = MappingProxyType({}),
) -> ir.Model:
    """The graph of `root` as torch writes it.

    copied: see `_InOrder`. examples: see `trace`.
    """
    root.output_names = spec.output_names
    root.copied = copied
    given = (*spec.inputs, *spec.states)
    inputs = {
        **{one.name: _example(one, sizes) for one in given if one.name not in examples},
        **examples,
    }
    # torch.export finds out by itself if the size of another axis has to be a multiple of a number.
    free = {
        axis
        for tensor in given
        for axis in tensor.axes
        if isinstance(axis, str) and axis not in sizes
    }
    dims = {
        axis: torch.export.Dim(axis) if axis in _TRACE_SIZES else torch.export.Dim.DYNAMIC
        for axis in free
    }
    shapes = {
        tensor.name: {i: dims[axis] for i, axis in enumerate(tensor.axes) if axis in dims}
        for tensor in given
    }
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        _without_torchvision_notice(),
        _without_graphs_of_failures(),
    ):
        # The exporter warns of deprecations in its own code, which no user can act on.
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                root,
                kwargs={"inputs": inputs},
                dynamo=True,
                dynamic_shapes={"inputs": shapes},
                input_names=spec.input_names,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
            )
        except OnnxExporterError as error:
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split())[:_MAX_REASON_CHARACTERS]
            raise UnsupportedModelError(
                f"the model does something that ONNX or torch.export cannot express: {type(cause).__name__}: {reason}; "
                "docs/architectures.md lists the model types that can be exported"
            ) from error
    if program is None:  # only the legacy exporter returns None
        raise RuntimeError("torch.onnx.export returned no program")
    return program.model


def compute_in_float32(model: ir.Model) -> bool:
    """Compute in float32, and round, everything that `model` computes in bfloat16, in place;
    returns whether anything changed.

    The CPU has no such kernels, and even a float32 Falcon computes its biases by distance in
    bfloat16."""
    modified = False
    for node in list(model.graph.all_nodes()):
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        if (
            node.domain
            or node.op_type in _BFLOAT16_OPERATORS
            or all(value.dtype != _BFLOAT16 for value in values)
        ):
            continue
        modified = True
        assert node.graph is not None
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == _BFLOAT16:
                node.replace_input_with(index, cast(value, _FLOAT, node))
        for value in node.outputs:
            if value.dtype == _BFLOAT16:
                put_behind(value, "Cast", attributes={"to": _BFLOAT16}, dtype=_BFLOAT16)
                value.type = ir.TensorType(_FLOAT)
    return modified


@contextmanager
def _without_torchvision_notice() -> Iterator[None]:
    """The exporter reports each of torchvision's operators as not installed. Language models use
    none of them."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("torchvision is not installed")

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@contextmanager
def _without_graphs_of_failures() -> Iterator[None]:
    """Before it raises, torch prints the code of its trace: thousands of lines, for a refusal of a
    single line."""
    import torch.export._trace as module

    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    module.print = lambda *values, **options: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        vars(module).pop("print", None)
        logger.setLevel(level)


def _example(spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    """A tensor of the spec's dtype and shape: an empty cache, or all 1: a valid id, length and
    scale."""
    shape = spec.shape({**_TRACE_SIZES, **sizes})
    value = 0 if CAPACITY in spec.axes else 1
    return torch.full(shape, value, dtype=getattr(torch, spec.dtype))


def simplify(model: ir.Model) -> None:
    """Fold constants and remove nodes that compute nothing, in place."""
    passes.InlinePass()(model)
    rewrite = RewritePass(RewriteRuleSet([*_exact_no_ops(), *_RULES]))
    for _ in range(_ROUNDS):
        folded = optimizer.fold_constants_ir(model, onnx_shape_inference=True).modified
        rewritten = rewrite(model).modified
        passes.RemoveUnusedNodesPass()(model)
        if not folded and not rewritten:
            break


def finish(model: ir.Model, output_names: list[str]) -> None:
    """Make constants initializers, and equal constants and nodes one, in place; the outputs get
    their names last: an output that is an input, or another output, gets a separate node on the
    way."""
    ir.passes.Sequential(
        passes.RemoveUnusedNodesPass(),
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
    """Sums with 0, differences with 0, products with 1 and quotients by 1, and no other numbers."""

    def keep(op: Any, x: Any, **unused: Any) -> Any:
        return op.Identity(x)

    def rule(pattern: Callable[[Any, Any], Any]) -> RewriteRule:
        return RewriteRule(pattern, keep)

    zero, one = (Constant(number, rel_tol=0.0, abs_tol=0.0) for number in (0, 1))
    yield from rule(lambda op, x: x + zero).commute()
    yield from rule(lambda op, x: x * one).commute()
    yield rule(lambda op, x: x - zero)
    yield rule(lambda op, x: x / one)
