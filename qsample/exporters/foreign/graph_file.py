"""A decoder file enters; its graph leaves, without functions, or a line that says why it cannot be baked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.errors import QsampleError, UnsupportedModelError
from qsample.graph.operators import CONTRIB_DOMAIN

# Operators of ONNX Runtime for which a file may have functions.
_OPERATORS: Final = (
    *("CausalConvWithState", "LinearAttention"),
    *("SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "MatMulNBits"),
)
_MOST_NODES: Final = 50_000  # a graph of 100 layers has half of that


def load(path: Path) -> ir.Model:
    """The model in `path`, without functions, its constants as initializers; weights next to it stay mapped.

    A function may say what an operator of ONNX Runtime computes, for other runtimes: that stays an operator.
    """
    log = logging.getLogger("onnx_ir.serde")
    before, log.disabled = log.disabled, True  # it prints names as they are; what is wrong is refused below
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf has its own kinds
        raise UnsupportedModelError(f"{path} is not an ONNX file ({type(error).__name__}: {error!s:.200})") from error
    finally:
        log.disabled = before
    for domain, name, overload in list(model.functions):
        if domain == CONTRIB_DOMAIN and name in _OPERATORS:
            del model.functions[domain, name, overload]
    if model.functions:
        _inline(path, model)
    common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common_passes.RemoveUnusedNodesPass()(model)
    return model


@contextmanager
def graph_errors(path: Path) -> Iterator[None]:
    """Turn an error of the graph's libraries, or of a rewrite that meets an operator unlike its definition, into a
    refusal of the file."""
    try:
        yield
    except (QsampleError, OSError, MemoryError):
        raise
    except Exception as error:
        raise refusal(
            path, f"its graph is not as its operators are defined ({type(error).__name__}: {error!s:.200})"
        ) from (error)


def _inline(path: Path, model: ir.Model) -> None:
    """Put the bodies of functions in place of their calls."""
    calls = {
        name: Counter(node.op_identifier() for node in function.all_nodes())
        for name, function in model.functions.items()
    }
    sizes: dict[ir.OperatorIdentifier, int] = {}
    try:
        for name in TopologicalSorter(
            {name: called.keys() & calls.keys() for name, called in calls.items()}
        ).static_order():
            sizes[name] = sum(count * sizes.get(called, 1) for called, count in calls[name].items())
    except CycleError:
        raise refusal(path, "its functions call one another in a circle") from None
    total = sum(sizes.get(node.op_identifier(), 1) for node in model.graph.all_nodes())
    if total > _MOST_NODES:
        raise refusal(path, f"its functions stand for {total} nodes, and bake reads at most {_MOST_NODES}")
    try:
        common_passes.InlinePass()(model)
    except ValueError as error:
        raise refusal(path, f"its functions cannot be inlined ({' '.join(str(error).split())!s:.200})") from error


def refusal(path: Path, why: str) -> UnsupportedModelError:
    """An error of a single line: the file, and why it cannot be baked."""
    return UnsupportedModelError(f"{path} cannot be baked: {' '.join(why.split())}")
