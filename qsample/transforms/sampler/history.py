"""The retained `tokens` enter; the ids of a row's history, and the tokens with this step's ids written, leave."""

from __future__ import annotations

import torch
from torch import Tensor


def history_ids(tokens: Tensor, start: Tensor, input_ids: Tensor, input_lengths: Tensor, length: int) -> Tensor:
    """Ids of every token of each row, this step's inputs included: [B, length + S] int64, padded with duplicates.

    Args:
        tokens: [B, T] int32, of which the unused tail repeats the row's first token; not read for a new row.
        start: [B, 1] int32, how many tokens each row holds already.
        input_ids: [B, S] int64, right-padded.
        input_lengths: [B, 1] int32, 1..S.
        length: how many columns of `tokens` to read: at least the largest `start` that matters.
    """
    filler = input_ids[:, :1]
    old = torch.where(start > 0, tokens[:, :length].to(torch.int64), filler)
    new = torch.where(_columns(input_ids.shape[1]) < input_lengths, input_ids, filler)
    return torch.cat([old, new], dim=1)


def writes(
    tokens: Tensor,
    start: Tensor,
    input_ids: Tensor,
    input_lengths: Tensor,
    next_ids: Tensor,
    advance: Tensor,
    emitted: Tensor,
    new: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What to scatter into `tokens`: this step's inputs and sampled tokens, and into a new row's tail its first token.

    One scatter, so that `tokens` may be updated in place. Every column writes something: those with nothing to record
    write the row's first token to position 0, where it stands already.

    Args:
        tokens: [B, T] int32.
        start: [B, 1] int32, the position of the first input.
        input_ids: [B, S] int64; input_lengths: [B, 1] int32, how many of them are real.
        next_ids: [B, 1] int64, the sampled token.
        advance: [B, 1] bool, rows that record their inputs.
        emitted: [B, 1] bool, rows that record `next_ids` as well; a subset of `advance`.
        new: [B, 1] bool, rows that advance from position 0; None: there is none.

    Returns positions, int64, and tokens, int32: [B, S + 1], or [B, S + 1 + T] with new rows.
    """
    batch, capacity = tokens.shape
    first = tokens[:, :1].to(torch.int64)
    inputs = torch.cat([input_ids, next_ids], dim=1)
    if new is not None:
        first = torch.where(new, input_ids[:, :1], first)
        inputs = torch.cat([inputs, first.expand(batch, capacity)], dim=1)
    columns = _columns(inputs.shape[1])
    positions = start + columns
    recorded = (columns < (input_lengths + emitted) * advance) & (positions < capacity)
    values = torch.where(columns == input_lengths, next_ids, inputs)
    values = torch.where(recorded, values, first).to(torch.int32)
    written = recorded if new is None else recorded | (new & (positions < capacity))
    return (positions * written).to(torch.int64), values


def _columns(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)[None]
