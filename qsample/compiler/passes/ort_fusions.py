"""Fuses a graph into ONNX Runtime's own operators for one provider.

This is the only module that touches transformers' private fusion passes, which is why transformers is pinned to 5.23.
Where it is not installed, the fusions of onnxscript that a decode graph is left to gain from do: of norms, activations
and transposed products. transformers' know more kinds of attention that a model writes out itself.

transformers' run onnxscript's optimizer, which takes a number for 0 within 1e-8 and for 1 within 1e-5 and drops what
adds or multiplies by it: a norm's eps, a scale close to 1, the factor below 1 of the sampler's draw. It does not see
those numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes
from onnxscript import optimizer
from onnxscript.rewriter.ort_fusions.bias_gelu import fuse_bias_gelu
from onnxscript.rewriter.ort_fusions.erfgelu import fuse_erfgelu
from onnxscript.rewriter.ort_fusions.fused_matmul_rule_sets import fused_matmul_rule_sets
from onnxscript.rewriter.ort_fusions.gelu import fuse_gelu
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import (
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
)

from qsample.graph.edit import all_initializers, constant, initializer
from qsample.tensors import Array

FUSION_PROVIDERS = ("cpu", "cuda")
_FUSIONS: Final[tuple[Callable[[ir.Model], Any], ...]] = (
    fuse_erfgelu,
    fuse_rms_normalization,
    fuse_skip_layer_normalization,
    fuse_skip_rms_normalization,
    fuse_gelu,
    fuse_bias_gelu,
)
# What onnxscript's patterns take for a number, unless they say otherwise.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8


def fuse_operators(model: ir.Model, provider: str) -> bool:
    """Fuse norms, skip-norms, rotary embeddings and projections of one input, in place. Returns whether the graph has
    other nodes than before.

    provider: one of FUSION_PROVIDERS; ValueError otherwise.
    """
    if provider not in FUSION_PROVIDERS:
        raise ValueError(f"no fusions for provider {provider!r}; choose one of {', '.join(FUSION_PROVIDERS)}")
    nodes = list(model.graph)
    fuse_rms_normalization(model)  # before its eps is hidden
    with _near_numbers_hidden(model):
        try:
            from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime
        except ImportError:
            fuse_without_transformers(model)
        else:
            fuse_for_onnxruntime(model, provider)
    return list(model.graph) != nodes


def fuse_without_transformers(model: ir.Model) -> None:
    """Fuse norms with their skips, activations, and products with transposed or scaled matrices, in place."""
    optimizer.fold_constants_ir(model, onnx_shape_inference=True)
    for fuse in _FUSIONS:
        fuse(model)
    fused_matmul_rule_sets().apply_to_model(model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.DeduplicateInitializersPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)


@contextmanager
def _near_numbers_hidden(model: ir.Model) -> Iterator[None]:
    """While open, scalars that are almost 0 or 1 are inputs of the graph, which no rewrite knows the numbers of."""
    graph = model.graph
    hidden: dict[ir.Value, Array] = {}
    for value in all_initializers(graph):
        number = _near_number(value)
        if number is not None:
            stand_in = ir.Value(name=f"{value.name}_exact", shape=value.shape, type=value.type)
            value.replace_all_uses_with(stand_in)
            hidden[stand_in] = number
    graph.inputs.extend(hidden)
    try:
        yield
    finally:
        for stand_in, number in hidden.items():
            graph.inputs.remove(stand_in)
            stand_in.replace_all_uses_with(initializer(graph, str(stand_in.name), number))


def _near_number(value: ir.Value) -> Array | None:
    """The number of a scalar that the optimizer would take for another one; None for any other value."""
    if value.dtype is None or not value.dtype.is_floating_point() or value.shape is None or len(value.shape):
        return None
    number = constant(value)
    if number is None:
        return None
    near = (math.isclose(number, exact, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) and number != exact for exact in (0, 1))
    return number if any(near) else None
