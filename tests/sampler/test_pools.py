"""Both pools over the same tokens: sums and thresholds against NumPy, and the draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.sampler.pools import Candidates, Pool, Vocabulary
from qsample.sampler.replay_draw import FlatVocabulary, SmallTopK
from qsample.sampler.search import PivotSearch, SortedSearch
from qsample.sampler.tensor import INT64, Tensor, Tensors, constant
from tests.helpers.computed import computed

Array = np.ndarray
ROWS, VOCAB, SIZE = 6, 320, 64
RNG = np.random.default_rng(0)
X = np.round(RNG.normal(size=(ROWS, VOCAB)) * 4, 1).astype(np.float32)
X[2, ::3] = -np.inf
X[4] = -np.inf
X[4, 100:105] = [1, 1, 0, 1, 1]
X -= X.max(1, keepdims=True)
INVERSE = np.float32([[1], [0.5], [2], [100], [1.5], [1e-3]])
FIRST = X < -0.5  # takes away the likeliest
FIRST[[0, 4]] = True
ALSO, AND = (np.broadcast_to(np.arange(VOCAB) % n != 1, X.shape) for n in (7, 11))
SECOND = np.broadcast_to(np.arange(VOCAB) % 5 > 0, X.shape)
PROBES = np.array([[9], [8], [7], [6], [102], [4]])  # tokens that are left in the end


def ask_both(
    function: Callable[[Pool, Callable[[Array], Tensor]], Tensors],
    x: Array = X,
    *,
    captured: bool = False,
) -> list[list[Array]]:
    """The results of `function` for each pool over x [B, V], and a function that brings [B, V] into the pool's form."""
    order = np.argsort(-x, axis=1, kind="stable")
    blocks = (-1, x.shape[1] // SIZE, SIZE)

    def candidates(x: Tensor) -> Tensors:
        ones = constant(np.ones((len(order), 1), bool))
        ids, whole = constant(order), constant(np.zeros((len(order), 1), np.float32))
        pool = SmallTopK(x, ids, is_whole=True) if captured else Candidates(x, ids, ones, whole)
        return function(pool, lambda array: constant(np.take_along_axis(array, order, 1)))

    def vocabulary(x: Tensor) -> Tensors:
        searched = constant(np.ones((len(order), 1), bool))
        pool: Vocabulary
        if captured:
            search = SortedSearch(constant(np.arange(len(order))), for_webgpu=False)
            pool = FlatVocabulary(x, searched, search, for_webgpu=False)
        else:
            pool = Vocabulary(x, searched, PivotSearch())
        return function(pool, lambda array: constant(array.reshape(blocks)))

    floor = np.maximum(np.take_along_axis(x, order, 1), np.float32(-3e38))
    return [computed(candidates, floor), computed(vocabulary, x.reshape(blocks))]


def expected_weights(*masks: Array, inverse: Array | float = 1.0) -> Array:
    """[B, V] float64: of the tokens that the first mask leaves at a temperature, without those of the other masks."""
    kept = masks[0] if masks else np.ones_like(X, bool)
    x = X - np.where(kept, X, -np.inf).max(1, keepdims=True)
    weights = np.exp(x.astype(np.float64) * inverse) * kept
    for mask in masks[1:]:
        weights = weights * mask
    return weights


def close(got: Array, wanted: Array) -> None:
    np.testing.assert_allclose(
        got.reshape(ROWS, -1), wanted.reshape(ROWS, -1), rtol=3e-6, atol=1e-30
    )


@pytest.mark.parametrize("heated", [False, True])
def test_what_a_pool_knows(heated: bool) -> None:
    """After filters that take away the likeliest token and others, a temperature, and another filter."""
    inverse = INVERSE if heated else np.ones_like(INVERSE)

    def function(pool: Pool, form: Callable[[Array], Tensor]) -> Tensors:
        before = pool.count(), pool.largest_weight() * pool.total(), pool.sum(pool.all_weights)
        pool.keep(form(FIRST), top_stays=False)
        pool.keep(form(ALSO))
        before = (*before, pool.total())
        pool.keep(form(AND))
        if heated:
            pool.heat(constant(INVERSE))
        count = () if heated else (pool.count(),)
        pool.keep(form(SECOND))
        least, greatest = pool.least(pool.weights), pool.greatest(pool.weights)
        numbers = (
            pool.total(),
            pool.entropy(),
            pool.mean_log(),
            pool.at(pool.weights, constant(PROBES)),
        )
        return (
            *before,
            *numbers,
            least,
            greatest,
            pool.largest_weight(),
            pool.row(pool.total()),
            *count,
        )

    kept = FIRST & ALSO & AND
    weights = expected_weights(kept, SECOND, inverse=inverse)
    if not heated:  # the weights are those of x still
        weights = expected_weights() * kept * SECOND
    total = weights.sum(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(weights > 0, np.log(weights), 0)
    mean_log = (weights * logs).sum(1, keepdims=True) / total
    unmasked = np.isfinite(X)
    for pool, got in zip((Candidates, Vocabulary), ask_both(function), strict=True):
        count, whole, whole_again, part, *got = got
        close(part, (expected_weights() * FIRST * ALSO).sum(1))
        close(count, unmasked.sum(1))
        close(whole, expected_weights().sum(1))
        close(whole_again, expected_weights().sum(1))
        for found, wanted in zip(
            got,
            [
                total,
                np.log(total) - mean_log,
                mean_log,
                np.take_along_axis(weights, PROBES, 1),
                weights.min(1),
            ]
            + [weights.max(1)] * 2
            + [total, (unmasked & kept).sum(1)],
            strict=False,
        ):
            close(found, wanted)
        assert got[-1 if heated else -2].ndim == (2 if pool is Candidates else 3)


@pytest.mark.parametrize("captured", [False, True])
def test_thresholds(captured: bool) -> None:
    """top-k before the temperature, nuclei of logits and of other keys after it; 0 and 1 are off."""
    k = np.array([[3], [1], [0], [70], [2], [320]], np.int32)
    shares = [
        np.float32([[0.5], [0.9], [1], [0.01], [0.6], [0.3]]),
        np.float32([[1], [0.5], [0.3], [0.9], [0.1], [0.99]]),
    ]
    keys = -np.abs(np.round(np.random.default_rng(1).normal(size=X.shape) * 50)).astype(np.float32)

    def function(pool: Pool, form: Callable[[Array], Tensor]) -> Tensors:
        kth_largest = pool.kth_largest(constant(k))
        pool.heat(constant(INVERSE))
        pool.keep(form(SECOND))
        return (
            kth_largest,
            pool.nucleus(None, constant(shares[0])),
            pool.nucleus(form(keys), constant(shares[1])),
        )

    weights = expected_weights(np.ones_like(X, bool), SECOND, inverse=INVERSE)
    for thresholds in ask_both(function, captured=captured):
        kth_largest, *nuclei = (threshold.reshape(ROWS, 1) for threshold in thresholds)
        for row in range(ROWS):
            smallest = np.sort(X[row])[-k[row, 0]] if k[row, 0] else -np.inf
            unmasked = X[row] > -np.inf
            np.testing.assert_array_equal(
                (X[row] >= kth_largest[row])[unmasked], (X[row] >= smallest)[unmasked]
            )
        for of, share, threshold in zip((X, keys), shares, nuclei, strict=True):
            larger = of[:, None, :] > of[:, :, None]
            before = (larger * weights[:, None]).sum(2)
            kept = (before < share * weights.sum(1, keepdims=True)) | (share == 1)
            there = weights > 1e-30
            np.testing.assert_array_equal((of >= threshold) & there, kept & there)


def draw_from(weights: Array, uniform: Array) -> list[Array]:
    """The tokens [B, 1] that each pool draws with these very weights [B, V], and Vocabulary for replay."""

    def function(pool: Pool, form: Callable[[Array], Tensor]) -> Tensors:
        pool._weights = form(weights)
        return (pool.draw(constant(uniform)),)

    x = np.random.default_rng(1).normal(size=weights.shape).astype(np.float32)
    both = [tokens for (tokens,) in ask_both(function, x)]
    return [*both, ask_both(function, x, captured=True)[1][0]]


@pytest.mark.parametrize("blocks", [1, 5, 64])
def test_the_first_token_whose_sum_exceeds_u(blocks: int) -> None:
    """Weights that sum without rounding, most of them 0, and u on every boundary, too."""
    rng, vocab = np.random.default_rng(blocks), blocks * SIZE
    weights = rng.integers(0, 3, (64, vocab)) * (rng.random((64, vocab)) < 0.1)
    weights[:, rng.integers(vocab)] += 1
    total = 2 ** int(np.ceil(np.log2(weights.sum(-1).max())))
    weights[:, rng.integers(vocab)] += total - weights.sum(-1)
    uniform = rng.integers(0, total, (64, 1)) / total
    expected = (weights.cumsum(-1) <= uniform * total).sum(-1, keepdims=True)
    for tokens in draw_from(weights.astype(np.float32), uniform.astype(np.float32)):
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24, 1.0])
def test_a_token_without_weight_is_never_drawn(u: float) -> None:
    weights = np.zeros((2, 1024), np.float32)
    weights[:, [400, 600]] = [1e-38, 1]
    weights[1, 700] = 1e-30
    uniform = np.full((2, 1), u, np.float32)
    for tokens in draw_from(weights, uniform):
        assert tokens[0, 0] == (400 if u == 0 else 600)
        assert tokens[1, 0] in ([400] if u == 0 else [600, 700])


@pytest.mark.parametrize("blocks", [1, 5])
def test_a_row_without_weight_draws_an_id(blocks: int) -> None:
    """It draws nothing, but an index beyond the blocks would stop the batch."""
    uniform = np.full((2, 1), 0.5, np.float32)
    for tokens in draw_from(np.zeros((2, blocks * SIZE), np.float32), uniform):
        assert ((tokens >= 0) & (tokens < blocks * SIZE)).all()


def test_a_draw_from_many_tokens_is_off_by_less_than_a_grain_of_u() -> None:
    """Plain float32 sums are off by 1e-7 of the whole, a hundredth of such a token's weight."""
    vocab, draws = 1500 * SIZE, 4000
    rng = np.random.default_rng(2)
    weights = rng.lognormal(0, 1, (1, vocab)).astype(np.float32)
    uniform = (rng.integers(0, 2**24, (draws, 1)) / 2**24).astype(np.float32)

    def function(x: Tensor, uniform: Tensor) -> Tensor:
        pool = Vocabulary(x, x.max(-1, keep=False) > 0, PivotSearch())
        pool._weights = x
        return pool.draw(uniform)

    (tokens,) = computed(function, weights.reshape(1, -1, SIZE), uniform)
    sums = weights[0].astype(np.float64).cumsum() / weights.sum(dtype=np.float64)
    wrong = np.flatnonzero(tokens[:, 0] != np.searchsorted(sums, uniform[:, 0], side="right"))
    assert all(np.abs(sums - uniform[index]).min() < 2e-9 for index in wrong)


def test_weight_beyond_the_candidates() -> None:
    """In a row that is not complete the total is given: shares and probabilities are of that."""
    x = np.log(np.float32([[4, 2, 1], [4, 2, 1]]) / 4)

    def function(x: Tensor, complete: Tensor, whole: Tensor, share: Tensor) -> Tensors:
        ids = constant(np.array([[5, 1, 3], [5, 1, 3]]))
        pool = Candidates(x, ids, complete, whole)
        return (
            pool.total(),
            pool.nucleus(None, share),
            pool.at(pool.weights, ids.columns(1, 2).to(INT64)),
        )

    arrays: Any = np.array([[True], [False]]), np.float32([[9], [4]]), np.float32([[0.6], [0.38]])
    total, threshold, weight = computed(function, x, *arrays)
    np.testing.assert_allclose(total[:, 0], [1.75, 4])
    np.testing.assert_array_equal(x >= threshold, [[True, True, False], [True, True, True]])
    np.testing.assert_allclose(weight[:, 0], [0.5, 0.5])
