"""A name of a row enters: a model type, or `image:` and a model type; its `Row` leaves, in a limited time."""

from __future__ import annotations

import signal
from types import FrameType

from tests.architectures.images import IMAGE, run_images
from tests.architectures.run import Row, run

TIMEOUT = 600  # seconds a type, on a machine that may be busy with something else


def run_in_time(name: str) -> Row:
    """`run` or `run_images`, given up after `TIMEOUT`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no result after {TIMEOUT} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT)
    try:
        return run_images(name) if name.startswith(IMAGE) else run(name)
    finally:
        signal.alarm(0)
