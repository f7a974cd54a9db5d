"""The places that requests hold while they are prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.serve.models import Places
from qsample.runtime import QueueFullError


def places_of(running: int, waiting: int, slots: int = 2, max_waiting: int = 4) -> Places:
    stats = SimpleNamespace(running=running, waiting=waiting, slots=slots, max_waiting=max_waiting)
    engine: Any = SimpleNamespace(stats=lambda: stats)
    return Places(engine)


def test_places_are_held_until_they_are_let_go() -> None:
    places = places_of(running=1, waiting=1)
    places.check(4)
    with pytest.raises(QueueFullError, match="2 of 6 places are taken and 5 were requested"):
        places.check(5)
    with places.hold(3) as let_go:
        places.check(1)
        with pytest.raises(QueueFullError, match="5 of 6 places are taken and 2 were requested"):
            places.hold(2).__enter__()
        with places.hold(1), pytest.raises(QueueFullError):
            places.check(1)
        let_go()
        places.check(4)
        let_go()
        places.check(4)
        with pytest.raises(QueueFullError):
            places.check(5)
    places.check(4)
    with pytest.raises(ZeroDivisionError), places.hold(4):
        raise ZeroDivisionError
    places.check(4)
    with pytest.raises(QueueFullError):
        places.check(5)
    places_of(running=2, waiting=4).check(0)
