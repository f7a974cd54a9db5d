"""Python's garbage collector during long work."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NEVER: Final = 1 << 30  # middle collections, before a full collection

_lock = threading.Lock()
_users = 0
_before = gc.get_threshold()


@contextmanager
def young_collections() -> Iterator[None]:
    """Collect young objects only while the body runs.

    A collection of all objects looks at each object of torch, transformers and a traced graph, for half a second and
    longer, and an export would start a dozen of them to find next to nothing. The setting is the process's: the last of
    several threads restores it.
    """
    global _users, _before
    with _lock:
        if _users == 0:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], _NEVER)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_before)
