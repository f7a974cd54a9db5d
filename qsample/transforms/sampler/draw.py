"""Draw a token by inverse CDF in id order, from the weights of the tokens that passed the filters.

The weights are float32 and summed in float64, but for blocks of some hundred tokens of a whole vocabulary, whose order
of summation is fixed. So a token does not depend on the shape of the batch; whether it comes from the candidates or the
whole vocabulary matters only where u lies within float rounding of a boundary. Sums in float64 also make the draw safe
at its ends: u * total is below the total for every u <= 1 - 2**-24, so there is always a token of positive weight to
draw, and a token of zero weight never moves the running sum past the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsample.transforms.sampler import candidates, sizes

_LARGEST_UNIFORM = 1.0 - 2.0**-24


def draw_candidates(ids: Tensor, weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one of the candidates, [B, 1] int64.

    Args:
        ids: [B, K] int64, in any order.
        weights: [B, K] float32, >= 0, one of them positive.
        uniform: [B, 1] float32, in [0, 1).
    """
    ordered, order = ids.topk(ids.shape[1], dim=-1, largest=False)
    cumulative = weights.gather(1, order).to(torch.float64).cumsum(-1)
    above = cumulative > _target(uniform, cumulative[:, -1:])
    return torch.where(above, ordered, ordered[:, -1:]).amin(-1, keepdim=True)


def draw_vocabulary(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token of the whole vocabulary, [B, 1] int64, in two levels: a block, then a token of that block.

    Args:
        weights: [B, V] float32, >= 0, one of them positive.
        uniform: [B, 1] float32, in [0, 1).
    """
    block_size = sizes.block_size(weights.shape[1])
    blocks = candidates.blocks(weights, block_size, 0.0)
    sums = blocks.sum(-1).to(torch.float64)
    cumulative = sums.cumsum(-1)
    target = _target(uniform, cumulative[:, -1:])
    block = _first_above(cumulative, target)
    before = cumulative.gather(1, block) - sums.gather(1, block)

    inside = candidates.take_chunks(blocks, block)[:, 0]
    inside_cumulative = inside.to(torch.float64).cumsum(-1)
    # Rounding may leave the remainder just outside the block; its first or last token of positive weight is meant then.
    remainder = torch.minimum((target - before).clamp(min=0), inside_cumulative[:, -1:] * _LARGEST_UNIFORM)
    return block * block_size + _first_above(inside_cumulative, remainder)


def _target(uniform: Tensor, total: Tensor) -> Tensor:
    return uniform.to(torch.float64).clamp(max=_LARGEST_UNIFORM) * total


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first cumulative sum above the target, [B, 1] int64; the last index where there is none."""
    last = cumulative.shape[1] - 1
    return torch.where(cumulative > target, torch.arange(last + 1), last).amin(-1, keepdim=True)
