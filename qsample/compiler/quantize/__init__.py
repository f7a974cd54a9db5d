"""Weights and caches in fewer bits; the names of methods and presets, for the check of options, without NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

FITTED: Final = "gptq"  # levels are fitted to a text; a matrix that cannot be is rounded
METHODS: Final = ("rtn", FITTED)


INT_BITS: Final[Mapping[str, int]] = {"int2": 2, "int4": 4, "int8": 8}
FLOAT: Final = "float"  # of a matrix that a table leaves as it is


class Preset(NamedTuple):
    """A point between the time that compile takes and the time of a step. method: one of METHODS. block_size: weights
    of a row that share a scale, and in 4 bits a zero point. head: the kind of the head's weights among fewer bits, one
    of INT_BITS."""

    method: str
    block_size: int
    head: str

    @property
    def fitted(self) -> bool:
        """Whether levels are fitted to a text."""
        return self.method == FITTED


PRESETS: Final[Mapping[str, Preset]] = {
    "quick": Preset("rtn", 32, head="int4"),
    "balanced": Preset(FITTED, 64, head="int8"),
    "speed": Preset(FITTED, 128, head="int4"),
}
