"""Numbers of two graphs enter; how far apart they are leaves, and the scale of what may differ.

A NaN or an infinity on one side is no rounding: it gives a difference that is within no tolerance.
Gates therefore ask `if not error <= most`, which a NaN does not pass, and take `most` from finite
numbers only, because an infinite limit would let everything pass.
"""

from __future__ import annotations

import numpy as np

from qsample.contract.arrays import Array


def largest_difference(got: Array, wanted: Array) -> float:
    """The largest difference between arrays of one shape.

    It is NaN if either side has a NaN, and infinite if one side alone has an infinity. Equal
    infinities, such as masks that both graphs apply, do not differ.
    """
    with np.errstate(invalid="ignore"):
        return float(np.where(got == wanted, 0.0, np.abs(got - wanted)).max(initial=0.0))


def largest_finite(*arrays: Array) -> float:
    """The largest absolute number of some arrays that is neither NaN nor infinite; 0 if there is
    none."""
    return max(float(np.abs(array).max(initial=0.0, where=np.isfinite(array))) for array in arrays)
