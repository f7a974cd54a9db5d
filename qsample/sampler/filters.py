"""The filters: which tokens of a pool may be drawn, and with which weights.

A filter reads its parameters, takes tokens away, and leaves at least the likeliest token (typical-p: the most typical).
It sees the distribution that the filters before it left, renormalized.

To add a filter: a function and its `Filter` here, its place in `ORDERS`, its inputs in `contract.EXTRA_PARAMETERS`,
its test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from qsample.contract.interface import Features
from qsample.contract.tensors import (
    EXTRA_PARAMETERS,
    HUGGING_FACE,
    LLAMA_CPP,
    PARAMETERS,
    TensorSpec,
)
from qsample.sampler.blocks import FLOOR
from qsample.sampler.call import Columns, DrawCall
from qsample.sampler.pools import Pool
from qsample.sampler.tensor import (
    FLOAT,
    Tensor,
    absolute,
    exp,
    log,
    maximum,
    minimum,
    op,
    where,
)

_LEAST_TEMPERATURE = 2.0**-126  # the smallest whose reciprocal is finite
_LEAST_WEIGHT = 2.0**-100  # so that sums of the weights below it are not rounded away
_LARGEST_TEMPERATURE = 1e36  # a masked token has weight 0 below it
_LARGEST_SURPRISE = 1e30


@dataclass(frozen=True, slots=True)
class SharedNumbers:
    """Numbers that are computed once for both pools: [B, 1] float32, None if no filter of the graph reads them.

    Attributes:
        xtc_uniform: the random number that decides whether XTC applies, in [0, 1).
        deviation: the standard deviation of the row's unmasked logits.
        temperature: the temperature, if it follows the entropy of the whole vocabulary.
    """

    xtc_uniform: Tensor | None = None
    deviation: Tensor | None = None
    temperature: Tensor | None = None


class FilterInputs(Columns):
    """What filters read of each row: its parameters by name, [B, 1] each, and the shared numbers."""

    def __init__(self, parameters: Mapping[str, Tensor], shared: SharedNumbers) -> None:
        super().__init__(parameters)
        self.shared = shared


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """A filter of the draw.

    Attributes:
        name: the name in `Features.filters`, or of the parameter that every graph has.
        inputs: the filter's parameters; the first one switches it off.
        apply: takes tokens away from a pool, or changes their weights.
        candidates_suffice: the K largest logits decide what the filter does to them; only the total weight that top-p
            needs comes from the whole vocabulary. A row with any other filter is drawn from the candidates only behind
            a small top-k.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    apply: Callable[[Pool, FilterInputs], None]
    candidates_suffice: bool = False

    def is_on(self, call: DrawCall) -> Tensor:
        """Whether the first parameter has another value than the one that switches the filter off: [B] bool."""
        switch = self.inputs[0]
        assert switch.off is not None
        return ~call[switch.name].equals(switch.off)


def filters_of(features: Features) -> tuple[Filter, ...]:
    """The filters of a graph, in its order."""
    return tuple(
        step
        for step in ORDERS[features.filter_order]
        if step.name in features.filters or step.name not in EXTRA_PARAMETERS
    )


def temperature(pool: Pool, row: FilterInputs) -> None:
    """P ~ exp(l / t), t from 2**-126 to 1e36."""
    if row.shared.temperature is not None:
        t = row.shared.temperature
    elif "dynatemp_range" in row:
        t = dynamic_temperature(pool, row)
    else:
        t = row["temperature"]
    pool.heat(op("Reciprocal", op("Clip", t, _LEAST_TEMPERATURE, _LARGEST_TEMPERATURE)))


def dynamic_temperature(pool: Pool, row: FilterInputs) -> Tensor:
    """A temperature that follows the entropy of the tokens that are left, [B, 1]: llama.cpp's `temp_ext`."""
    t = minimum(row["temperature"], _LARGEST_TEMPERATURE)
    spread = minimum(row["dynatemp_range"], _LARGEST_TEMPERATURE)
    count = pool.count()
    entropy = op("Clip", pool.entropy() / log(maximum(count, 2.0)), 0.0, 1.0)
    low = maximum(t - spread, 0.0)
    high = t + spread
    dynamic = low + (high - low) * op("Pow", entropy, row["dynatemp_exponent"])
    return where((spread > 0) & (count > 1), dynamic, t)


def top_k(pool: Pool, row: FilterInputs) -> None:
    """The k likeliest tokens and their ties, among candidates those ties that are in the pool: Fan et al. 2018,
    arXiv:1805.04833."""
    pool.keep(pool.x >= pool.kth_largest(row["top_k"]))


def has_small_top_k(call: DrawCall, num_candidates: int) -> Tensor:
    """Whether top-k is applied to the candidates, however many ties it has, instead of the vocabulary: [B] bool."""
    if num_candidates >= call.vocab:
        return call["top_k"].equals(call["top_k"])
    return (call["top_k"] > 0) & (call["top_k"] <= num_candidates)


def top_p(pool: Pool, row: FilterInputs) -> None:
    """Tokens whose strictly likelier ones weigh less than p: Holtzman et al. 2020, arXiv:1904.09751."""
    pool.keep(pool.x >= pool.nucleus(None, row["top_p"]))


def min_p(pool: Pool, row: FilterInputs) -> None:
    """Tokens with at least min_p times the largest probability: Nguyen et al. 2024, arXiv:2407.01082."""
    pool.keep(pool.all_weights >= pool.row(row["min_p"]) * pool.largest_weight())


def top_a(pool: Pool, row: FilterInputs) -> None:
    """Tokens with at least a times the square of the largest probability; Peng Bo's, of RWKV and KoboldAI."""
    largest = pool.largest_weight()
    pool.keep(pool.weights >= pool.row(row["top_a"] / pool.total()) * largest * largest)


def top_n_sigma(pool: Pool, row: FilterInputs) -> None:
    """Logits within n standard deviations of the largest: Tang et al. 2024, arXiv:2411.07641."""
    assert row.shared.deviation is not None
    distance = where(row["top_n_sigma"] > 0, row["top_n_sigma"] * row.shared.deviation, -FLOOR)
    pool.keep(pool.x >= pool.row(-distance))


def typical_p(pool: Pool, row: FilterInputs) -> None:
    """Tokens whose surprise is closest to the entropy, with mass p: Meister et al. 2023, arXiv:2202.00666."""
    # Surprise less entropy, ln(total) - ln(weight) each: without the total: it would round small differences away.
    atypical = absolute(pool.logs - pool.row(pool.mean_log()))
    # A token that was taken away before has no weight, and its key changes nothing.
    keys = -minimum(atypical, 390.0)
    pool.keep(keys >= pool.nucleus(keys, row["typical_p"]), top_stays=False)


def epsilon_cutoff(pool: Pool, row: FilterInputs) -> None:
    """Probabilities of at least epsilon: Hewitt et al. 2022, arXiv:2210.15191."""
    _keep_from(pool, row["epsilon_cutoff"] * pool.total())


def eta_cutoff(pool: Pool, row: FilterInputs) -> None:
    """Probabilities of at least min(eta, sqrt(eta) exp(-H)): Hewitt et al. 2022, arXiv:2210.15191."""
    eta = row["eta_cutoff"]
    least = minimum(eta, op("Sqrt", eta) * exp(-pool.entropy()))
    _keep_from(pool, least * pool.total())


def xtc(pool: Pool, row: FilterInputs) -> None:
    """Excludes the top choices: of the tokens with at least the threshold, only the least likely stays
    (https://github.com/oobabooga/text-generation-webui/pull/6335, in llama.cpp's form)."""
    threshold = row["xtc_threshold"]
    assert row.shared.xtc_uniform is not None
    applies = (row.shared.xtc_uniform < row["xtc_probability"]) & (threshold <= 0.5)
    # A token without weight reaches no threshold, or it would stay as the only one.
    reaches = (pool.weights >= pool.row(maximum(threshold * pool.total(), _LEAST_WEIGHT))).to(FLOAT)
    least = pool.least(
        maximum(pool.x, FLOOR) * reaches
    )  # x is at most 0, and 0 stands for the other tokens
    pool.keep(pool.x <= where(pool.row(applies), least, 0.0), top_stays=False)


def mirostat(pool: Pool, row: FilterInputs) -> None:
    """Tokens whose surprise is at most mu bits: Mirostat 2.0, Basu et al. 2021, arXiv:2007.14966."""
    least = where(row["mirostat_tau"] > 0, exp(-math.log(2) * largest_surprise(row)), 0.0)
    _keep_from(pool, least * pool.total())


def largest_surprise(row: Mapping[str, Tensor]) -> Tensor:
    """Mirostat's mu in bits, [B, 1] float32; a row that begins has twice tau."""
    mu = row["mirostat_mu"]
    return where(mu.equals(0.0), row["mirostat_tau"] * 2.0, mu)


def next_largest_surprise(row: Mapping[str, Tensor], surprise: Tensor) -> Tensor:
    """The next mu, [B, 1] float32, after a token of this surprise: in bits, finite."""
    mu = largest_surprise(row) - row["mirostat_eta"] * (surprise - row["mirostat_tau"])
    return op("Clip", mu, -_LARGEST_SURPRISE, _LARGEST_SURPRISE)


def adaptive_p(pool: Pool, row: FilterInputs) -> None:
    """Weights that favour tokens near a probability, such that drawn tokens have the target as their mean:
    https://github.com/ggml-org/llama.cpp/pull/17927."""
    aim = op("Clip", row["adaptive_target"] - row["adaptive_error"], 0.0, 1.0)
    probability = pool.weights / pool.row(maximum(pool.total(), _LEAST_WEIGHT))
    distance = absolute(probability - pool.row(aim)) * (1 / 0.3)
    favoured = exp(distance * distance * -10.0 / (distance + 1.0))
    pool.reweigh(pool.left() * favoured, row["adaptive_target"] >= 0)


def _keep_from(pool: Pool, least: Tensor) -> None:
    """Keep weights of at least `least`, [B, 1], or the largest."""
    pool.keep(pool.weights >= minimum(pool.row(least), pool.largest_weight()))


def _parameter(name: str) -> tuple[TensorSpec, ...]:
    """The input of a filter that every graph has."""
    return tuple(spec for spec in PARAMETERS if spec.name == name)


TEMPERATURE: Final = Filter(
    "temperature", _parameter("temperature"), temperature, candidates_suffice=True
)
# The temperature's options, so not in the orders: `temperature` applies them.
DYNATEMP: Final = Filter("dynatemp", EXTRA_PARAMETERS["dynatemp"], temperature)
TOP_K: Final = Filter("top_k", _parameter("top_k"), top_k, candidates_suffice=True)
_TOP_P: Final = Filter("top_p", _parameter("top_p"), top_p, candidates_suffice=True)
_MIN_P: Final = Filter("min_p", _parameter("min_p"), min_p, candidates_suffice=True)
_TOP_N_SIGMA: Final = Filter(
    "top_n_sigma", EXTRA_PARAMETERS["top_n_sigma"], top_n_sigma, candidates_suffice=True
)
_TOP_A: Final = Filter("top_a", EXTRA_PARAMETERS["top_a"], top_a)
_TYPICAL_P: Final = Filter("typical_p", EXTRA_PARAMETERS["typical_p"], typical_p)
_EPSILON_CUTOFF: Final = Filter(
    "epsilon_cutoff", EXTRA_PARAMETERS["epsilon_cutoff"], epsilon_cutoff
)
_ETA_CUTOFF: Final = Filter("eta_cutoff", EXTRA_PARAMETERS["eta_cutoff"], eta_cutoff)
_XTC: Final = Filter("xtc", EXTRA_PARAMETERS["xtc"], xtc)
_MIROSTAT: Final = Filter("mirostat", EXTRA_PARAMETERS["mirostat"], mirostat)
_ADAPTIVE_P: Final = Filter("adaptive_p", EXTRA_PARAMETERS["adaptive_p"], adaptive_p)

ORDERS: Final[dict[str, tuple[Filter, ...]]] = {
    HUGGING_FACE: (
        _TOP_N_SIGMA,
        TEMPERATURE,
        TOP_K,
        _TOP_P,
        _MIN_P,
        _TOP_A,
        _TYPICAL_P,
        _EPSILON_CUTOFF,
        _ETA_CUTOFF,
        _XTC,
        _MIROSTAT,
        _ADAPTIVE_P,
    ),
    LLAMA_CPP: (
        _TOP_N_SIGMA,
        TOP_K,
        _TYPICAL_P,
        _TOP_P,
        _MIN_P,
        _TOP_A,
        _EPSILON_CUTOFF,
        _ETA_CUTOFF,
        _XTC,
        TEMPERATURE,
        _MIROSTAT,
        _ADAPTIVE_P,
    ),
}
