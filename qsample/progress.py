"""How long work says how far it has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]  # what is being done, and the fraction of the whole that is done, in [0, 1]


def unreported(stage: str, fraction: float) -> None:
    """The callback of a caller who gave none."""
