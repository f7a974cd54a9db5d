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
from qsample.transforms.sampler.control import Tensors, branch
from qsample.transforms.sampler.threshold_search import find_threshold

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
    """Draw from each random row: in the narrow tier where it settles the row, else in the wide one.

    The branches stand side by side, each asking whether any row needs it, so that a batch of greedy rows takes none.
    They are not nested because tracing takes twice as long with every level.
    """
    vocab = logits.shape[1]
    filtered = rows.random & (_has_top_k(rows, vocab) | (rows.top_p < 1) | (rows.min_p > 0))
    needs_total = filtered & (rows.top_p < 1) & ~_has_top_k(rows, vocab)
    (total,) = branch(needs_total.any(), _total_weight, _no_weight, (chunks.values, rows.maximum, rows.temperature))

    def try_narrow(values: Tensor, maxima: Tensor, total: Tensor, *row: Tensor) -> Tensors:
        return narrow(Chunks(values, maxima), total, Rows(*row), num_candidates, vocab)

    def skip_narrow(values: Tensor, maxima: Tensor, total: Tensor, *row: Tensor) -> Tensors:
        return _no_draw(Rows(*row))

    draw_ = Draw(*branch(filtered.any(), try_narrow, skip_narrow, (*chunks, total, *rows)))
    searched, whole = filtered & ~draw_.settled, rows.random & ~filtered

    def keep(logits: Tensor, token: Tensor, threshold: Tensor, settled: Tensor, *row: Tensor) -> Tensors:
        return token.clone(), threshold.clone()

    def draw_filtered(logits: Tensor, token: Tensor, threshold: Tensor, settled: Tensor, *row: Tensor) -> Tensors:
        wide_token, wide_threshold = _wide_filtered(logits, Rows(*row))
        return torch.where(settled, token, wide_token), torch.where(settled, threshold, wide_threshold)

    def draw_whole(logits: Tensor, token: Tensor, threshold: Tensor, settled: Tensor, *row: Tensor) -> Tensors:
        wide_token, wide_threshold = _wide_whole(logits, Rows(*row))
        return torch.where(settled, token, wide_token), torch.where(settled, threshold, wide_threshold)

    needs_search = searched.any()
    operands = (logits, *draw_, *rows)
    token, threshold = branch(needs_search, draw_filtered, keep, operands)
    operands = (logits, token, threshold, draw_.settled, *rows)
    token, threshold = branch(whole.any() & ~needs_search, draw_whole, keep, operands)
    return Draw(token, threshold, torch.ones_like(rows.random))


def narrow(chunks: Chunks, total: Tensor, rows: Rows, num_candidates: int, vocab: int) -> Draw:
    """Draw from the `num_candidates` largest logits.

    Args:
        total: [B, 1] float64, the weight of the whole vocabulary; read where top_p is on and top_k is off.
    """
    values, ids = candidates.top_candidates(chunks, num_candidates)
    masses = filters.weights(values, rows.maximum, rows.temperature)
    top_k = filters.top_k_threshold(values, rows.top_k)
    masses = masses * (values >= top_k)
    has_top_k = _has_top_k(rows, vocab)
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


def narrow_only(chunks: Chunks, rows: Rows, num_candidates: int, vocab: int) -> Draw:
    """The narrow tier without control flow: `settled` is False where it takes the wide one."""
    (total,) = _total_weight(chunks.values, rows.maximum, rows.temperature)
    return narrow(chunks, total, rows, num_candidates, vocab)


def _wide_filtered(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Draw from the tokens of the whole vocabulary that pass the filters."""
    masses = filters.weights(logits, rows.maximum, rows.temperature)
    threshold = _search(logits, rows)
    token = draw.draw_vocabulary(masses * (logits >= threshold), rows.uniform, DRAW_BLOCK_SIZE)
    return token, threshold


def _wide_whole(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Draw from the whole vocabulary, for rows without filters."""
    masses = filters.weights(logits, rows.maximum, rows.temperature)
    token = draw.draw_vocabulary(masses, rows.uniform, DRAW_BLOCK_SIZE)
    return token, torch.full_like(rows.maximum, -torch.inf)


def _search(logits: Tensor, rows: Rows) -> Tensor:
    """The threshold of each row, [B, 1] float32: that of `narrow`, found over the whole vocabulary."""
    vocab = logits.shape[1]
    count = torch.where(_has_top_k(rows, vocab), rows.top_k, torch.inf).to(torch.float64)
    top_k = find_threshold(logits, torch.ones_like(logits), rows.maximum, count)
    masses = filters.weights(logits, rows.maximum, rows.temperature) * (logits >= top_k)
    limit = filters.nucleus_limit(rows.top_p, masses.to(torch.float64).sum(-1, keepdim=True))
    top_p = find_threshold(logits, masses, rows.maximum, limit)
    min_p = filters.min_p_threshold(rows.maximum, rows.temperature, rows.min_p)
    return torch.maximum(torch.maximum(top_k, top_p), min_p)


def _has_top_k(rows: Rows, vocab: int) -> Tensor:
    return (rows.top_k > 0) & (rows.top_k < vocab)


def _total_weight(values: Tensor, maximum: Tensor, temperature: Tensor) -> Tensors:
    """The weight of the whole vocabulary, [B, 1] float64; `values` [B, n, C] are the chunks."""
    masses = filters.weights(values, maximum[:, :, None], temperature[:, :, None])
    return (masses.sum(-1).to(torch.float64).sum(-1, keepdim=True),)


def _no_weight(values: Tensor, maximum: Tensor, temperature: Tensor) -> Tensors:
    return (torch.zeros_like(maximum, dtype=torch.float64),)


def _no_draw(rows: Rows) -> Draw:
    return Draw(
        torch.zeros_like(rows.top_k, dtype=torch.int64), torch.zeros_like(rows.maximum), torch.zeros_like(rows.random)
    )
