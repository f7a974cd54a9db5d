"""The retained `tokens`: the ids of a row's history, and what a step writes."""

from __future__ import annotations

from qsample.sampler.tensor import INT32, INT64, Tensor, concat, maximum, minimum, op, size, where


def history_ids(tokens: Tensor, start: Tensor, input_ids: Tensor, input_lengths: Tensor, length: Tensor) -> Tensor:
    """Ids of every token of each row, this step's inputs included: [B, length + S] int64, padded with duplicates.

    Args:
        tokens: [B, T] int32, of which the unused tail repeats the row's first token; not read for a new row.
        start: [B, 1] int32, how many tokens each row holds already.
        input_ids: [B, S] int64, right-padded.
        input_lengths: [B, 1] int32, 1..S.
        length: int64, how many columns of `tokens` to read: at least the largest `start` that matters.
    """
    filler = input_ids.columns(0, 1)
    old = where(start > 0, tokens.columns(0, length).to(INT64), filler)
    new = where(_range(size(input_ids, 1)) < input_lengths, input_ids, filler)
    return concat(old, new)


def row_tokens(tokens: Tensor, start: Tensor, input_ids: Tensor, input_lengths: Tensor) -> Tensor:
    """Each row's tokens in their places, this step's inputs included: [B, T] int64.

    Args:
        tokens, start, input_ids, input_lengths: as for `history_ids`.
    """
    offset = _range(size(tokens, 1)) - start
    inside = (offset >= 0) & (offset < input_lengths)
    # Clip of int32 has no kernel on CUDA.
    columns = maximum(minimum(offset, size(input_ids, 1).to(INT32) - 1), 0).to(INT64)
    return where(inside, input_ids.gather(columns), tokens.to(INT64))


def writes(
    tokens: Tensor,
    capacity: Tensor,
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
        capacity: T, scalar int32.
        start: [B, 1] int32, the position of the first input.
        total: [B, 1] int32, the one after the last input.
        lengths: [B, 1] int32, `total` in rows that record their inputs, else `start`.
        input_ids: [B, S] int64.
        next_ids: [B, 1] int64, the sampled token.
        emitted: [B, 1] bool, rows that record `next_ids` as well.
        new: [B, 1] bool, rows that record inputs from position 0 on; None: there is none.

    Returns:
        Positions, int64, and tokens, int32: [B, S + 1], or [B, S + 1 + T] with new rows.
    """
    first = tokens.columns(0, 1)
    positions = start + _range(size(input_ids, 1))
    recorded = concat(positions < lengths, emitted)
    positions = concat(positions, total)
    values = concat(input_ids, next_ids).to(INT32)
    if new is not None:
        first = where(new, values.columns(0, 1), first)
        tail = lengths + emitted.to(INT32) + _range(size(tokens, 1))
        positions = concat(positions, tail)
        recorded = concat(recorded, new & (tail >= 0))
        values = concat(values, op("Expand", first, op("Shape", tokens)))
    recorded = recorded & (positions < capacity)
    return where(recorded, positions, 0).to(INT64), where(recorded, values, first)


def _range(count: Tensor) -> Tensor:
    """0, 1, … count - 1: [count] int32. count: [1] int64."""
    return op("Range", 0, op("Squeeze", count), 1).to(INT32)
