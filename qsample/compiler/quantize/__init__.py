"""Weights and caches in fewer bits; the names of the methods, for the check of options, without NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Method(NamedTuple):
    """A quantization method; `methods` has its function.

    symmetric: levels are symmetric around the middle level. by_rows: outputs of a matrix are quantized independently,
    so that a part of them gets the same levels alone. unfitted: if levels are fitted to a text (`gptq.py`), the method
    of matrices that cannot be: in loops, the head and lookup tables.
    """

    symmetric: bool = False
    by_rows: bool = False
    unfitted: str | None = None

    @property
    def calibrated(self) -> bool:
        return self.unfitted is not None


METHODS: Final[Mapping[str, Method]] = {
    "rtn": Method(symmetric=True, by_rows=True),
    "k_quant": Method(by_rows=True),
    "hqq": Method(),
    "gptq": Method(unfitted="hqq"),
}
