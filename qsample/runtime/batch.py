"""A fixed set of sequences, from the first step to the end of the last."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from qsample.runtime.callbacks import BatchEnd
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.guided_decoding import Guide
from qsample.runtime.output import Timing
from qsample.runtime.sequence import NO_DRAFTS, Sequence
from qsample.text.generated_text import Streamer


def run(
    loop: DecodeLoop, sequences: list[Sequence], streamer: Streamer | None, guide: Guide | None, end: BatchEnd | None
) -> Timing:
    """Run every sequence to its end. streamer: gets the only sequence. guide: writes masks between steps. end: ends
    sequences before the graph does."""
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
                end.update(loop.leave, partial(hand_on, streamer, 1))
    ended = time.perf_counter()
    if streamer is not None:
        streamer.end()
    prefilled = prefilled or ended
    drafts = sum((sequence.drafts for sequence in sequences), NO_DRAFTS)
    return Timing(prefilled - started, ended - prefilled, loop.steps, drafts)


def hand_on(streamer: Streamer | None, most: int | None, sequence: Sequence) -> None:
    """Take the tokens of a sequence that were read, `most` at most, and give them to the streamer."""
    for token in sequence.take(most)[0]:
        if streamer is not None:
            streamer.put(np.array([token], dtype=np.int64))
