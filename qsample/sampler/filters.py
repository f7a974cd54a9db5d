"""The filters, one function each: which tokens of a pool may be drawn. `ORDERS` puts them in order.

A filter reads its parameters, takes tokens away, and leaves at least the likeliest token (typical-p: the most typical).
It sees the distribution that the filters before it left, renormalized.

To add a filter: a function here, its name in `ORDERS`, its inputs in `contract.EXTRA_PARAMETERS`, its test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from qsample.contract.tensors import HUGGING_FACE, LLAMA_CPP
from qsample.sampler.blocks import FLOOR
from qsample.sampler.call import Call
from qsample.sampler.pools import Pool
from qsample.sampler.tensor import FLOAT, Tensor, absolute, exp, log, maximum, minimum, op, where

_LEAST_TEMPERATURE = 2.0**-126  # the smallest whose reciprocal is finite
_LEAST_WEIGHT = 2.0**-100  # so that sums of the weights below it are not rounded away
_LARGEST_TEMPERATURE = 1e36  # a masked token has weight 0 below it
_LARGEST_SURPRISE = 1e30

Parameters = Mapping[str, Tensor]  # each [B, 1]
Filter = Callable[[Pool, Parameters], None]


def temperature(pool: Pool, row: Parameters) -> None:
    """P ~ exp(l / t), t from 2**-126 to 1e36."""
    t = dynamic_temperature(pool, row) if "dynatemp_range" in row else row["temperature"]
    pool.heat(op("Reciprocal", op("Clip", t, _LEAST_TEMPERATURE, _LARGEST_TEMPERATURE)))


def dynamic_temperature(pool: Pool, row: Parameters) -> Tensor:
    """A temperature that follows the entropy of the tokens that are left, [B, 1]: llama.cpp's `temp_ext`."""
    t, spread = (
        minimum(row[name], _LARGEST_TEMPERATURE) for name in ("temperature", "dynatemp_range")
    )
    count = pool.count()
    entropy = op("Clip", pool.entropy() / log(maximum(count, 2.0)), 0.0, 1.0)
    low, high = maximum(t - spread, 0.0), t + spread
    dynamic = low + (high - low) * op("Pow", entropy, row["dynatemp_exponent"])
    return where((spread > 0) & (count > 1), dynamic, t)


def top_k(pool: Pool, row: Parameters) -> None:
    """The k likeliest tokens and their ties, among candidates those ties that are in the pool: Fan et al. 2018,
    arXiv:1805.04833."""
    pool.keep(pool.x >= pool.kth_largest(row["top_k"]))


def has_small_top_k(call: Call, num_candidates: int) -> Tensor:
    """Whether top-k is applied to the candidates, however many ties it has, instead of the vocabulary: [B] bool."""
    if num_candidates >= call.vocab:
        return call["top_k"].equals(call["top_k"])
    return (call["top_k"] > 0) & (call["top_k"] <= num_candidates)


def top_p(pool: Pool, row: Parameters) -> None:
    """Tokens whose strictly likelier ones weigh less than p: Holtzman et al. 2020, arXiv:1904.09751."""
    pool.keep(pool.x >= pool.nucleus(None, row["top_p"]))


def min_p(pool: Pool, row: Parameters) -> None:
    """Tokens with at least min_p times the largest probability: Nguyen et al. 2024, arXiv:2407.01082."""
    pool.keep(pool.all_weights >= pool.row(row["min_p"]) * pool.largest_weight())


def top_a(pool: Pool, row: Parameters) -> None:
    """Tokens with at least a times the square of the largest probability; Peng Bo's, of RWKV and KoboldAI."""
    largest = pool.largest_weight()
    pool.keep(pool.weights >= pool.row(row["top_a"] / pool.total()) * largest * largest)


def top_n_sigma(pool: Pool, row: Parameters) -> None:
    """Logits within n standard deviations of the largest: Tang et al. 2024, arXiv:2411.07641."""
    distance = where(row["top_n_sigma"] > 0, row["top_n_sigma"] * row["sigma"], -FLOOR)
    pool.keep(pool.x >= pool.row(-distance))


def typical_p(pool: Pool, row: Parameters) -> None:
    """Tokens whose surprise is closest to the entropy, with mass p: Meister et al. 2023, arXiv:2202.00666."""
    # Surprise less entropy, ln(total) - ln(weight) each: without the total: it would round small differences away.
    atypical = absolute(pool.logs - pool.row(pool.mean_log()))
    # A token that was taken away before has no weight, and its key changes nothing.
    keys = -minimum(atypical, 390.0)
    pool.keep(keys >= pool.nucleus(keys, row["typical_p"]), top_stays=False)


def epsilon_cutoff(pool: Pool, row: Parameters) -> None:
    """Probabilities of at least epsilon: Hewitt et al. 2022, arXiv:2210.15191."""
    _keep_from(pool, row["epsilon_cutoff"] * pool.total())


def eta_cutoff(pool: Pool, row: Parameters) -> None:
    """Probabilities of at least min(eta, sqrt(eta) exp(-H)): Hewitt et al. 2022, arXiv:2210.15191."""
    eta = row["eta_cutoff"]
    least = minimum(eta, op("Sqrt", eta) * exp(-pool.entropy()))
    _keep_from(pool, least * pool.total())


def xtc(pool: Pool, row: Parameters) -> None:
    """Excludes the top choices: of the tokens with at least the threshold, only the least likely stays
    (https://github.com/oobabooga/text-generation-webui/pull/6335, in llama.cpp's form)."""
    threshold = row["xtc_threshold"]
    applies = (row["xtc_uniform"] < row["xtc_probability"]) & (threshold <= 0.5)
    # A token without weight reaches no threshold, or it would stay as the only one.
    reaches = (pool.weights >= pool.row(maximum(threshold * pool.total(), _LEAST_WEIGHT))).to(FLOAT)
    least = pool.least(
        maximum(pool.x, FLOOR) * reaches
    )  # x is at most 0, and 0 stands for the other tokens
    pool.keep(pool.x <= where(pool.row(applies), least, 0.0), top_stays=False)


def mirostat(pool: Pool, row: Parameters) -> None:
    """Tokens whose surprise is at most mu bits: Mirostat 2.0, Basu et al. 2021, arXiv:2007.14966."""
    least = where(row["mirostat_tau"] > 0, exp(-math.log(2) * largest_surprise(row)), 0.0)
    _keep_from(pool, least * pool.total())


def largest_surprise(row: Parameters) -> Tensor:
    """Mirostat's mu in bits, [B, 1] float32; a row that begins has twice tau."""
    mu = row["mirostat_mu"]
    return where(mu.equals(0.0), row["mirostat_tau"] * 2.0, mu)


def next_largest_surprise(row: Parameters, surprise: Tensor) -> Tensor:
    """The next mu, [B, 1] float32, after a token of this surprise: in bits, finite."""
    mu = largest_surprise(row) - row["mirostat_eta"] * (surprise - row["mirostat_tau"])
    return op("Clip", mu, -_LARGEST_SURPRISE, _LARGEST_SURPRISE)


def adaptive_p(pool: Pool, row: Parameters) -> None:
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


ORDERS: Final[dict[str, tuple[Filter, ...]]] = {
    HUGGING_FACE: (
        top_n_sigma,
        temperature,
        top_k,
        top_p,
        min_p,
        top_a,
        typical_p,
        epsilon_cutoff,
        eta_cutoff,
        xtc,
        mirostat,
        adaptive_p,
    ),
    LLAMA_CPP: (
        top_n_sigma,
        top_k,
        typical_p,
        top_p,
        min_p,
        top_a,
        epsilon_cutoff,
        eta_cutoff,
        xtc,
        temperature,
        mirostat,
        adaptive_p,
    ),
}
ALWAYS: Final = ("temperature", "top_k", "top_p", "min_p")
