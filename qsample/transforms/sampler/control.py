"""Data-dependent branches and loops: `If` and `Loop` when traced, plain Python when run eagerly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops import while_loop

Tensors = tuple[Tensor, ...]


def branch(
    predicate: Tensor, then: Callable[..., Tensors], otherwise: Callable[..., Tensors], operands: Tensors
) -> Tensors:
    """`then(*operands)` if `predicate` (scalar bool) holds, else `otherwise(*operands)`; only that one is computed.

    Both return tensors of the same shapes and dtypes, none of them an operand itself.
    """
    if torch.compiler.is_exporting():
        results: Tensors = torch.cond(predicate, then, otherwise, operands)
        return results
    return then(*operands) if bool(predicate) else otherwise(*operands)


def repeat_while(condition: Callable[..., Tensor], body: Callable[..., Tensors], carried: Tensors) -> Tensors:
    """Replace `carried` by `body(*carried)` while `condition(*carried)` (scalar bool) holds.

    `body` returns tensors of the shapes and dtypes it takes.
    """
    if torch.compiler.is_exporting():
        results: Tensors = while_loop(condition, body, carried)
        return results
    while bool(condition(*carried)):
        carried = body(*carried)
    return carried
