"""Data-dependent branches: an ONNX `If` when traced, plain Python when run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]

# The node that `branch` leaves in a traced graph; inputs: the predicate, then's results, otherwise's results.
MARKER_DOMAIN = "qsample"
MARKER = "Branch"

_inline: ContextVar[bool] = ContextVar("_inline", default=False)


@contextmanager
def inline_branches() -> Iterator[None]:
    """Trace both sides of a branch in line, with a marker where they meet, of which `exporters.control_flow` makes an
    `If`.

    torch.cond would do without the second step, but traces a branch many times over, and twice that with every level.
    """
    token = _inline.set(True)
    try:
        yield
    finally:
        _inline.reset(token)


def branch(predicate: Tensor, then: Callable[[], Tensors], otherwise: Callable[[], Tensors]) -> Tensors:
    """`then()` if `predicate` (scalar bool) holds, else `otherwise()`; only that one is computed.

    Both return tensors of the same shapes and dtypes.
    """
    if not torch.compiler.is_exporting():
        return tuple(then() if bool(predicate) else otherwise())
    if not _inline.get():
        raise RuntimeError("export under inline_branches() and then call outline_branches()")
    yes, no = tuple(then()), tuple(otherwise())
    merged = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{MARKER}",
        [predicate, *yes, *no],
        dtypes=[tensor.dtype for tensor in yes],
        shapes=[tensor.shape for tensor in yes],
        version=1,
    )
    return tuple(merged)
