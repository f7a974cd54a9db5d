"""Positions in three axes (M-RoPE), as offsets from a token's place in its row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qsample.contract.arrays import Array


def position_offsets(is_image: Array, sizes: Sequence[tuple[int, int]]) -> Array:
    """The positions of each token in time, height and width, less its place in the row.

    An image at position p has its placeholders, row by row, at (p, p + row, p + column). The token
    after it is at p plus the larger side.

    Args:
        is_image: [n] bool, whether each token is a placeholder.
        sizes: the rows and columns of each image's placeholders, in the order of the prompt.

    Returns:
        [n + 1, 3] int32; the last entry is for all tokens after these n.
    """
    places = np.flatnonzero(is_image)
    offsets = np.zeros((len(is_image) + 1, 3), np.int32)
    seen = 0  # placeholders
    shift = 0
    for rows, columns in sizes:
        count = rows * columns
        start = int(places[seen])
        index = np.arange(count)
        axes = np.stack([np.zeros(count, np.int64), index // columns, index % columns], axis=1)
        offsets[start : start + count] = shift + axes - index[:, None]
        seen += count
        shift += max(rows, columns) - count
        offsets[start + count :] = shift
    return offsets
