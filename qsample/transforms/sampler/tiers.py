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
    maximum: float32, the largest logit. inverse_temperature: float32. last_rank: int64, of the last token that top-k
    keeps. has_top_k: bool, whether it drops any. top_p: float32, 1 = off. has_top_p: bool, whether it is on. min_p:
    float32, 0 = off. uniform: float32, in [0, 1).
    """

    random: Tensor
    maximum: Tensor
    inverse_temperature: Tensor
    last_rank: Tensor
    has_top_k: Tensor
    top_p: Tensor
    has_top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def weights(self, logits: Tensor) -> Tensor:
        return filters.weights(logits, self.maximum, self.inverse_temperature)


class Draw(NamedTuple):
    """token: [B, 1] int64. threshold: [B, 1] float32: the logits at or above it passed top-k and top-p.

    unsettled: [B, 1] bool, the row needs another way to draw.
    """

    token: Tensor
    threshold: Tensor
    unsettled: Tensor


def sample(logits: Tensor, chunks: Chunks, rows: Rows, num_candidates: int) -> Draw:
    """Draw from each random row: in the narrow tier where it settles the row, else in the wide one.

    Every step is under a branch that asks whether any row needs it; a batch of greedy rows takes none.
    """
    filtered = rows.random & (rows.has_top_k | rows.has_top_p | (rows.min_p > 0))

    def draw_narrow() -> Tensors:
        needs_total = filtered & rows.has_top_p & ~rows.has_top_k
        (total,) = branch(needs_total.any(), lambda: (_total_weight(chunks, rows),), lambda: (_no_weight(rows),))
        return narrow(chunks, total, rows, num_candidates, logits.shape[1])

    first = Draw(*branch(filtered.any(), draw_narrow, lambda: _no_draw(rows)))
    needs_wide = rows.random & first.unsettled
    token, threshold = branch(needs_wide.any(), lambda: _wide(logits, filtered, rows, first), lambda: first[:2])
    return Draw(token, threshold, torch.zeros_like(rows.random))


def narrow(chunks: Chunks, total: Tensor, rows: Rows, num_candidates: int, vocab: int) -> Draw:
    """Draw from the `num_candidates` largest logits.

    Args:
        total: [B, 1] float64, the weight of the whole vocabulary; read where top_p is on and top_k is off.
    """
    values, ids = candidates.top_candidates(chunks, num_candidates)
    masses = rows.weights(values)
    top_k = filters.top_k_threshold(values, rows.last_rank)
    passed_top_k = masses * (values >= top_k)
    kept_weight = torch.where(rows.has_top_k, passed_top_k.to(torch.float64).sum(-1, keepdim=True), total)
    limit = filters.nucleus_limit(rows.top_p, rows.has_top_p, kept_weight)
    top_p = filters.nucleus_threshold(values, passed_top_k, limit)
    threshold = torch.maximum(top_k, top_p)
    masses = filters.keep(values, masses, threshold, rows.min_p)

    token = draw.draw_candidates(ids, masses, rows.uniform)
    if num_candidates >= vocab:
        return Draw(token, threshold, torch.zeros_like(rows.random))
    # The last candidate tells of the tokens beyond. Where top-k comes before top-p it must fail top-k already:
    # survivors out of sight, ties or a larger k, make a nucleus of unknown size, since its normaliser is unknown.
    told = torch.where(rows.has_top_k & rows.has_top_p, passed_top_k[:, -1:], masses[:, -1:])
    return Draw(token, threshold, told > 0)


def narrow_only(chunks: Chunks, rows: Rows, num_candidates: int, vocab: int) -> Draw:
    """The narrow tier without control flow: a row stays unsettled where it takes the wide one."""
    return narrow(chunks, _total_weight(chunks, rows), rows, num_candidates, vocab)


def _wide(logits: Tensor, filtered: Tensor, rows: Rows, first: Draw) -> Tensors:
    """Token and threshold: those of `first` where it is settled, else of a draw from the whole vocabulary.

    filtered: [B, 1] bool, rows that some filter applies to.
    """
    searched = filtered & first.unsettled
    # The search serves rows without filters too; alone, they need none.
    second = Draw(*branch(searched.any(), lambda: _wide_searched(logits, rows), lambda: _wide_whole(logits, rows)))
    failed = searched & second.unsettled
    third = branch(failed.any(), lambda: _replaced(second, _wide_sorted(logits, rows)), lambda: second[:2])
    return _replaced(first, third)


def _replaced(draw: Draw, other: Tensors) -> Tensors:
    """Token and threshold: the other ones in the rows that are unsettled."""
    return tuple(torch.where(draw.unsettled, new, old) for new, old in zip(other, draw[:2], strict=True))


def _wide_searched(logits: Tensor, rows: Rows) -> Draw:
    """Draw from the tokens of the whole vocabulary that pass the filters, where the threshold search succeeds."""

    def find_top_k() -> Tensors:
        largest = logits.topk(min(SORT_SIZE, logits.shape[1]), dim=-1).values
        return (filters.top_k_threshold(largest, rows.last_rank),)

    needs_top_k = (rows.random & rows.has_top_k).any()
    (top_k,) = branch(needs_top_k, find_top_k, lambda: (torch.full_like(rows.maximum, -torch.inf),))
    masses = rows.weights(logits) * (logits >= top_k)
    total = total_mass(masses)
    limit = filters.nucleus_limit(rows.top_p, rows.has_top_p, total)
    top_p = find_threshold(logits, masses, initial_bracket(rows.maximum, total), limit.minimum(total))
    top_p = torch.where(rows.has_top_p, top_p, -torch.inf)
    # A lighter token may belong to the nucleus where what is kept weighs too little.
    too_light = rows.has_top_p & (total_mass(masses * (logits >= top_p)) < limit)

    threshold = torch.maximum(top_k, top_p)
    token = draw.draw_vocabulary(filters.keep(logits, masses, threshold, rows.min_p), rows.uniform)
    return Draw(token, threshold, too_light | (rows.has_top_k & (rows.last_rank >= SORT_SIZE)))


def _wide_sorted(logits: Tensor, rows: Rows) -> Tensors:
    """Draw from the whole vocabulary by way of a full sort: right for any data, and slow."""
    values = logits.sort(dim=-1, descending=True).values
    top_k = filters.top_k_threshold(values, rows.last_rank)
    masses = rows.weights(values) * (values >= top_k)
    limit = filters.nucleus_limit(rows.top_p, rows.has_top_p, masses.to(torch.float64).sum(-1, keepdim=True))
    threshold = torch.maximum(top_k, filters.nucleus_threshold(values, masses, limit))
    masses = filters.keep(logits, rows.weights(logits), threshold, rows.min_p)
    return draw.draw_vocabulary(masses, rows.uniform), threshold


def _wide_whole(logits: Tensor, rows: Rows) -> Draw:
    """Draw from the whole vocabulary, for rows without filters."""
    token = draw.draw_vocabulary(rows.weights(logits), rows.uniform)
    return Draw(token, torch.full_like(rows.maximum, -torch.inf), torch.zeros_like(rows.random))


def _total_weight(chunks: Chunks, rows: Rows) -> Tensor:
    """The weight of the whole vocabulary, [B, 1] float64."""
    masses = filters.weights(chunks.values, rows.maximum[:, :, None], rows.inverse_temperature[:, :, None])
    return masses.sum(-1).to(torch.float64).sum(-1, keepdim=True)


def _no_weight(rows: Rows) -> Tensor:
    return torch.zeros_like(rows.maximum, dtype=torch.float64)


def _no_draw(rows: Rows) -> Draw:
    return Draw(torch.zeros_like(rows.last_rank), torch.zeros_like(rows.maximum), torch.ones_like(rows.random))
