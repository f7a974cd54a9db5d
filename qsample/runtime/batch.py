"""Runs a fixed set of sequences to their end, and hands their tokens on as they come."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from qsample.runtime.callbacks import BatchEnd
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.decode.scheduler import Scheduler
from qsample.runtime.decode.slots import Slots
from qsample.runtime.guided_decoding import Guide
from qsample.runtime.output import Timing
from qsample.runtime.sequence import Sequence
from qsample.text.generated_text import Streamer


def run_batch(
    slots: Slots,
    scheduler: Scheduler,
    sequences: list[Sequence],
    *,
    double_buffering: bool,
    streamer: Streamer | None = None,
    guide: Guide | None = None,
    end: BatchEnd | None = None,
) -> Timing:
    """Run every sequence to its end.

    streamer: gets the only sequence. guide: writes masks between steps. end: ends sequences before the graph does.
    """
    # Whoever may end a sequence takes its tokens, so that none is handed on after the end.
    deliver = partial(_stream, streamer, None) if end is None else _leave_to_end
    loop = DecodeLoop(slots, scheduler, deliver, double_buffering=double_buffering)
    if streamer is not None:
        streamer.put(sequences[0].given[None])
    started, prefilled = time.perf_counter(), None
    with loop:
        for sequence in sequences:
            loop.add(sequence)
        while loop.busy:
            loop.step()
            if prefilled is None and all(sequence.started for sequence in sequences):
                prefilled = time.perf_counter()
            if guide is not None and loop.busy and not loop.prefilling:
                guide.update(loop.set_parameter)
            if end is not None:
                end.update(loop.leave, partial(_stream, streamer, 1))
    ended = time.perf_counter()
    if streamer is not None:
        streamer.end()
    prefilled = prefilled or ended
    return Timing(prefilled - started, ended - prefilled, loop.steps)


def _stream(streamer: Streamer | None, most: int | None, sequence: Sequence) -> None:
    for token in sequence.take(most)[0]:
        if streamer is not None:
            streamer.put(np.array([token], dtype=np.int64))


def _leave_to_end(sequence: Sequence) -> None:
    """`BatchEnd` takes the tokens."""
