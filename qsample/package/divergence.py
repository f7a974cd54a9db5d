"""The divergence of a package from its float model: the figures that `compile` measures and writes
to the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from qsample.package.package import Package
from qsample.package.statistics import Estimate

# In nats for each token. From this divergence on, answers may differ in meaning from the float
# model's; see docs/quantization.md.
FAR: Final = 0.3

CHATS: Final = "chats"
DOCUMENTS: Final = "documents"
RANDOM_STARTS: Final = "random starts"
# The descriptions of the kinds of texts.
TEXTS: Final[Mapping[str, str]] = {
    CHATS: "chats that the float model wrote",
    DOCUMENTS: "documents that the float model wrote",
    RANDOM_STARTS: "texts that the float model wrote after random tokens",
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The figures of a package and its float model: means over the tokens of a text, with 95 %
    intervals. `Comparison` of the add-on `evaluate` has the same definitions.

    Attributes:
        text: The kind of the text, a key of TEXTS.
        tokens: The number of scored tokens.
        kl: The Kullback-Leibler divergence of the package's distribution from the float model's, in
            nats for each token.
        agreement: The share of tokens, in [0, 1], with the same likeliest next token (top-1).
        perplexity_ratio: The package's perplexity divided by the float model's.
    """

    text: str
    tokens: int
    kl: Estimate
    agreement: Estimate
    perplexity_ratio: Estimate

    @classmethod
    def of(cls, package: Package) -> Divergence | None:
        """The figures in the manifest. None if nothing is quantized, or if an older version
        measured other figures."""
        compilation = package.manifest.compilation
        if compilation is None or compilation.quantization is None:
            return None
        try:
            return cls.from_json(compilation.quantization.get("divergence"))
        except (LookupError, TypeError):
            return None

    @classmethod
    def from_json(cls, figures: Any) -> Divergence:
        """The figures in the result of `dataclasses.asdict`. Raises KeyError or TypeError for
        anything else."""
        return cls(
            text=figures["text"],
            tokens=figures["tokens"],
            kl=Estimate(**figures["kl"]),
            agreement=Estimate(**figures["agreement"]),
            perplexity_ratio=Estimate(**figures["perplexity_ratio"]),
        )

    def is_within(self, limit: float) -> bool:
        """Whether the divergence is a number that is at most `limit`, in nats for each token. NaN and
        infinity, as of a graph that gives no numbers, are within no limit."""
        return math.isfinite(self.kl.value) and self.kl.value <= limit

    @property
    def far(self) -> bool:
        """Whether the user should know of the divergence."""
        return not self.is_within(FAR)

    def __str__(self) -> str:
        kl = f"KL {self.kl.value:.3g} nats a token ({self.kl.low:.3g} to {self.kl.high:.3g})"
        top = f"top-1 {100 * self.agreement.value:.1f} %"
        ratio = f"perplexity ratio {self.perplexity_ratio.value:.3g}"
        return (
            f"{kl}, {top}, {ratio}, on {self.tokens:,} tokens of {TEXTS.get(self.text, self.text)}"
        )
