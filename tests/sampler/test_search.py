"""Thresholds by weight and by count against float64 sorts; wide nuclei and large top-k of whole steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.sampler.search import (
    EVERYTHING,
    NOTHING,
    PivotSearch,
    Search,
    SortedSearch,
    WeightedKeys,
)
from qsample.sampler.tensor import Tensor
from tests.helpers.computed import computed
from tests.helpers.reference_filters import survivors
from tests.helpers.sampler_cases import make_inputs, sampler

Array = np.ndarray
ROWS, BLOCKS, SIZE = 8, 125, 160
VOCAB = BLOCKS * SIZE


def bimodal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.where(rng.random(shape) < 0.5, rng.normal(-6, 1, shape), rng.normal(size=shape))


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "flat": lambda rng, shape: rng.normal(size=shape) * 0.01,
    "peaked": lambda rng, shape: rng.normal(size=shape) * 30,
    "half precision": lambda rng, shape: (rng.normal(size=shape) * 2 + 9).astype(np.float16),
    "masked": lambda rng, shape: np.where(rng.random(shape) < 0.9, -np.inf, rng.normal(size=shape)),
    "alike": lambda rng, shape: np.full(shape, 1.5),
    "bimodal": bimodal,
    "heavy above": lambda rng, shape: rng.exponential(size=shape),
    "heavy below": lambda rng, shape: -rng.exponential(size=shape),
    "two values": lambda rng, shape: np.where(rng.random(shape) < 0.2, 1.0, 0.5),
    # Float32 has no number between -1 and its neighbours.
    "neighbours": lambda rng, shape: rng.choice(
        [0, -1 + 2**-24, -1, -1 - 2**-23], shape, p=[0.01, 0.33, 0.33, 0.33]
    ),
    # Order and weights that mislead a sample of each block's first element.
    "sorted": lambda rng, shape: np.broadcast_to(np.linspace(-3, 3, shape[-1]), shape),
    "first of each block": lambda rng, shape: np.where(
        np.arange(shape[-1]) % SIZE, rng.normal(size=shape), -50
    ),
    "outliers": lambda rng, shape: np.select(
        [np.arange(shape[-1]) == 7, np.arange(shape[-1]) == 9], [-60, 5], rng.normal(size=shape)
    ),
}


def in_blocks(values: Array) -> Array:
    return values.reshape(len(values), -1, SIZE)


def threshold_of(keys: Array, weights: Array, wanted: Array) -> tuple[Array, Array]:
    """The smallest key whose strictly larger keys weigh less than `wanted` [ROWS], and the closest call, relative."""
    found, close = [], []
    for row, weight, limit in zip(keys, weights.astype(np.float64), wanted, strict=True):
        values, groups = np.unique(-row, return_inverse=True)
        mass = np.bincount(groups, weight)
        before = np.cumsum(mass) - mass
        found.append(-values[before < limit][-1])
        close.append(np.abs(before[1:] - limit).min(initial=np.inf) / limit)
    return np.array(found), np.array(close)


def search_of(listed: object, rows: Tensor, *, for_webgpu: bool = False) -> Search:
    """The search with control flow if nothing is listed, else that of a graph for replay."""
    return PivotSearch() if listed is None else SortedSearch(rows, for_webgpu=for_webgpu)


@pytest.mark.parametrize("listed", [None, [5, 0, 3, 3, 2, 1, 6, 7, 4]])
@pytest.mark.parametrize("kind", KINDS)
def test_by_weight(kind: str, listed: list[int] | None) -> None:
    rng = np.random.default_rng(2)
    logits = KINDS[kind](rng, (ROWS, VOCAB)).astype(np.float32)
    x = logits - logits.max(1, keepdims=True)
    temperature = np.float32([[0.5], [0.7], [1], [1], [1], [2], [5], [100]])
    share = rng.permutation(np.float32([1e-9, 0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 0.99999]))[:, None]
    weights = np.exp(x / temperature)
    searched = np.ones((ROWS, 1), bool)
    searched[3] = False

    def find(
        keys: Tensor, weights: Tensor, share: Tensor, lowest: Tensor, searched: Tensor, rows: Tensor
    ) -> Tensor:
        weighted = WeightedKeys(keys, weights, lowest, share * 0.0)
        return search_of(listed, rows).by_weight(weighted, share, searched)

    given = (
        in_blocks(x),
        in_blocks(weights),
        share,
        -105 * temperature,
        searched,
        np.array(listed or [0]),
    )
    (got,) = computed(find, *given)
    assert got[3] == np.float32(EVERYTHING)
    wanted, close = threshold_of(
        x, weights, share[:, 0].astype(np.float64) * weights.sum(1, dtype=np.float64)
    )
    for row in np.flatnonzero(searched):
        differ = ((x[row] >= got[row]) != (x[row] >= wanted[row])) & (weights[row] > 0)
        assert not differ.any() or close[row] < 1e-7, (row, differ.sum(), close[row])


@pytest.mark.parametrize("listed", [None, [*range(8)]])
@pytest.mark.parametrize("kind", KINDS)
def test_by_count(kind: str, listed: list[int] | None) -> None:
    rng = np.random.default_rng(1)
    logits = KINDS[kind](rng, (ROWS, VOCAB)).astype(np.float32)
    x = logits - logits.max(1, keepdims=True)
    k = np.array([[1], [2], [65], [1000], [5000], [VOCAB - 1], [VOCAB], [VOCAB + 5]])

    def find(keys: Tensor, count: Tensor, searched: Tensor, rows: Tensor) -> Tensor:
        return search_of(listed, rows).by_count(keys, count, searched)

    (got,) = computed(
        find, in_blocks(x), k.astype(np.float32), np.ones((ROWS, 1), bool), np.array(listed or [0])
    )
    for row in range(ROWS):
        wanted = -np.sort(-x[row])[min(k[row, 0], VOCAB) - 1]
        if not np.isfinite(wanted):  # there are not so many
            wanted = x[row][np.isfinite(x[row])].min()
        differ = np.isfinite(x[row]) & ((x[row] >= got[row]) != (x[row] >= wanted))
        assert not differ.any(), (row, got[row], wanted)


@pytest.mark.parametrize("for_webgpu", [False, True])
@pytest.mark.parametrize("listed", [[], [2, 0], [3, 1, 3]])
def test_nothing_passes_in_rows_that_should_be_listed(listed: list[int], for_webgpu: bool) -> None:
    """Without listed rows, the graph may skip the search. A listed row need not be searched."""
    keys = np.tile(-np.arange(320.0, dtype=np.float32), (4, 1))
    keys = np.random.default_rng(3).permuted(keys, axis=1)
    searched = np.array([[True], [True], [True], [False]])

    def find(keys: Tensor, searched: Tensor, share: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        search = search_of(listed, rows, for_webgpu=for_webgpu)
        weighted = WeightedKeys(keys, keys * 0.0 + 1.0, share * 0.0 - 400.0, share * 0.0)
        # 10 % of 320 equal weights, and the 100 largest keys.
        by_count = search.by_count(keys, share * 1000.0, searched)
        return search.by_weight(weighted, share, searched), by_count

    share = np.full((4, 1), 0.1, np.float32)
    by_weight, by_count = computed(find, in_blocks(keys), searched, share, np.array(listed, int))
    found = np.isin(np.arange(4), listed)
    others = np.where(searched[:, 0], np.float32(NOTHING), np.float32(EVERYTHING))
    for got, threshold in ((by_weight, -31), (by_count, -99)):
        wanted = np.where(found & searched[:, 0], threshold, others)
        assert got[:, 0].tolist() == wanted.tolist()


def test_a_nucleus_that_ends_exactly_at_its_weight() -> None:
    """600 keys of weight 1 and 1,200 of weight 1/2: the larger keys weigh exactly the wanted weight, not less."""
    weights = np.ones((1, 1920), np.float32)
    weights[0, np.random.default_rng(6).permutation(1920)] = np.repeat(
        [0, 1, 0.5], [120, 600, 1200]
    )
    keys = np.where(weights == 0, -np.inf, weights - 1).astype(np.float32)

    def find(keys: Tensor, weights: Tensor, share: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        weighted = WeightedKeys(keys, weights, share * 0.0 - 400.0, share * 0.0)
        return tuple(
            search.by_weight(weighted, share, share > 0)
            for search in (
                PivotSearch(),
                SortedSearch(rows, for_webgpu=False),
                SortedSearch(rows, for_webgpu=True),
            )
        )

    for share, least in ((0.5, 0.0), (np.nextafter(np.float32(0.5), np.float32(1)), -0.5)):
        given = in_blocks(keys), in_blocks(weights), np.float32([[share]]), np.array([0])
        assert [(keys >= got).sum() for got in computed(find, *given)] == [
            (keys >= least).sum()
        ] * 3


@pytest.mark.parametrize(
    ("kind", "captured"),
    [
        *((kind, False) for kind in ("normal", "half precision", "bimodal")),
        ("half precision", True),
        *(
            pytest.param(kind, False, marks=pytest.mark.slow)
            for kind in ("flat", "peaked", "alike")
        ),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("flat", "bimodal")),
    ],
)
def test_wide_thresholds_are_exact(kind: str, captured: bool) -> None:
    """The support is that of float64, but for tokens whose case float32 cannot tell."""
    vocab = 151_936
    rows: list[dict[str, float]] = [
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.99, "temperature": 0.7},
        {"top_p": 0.95, "temperature": 100},
        {"top_k": 700},
        {"top_k": 5000, "top_p": 0.95},
        {"typical_p": 0.3},
        {"typical_p": 0.9},
    ]
    off = {"temperature": 1, "top_k": 0, "top_p": 1, "typical_p": 1, "min_p": 0}
    values = {
        name: np.array([row.get(name, default) for row in rows], np.float32)
        for name, default in off.items()
    }
    logits = KINDS[kind](np.random.default_rng(5), (len(rows), vocab)).astype(np.float32)
    face = Interface(
        vocab, (), features=Features(probs=True, filters=("typical_p",)), captured=captured
    )
    probs = sampler(face)(logits, make_inputs(face, len(rows), **values))["probs"]
    for index, row in enumerate(rows):
        expected = survivors(logits[index], {name: value[index] for name, value in values.items()})
        different = int(((probs[index] > 0) != expected.left).sum())
        assert different <= (3 if expected.edge < 1e-7 else 0), (row, different, expected.edge)
