"""Pools from which a row's token is drawn: the K likeliest tokens, or the whole vocabulary.

A pool holds its tokens' shifted logits x = l - max and their weights, unnormalized probabilities. A filter takes
tokens away. The two kinds find sums, thresholds and the draw in different ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from qsample.sampler import blocks
from qsample.sampler.blocks import FLOOR
from qsample.sampler.search import Search, WeightedKeys
from qsample.sampler.tensor import (
    FLOAT,
    INT64,
    Tensor,
    axis_size,
    constants,
    exp,
    log,
    maximum,
    minimum,
    op,
    top,
    where,
)

_LARGEST_UNIFORM = 1.0 - 2.0**-24  # u * total < total, in float32 as well
_WEIGHTLESS = 105.0  # exp(-105) is 0 in float32
_LEAST_LOG = -200.0  # of a weight that is not 0
_LOWEST_KEY = 400.0
_NO_LIMIT = 3e38  # more than any weight
_ROUNDS_TO_8_BITS = 1.5 * 2.0**15  # added to a number below 1 and taken off again


class Pool(ABC):
    """Tokens to draw from, less the tokens that filters took away. x: float32, l - max of each token, at most 0. logs:
    float32, the logarithm of each token's weight, whether a filter took it away or not."""

    def __init__(self, x: Tensor) -> None:
        self.x = self.logs = x
        self._top_stays = True
        self._all_weights: Tensor | None = None
        self._weights: Tensor | None = None
        self._passed: Tensor | None = None  # of the filters since then
        self._kept: Tensor | None = None  # 1 for each token that passed all of them, 0 for the rest
        self._before: tuple[Tensor, Tensor] | None = (
            None  # the weights and their total before `reweigh`
        )

    @property
    def all_weights(self) -> Tensor:
        """float32, at least 0: exp(x) before `heat`, exp(x / t) after it; also of tokens that were taken away."""
        if self._all_weights is None:
            self._all_weights = exp(self.logs)
        return self._all_weights

    @property
    def weights(self) -> Tensor:
        """The same, but 0 for tokens that were taken away."""
        self._apply()
        if self._weights is None:
            self._weights = (
                self.all_weights if self._kept is None else self.all_weights * self._kept
            )
        return self._weights

    def heat(self, inverse_temperature: Tensor) -> None:
        """Apply a temperature to the tokens that are left. inverse_temperature: [B, 1] float32, positive."""
        self._apply()
        x = self.x
        if not self._top_stays:  # or a low temperature would leave no weight at all
            assert self._kept is not None
            x = minimum(x - self.greatest(maximum(x, FLOOR) + (self._kept - 1.0) * -FLOOR), 0.0)
        self.logs = x * self.row(inverse_temperature)
        self._all_weights, self._weights = None, None

    def keep(self, passed: Tensor, *, top_stays: bool = True) -> None:
        """Take away all tokens but `passed`, bool like `x`. top_stays: whether the likeliest token always passes."""
        self._passed = passed if self._passed is None else self._passed & passed
        self._top_stays = self._top_stays and top_stays

    def reweigh(self, weights: Tensor, applies: Tensor) -> None:
        """Draw by `weights`, like `x`, in rows with `applies`, [B, 1] bool; to be called after all filters."""
        self._before, on = (self.weights, self.total()), self.row(applies.to(FLOAT))
        self._weights = weights * on + self.weights * (1.0 - on)

    def _apply(self) -> None:
        """Take the tokens away that the latest filters did not pass."""
        if self._passed is not None:
            mask, self._passed = self._passed.to(FLOAT), None
            self._kept = mask if self._kept is None else self._kept * mask
            self._weights = None if self._weights is None else self._weights * mask

    def left(self) -> Tensor:
        """1 for each token that is left and 0 for the rest, float32; a weight may round to 0, too."""
        self._apply()
        unmasked = (self.x > FLOOR).to(FLOAT)
        return unmasked if self._kept is None else unmasked * self._kept

    def count(self) -> Tensor:
        """How many tokens are left, [B, 1] float32."""
        return self.sum(self.left())

    def share_of(self, token: Tensor) -> Tensor:
        """The probability of a token, [B, 1] int64 in the pool, before `reweigh`: [B, 1] float32."""
        weights, total = self._before or (self.weights, self.total())
        return self.at(weights, token) / total

    def entropy(self) -> Tensor:
        """-sum p ln p in nats, [B, 1] float32."""
        return log(self.total()) - self.mean_log()

    def mean_log(self) -> Tensor:
        """The mean of `logs` over the distribution, [B, 1] float32."""
        return self.sum(self.weights * maximum(self.logs, _LEAST_LOG)) / self.total()

    @abstractmethod
    def row(self, value: Tensor) -> Tensor:
        """[B, 1] in the rank of `x`."""

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Of the shape of `x`; gives [B, 1]."""

    @abstractmethod
    def total(self) -> Tensor:
        """The weight of all tokens that are left, in the pool or not: [B, 1] float32."""

    @abstractmethod
    def least(self, values: Tensor) -> Tensor:
        """The smallest value of each row, in the rank of `x`."""

    @abstractmethod
    def greatest(self, values: Tensor) -> Tensor:
        """The largest value of each row, in the rank of `x`."""

    def largest_weight(self) -> Tensor | float:
        """In the rank of `x`."""
        return 1.0 if self._top_stays else self.greatest(self.weights)

    @abstractmethod
    def kth_largest(self, k: Tensor) -> Tensor:
        """The k-th largest x, in the rank of `x`. k: [B, 1] int32; 0 = off: a number that every x passes."""

    @abstractmethod
    def nucleus(self, keys: Tensor | None, share: Tensor) -> Tensor:
        """The smallest key whose strictly larger keys weigh less than `share` of the total, in the rank of `x`. keys:
        float32 of the shape of `x`, at most 0 and more than -400; by default x. share: [B, 1] float32, in (0, 1); 1 is
        off: a number that every key passes."""

    @abstractmethod
    def draw(self, uniform: Tensor) -> Tensor:
        """Draw by inverse CDF in id order: [B, 1] int64. uniform: [B, 1] float32, in [0, 1)."""

    @abstractmethod
    def at(self, values: Tensor, token: Tensor) -> Tensor:
        """The value, [B, 1], of a token, [B, 1] int64 in the pool. values: of the shape of `x`."""


class Candidates(Pool):
    """The K largest logits, x [B, K] float32, largest first, and their ids [B, K] int64."""

    def __init__(self, x: Tensor, ids: Tensor, complete: Tensor, whole: Tensor) -> None:
        """complete: [B, 1] bool, rows that cannot draw any other token. whole: [B, 1] float32, the weight of the whole
        vocabulary; read in other rows that have top-p."""
        super().__init__(x)
        self.ids = ids
        self._complete, self._whole = complete, whole

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
        return self.x.gather(minimum(k - 1, axis_size(self.x, 1) - 1))  # of off, -1: the last

    def nucleus(self, keys: Tensor | None, share: Tensor) -> Tensor:
        weights, descending = self.weights, self.x
        if keys is not None:
            descending, order = top(keys, axis_size(keys, 1))
            weights = weights.gather(order)
        # Of tied tokens the first decides for all: the weight of the strictly larger tokens precedes it exactly.
        before = weights.cumsum(exclusive=True)
        limit = where(share < 1, share * self.total(), _NO_LIMIT)
        return where(before < limit, descending, descending.columns(0, 1)).min()

    def draw(self, uniform: Tensor) -> Tensor:
        ordered, order = top(self.ids, axis_size(self.ids, 1), largest=False)
        sums = self.weights.gather(order).cumsum()
        above = sums > minimum(uniform, _LARGEST_UNIFORM) * sums.last()
        return where(above, ordered, ordered.last()).min()

    def at(self, values: Tensor, token: Tensor) -> Tensor:
        return self.sum(values * self.ids.equals(token).to(FLOAT))


class Vocabulary(Pool):
    """All tokens: x [B, n, C] float32, in blocks."""

    def __init__(self, x: Tensor, searched: Tensor, search: Search, *, replayed: bool) -> None:
        """searched: [B, 1] bool, rows whose thresholds matter; `search` finds them. replayed: the graph is captured."""
        super().__init__(x)
        self._searched, self._search, self._replayed = searched, search, replayed
        self._lowest: Tensor | None = None

    def heat(self, inverse_temperature: Tensor) -> None:
        super().heat(inverse_temperature)
        self._lowest = op("Div", -_WEIGHTLESS, inverse_temperature)

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
        lowest = self._lowest if keys is None else None
        if lowest is None:
            lowest = share * 0.0 - _LOWEST_KEY
        highest = constants(share, 0.0) if keys is None else keys.max(-2, -1).squeeze()
        if keys is None:
            keys = self.x
        weighted = WeightedKeys(keys, self.weights, lowest, highest)
        return self.row(self._search.by_weight(weighted, share, self._searched & (share < 1)))

    def draw(self, uniform: Tensor) -> Tensor:
        """In two levels: a block, then a token of that block. u times the total needs more than the 24 bits of a
        float32. So block sums are split into a high part, whose sums are exact in any order, and a low part; u is split
        into its first 8 bits and the other 16. The difference between u times the total and the blocks before each is
        then off by about 2e-10 of the total."""
        high, low = _split(blocks.aligned(blocks.block_sums(self.weights)))
        u = minimum(uniform, _LARGEST_UNIFORM)
        u_high = (u + _ROUNDS_TO_8_BITS) - _ROUNDS_TO_8_BITS
        total_high = high.sum()
        target_low = (u - u_high) * total_high + u * low.sum()
        beyond = (u_high * total_high - high.cumsum(exclusive=True)) + (
            target_low - low.cumsum(exclusive=True)
        )

        # The last block that begins at or before the target: a block of weight 0 begins together with the next. In rows
        # without weight, which draw nothing, the padding of the sums does so as well.
        last = float(axis_size(self.x, 1) - 1)
        block = op("Clip", (beyond >= 0).to(FLOAT).sum() - 1.0, 0.0, last).to(INT64)
        inside = blocks.take_block(self.weights, block, replayed=self._replayed).cumsum()
        # Rounding may leave the remainder just outside the block; its last token of positive weight is meant then.
        remainder = minimum(beyond.gather(block), inside.last() * _LARGEST_UNIFORM)
        place = minimum((inside <= remainder).to(FLOAT).sum(), axis_size(self.x, 2) - 1.0).to(INT64)
        return block * axis_size(self.x, 2) + place

    def at(self, values: Tensor, token: Tensor) -> Tensor:
        return values.reshape(0, -1).gather(token)


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts that sum to the values [B, n] exactly: multiples of about 2**-15 of their sum, and the rest. Adding a
    number rounds to its last bit, and taking it off again is exact: Rump, Ogita and Oishi, "Accurate floating-point
    summation", SIAM J. Sci. Comput. 31(1), 2008."""
    unit = values.sum() * 256.0
    high = (values + unit) - unit
    return high, values - high
