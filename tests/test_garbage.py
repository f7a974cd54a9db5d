"""The garbage collector: the oldest objects rest while a body runs, and the setting comes back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from qsample.garbage import young_collections


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Python's own setting, and a heap without the libraries' objects: a few new ones bring about full collections."""
    before = gc.get_threshold()  # of the suite
    gc.freeze()
    gc.collect()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def collections_of(generation: int) -> int:
    """Make many objects that stay, and return how many collections of the generation ran meanwhile."""
    before = gc.get_stats()[generation]["collections"]
    kept = [[number] for number in range(200_000)]
    return int(gc.get_stats()[generation]["collections"] - before) * bool(kept)


def test_only_young_objects_are_collected(small_heap: None) -> None:
    assert collections_of(2) > 0
    with young_collections():
        assert collections_of(2) == 0
        assert collections_of(0) > 0
    assert collections_of(2) > 0


def test_the_last_of_several_threads_restores_the_setting() -> None:
    before, inside, leave = gc.get_threshold(), threading.Event(), threading.Event()

    def hold() -> None:
        with young_collections():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with young_collections():
        thread.start()
        inside.wait()
    held = gc.get_threshold()
    leave.set()
    thread.join()
    assert held[2] > before[2]
    assert gc.get_threshold() == before
