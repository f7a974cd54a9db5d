"""What an evaluation found."""

from __future__ import annotations

from dataclasses import dataclass

from qsample.evaluation.statistics import Estimate


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a package is from a reference, on the same tokens.

    reference: its folder. kl: Kullback-Leibler divergence of the package's distribution from the reference's,
    sum of p_reference * ln(p_reference / p_package), in nats a token. agreement: share of tokens, in [0, 1], where the
    likeliest token is the same (top-1). perplexity_ratio: the package's perplexity over the reference's; its interval
    is of pairs, and so narrower than the two perplexities' own.
    """

    reference: str
    kl: Estimate
    agreement: Estimate
    perplexity_ratio: Estimate


@dataclass(frozen=True, slots=True)
class PackageQuality:
    """One package.

    path: its folder. label: how its weights are held, in words. bytes: of all its files. perplexity: exp of the mean
    negative log-likelihood of a token. comparisons: one a reference. step_ms: milliseconds of a decode step of one row,
    median; None = not asked for.
    """

    path: str
    label: str
    bytes: int
    perplexity: Estimate
    comparisons: tuple[Comparison, ...] = ()
    step_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Packages on one text.

    tokens: how many were scored. documents: how many texts they are of. max_length, stride: of the windows, in tokens;
    see `windows.cut_windows`. confidence: of every interval, in (0, 1). packages: in the order given, then the
    references, each of them once.
    """

    tokens: int
    documents: int
    max_length: int
    stride: int
    confidence: float
    packages: tuple[PackageQuality, ...]
