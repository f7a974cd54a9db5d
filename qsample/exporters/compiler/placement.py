"""Which execution provider runs what of a compiled graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsample.exporters.compiler.quantize.weights import QuantizationReport


@dataclass(frozen=True, slots=True)
class Placement:
    """What a target did. nodes: which execution provider runs what: provider → operator type → how many.
    quantization: what became of the weights, where that was asked for."""

    nodes: Mapping[str, Mapping[str, int]]

    quantization: QuantizationReport | None = None

    def count(self, provider: str) -> int:
        return sum(self.nodes.get(provider, {}).values())
