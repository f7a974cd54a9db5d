"""Data-dependent branches: an ONNX `If` when traced, plain Python when run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]

# The node that `branch` leaves in a graph traced under `inline_branches`: inputs predicate, then's results, otherwise's.
MARKER_DOMAIN = "qsample"
MARKER = "Branch"

_inline: ContextVar[bool] = ContextVar("_inline", default=False)


@contextmanager
def inline_branches() -> Iterator[None]:
    """Trace both sides of a branch in line, with a marker where they meet, for `exporters.branches` to make an `If` of.

    The graph is that of torch.cond, which traces a branch many times over: several times faster to export.
    """
    token = _inline.set(True)
    try:
        yield
    finally:
        _inline.reset(token)


def branch(
    predicate: Tensor, then: Callable[..., Tensors], otherwise: Callable[..., Tensors], operands: Tensors
) -> Tensors:
    """`then(*operands)` if `predicate` (scalar bool) holds, else `otherwise(*operands)`; only that one is computed.

    Both return tensors of the same shapes and dtypes, none of them an operand itself.
    """
    if not torch.compiler.is_exporting():
        return then(*operands) if bool(predicate) else otherwise(*operands)
    if not _inline.get():
        results: Tensors = torch.cond(predicate, then, otherwise, operands)
        return results
    yes, no = tuple(then(*operands)), tuple(otherwise(*operands))
    merged = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{MARKER}",
        [predicate, *yes, *no],
        dtypes=[tensor.dtype for tensor in yes],
        shapes=[tensor.shape for tensor in yes],
        version=1,
    )
    return tuple(merged)
