"""Signals that ask a command to end: it ends as after ctrl-C, and what was half made is removed on the way out."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

# `kill`, a batch system, `docker stop`; and the terminal that was closed, which Windows does not tell.
_ENDING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Terminated(SystemExit):
    """A signal asked for the end. code: 128 and the signal's number, as shells report it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def end_on_signals() -> None:
    """Raise Terminated in the main thread where one of the signals comes.

    One that is ignored, as `nohup` wants it, stays ignored; so do those that come while the command is ending.
    """
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    raise Terminated(number)
