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
from qsample.transforms.sampler.threshold_search import SORT_SIZE, find_threshold, initial_bracket, total_mass


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

    Every step is under a branch that asks whether any row needs it; a batch of greedy rows takes none.
    """
    vocab = logits.shape[1]
    filtered = rows.random & (_has_top_k(rows, vocab) | (rows.top_p < 1) | (rows.min_p > 0))

    def draw_random() -> Tensors:
        needs_total = filtered & (rows.top_p < 1) & ~_has_top_k(rows, vocab)

        def draw_narrow() -> Tensors:
            (total,) = branch(needs_total.any(), lambda: (_total_weight(chunks, rows),), lambda: (_no_weight(rows),))
            return narrow(chunks, total, rows, num_candidates, vocab)

        first = Draw(*branch(filtered.any(), draw_narrow, lambda: _no_draw(rows)))
        needs_wide = (rows.random & ~first.settled).any()
        return branch(needs_wide, lambda: _wide(logits, filtered, rows, first)[:2], lambda: first[:2])

    token, threshold = branch(rows.random.any(), draw_random, lambda: _no_draw(rows)[:2])
    return Draw(token, threshold, torch.ones_like(rows.random))


def narrow(chunks: Chunks, total: Tensor, rows: Rows, num_candidates: int, vocab: int) -> Draw:
    """Draw from the `num_candidates` largest logits.

    Args:
        total: [B, 1] float64, the weight of the whole vocabulary; read where top_p is on and top_k is off.
    """
    values, ids = candidates.top_candidates(chunks, num_candidates)
    masses = filters.weights(values, rows.maximum, rows.temperature)
    top_k = filters.top_k_threshold(values, rows.top_k)
    passed_top_k = masses * (values >= top_k)
    has_top_k = _has_top_k(rows, vocab)
    kept_weight = torch.where(has_top_k, passed_top_k.to(torch.float64).sum(-1, keepdim=True), total)
    top_p = filters.nucleus_threshold(values, passed_top_k, filters.nucleus_limit(rows.top_p, kept_weight))
    min_p = filters.min_p_threshold(rows.maximum, rows.temperature, rows.min_p)
    threshold = torch.maximum(torch.maximum(top_k, top_p), min_p)
    masses = masses * (values >= threshold)

    token = draw.draw_candidates(ids, masses, rows.uniform)
    if num_candidates >= vocab:
        return Draw(token, threshold, torch.ones_like(has_top_k))
    # Top-k survivors beyond the candidates, ties or a larger k, make a nucleus of unknown size: its normaliser is.
    unknown = has_top_k & (rows.top_p < 1) & (passed_top_k[:, -1:] > 0)
    return Draw(token, threshold, (masses[:, -1:] == 0) & ~unknown)


def narrow_only(chunks: Chunks, rows: Rows, num_candidates: int, vocab: int) -> Draw:
    """The narrow tier without control flow: `settled` is False where it takes the wide one."""
    return narrow(chunks, _total_weight(chunks, rows), rows, num_candidates, vocab)


def _wide(logits: Tensor, filtered: Tensor, rows: Rows, first: Draw) -> Draw:
    """`first` where it is settled, else a draw from the whole vocabulary.

    filtered: [B, 1] bool, rows that some filter applies to.
    """
    searched = filtered & ~first.settled
    # The search serves rows without filters too; alone, they need none.
    second = Draw(*branch(searched.any(), lambda: _wide_searched(logits, rows), lambda: _wide_whole(logits, rows)))
    failed = searched & ~second.settled
    third = Draw(*branch(failed.any(), lambda: _first_settled(second, _wide_sorted(logits, rows)), lambda: second))
    return _first_settled(first, third)


def _first_settled(first: Draw, second: Draw) -> Draw:
    return Draw(
        torch.where(first.settled, first.token, second.token),
        torch.where(first.settled, first.threshold, second.threshold),
        first.settled | second.settled,
    )


def _wide_searched(logits: Tensor, rows: Rows) -> Draw:
    """Draw from the tokens of the whole vocabulary that pass the filters, where the threshold search succeeds."""
    vocab = logits.shape[1]
    has_top_k = _has_top_k(rows, vocab)

    def find_top_k() -> Tensors:
        return (filters.top_k_threshold(logits.topk(min(SORT_SIZE, vocab), dim=-1).values, rows.top_k),)

    needs_top_k = (rows.random & has_top_k).any()
    (top_k,) = branch(needs_top_k, find_top_k, lambda: (torch.full_like(rows.maximum, -torch.inf),))
    masses = filters.weights(logits, rows.maximum, rows.temperature) * (logits >= top_k)
    total = total_mass(masses)
    limit = filters.nucleus_limit(rows.top_p, total)
    top_p = find_threshold(logits, masses, initial_bracket(rows.maximum, total), limit.minimum(total))
    top_p = torch.where(rows.top_p < 1, top_p, -torch.inf)
    # No lighter token belongs to the nucleus where what is kept weighs enough.
    found = (total_mass(masses * (logits >= top_p)) >= limit) | (rows.top_p >= 1)

    min_p = filters.min_p_threshold(rows.maximum, rows.temperature, rows.min_p)
    threshold = torch.maximum(torch.maximum(top_k, top_p), min_p)
    token = draw.draw_vocabulary(masses * (logits >= threshold), rows.uniform)
    return Draw(token, threshold, found & ~(has_top_k & (rows.top_k > SORT_SIZE)))


def _wide_sorted(logits: Tensor, rows: Rows) -> Draw:
    """Draw from the whole vocabulary by way of a full sort: right for any data, and slow."""
    values = logits.sort(dim=-1, descending=True).values
    top_k = filters.top_k_threshold(values, rows.top_k)
    masses = filters.weights(values, rows.maximum, rows.temperature) * (values >= top_k)
    limit = filters.nucleus_limit(rows.top_p, masses.to(torch.float64).sum(-1, keepdim=True))
    threshold = torch.maximum(top_k, filters.nucleus_threshold(values, masses, limit))
    threshold = torch.maximum(threshold, filters.min_p_threshold(rows.maximum, rows.temperature, rows.min_p))
    masses = filters.weights(logits, rows.maximum, rows.temperature) * (logits >= threshold)
    return Draw(draw.draw_vocabulary(masses, rows.uniform), threshold, torch.ones_like(rows.random))


def _wide_whole(logits: Tensor, rows: Rows) -> Draw:
    """Draw from the whole vocabulary, for rows without filters."""
    masses = filters.weights(logits, rows.maximum, rows.temperature)
    token = draw.draw_vocabulary(masses, rows.uniform)
    return Draw(token, torch.full_like(rows.maximum, -torch.inf), torch.ones_like(rows.random))


def _has_top_k(rows: Rows, vocab: int) -> Tensor:
    return (rows.top_k > 0) & (rows.top_k < vocab)


def _total_weight(chunks: Chunks, rows: Rows) -> Tensor:
    """The weight of the whole vocabulary, [B, 1] float64."""
    masses = filters.weights(chunks.values, rows.maximum[:, :, None], rows.temperature[:, :, None])
    return masses.sum(-1).to(torch.float64).sum(-1, keepdim=True)


def _no_weight(rows: Rows) -> Tensor:
    return torch.zeros_like(rows.maximum, dtype=torch.float64)


def _no_draw(rows: Rows) -> Draw:
    return Draw(
        torch.zeros_like(rows.top_k, dtype=torch.int64), torch.zeros_like(rows.maximum), torch.zeros_like(rows.random)
    )
