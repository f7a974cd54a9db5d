"""Draw each row's token: from the largest logits where they settle it, else from the whole vocabulary.

Both are exact. The K largest logits, the candidates, settle a row if the last of them is filtered out: then every token
that passes the filters is among them. A row without filters, or with a nucleus of more than K tokens, draws from the
whole vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsample.transforms.sampler import candidates, draw, filters, radix_search, sizes
from qsample.transforms.sampler.branching import Tensors, branch, option
from qsample.transforms.sampler.candidates import Chunks
from qsample.transforms.sampler.wide_nucleus import find_threshold

ALL_CANDIDATES = "all_candidates"  # the option of a vocabulary that has no token beyond them

_LEAST_WEIGHT = 1e-30  # of a nucleus: some token stays whatever top_p is


class Rows(NamedTuple):
    """What a random draw depends on besides the logits, one number a row.

    random: [B] bool, rows that draw; nothing is computed for the sake of another row, and its results have no meaning.
    maximum: [B] float32, the largest logit. temperature: [B] float32, positive in random rows. top_k: [B] int32, 0 =
    off. top_p: [B] float32, 1 = off. min_p: [B] float32, 0 = off. uniform: [B, 1] float32, in [0, 1).
    """

    random: Tensor
    maximum: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def weigh(self, logits: Tensor) -> Tensor:
        """The weights of logits [B, K] or [B, V]."""
        inverse = filters.inverse_temperature(self.temperature)
        return filters.weigh(logits, self.maximum[:, None], inverse[:, None])

    def has_top_k(self, vocab: int) -> Tensor:
        """Whether top-k drops any token: [B] bool."""
        return filters.kept_count(self.top_k) < vocab

    def keep(self, logits: Tensor, weights: Tensor, threshold: Tensor) -> Tensor:
        """`filters.keep` with the rows' min_p."""
        return filters.keep(logits, weights, threshold, self.min_p[:, None])


class Draw(NamedTuple):
    """token: [B, 1] int64. threshold: [B, 1] float32: the logits at or above it passed top-k and top-p.

    unsettled: [B] bool, random rows that need another way to draw.
    """

    token: Tensor
    threshold: Tensor
    unsettled: Tensor


def sample(logits: Tensor, chunks: Chunks, rows: Rows, num_candidates: int, greedy: Tensor) -> Draw:
    """Draw from each random row: from the candidates where they settle it, else from the whole vocabulary.

    Every step is under a branch that asks whether any row needs it; a batch of greedy rows takes none.

    Args:
        greedy: [B, 1] int64, the argmax: any token will do for rows that do not draw.
    """
    filtered = rows.random & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))

    def from_candidates() -> Tensors:
        needs_total = rows.random & (rows.top_p < 1) & ~rows.has_top_k(logits.shape[1])
        (total,) = branch(needs_total.any(), lambda: (_total_weight(chunks, rows),), lambda: (_no_weight(rows),))
        found = _from_candidates(chunks, total, rows, num_candidates, logits.shape[1])
        # A row without filters is drawn from the vocabulary where it is alone, and rounds alike beside others.
        return found._replace(unsettled=found.unsettled | (rows.random & ~filtered))

    # Where no row has a filter, the candidates settle none.
    first = Draw(*branch(filtered.any(), from_candidates, lambda: (greedy, rows.maximum[:, None], rows.random)))
    token, threshold = branch(first.unsettled.any(), lambda: _from_vocabulary(logits, rows, first), lambda: first[:2])
    return Draw(token, threshold, torch.zeros_like(rows.random))


def sample_without_branches(
    logits: Tensor, chunks: Chunks, rows: Rows, num_candidates: int, searched_rows: Tensor
) -> Draw:
    """Draw without control flow; rows with a top-k or a nucleus that goes beyond the candidates may stay unsettled.

    Those that are not among `searched_rows` do, and a few that are: see `radix_search`. Without top-k and top-p there
    is nothing to search: min-p is relative to the maximum, which is known.

    Args:
        searched_rows: [R] int64, in [0, B). The search costs in proportion to R, whatever the rows; none: nothing.
    """
    vocab = logits.shape[1]
    total = _total_weight(chunks, rows)
    first = _from_candidates(chunks, total, rows, num_candidates, vocab)

    def beyond() -> Tensors:
        weights = rows.weigh(logits)
        unknown = torch.where(rows.has_top_k(vocab) | (rows.top_p < 1), torch.inf, -torch.inf)[:, None]
        found = _radix_thresholds(logits, weights, total, rows, searched_rows)
        threshold = unknown.scatter(0, searched_rows[:, None], found)
        second = draw.draw_vocabulary(rows.keep(logits, weights, threshold), rows.uniform), threshold
        return *_settle(first, second), first.unsettled & (threshold == torch.inf)[:, 0]

    return Draw(*option(ALL_CANDIDATES, num_candidates >= vocab, lambda: first, beyond))


def _radix_thresholds(logits: Tensor, weights: Tensor, total: Tensor, rows: Rows, searched_rows: Tensor) -> Tensor:
    """The thresholds of the searched rows, [R, 1] float32: -inf where all tokens pass, +inf where it is not known.

    Args:
        weights: [B, V] float32. total: [B] float64, their sums.
    """
    columns = (rows.maximum, rows.temperature, rows.top_k, rows.top_p, total)
    maximum, temperature, top_k, top_p, total = (values[:, None].index_select(0, searched_rows) for values in columns)
    logits, weights = (values.index_select(0, searched_rows) for values in (logits, weights))
    keys = radix_search.make_keys(logits, maximum, temperature)
    kept_count = filters.kept_count(top_k)
    has_top_k, has_top_p = kept_count < logits.shape[1], top_p < 1

    wide = weights.to(torch.float64)
    count = kept_count.to(torch.float64)
    by_count = radix_search.find_threshold(logits, keys, torch.ones_like(wide), lambda tokens: count)

    def nucleus_weight(passed: Tensor) -> Tensor:
        whole = torch.where(has_top_k, passed, total)
        return (top_p.to(torch.float64) * whole).minimum(passed).clamp(min=_LEAST_WEIGHT)

    wide = torch.where(by_count.passed | ~has_top_k, wide, 0.0)
    by_weight = radix_search.find_threshold(logits, keys, wide, nucleus_weight)

    exact = (by_count.exact | ~has_top_k) & (by_weight.exact | ~has_top_p)
    top_k_threshold = torch.where(has_top_k, by_count.value, -torch.inf)
    top_p_threshold = torch.where(has_top_p, by_weight.value, -torch.inf)
    return torch.where(exact, torch.maximum(top_k_threshold, top_p_threshold), torch.inf)


def _from_candidates(chunks: Chunks, total: Tensor, rows: Rows, num_candidates: int, vocab: int) -> Draw:
    """Draw from the `num_candidates` largest logits.

    Args:
        total: [B] float64, the weight of the whole vocabulary; read where top_p is on and top_k is off.
    """
    values, ids = candidates.top_candidates(chunks, num_candidates)
    weights = rows.weigh(values)
    has_top_k = rows.has_top_k(vocab)
    top_k = filters.top_k_threshold(values, filters.kept_count(rows.top_k))
    passed_top_k = torch.where(values >= top_k, weights, 0.0)
    total = torch.where(has_top_k, passed_top_k.to(torch.float64).sum(-1), total)
    top_p = filters.nucleus_threshold(values, passed_top_k, filters.nucleus_weight(rows.top_p, total))
    threshold = torch.maximum(top_k, top_p)
    weights = rows.keep(values, weights, threshold)

    token = draw.draw_candidates(ids, weights, rows.uniform)

    def beyond() -> Tensors:
        # The last candidate tells of the tokens beyond. Where top-k comes before top-p it must fail top-k already:
        # survivors out of sight, ties or a larger k, make a nucleus of unknown size, since its normaliser is unknown.
        last = torch.where(has_top_k & (rows.top_p < 1), passed_top_k[:, -1], weights[:, -1])
        return (rows.random & (last > 0),)

    none_beyond = num_candidates >= vocab
    (unsettled,) = option(ALL_CANDIDATES, none_beyond, lambda: (torch.zeros_like(rows.random),), beyond)
    return Draw(token, threshold, unsettled)


def _from_vocabulary(logits: Tensor, rows: Rows, first: Draw) -> Tensors:
    """Token and threshold: those of `first` where it is settled, else of a draw from the whole vocabulary."""
    filtered = first.unsettled & (rows.has_top_k(logits.shape[1]) | (rows.top_p < 1) | (rows.min_p > 0))
    # The search serves rows without filters too; alone, they need none.
    second = Draw(*branch(filtered.any(), lambda: _with_search(logits, rows), lambda: _without_filters(logits, rows)))
    failed = (filtered & second.unsettled).any()
    third = branch(failed, lambda: _settle(second, _with_sort(logits, rows)), lambda: second[:2])
    return _settle(first, third)


def _settle(draw: Draw, other: Tensors) -> Tensors:
    """Token and threshold: the other ones in the rows that are unsettled."""
    unsettled = draw.unsettled[:, None]
    return tuple(torch.where(unsettled, new, old) for new, old in zip(other, draw[:2], strict=True))


def _with_search(logits: Tensor, rows: Rows) -> Draw:
    """Draw from the tokens of the whole vocabulary that pass the filters; unsettled where the search fails."""
    has_top_k = rows.has_top_k(logits.shape[1])
    kept_count = filters.kept_count(rows.top_k)
    sort_size = sizes.sort_size(logits.shape[1])

    def find_top_k() -> Tensors:
        largest = logits.topk(sort_size, dim=-1).values
        return (torch.where(has_top_k[:, None], filters.top_k_threshold(largest, kept_count), -torch.inf),)

    needs_top_k = (rows.random & has_top_k).any()
    (top_k,) = branch(needs_top_k, find_top_k, lambda: (torch.full_like(rows.uniform, -torch.inf),))
    weights = torch.where(logits >= top_k, rows.weigh(logits), 0.0)
    top_p, failed = find_threshold(logits, weights, rows.top_p, rows.maximum, rows.temperature, rows.random)
    threshold = torch.maximum(top_k, top_p)
    token = draw.draw_vocabulary(rows.keep(logits, weights, threshold), rows.uniform)
    unsettled = failed | (has_top_k & (kept_count > sort_size))
    return Draw(token, threshold, unsettled)


def _with_sort(logits: Tensor, rows: Rows) -> Tensors:
    """Draw from the whole vocabulary by way of a full sort: right for any data, and slow."""
    values = logits.sort(dim=-1, descending=True).values
    top_k = filters.whole_top_k_threshold(values, filters.kept_count(rows.top_k))
    weights = torch.where(values >= top_k, rows.weigh(values), 0.0)
    nucleus_weight = filters.nucleus_weight(rows.top_p, weights.to(torch.float64).sum(-1))
    threshold = torch.maximum(top_k, filters.nucleus_threshold(values, weights, nucleus_weight))
    weights = rows.keep(logits, rows.weigh(logits), threshold)
    return draw.draw_vocabulary(weights, rows.uniform), threshold


def _without_filters(logits: Tensor, rows: Rows) -> Draw:
    """Draw from the whole vocabulary, for rows without filters."""
    token = draw.draw_vocabulary(rows.weigh(logits), rows.uniform)
    return Draw(token, torch.full_like(rows.uniform, -torch.inf), torch.zeros_like(rows.random))


def _total_weight(chunks: Chunks, rows: Rows) -> Tensor:
    """The weight of the whole vocabulary, [B] float64."""
    inverse = filters.inverse_temperature(rows.temperature)
    weights = filters.weigh(chunks.values, rows.maximum[:, None, None], inverse[:, None, None])
    return weights.sum(-1).to(torch.float64).sum(-1)


def _no_weight(rows: Rows) -> Tensor:
    """Some [B] float64: no row reads it."""
    return rows.maximum.to(torch.float64)
