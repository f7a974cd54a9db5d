"""The retained `tokens`: the ids of a row's history, and what a step writes."""

from __future__ import annotations

import torch
from torch import Tensor


def history_ids(tokens: Tensor, start: Tensor, input_ids: Tensor, input_lengths: Tensor, length: int) -> Tensor:
    """Ids of every token of each row, this step's inputs included: [B, length + S] int64, padded with duplicates.

    Args:
        tokens: [B, T] int32, of which the unused tail repeats the row's first token; not read for a new row.
        start: [B] int32, how many tokens each row holds already.
        input_ids: [B, S] int64, right-padded.
        input_lengths: [B] int32, 1..S.
        length: how many columns of `tokens` to read: at least the largest `start` that matters.
    """
    filler = input_ids[:, :1]
    old = torch.where((start > 0)[:, None], tokens[:, :length].to(torch.int64), filler)
    new = torch.where(_range(input_ids.shape[1]) < input_lengths[:, None], input_ids, filler)
    return torch.cat([old, new], dim=1)


def writes(
    tokens: Tensor,
    start: Tensor,
    total: Tensor,
    lengths: Tensor,
    input_ids: Tensor,
    next_ids: Tensor,
    emitted: Tensor,
    new: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What to scatter into `tokens`: this step's inputs and sampled tokens, and into a new row's tail its first token.

    One scatter, so that `tokens` may be updated in place. Every column writes something: those with nothing to record
    write the row's first token to position 0, where it stands already.

    Args:
        tokens: [B, T] int32.
        start: [B] int32, the position of the first input; total: [B] int32, the one after the last input.
        lengths: [B] int32, `total` in rows that record their inputs, else `start`.
        input_ids: [B, S] int64. next_ids: [B, 1] int64, the sampled token.
        emitted: [B] bool, rows that record `next_ids` as well.
        new: [B] bool, rows that record inputs from position 0 on; None: there is none.

    Returns positions, int64, and tokens, int32: [B, S + 1], or [B, S + 1 + T] with new rows.
    """
    batch, capacity = tokens.shape
    first = tokens[:, :1]
    positions = start[:, None] + _range(input_ids.shape[1])
    recorded = torch.cat([positions < lengths[:, None], emitted[:, None]], dim=1)
    positions = torch.cat([positions, total[:, None]], dim=1)
    values = torch.cat([input_ids, next_ids], dim=1).to(torch.int32)
    if new is not None:
        first = torch.where(new[:, None], values[:, :1], first)
        tail = (lengths + emitted)[:, None] + _range(capacity)
        positions = torch.cat([positions, tail], dim=1)
        recorded = torch.cat([recorded, new[:, None].expand(batch, capacity)], dim=1)
        values = torch.cat([values, first.expand(batch, capacity)], dim=1)
    recorded = recorded & (positions < capacity)
    return torch.where(recorded, positions, 0).to(torch.int64), torch.where(recorded, values, first)


def _range(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)
