"""The retained `tokens` enter; the ids of a row's history, and the tokens with this step's ids written, leave."""

from __future__ import annotations

import torch
from torch import Tensor


def history_ids(tokens: Tensor, start: Tensor, input_ids: Tensor, input_lengths: Tensor, length: int) -> Tensor:
    """Ids of every token of each row, this step's inputs included: [B, length + S] int64, padded with duplicates.

    Args:
        tokens: [B, T] int32; the first `start` of each row are read.
        start: [B, 1] int32, how many tokens each row holds already.
        input_ids: [B, S] int64, right-padded.
        input_lengths: [B, 1] int32, 1..S.
        length: how many columns of `tokens` to read: at least the largest `start` that matters.
    """
    filler = input_ids[:, :1]
    old = torch.where(_columns(length) < start, tokens[:, :length].to(torch.int64), filler)
    new = torch.where(_columns(input_ids.shape[1]) < input_lengths, input_ids, filler)
    return torch.cat([old, new], dim=1)


def write_tokens(
    tokens: Tensor,
    start: Tensor,
    input_ids: Tensor,
    input_lengths: Tensor,
    next_ids: Tensor,
    advance: Tensor,
    emitted: Tensor,
    fill: int,
) -> Tensor:
    """Record this step's inputs and sampled tokens; a new row's tail is filled with its first token.

    One scatter, so that `tokens` may be updated in place. Positions that must not change get a write too, one that
    changes nothing: the first input again, or the value that is there.

    Args:
        tokens: [B, T] int32.
        start: [B, 1] int32, the position of the first input.
        input_ids: [B, S] int64; input_lengths: [B, 1] int32, how many of them are real.
        next_ids: [B, 1] int64, the sampled token.
        advance: [B, 1] bool, rows that record their inputs.
        emitted: [B, 1] bool, rows that record `next_ids` as well; a subset of `advance`.
        fill: T if some row is new (start == 0), else 0.
    """
    capacity = tokens.shape[1]
    first = input_ids[:, :1]
    advance = advance & (start < capacity)
    offsets = _columns(input_ids.shape[1] + 1 + fill)
    padding = first.expand(input_ids.shape[0], 1 + fill)
    is_input, is_next = offsets < input_lengths, (offsets == input_lengths) & emitted
    values = torch.where(is_input, torch.cat([input_ids, padding], dim=1), torch.where(is_next, next_ids, first))
    positions = start + offsets
    writes = advance & (is_input | is_next | (start == 0)) & (positions < capacity)

    home = start.clamp(max=capacity - 1).to(torch.int64)
    unchanged = torch.where(advance, first, tokens.gather(1, home).to(torch.int64))
    positions = torch.where(writes, positions.to(torch.int64), home)
    return tokens.scatter(1, positions, torch.where(writes, values, unchanged).to(torch.int32))


def _columns(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)[None]
