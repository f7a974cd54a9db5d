"""A fixed set of requests enters; what each of them sampled, in a `Collector`, leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from qsample.contract import ALLOWED_TOKENS
from qsample.runtime.decode.loop import DecodeLoop, Progress
from qsample.runtime.decode.scheduler import DecodeRequest, Scheduler
from qsample.runtime.decode.slots import Slots
from qsample.runtime.inputs import AllowedTokensFn
from qsample.runtime.output import Collector, Step, Timing
from qsample.runtime.text.streamer import Streamer
from qsample.tensors import Array


class Batch:
    """Requests that start together; row i of everything belongs to request i."""

    def __init__(
        self,
        requests: Sequence[DecodeRequest],
        collector: Collector,
        pad_token_id: int,
        streamer: Streamer | None = None,
        guide: AllowedTokensFn | None = None,
        mask: Array | None = None,
    ) -> None:
        """streamer: follows the only request. guide: writes `mask` [B, W] int32 before every token but the first; all
        requests need a slot at once then."""
        self._requests = requests
        self._rows = {request: row for row, request in enumerate(requests)}
        self._collector = collector
        self._pad = pad_token_id
        self._streamer = streamer
        self._guide = guide
        self._mask = mask
        self._new: list[Progress] = []  # delivered since the guide was called

    def run(self, slots: Slots, scheduler: Scheduler, *, double_buffering: bool) -> Timing:
        """Run every request to its end."""
        if self._streamer is not None:
            self._streamer.put(self._requests[0].prompt[None])
        started, prefilled = time.perf_counter(), None
        with DecodeLoop(slots, scheduler, self._deliver, double_buffering=double_buffering) as loop:
            self._loop = loop
            try:
                for request in self._requests:
                    loop.add(request)
                while loop.busy:
                    loop.step()
                    if prefilled is None and self._collector.started:
                        prefilled = time.perf_counter()
                    if self._guide is not None and self._new and loop.busy and not loop.prefilling:
                        self._write_mask(self._guide)
            finally:
                del self._loop  # each holds the other, and the batch's memory until the garbage collector comes
        if self._streamer is not None:
            self._streamer.end()
        ended = time.perf_counter()
        prefilled = prefilled or ended
        return Timing(prefilled - started, ended - prefilled, loop.steps)

    def _deliver(self, progress: Progress) -> None:
        row = self._rows[progress.request]
        for token in self._collector.add(row, progress):
            if self._streamer is not None:
                self._streamer.put(np.array([token], dtype=np.int64))
        if self._collector.statuses[row] != progress.status:  # a stop string, which the graph knows nothing of
            self._loop.leave(progress.request)
        if self._guide is not None:
            self._new.append(progress)

    def _write_mask(self, guide: AllowedTokensFn) -> None:
        assert self._mask is not None
        guide(self._step(), self._mask)
        for request, mask in zip(self._requests, self._mask, strict=True):
            self._loop.set_parameter(request, ALLOWED_TOKENS.name, mask)
        self._new.clear()

    def _step(self) -> Step:
        """The newest token of every row: the loop reads guided requests after each one."""
        rows = len(self._requests)
        tokens, emitted = np.full(rows, self._pad, dtype=np.int64), np.zeros(rows, dtype=np.bool_)
        outputs = {name: np.zeros((rows, *value.shape), value.dtype) for name, value in self._new[0].outputs.items()}
        for progress in self._new:
            row = self._rows[progress.request]
            emitted[row] = bool(progress.tokens)
            tokens[row] = progress.tokens[0] if progress.tokens else self._pad
            for name, value in progress.outputs.items():
                outputs[name][row] = value
        return Step(tokens, emitted, np.array(self._collector.statuses, dtype=np.int32), outputs)
