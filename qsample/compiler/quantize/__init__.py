"""Weights and caches in fewer bits; the names of methods and presets, for the check of options, without NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from qsample.contract.tensors import BLOCK_SIZES

# The levels of this method are fitted to a text; a matrix that cannot be fitted is rounded.
GPTQ: Final = "gptq"
METHODS: Final = ("rtn", GPTQ)


INT_BITS: Final[Mapping[str, int]] = {"int2": 2, "int4": 4, "int8": 8}
# The entry of a table for a matrix that stays as it is.
FLOAT: Final = "float"


def entry_of_table(kind: str) -> tuple[int | None, int | None]:
    """The bits, None for float, and the block size, None for that of the preset, of an entry of a table: "int4",
    "int8:128", "float". Raises ValueError for any other text."""
    name, _, size = kind.partition(":")
    if kind == FLOAT:
        return None, None
    if name not in INT_BITS or (":" in kind and size not in map(str, BLOCK_SIZES)):
        raise ValueError(f"{kind!r} is no entry of a table of bits")
    return INT_BITS[name], int(size) if size else None


class Preset(NamedTuple):
    """A point between the time that compile takes, the time of a step, and quality.

    Attributes:
        method: one of METHODS.
        block_size: the weights of a row that share a scale, and in 4 bits a zero point.
        head: how the head's weights are held beside others in 4 bits, as in a table: see `bits.BitsTable`.
        outer: how those of the first and the last layer are.
    """

    method: str
    block_size: int
    head: str
    outer: str

    @property
    def fitted(self) -> bool:
        """Whether levels are fitted to a text."""
        return self.method == GPTQ


PRESETS: Final[Mapping[str, Preset]] = {
    "quick": Preset("rtn", 32, head="int4:32", outer="int8:128"),
    "balanced": Preset(GPTQ, 64, head="int4:32", outer="int8:128"),
    "speed": Preset(GPTQ, 128, head="int4:32", outer="int4"),
}
