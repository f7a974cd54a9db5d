"""How long work says how far it has come: the types of the callbacks."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]  # what is being done, and the fraction of the whole that is done, in [0, 1]
ByteProgress = Callable[[int, int], None]  # bytes done, bytes in all
