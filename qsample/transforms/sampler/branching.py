"""Branches: on data, an ONNX `If` when traced and plain Python when run eagerly; on what is known at export, Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from qsample.transforms.markers import BRANCH, MARKER_DOMAIN, OPTION, OPTION_NAME

Tensors = tuple[Tensor, ...]

_inline: ContextVar[bool] = ContextVar("_inline", default=False)
_keep_options: ContextVar[bool] = ContextVar("_keep_options", default=False)


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
        f"{MARKER_DOMAIN}::{BRANCH}",
        [predicate, *yes, *no],
        dtypes=[tensor.dtype for tensor in yes],
        shapes=[tensor.shape for tensor in yes],
        version=1,
    )
    return tuple(merged)


@contextmanager
def keep_options() -> Iterator[None]:
    """Trace both sides of an option, with a marker where they meet, for a template that has all of them."""
    token = _keep_options.set(True)
    try:
        yield
    finally:
        _keep_options.reset(token)


def option(name: str, wanted: bool, then: Callable[[], Tensors], otherwise: Callable[[], Tensors]) -> Tensors:
    """`then()` if `wanted`, which is known before the graph is traced, else `otherwise()`.

    name: what decides `wanted`, as `exporters.sampler` knows it.
    """
    if not _keep_options.get():
        return tuple(then() if wanted else otherwise())
    yes, no = tuple(then()), tuple(otherwise())
    merged = torch.onnx.ops.symbolic_multi_out(
        f"{MARKER_DOMAIN}::{OPTION}",
        [*yes, *no],
        {OPTION_NAME: name},
        dtypes=[tensor.dtype for tensor in yes],
        shapes=[tensor.shape for tensor in yes],
        version=1,
    )
    return tuple(merged)
