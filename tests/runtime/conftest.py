"""A gate in front of decode steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from qsample.runtime.decode.slots import Slots


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """The engine makes one decode step for each release."""
    steps = threading.Semaphore(0)
    plain = Slots.decode

    def decode(self: Slots, rows: range, *, wait: bool = True) -> None:
        assert steps.acquire(timeout=60)
        plain(self, rows, wait=wait)

    monkeypatch.setattr(Slots, "decode", decode)
    yield steps
    steps.release(100_000)
