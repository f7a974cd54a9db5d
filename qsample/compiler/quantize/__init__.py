"""Weights and caches in fewer bits; the names of methods and presets, for the check of options, without NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

FITTED: Final = "gptq"  # levels are fitted to a text; a matrix that cannot be is rounded
METHODS: Final = ("rtn", FITTED)


class Preset(NamedTuple):
    """A point between the time that compile takes and the time of a step. method: one of METHODS. block_size: weights
    of a row that share a scale."""

    method: str
    block_size: int

    @property
    def fitted(self) -> bool:
        """Whether levels are fitted to a text."""
        return self.method == FITTED


PRESETS: Final[Mapping[str, Preset]] = {
    "quick": Preset("rtn", 32),
    "balanced": Preset(FITTED, 64),
    "speed": Preset(FITTED, 128),
}
