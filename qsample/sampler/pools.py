"""Pools from which the token of a row is drawn: the K likeliest tokens, or the whole vocabulary.

A pool has the shifted logits x = l - max of its tokens, and their weights, which are unnormalized
probabilities. Filters take tokens away. The two kinds of pools compute sums, thresholds and the
draw in different ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from qsample.sampler import blocks
from qsample.sampler.blocks import FLOOR, LARGEST_UNIFORM, Blocks
from qsample.sampler.search import Search, WeightedKeys
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    axis_size,
    constants,
    exp,
    log_of_column,
    maximum,
    minimum,
    op,
    top,
    where,
)

# exp(-105) is 0 in float32.
_WEIGHTLESS_LOG = 105.0
# Smaller logarithms belong to weights of 0.
_LEAST_LOG = -200.0
# All keys of a nucleus are above the negative of this.
_KEY_LIMIT = 400.0
# No weight reaches this.
WEIGHT_LIMIT = 3e38


class Pool(ABC):
    """Tokens to draw from, except those that filters took away.

    Attributes:
        x: float32, l - max of each token, at most 0.
        logs: float32, the logarithm of each token's weight, even if a filter took the token away.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.logs = x
        # Whether the likeliest token is among the remaining tokens for sure.
        self._top_stays = True
        self._all_weights: Tensor | None = None
        # The weights after the filters of `_kept`, if they were computed.
        self._weights: Tensor | None = None
        # bool: the tokens that the newest filters passed, which `_kept` does not contain yet.
        self._passed: Tensor | None = None
        # float32: 1 for each token that all earlier filters passed, 0 for other tokens.
        self._kept: Tensor | None = None
        # The weights and their total before `reweigh`.
        self._weights_before: Tensor | None = None
        self._total_before: Tensor | None = None

    @property
    def all_weights(self) -> Tensor:
        """The weights of all tokens, including those that were taken away: float32, at least 0.

        They are exp(x) before `heat`, and exp(x / t) after it.
        """
        if self._all_weights is None:
            self._all_weights = exp(self.logs)
        return self._all_weights

    @property
    def weights(self) -> Tensor:
        """The weights of the remaining tokens, and 0 for those that were taken away."""
        self._apply()
        if self._weights is None:
            weights = self.all_weights
            self._weights = weights if self._kept is None else weights * self._kept
        return self._weights

    def heat(self, inverse_temperature: Tensor) -> None:
        """Apply a temperature to the remaining tokens.

        Args:
            inverse_temperature: [B, 1] float32, positive.
        """
        self._apply()
        x = self.x
        if not self._top_stays:
            # Otherwise a low temperature would leave no weight at all.
            assert self._kept is not None
            largest = self.greatest(maximum(x, FLOOR) + (self._kept - 1.0) * -FLOOR)
            x = minimum(x - largest, 0.0)
        self.logs = x * self.row(inverse_temperature)
        self._all_weights = None
        self._weights = None

    def keep(self, passed: Tensor, *, top_stays: bool = True) -> None:
        """Take away all other tokens.

        Args:
            passed: the tokens that stay, bool in the shape of `x`.
            top_stays: whether the likeliest token is among them for sure.
        """
        self._passed = passed if self._passed is None else self._passed & passed
        self._top_stays = self._top_stays and top_stays

    def reweigh(self, weights: Tensor, applies: Tensor) -> None:
        """Replace the weights; to be called after all filters.

        Args:
            weights: the new weights, float32 in the shape of `x`.
            applies: [B, 1] bool, the rows whose weights are replaced.
        """
        self._weights_before = self.weights
        self._total_before = self.total()
        replaced = self.row(applies.to(FLOAT))
        self._weights = weights * replaced + self.weights * (1.0 - replaced)

    def _apply(self) -> None:
        """Take away the tokens that the newest filters did not pass."""
        if self._passed is None:
            return
        mask = self._passed.to(FLOAT)
        self._passed = None
        self._kept = mask if self._kept is None else self._kept * mask
        if self._weights is not None:
            self._weights = self._weights * mask

    def left(self) -> Tensor:
        """1 for each remaining token, even if its weight rounds to 0, and 0 for others: float32."""
        self._apply()
        unmasked = (self.x > FLOOR).to(FLOAT)
        return unmasked if self._kept is None else unmasked * self._kept

    def count(self) -> Tensor:
        """The number of remaining tokens: [B, 1] float32."""
        return self.sum(self.left())

    def share_of(self, token: Tensor) -> Tensor:
        """The probability of a token before `reweigh`: [B, 1] float32.

        Args:
            token: [B, 1] int64, a token of the pool.
        """
        if self._weights_before is None or self._total_before is None:
            weights = self.weights
            total = self.total()
        else:
            weights = self._weights_before
            total = self._total_before
        return self.at(weights, token) / total

    def entropy(self) -> Tensor:
        """The entropy -sum p ln p in nats: [B, 1] float32."""
        return log_of_column(self.total()) - self.mean_log()

    def mean_log(self) -> Tensor:
        """The mean of `logs` over the distribution: [B, 1] float32."""
        return self.sum(self.weights * maximum(self.logs, _LEAST_LOG)) / self.total()

    @abstractmethod
    def row(self, value: Tensor) -> Tensor:
        """A number of each row, [B, 1], with as many axes as `x`."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """The sum of each row, [B, 1]. values: float32 in the shape of `x`."""

    @abstractmethod
    def total(self) -> Tensor:
        """The weight of all remaining tokens, in the pool or not: [B, 1] float32."""

    @abstractmethod
    def least(self, values: Tensor) -> Tensor:
        """The smallest value of each row, with as many axes as `x`."""

    @abstractmethod
    def greatest(self, values: Tensor) -> Tensor:
        """The largest value of each row, with as many axes as `x`."""

    def largest_weight(self) -> Tensor | float:
        """The largest weight of each row, with as many axes as `x`."""
        return 1.0 if self._top_stays else self.greatest(self.weights)

    @abstractmethod
    def kth_largest(self, k: Tensor) -> Tensor:
        """The k-th largest x, with as many axes as `x`.

        Args:
            k: [B, 1] int32; for 0, which is off, the result is a number that every x passes.
        """

    @abstractmethod
    def nucleus(self, keys: Tensor | None, share: Tensor) -> Tensor:
        """The smallest key whose strictly larger keys weigh less than a share of the total.

        Args:
            keys: float32 in the shape of `x`, at most 0 and above -400; None for x.
            share: [B, 1] float32, in (0, 1); for 1, which is off, the result is a number that every
                key passes.

        Returns:
            A number of each row, with as many axes as `x`.
        """

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """A token of each row, drawn by inverse CDF in the order of ids: [B, 1] int64.

        Args:
            uniform: [B, 1] float32, in [0, 1).
        """

    @abstractmethod
    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest weights, largest first; of equal weights, those of the lowest ids.

        Args:
            count: M, how many tokens.

        Returns:
            The weights, [B, M] float32, and the ids of their tokens, [B, M] int64. Weights of 0 are
            of tokens that were taken away, or of none.
        """

    @abstractmethod
    def at(self, values: Tensor, token: Tensor) -> Tensor:
        """The value of a token: [B, 1].

        Args:
            values: numbers in the shape of `x`.
            token: [B, 1] int64, a token of the pool.
        """


class Candidates(Pool):
    """The K largest logits of each row, largest first: x is [B, K] float32.

    Attributes:
        ids: [B, K] int64, the ids of the logits.
    """

    def __init__(self, x: Tensor, ids: Tensor, complete: Tensor, whole: Tensor) -> None:
        """Make a pool of candidates.

        Args:
            x: [B, K] float32, l - max.
            ids: [B, K] int64, their ids.
            complete: [B, 1] bool, rows that cannot draw any other token.
            whole: [B, 1] float32, the weight of the whole vocabulary, read in other rows.
        """
        super().__init__(x)
        self.ids = ids
        self._complete = complete
        self._whole = whole

    def row(self, value: Tensor) -> Tensor:
        return value

    def sum(self, values: Tensor) -> Tensor:
        return values.cumsum().last()

    def total(self) -> Tensor:
        return where(self._complete, self.sum(self.weights), self._whole)

    def least(self, values: Tensor) -> Tensor:
        return values.min()

    def greatest(self, values: Tensor) -> Tensor:
        return values.max()

    def kth_largest(self, k: Tensor) -> Tensor:
        # If k is 0, the index is -1: the last candidate.
        return self.x.gather(minimum(k - 1, axis_size(self.x, 1) - 1))

    def nucleus(self, keys: Tensor | None, share: Tensor) -> Tensor:
        weights = self.weights
        descending = self.x
        if keys is not None:
            descending, order = top(keys, axis_size(keys, 1))
            weights = weights.gather(order)
        # Tied tokens pass or fail together: the cumulative weight before the first of them covers
        # exactly the larger keys.
        before = weights.cumsum(exclusive=True)
        limit = where(share < 1, share * self.total(), WEIGHT_LIMIT)
        return where(before < limit, descending, descending.columns(0, 1)).min()

    def draw(self, uniform: Tensor) -> Tensor:
        ordered, order = top(self.ids, axis_size(self.ids, 1), largest=False)
        sums = self.weights.gather(order).cumsum()
        above = sums > minimum(uniform, LARGEST_UNIFORM) * sums.last()
        return where(above, ordered, ordered.last()).min()

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        num_candidates = axis_size(self.ids, 1)
        by_id, order = top(self.ids, num_candidates, largest=False)
        weights, places = top(self.weights.gather(order), min(count, num_candidates))
        ids = by_id.gather(places)
        missing = [0, 0, 0, count - min(count, num_candidates)]
        return op("Pad", weights, missing), op("Pad", ids, missing)

    def at(self, values: Tensor, token: Tensor) -> Tensor:
        return self.sum(values * self.ids.equals(token).to(FLOAT))


class Vocabulary(Pool):
    """All tokens, in blocks: x is [B, n, C] float32."""

    def __init__(self, x: Tensor, searched: Tensor, search: Search) -> None:
        """Make a pool of the vocabulary.

        Args:
            x: [B, n, C] float32, l - max.
            searched: [B, 1] bool, the rows whose thresholds matter.
            search: finds the thresholds.
        """
        super().__init__(x)
        self._searched = searched
        self._search = search
        # Every x that weighs something is above this, [B, 1]; None before `heat`.
        self._lowest_x: Tensor | None = None

    def heat(self, inverse_temperature: Tensor) -> None:
        super().heat(inverse_temperature)
        self._lowest_x = op("Div", -_WEIGHTLESS_LOG, inverse_temperature)

    def row(self, value: Tensor) -> Tensor:
        return value.unsqueeze()

    def sum(self, values: Tensor) -> Tensor:
        return blocks.total(blocks.block_sums(values))

    def total(self) -> Tensor:
        return self.sum(self.weights)

    def least(self, values: Tensor) -> Tensor:
        return values.min(-2, -1)

    def greatest(self, values: Tensor) -> Tensor:
        return values.max(-2, -1)

    def kth_largest(self, k: Tensor) -> Tensor:
        return self.row(self._search.by_count(self.x, k.to(FLOAT), self._searched & (k > 0)))

    def nucleus(self, keys: Tensor | None, share: Tensor) -> Tensor:
        lowest = self._lowest_x if keys is None else None
        if lowest is None:
            lowest = share * 0.0 - _KEY_LIMIT
        highest = constants(share, 0.0) if keys is None else keys.max(-2, -1).squeeze()
        if keys is None:
            keys = self.x
        weighted = WeightedKeys(keys, self.weights, lowest, highest)
        return self.row(self._search.by_weight(weighted, share, self._searched & (share < 1)))

    def draw(self, uniform: Tensor) -> Tensor:
        """A token of each row, drawn in two levels: first a block, then a token of the block.

        Args:
            uniform: u, [B, 1] float32, in [0, 1).
        """
        sums = blocks.block_sums(self.weights)
        distance = blocks.distances(sums, uniform)

        # The target lies in the last block that starts at or before it: a block of weight 0 starts
        # together with the next block. In rows without weight, which draw nothing, even the padding
        # of the sums starts at the target, so the index is clipped.
        last_block = float(axis_size(self.x, 1) - 1)
        block = op("Clip", (distance >= 0).to(FLOAT).sum() - 1.0, 0.0, last_block).to(INT64)
        sums = blocks.take_block(self.weights, block).cumsum()
        # By rounding, the target may lie just after the block. Its last token of positive weight is
        # drawn then.
        remainder = minimum(distance.gather(block), sums.last() * LARGEST_UNIFORM)
        last_place = axis_size(self.x, 2) - 1.0
        place = minimum((sums <= remainder).to(FLOAT).sum(), last_place).to(INT64)
        return block * axis_size(self.x, 2) + place

    def likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        weights = self.weights
        in_blocks = Blocks(weights, weights.max(keep=False))
        return blocks.top_candidates(in_blocks, count)

    def at(self, values: Tensor, token: Tensor) -> Tensor:
        return blocks.joined(values).gather(token)
