"""How far a package is from its float model: the figures that compile measures and a manifest keeps, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from qsample.package.package import Package
from qsample.package.statistics import Estimate

FAR: Final = 0.3
"""Nats a token from which on answers may say other things than the float model's: see docs/quantization.md."""

CHATS: Final = "chats"
DOCUMENTS: Final = "documents"
RANDOM_STARTS: Final = "random starts"
TEXTS: Final[Mapping[str, str]] = {
    CHATS: "chats that the float model wrote",
    DOCUMENTS: "documents that the float model wrote",
    RANDOM_STARTS: "texts that the float model wrote after random tokens",
}
"""The kind of a text → its words."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Figures of a package and its float model, plain means over the tokens of a text, with 95 % intervals. They are
    defined as those of `evaluate.Comparison`.

    Attributes:
        text: one of TEXTS.
        tokens: the scored tokens.
        kl: Kullback-Leibler divergence of the package's distribution from the float model's, nats a token.
        agreement: share of tokens, in [0, 1], with the same likeliest next token (top-1).
        perplexity_ratio: the package's perplexity over the float model's.
    """

    text: str
    tokens: int
    kl: Estimate
    agreement: Estimate
    perplexity_ratio: Estimate

    @classmethod
    def of(cls, package: Package) -> Divergence | None:
        """Of the manifest. None if nothing was quantized, or if an older version measured it in other figures."""
        compilation = package.manifest.compilation
        quantization = (compilation.quantization if compilation is not None else None) or {}
        figures = quantization.get("divergence")
        try:
            return cls.from_json(figures)
        except (LookupError, TypeError):
            return None

    @classmethod
    def from_json(cls, figures: Any) -> Divergence:
        """Of what `dataclasses.asdict` made. Raises KeyError or TypeError for anything else."""
        kl, agreement, ratio = (
            Estimate(**figures[name]) for name in ("kl", "agreement", "perplexity_ratio")
        )
        return cls(figures["text"], figures["tokens"], kl, agreement, ratio)

    @property
    def far(self) -> bool:
        """Whether the package is so far off that its user should know; NaN is."""
        return not self.kl.value <= FAR

    def __str__(self) -> str:
        kl = f"KL {self.kl.value:.3g} nats a token ({self.kl.low:.3g} to {self.kl.high:.3g})"
        top = f"top-1 {100 * self.agreement.value:.1f} %"
        ratio = f"perplexity ratio {self.perplexity_ratio.value:.3g}"
        return (
            f"{kl}, {top}, {ratio}, on {self.tokens:,} tokens of {TEXTS.get(self.text, self.text)}"
        )
