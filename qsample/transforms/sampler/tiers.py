"""Adjusted logits and the filter parameters enter; the drawn token and the survivors' threshold leave.

Two tiers, exact both. Narrow: the K largest logits settle the row when the survivors are among them, which shows in the
last candidate being filtered out. Wide: everything over the whole vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler import candidates, draw, filters
from qsample.transforms.sampler.candidates import Chunks
from qsample.transforms.sampler.control import branch

DRAW_BLOCK_SIZE = 128  # splits the vocabulary for the two-level draw


class Rows(NamedTuple):
    """What a random draw depends on besides the logits, each [B, 1].

    random: bool, rows that draw; nothing is computed for the sake of another row, and what it gets is of no meaning.
    maximum: float32, the largest logit. temperature: float32, > 0. top_k: int32, 0 = off. top_p: float32, 1 = off.
    min_p: float32, 0 = off. uniform: float32, in [0, 1).
    """

    random: Tensor
    maximum: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


class Draw(NamedTuple):
    """token: [B, 1] int64. threshold: [B, 1] float32, tokens survived iff their logit is at least this.

    settled: [B, 1] bool, whether the two are right; the wide tier always is.
    """

    token: Tensor
    threshold: Tensor
    settled: Tensor


def sample(logits: Tensor, chunks: Chunks, rows: Rows, num_candidates: int) -> Draw:
    """Draw from each random row, in the narrow tier where it settles the row, else in the wide one."""
    vocab = logits.shape[1]
    filtered = rows.random & (_has_top_k(rows, vocab) | (rows.top_p < 1) | (rows.min_p > 0))

    def try_narrow(values: Tensor, maxima: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
        return narrow(Chunks(values, maxima), Rows(*row), num_candidates, vocab)

    def skip_narrow(values: Tensor, maxima: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
        return undrawn(Rows(*row))

    draw_ = Draw(*branch(filtered.any(), try_narrow, skip_narrow, (*chunks, *rows)))

    def keep(logits: Tensor, filtered: Tensor, token: Tensor, threshold: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return token.clone(), threshold.clone()

    def go_wide(
        logits: Tensor, filtered: Tensor, token: Tensor, threshold: Tensor, settled: Tensor, *row: Tensor
    ) -> tuple[Tensor, ...]:
        wide_token, wide_threshold = wide(logits, filtered & ~settled, Rows(*row))
        return torch.where(settled, token, wide_token), torch.where(settled, threshold, wide_threshold)

    settled = draw_.settled | ~rows.random
    operands = (logits, filtered, draw_.token, draw_.threshold, settled, *rows)
    token, threshold = branch(settled.all(), keep, go_wide, operands)
    return Draw(token, threshold, torch.ones_like(settled))


def narrow(chunks: Chunks, rows: Rows, num_candidates: int, vocab: int, *, control_flow: bool = True) -> Draw:
    """Draw from the `num_candidates` largest logits.

    control_flow: compute the normaliser of the whole vocabulary only if some row's nucleus is measured by it.
    """
    has_top_k = _has_top_k(rows, vocab)
    needs_total = rows.random & ~has_top_k & (rows.top_p < 1)

    def compute_total(values: Tensor, maximum: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        return (_total_weight(values, maximum, temperature),)

    def skip_total(values: Tensor, maximum: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        return (torch.ones_like(maximum, dtype=torch.float64),)

    operands = (chunks.values, rows.maximum, rows.temperature)
    total = (branch(needs_total.any(), compute_total, skip_total, operands) if control_flow else compute_total(*operands))[0]

    values, ids = candidates.top_candidates(chunks, num_candidates)
    masses = filters.weights(values, rows.maximum, rows.temperature)
    top_k = filters.top_k_threshold(values, rows.top_k)
    masses = masses * (values >= top_k)
    kept_weight = torch.where(has_top_k, masses.to(torch.float64).sum(-1, keepdim=True), total)
    top_p = filters.nucleus_threshold(values, masses, filters.nucleus_limit(rows.top_p, kept_weight))
    min_p = filters.min_p_threshold(rows.maximum, rows.temperature, rows.min_p)
    threshold = torch.maximum(torch.maximum(top_k, top_p), min_p)
    masses = masses * (values >= threshold)

    token = draw.draw_candidates(ids, masses, rows.uniform)
    if num_candidates >= vocab:
        return Draw(token, threshold, torch.ones_like(has_top_k))
    # The nucleus of a top_k beyond the candidates has a normaliser that they do not give.
    unknown = has_top_k & (rows.top_k > num_candidates) & (rows.top_p < 1)
    return Draw(token, threshold, (masses[:, -1:] == 0) & ~unknown)


def wide(logits: Tensor, searching: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Draw from the whole vocabulary. `searching` [B, 1] bool: rows that some filter applies to.

    Returns the token [B, 1] int64 and the threshold [B, 1] float32.
    """
    masses = filters.weights(logits, rows.maximum, rows.temperature)

    def search(logits: Tensor, masses: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
        threshold = _search(logits, Rows(*row))
        return masses * (logits >= threshold), threshold

    def keep_all(logits: Tensor, masses: Tensor, *row: Tensor) -> tuple[Tensor, ...]:
        return masses.clone(), torch.full_like(Rows(*row).maximum, -torch.inf)

    masses, threshold = branch(searching.any(), search, keep_all, (logits, masses, *rows))
    return draw.draw_vocabulary(masses, rows.uniform, DRAW_BLOCK_SIZE), threshold


def _search(logits: Tensor, rows: Rows) -> Tensor:
    """The threshold of each row, [B, 1] float32."""
    values = logits.sort(dim=-1, descending=True).values
    top_k = filters.top_k_threshold(values, rows.top_k)
    masses = filters.weights(values, rows.maximum, rows.temperature) * (values >= top_k)
    limit = filters.nucleus_limit(rows.top_p, masses.to(torch.float64).sum(-1, keepdim=True))
    threshold = torch.maximum(top_k, filters.nucleus_threshold(values, masses, limit))
    return torch.maximum(threshold, filters.min_p_threshold(rows.maximum, rows.temperature, rows.min_p))


def _has_top_k(rows: Rows, vocab: int) -> Tensor:
    return (rows.top_k > 0) & (rows.top_k < vocab)


def _total_weight(values: Tensor, maximum: Tensor, temperature: Tensor) -> Tensor:
    """The weight of the whole vocabulary, [B, 1] float64; `values` [B, n, C] are the chunks."""
    masses = filters.weights(values, maximum[:, :, None], temperature[:, :, None])
    return masses.sum(-1).to(torch.float64).sum(-1, keepdim=True)


def undrawn(rows: Rows) -> Draw:
    token = torch.zeros_like(rows.top_k, dtype=torch.int64)
    return Draw(token, torch.zeros_like(rows.maximum), torch.zeros_like(rows.random))
