"""The filters: which tokens of a pool may be drawn, and with which weights.

A filter reads its parameters, takes tokens away, and leaves at least the likeliest token
(typical-p: the most typical token). It sees the distribution that the filters before it left,
renormalized.

To add a filter, write a function and its `Filter` here, put the `Filter` into `ORDERS`, and add its
inputs to `EXTRA_PARAMETERS` of the contract and its cases to the tests.
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
    TensorRecord,
    absolute,
    exp,
    log_of_column,
    maximum,
    minimum,
    op,
    where,
)

# The smallest temperature whose reciprocal is finite.
_LEAST_TEMPERATURE = 2.0**-126
# Up to this temperature, a masked token has weight 0.
_LARGEST_TEMPERATURE = 1e36
# Sums of weights below this are not rounded away.
_LEAST_WEIGHT = 2.0**-100
# Mirostat's mu stays finite, in bits.
_LARGEST_SURPRISE = 1e30
# Keys of typical-p stay above the lowest key of a search, -400.
_LARGEST_ATYPICALITY = 390.0
# llama.cpp's constants of adaptive-p: the width and the height of the peak.
_ADAPTIVE_P_WIDTH = 0.3
_ADAPTIVE_P_HEIGHT = 10.0


@dataclass(frozen=True)
class SharedNumbers(TensorRecord):
    """Numbers that are computed once for both pools.

    Each is [B, 1] float32, or None if no filter of the graph reads it.

    Attributes:
        xtc_uniform: the random number that decides whether XTC applies, in [0, 1).
        deviation: the standard deviation of the row's unmasked logits.
        temperature: the temperature, if it follows the entropy of the whole vocabulary.
    """

    xtc_uniform: Tensor | None = None
    deviation: Tensor | None = None
    temperature: Tensor | None = None


class FilterInputs(Columns):
    """The parameters of each row by name, [B, 1] each, and the shared numbers."""

    def __init__(self, parameters: Mapping[str, Tensor], shared: SharedNumbers) -> None:
        super().__init__(parameters)
        self.shared = shared


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """A filter of the draw.

    Attributes:
        name: the name of an optional filter in `Features.filters`, or of the parameter of a filter
            that every graph has.
        inputs: the parameters of the filter; the first parameter switches it off.
        apply: takes tokens away from a pool, or changes their weights.
        candidates_suffice: whether the filter needs no logits except the K largest; only the total
            weight for top-p comes from the whole vocabulary. A row with any other filter is drawn
            from the candidates only if it has a small top-k.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    apply: Callable[[Pool, FilterInputs], None]
    candidates_suffice: bool = False

    def is_on(self, call: DrawCall) -> Tensor:
        """Whether the first parameter differs from the value that switches it off: [B] bool."""
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
    """Sets the distribution to p ~ exp(l / t), with t from 2**-126 to 1e36."""
    if row.shared.temperature is not None:
        t = row.shared.temperature
    elif "dynatemp_range" in row:
        t = dynamic_temperature(pool, row)
    else:
        t = row["temperature"]
    pool.heat(op("Reciprocal", op("Clip", t, _LEAST_TEMPERATURE, _LARGEST_TEMPERATURE)))


def dynamic_temperature(pool: Pool, row: FilterInputs) -> Tensor:
    """The temperature that follows the entropy of the remaining tokens: [B, 1] float32.

    With the entropy H of m tokens, it is low + (high - low) * (H / ln m) ** exponent. Source:
    llama.cpp's `temp_ext`.
    """
    t = minimum(row["temperature"], _LARGEST_TEMPERATURE)
    spread = minimum(row["dynatemp_range"], _LARGEST_TEMPERATURE)
    count = pool.count()
    entropy = op("Clip", pool.entropy() / log_of_column(maximum(count, 2.0)), 0.0, 1.0)
    low = maximum(t - spread, 0.0)
    high = t + spread
    dynamic = low + (high - low) * op("Pow", entropy, row["dynatemp_exponent"])
    return where((spread > 0) & (count > 1), dynamic, t)


def top_k(pool: Pool, row: FilterInputs) -> None:
    """Keeps the k likeliest tokens and their ties; of the candidates, the ties among them.

    Source: Fan et al. 2018, arXiv:1805.04833.
    """
    pool.keep(pool.x >= pool.kth_largest(row["top_k"]))


def has_small_top_k(call: DrawCall, num_candidates: int) -> Tensor:
    """Whether top-k only looks at the candidates, however many ties it has: [B] bool."""
    if num_candidates >= call.vocab:
        return call["top_k"].equals(call["top_k"])
    return (call["top_k"] > 0) & (call["top_k"] <= num_candidates)


def top_p(pool: Pool, row: FilterInputs) -> None:
    """Keeps a token if all strictly likelier tokens together have a probability below p.

    Source: nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751.
    """
    pool.keep(pool.x >= pool.nucleus(None, row["top_p"]))


def min_p(pool: Pool, row: FilterInputs) -> None:
    """Keeps probabilities of at least min_p times the largest.

    Source: Nguyen et al. 2024, arXiv:2407.01082.
    """
    pool.keep(pool.all_weights >= pool.row(row["min_p"]) * pool.largest_weight())


def top_a(pool: Pool, row: FilterInputs) -> None:
    """Keeps probabilities of at least a times the square of the largest.

    Source: Peng Bo, in RWKV (https://github.com/BlinkDL/RWKV-LM) and KoboldAI.
    """
    largest = pool.largest_weight()
    pool.keep(pool.weights >= pool.row(row["top_a"] / pool.total()) * largest * largest)


def top_n_sigma(pool: Pool, row: FilterInputs) -> None:
    """Keeps logits within n standard deviations of the largest.

    Source: Tang et al. 2024, arXiv:2411.07641.
    """
    assert row.shared.deviation is not None
    distance = where(row["top_n_sigma"] > 0, row["top_n_sigma"] * row.shared.deviation, -FLOOR)
    pool.keep(pool.x >= pool.row(-distance))


def typical_p(pool: Pool, row: FilterInputs) -> None:
    """Keeps the tokens with a surprise closest to the entropy, up to a total probability of p.

    Source: Meister et al. 2023, arXiv:2202.00666.
    """
    # Both the surprise and the entropy contain ln(total). It is left out, because it would round
    # small differences away.
    atypicality = absolute(pool.logs - pool.row(pool.mean_log()))
    # A token that was taken away before has no weight, so its key changes nothing.
    keys = -minimum(atypicality, _LARGEST_ATYPICALITY)
    pool.keep(keys >= pool.nucleus(keys, row["typical_p"]), top_stays=False)


def epsilon_cutoff(pool: Pool, row: FilterInputs) -> None:
    """Keeps probabilities of at least epsilon. Source: Hewitt et al. 2022, arXiv:2210.15191."""
    _keep_from(pool, row["epsilon_cutoff"] * pool.total())


def eta_cutoff(pool: Pool, row: FilterInputs) -> None:
    """Keeps probabilities of at least min(eta, sqrt(eta) * exp(-H)), with the entropy H.

    Source: Hewitt et al. 2022, arXiv:2210.15191.
    """
    eta = row["eta_cutoff"]
    least = minimum(eta, op("Sqrt", eta) * exp(-pool.entropy()))
    _keep_from(pool, least * pool.total())


def xtc(pool: Pool, row: FilterInputs) -> None:
    """Excludes the top choices: of probabilities from the threshold on, only the smallest stays.

    Source: https://github.com/oobabooga/text-generation-webui/pull/6335, in llama.cpp's form.
    """
    threshold = row["xtc_threshold"]
    assert row.shared.xtc_uniform is not None
    applies = (row.shared.xtc_uniform < row["xtc_probability"]) & (threshold <= 0.5)
    # A token without weight must not reach the threshold: it would be the one that stays.
    least_weight = maximum(threshold * pool.total(), _LEAST_WEIGHT)
    reaches = (pool.weights >= pool.row(least_weight)).to(FLOAT)
    # x is at most 0, and 0 stands for the tokens below the threshold.
    least = pool.least(maximum(pool.x, FLOOR) * reaches)
    pool.keep(pool.x <= where(pool.row(applies), least, 0.0), top_stays=False)


def mirostat(pool: Pool, row: FilterInputs) -> None:
    """Keeps tokens with a surprise, -log2 p, of at most mu bits.

    Source: Mirostat 2.0, Basu et al. 2021, arXiv:2007.14966.
    """
    least = where(row["mirostat_tau"] > 0, exp(-math.log(2) * largest_surprise(row)), 0.0)
    _keep_from(pool, least * pool.total())


def largest_surprise(row: Mapping[str, Tensor]) -> Tensor:
    """Mirostat's mu in bits: [B, 1] float32; in a row that begins, twice tau."""
    mu = row["mirostat_mu"]
    return where(mu.equals(0.0), row["mirostat_tau"] * 2.0, mu)


def next_largest_surprise(row: Mapping[str, Tensor], surprise: Tensor) -> Tensor:
    """Mirostat's next mu in bits: mu - eta * (surprise - tau), [B, 1] float32, finite.

    Args:
        row: the parameters of each row by name.
        surprise: [B, 1] float32, the surprise of the drawn token in bits.
    """
    mu = largest_surprise(row) - row["mirostat_eta"] * (surprise - row["mirostat_tau"])
    return op("Clip", mu, -_LARGEST_SURPRISE, _LARGEST_SURPRISE)


def adaptive_p(pool: Pool, row: FilterInputs) -> None:
    """Favours tokens near a probability, so that drawn tokens have the target as their mean.

    The weight of a probability p is exp(-10 d**2 / (1 + d)), where d is |p - aim| / 0.3. Source:
    https://github.com/ggml-org/llama.cpp/pull/17927.
    """
    aim = op("Clip", row["adaptive_target"] - row["adaptive_error"], 0.0, 1.0)
    probability = pool.weights / pool.row(maximum(pool.total(), _LEAST_WEIGHT))
    distance = absolute(probability - pool.row(aim)) * (1 / _ADAPTIVE_P_WIDTH)
    weight = exp(distance * distance * -_ADAPTIVE_P_HEIGHT / (distance + 1.0))
    pool.reweigh(pool.left() * weight, row["adaptive_target"] >= 0)


def _keep_from(pool: Pool, least: Tensor) -> None:
    """Keep the weights of at least `least`, [B, 1], and the largest weight."""
    pool.keep(pool.weights >= minimum(pool.row(least), pool.largest_weight()))


def _parameter(name: str) -> tuple[TensorSpec, ...]:
    """The input of a filter that every graph has."""
    return tuple(spec for spec in PARAMETERS if spec.name == name)


TEMPERATURE: Final = Filter(
    "temperature", _parameter("temperature"), temperature, candidates_suffice=True
)
# Not in the orders, because it is an option of the temperature, which applies it.
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
