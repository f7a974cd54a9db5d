"""The exact maximum and the exact top K of logits, at little more than one pass over the vocabulary.

Chunked selection is exact: a token of a chunk that is not among the K with the largest maxima has K tokens, those
maxima, that are at least as large. Chosen chunks are put in ascending order so that ties go to the lowest id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_SUM_FACTOR = 2.0**-24


class Chunks(NamedTuple):
    """Logits cut into n chunks of C tokens.

    values: [B, n, C] float32, -inf beyond the vocabulary. maxima: [B, n] float32.
    """

    values: Tensor
    maxima: Tensor


def split(logits: Tensor, chunk_size: int) -> Chunks:
    """Cut logits [B, V] float32 into chunks of `chunk_size`."""
    values = blocks(logits, chunk_size, -torch.inf)
    return Chunks(values, values.amax(-1))


def blocks(values: Tensor, size: int, padding: float) -> Tensor:
    """[B, V] as [B, n, size]; padded, and so copied, only where V is no multiple of `size`."""
    batch, vocab = values.shape
    count = -(-vocab // size)
    if vocab % size:
        values = functional.pad(values, (0, count * size - vocab), value=padding)
    return values.reshape(batch, count, size)


def is_valid(chunks: Chunks, maximum: Tensor, *, one_product: bool = False) -> Tensor:
    """Whether a row holds neither NaN nor +inf, and some finite logit: [B] bool.

    A sum is NaN if one of its terms is, so a reduction finds NaN without an elementwise pass, and a product with a
    constant is the cheapest one. (ONNX Runtime's ReduceMax drops NaN.) The factor keeps the sum of up to 2**23
    finite logits finite, so the difference from the maximum is NaN where that is infinite, too: the sum is then of the
    same sign, or NaN already.

    Args:
        maximum: [B] float32, the largest of the maxima.
        one_product: of two matrices, as a graph that CUDA replays needs it: a batch of products takes its pointers from
            the host's memory. On the CPU the batch is twice as fast, because its rows are long.
    """
    batch, count, size = chunks.values.shape
    if one_product:
        sums = chunks.values @ torch.full((size, 1), _SUM_FACTOR)
    else:
        sums = torch.full((1, 1, size), _SUM_FACTOR) @ chunks.values.reshape(batch, size, count)  # any cut will do
    difference = sums.sum((-2, -1)) - maximum
    return difference == difference


def take_chunks(values: Tensor, indices: Tensor) -> Tensor:
    """Chunks `indices` ([B, k] int64) of `values` [B, n, C], copied whole: [B, k, C]."""
    batch, count, size = values.shape
    rows = torch.arange(batch)[:, None] * count
    return functional.embedding(indices + rows, values.reshape(batch * count, size))


def argmax(chunks: Chunks) -> Tensor:
    """The most likely token of each row, the lowest id of a tie: [B, 1] int64."""
    size = chunks.values.shape[2]
    best = chunks.maxima.argmax(-1, keepdim=True)
    inside = chunks.values.gather(1, best[:, :, None].expand(-1, 1, size)).argmax(-1)
    return best * size + inside


def top_candidates(chunks: Chunks, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The `num_candidates` largest logits, largest first, and their ids; at equal values the lowest ids.

    Returns values [B, K] float32 and ids [B, K] int64.
    """
    count, size = chunks.values.shape[1:]
    chosen = chunks.maxima.topk(min(num_candidates, count), dim=-1).indices
    chosen = chosen.topk(chosen.shape[1], dim=-1, largest=False).values
    pool = take_chunks(chunks.values, chosen).flatten(1)
    values, indices = pool.topk(num_candidates, dim=-1)
    rank = torch.div(indices, size, rounding_mode="floor")
    return values, (chosen.gather(1, rank) - rank) * size + indices
