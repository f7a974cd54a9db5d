"""A prompt in an engine: its handle, written on the engine's thread and read on any other, and all that readers get."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from qsample.errors import Failure, QsampleError, shown
from qsample.runtime.sequence import PrefixStats, Sequence
from qsample.tensors import Array
from qsample.values import checked_timeout

CANCELLED: Final = "cancelled"
TIME: Final = "time"


class QueueFullError(QsampleError):
    """The engine has no free slot, and its queue is full."""


class EngineClosedError(QsampleError):
    """The engine was closed, its graph failed, or this is a fork of the process that it runs in."""


class RequestFailedError(QsampleError):
    """A function that came with the request raised, or its text could not be decoded. The cause is what was raised."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the delta before.

    token_ids: sampled tokens, a stop token included. text: what they make certain; None without a tokenizer. There may
    be tokens without text, where a character or a stop string is not complete, and at the end text without tokens.
    seconds: since the request was added. outputs: the optional outputs that the package has, by name, one entry a
    token.
    """

    token_ids: list[int]
    text: str | None
    seconds: float
    outputs: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. cached_tokens: of the prompt, those that a slot held already from an earlier request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds since the request was added: until it got a slot, until its first token, until its end. None where it did
    not come so far."""

    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request at its end.

    token_ids: sampled, a stop token included, up to the one that completes a stop string. text: cut off before the stop
    string; None without a tokenizer. finish_reason: "stop" (a stop token or a stop string), "length", "time" (its
    max_time), "invalid" (the model gave NaN or infinite logits) or "cancelled". stop_string: the one that ended it.
    seed: reproduces the tokens. outputs: the optional outputs that the package has, by name, one entry a token.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    stop_string: str | None
    seed: int
    usage: Usage
    timing: RequestTiming
    outputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The requests of an engine at one moment. running: in slots. waiting: added, without a slot. prefixes: what of all
    prompts so far was not read again."""

    slots: int
    max_waiting: int
    running: int
    waiting: int
    prefixes: PrefixStats


def stacked(outputs: list[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several tokens by name, a row each."""
    return {name: np.stack([output[name] for output in outputs]) for name in outputs[0]} if outputs else {}


class Request:
    """A prompt in an engine; `Engine.add_request` makes it.

    Iterate over it for its `Delta`s, with `for` or `async for`; or wait for all of it, with `result()` or `await`. Any
    number of threads and tasks may do so at once, and each sees everything from the beginning. What nobody reads is
    kept as long as the request itself, and holds up nobody.

    A request whose last reader gives up before its end is cancelled: a `for` or `async for` that was left (its iterator
    was closed or garbage collected), or a task that was cancelled while it awaited the request or its next `Delta`. A
    `result()` that timed out has not given up. `add_request(..., cancel_if_abandoned=False)` lets it go on.
    """

    def __init__(
        self,
        sequence: Sequence,
        cancel: Callable[[Sequence], None],
        check_waiting: Callable[[], None],
        *,
        cancel_if_abandoned: bool = True,
    ) -> None:
        """cancel: must not wait or take a lock. check_waiting: raises where waiting for the engine would never end."""
        self._sequence = sequence
        self._cancel = cancel
        self._check_waiting = check_waiting
        self._cancel_if_abandoned = cancel_if_abandoned
        self.added_at = time.perf_counter()
        self._changed = threading.Condition()
        # Changed without a lock: readers are garbage collected at any time, also while this thread holds one.
        self._readers: set[Reader] = set()
        self._deltas: list[Delta] = []
        self._output: RequestOutput | None = None
        self._failure: Failure | None = None
        self._callbacks: list[Callable[[Request], object]] = []

    @property
    def seed(self) -> int:
        return self._sequence.seed

    @property
    def prompt_tokens(self) -> int:
        return len(self._sequence.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens that have come so far."""
        return len(self._sequence.token_ids)

    @property
    def running(self) -> bool:
        """Whether it has a slot."""
        return self._sequence.slot is not None

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._output is not None or self._failure is not None

    def add_done_callback(self, function: Callable[[Request], object]) -> None:
        """Have `function(request)` called once it has ended, for whatever reason: on the engine's thread, so it must be
        quick; or at once, where it has ended already. What it raises is reported as a warning."""
        with self._changed:
            if not self.done:
                self._callbacks.append(function)
                return
        self._call(function)

    def cancel(self) -> None:
        """End it with what it has, finish reason "cancelled"; nothing happens where it has ended already."""
        if not self.done:
            self._cancel(self._sequence)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises TimeoutError after `timeout` seconds, RequestFailedError or EngineClosedError where
        the request failed, and RuntimeError where a function of a request waits for the engine that called it."""
        seconds = checked_timeout(timeout)
        if not self.done:
            self._check_waiting()
            reader = Reader()
            self._readers.add(reader)
            try:
                with self._changed:
                    if not self._changed.wait_for(lambda: self.done, seconds):
                        raise TimeoutError(
                            f"the request has not ended after {timeout} seconds; it goes on, or cancel() it"
                        )
            finally:
                self._readers.discard(reader)
        return self._result()

    def __iter__(self) -> Iterator[Delta]:
        seen, reader = 0, Reader()
        self._readers.add(reader)
        try:
            while True:
                done = self.done  # before the deltas: none comes after that
                new = self._deltas[seen:]
                yield from new
                seen += len(new)
                if done:
                    self._result()
                    return
                if not new:
                    self._may_wait(reader)
                    with self._changed:
                        self._changed.wait_for(lambda: len(self._deltas) > seen or self.done)  # noqa: B023
        finally:
            self._leave(reader)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return AsyncDeltas(self)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._wait().__await__()

    async def _wait(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._result()

    def _may_wait(self, reader: Reader) -> None:
        """Let `reader` wait, or raise; it has not given up then."""
        try:
            self._check_waiting()
        except BaseException:
            self._readers.discard(reader)
            raise

    def _leave(self, reader: Reader) -> None:
        if reader in self._readers:
            self._readers.discard(reader)
            if self._cancel_if_abandoned and not self._readers:
                self.cancel()

    def _result(self) -> RequestOutput:
        if self._failure is not None:
            raise self._failure.error()
        assert self._output is not None
        return self._output

    # The rest is for the engine's thread.

    def update(self) -> None:
        """Publish what was sampled since the last call."""
        known = len(self._sequence.token_ids)
        tokens, text = self._sequence.take()
        if tokens:
            self._publish(tokens, text, self._sequence.outputs[known : known + len(tokens)])

    def finish(self, reason: str) -> None:
        """End it with what it has."""
        try:
            output = self._make_output(reason)
        except BaseException as error:  # a tokenizer's
            self.fail(Failure.of(RequestFailedError, "the request's text cannot be decoded ({})", error))
            return
        with self._changed:
            self._output = output
            self._notify()
        self._call_back()

    def _make_output(self, reason: str) -> RequestOutput:
        sequence, text = self._sequence, self._sequence.text
        rest = text.end() if text is not None else ""
        if rest:
            self._publish([], rest)
        now = time.perf_counter()
        tokens, outputs = sequence.token_ids, sequence.outputs
        queued = None if sequence.admitted_at is None else sequence.admitted_at - self.added_at
        first = self._deltas[0].seconds if tokens else None
        return RequestOutput(
            token_ids=tokens,
            text=None if text is None else text.whole,
            finish_reason=reason,
            stop_string=None if text is None else text.stop_string,
            seed=sequence.seed,
            usage=Usage(len(sequence.prompt), len(tokens), sequence.reused),
            timing=RequestTiming(queued, first, now - self.added_at),
            outputs=stacked(outputs[: len(tokens)]),
        )

    def fail(self, failure: Failure) -> None:
        """End it with an error, which its readers get."""
        with self._changed:
            self._failure = failure
            self._notify()
        self._call_back()

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            with suppress(BaseException):  # SystemExit, and warnings that are errors: nobody else is to suffer
                self._call(function)

    def _call(self, function: Callable[[Request], object]) -> None:
        try:
            function(self)
        except BaseException as error:
            warnings.warn(f"a callback of a request raised {shown(error, 200)}", RuntimeWarning, stacklevel=2)
            if not isinstance(error, Exception):
                raise

    def _publish(self, tokens: list[int], text: str, outputs: list[Mapping[str, Array]] | None = None) -> None:
        shown = None if self._sequence.text is None else text
        delta = Delta(tokens, shown, time.perf_counter() - self.added_at, stacked(outputs or []))
        with self._changed:
            self._deltas.append(delta)
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for reader in self._readers.copy():
            reader.wake()


class Reader:
    """Somebody who waits for a request, on its condition; or, in a coroutine, on `event`."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self.event = asyncio.Event()

    def wake(self) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self.event.set)
            except BaseException:  # most likely it was closed, so nobody waits there any more
                self._loop = None


class AsyncDeltas(AsyncIterator[Delta]):
    """The deltas of a request in a coroutine. No generator: those wait for their event loop to be collected."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._reader: Reader | None = None  # since the first `anext`
        self._seen = 0
        self._closed = False

    async def __anext__(self) -> Delta:
        request = self._request
        if self._reader is None:
            self._reader = Reader(asyncio.get_running_loop())
            request._readers.add(self._reader)
        while not self._closed:
            self._reader.event.clear()
            done = request.done  # before the deltas: none comes after that
            if self._seen < len(request._deltas):
                self._seen += 1
                return request._deltas[self._seen - 1]
            if done:
                self._close()
                request._result()
                break
            request._may_wait(self._reader)
            try:
                await self._reader.event.wait()
            except BaseException:  # its task was cancelled
                if request._cancel_if_abandoned:
                    self._close()
                    self._reader.event.set()  # for another task that waits here
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Give up."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._reader is not None and not self._closed:
            self._request._leave(self._reader)
        self._closed = True


class Deadlines:
    """When each sequence has to end."""

    def __init__(self) -> None:
        self._ends: dict[Sequence, float] = {}
        self._next = math.inf  # none is due before; nothing is looked through until then

    def add(self, sequence: Sequence, since: float) -> None:
        """Count its `max_time`, where it has one, from `since`, on `time.perf_counter`."""
        if sequence.max_time is not None:
            self._ends[sequence] = since + sequence.max_time
            self._next = min(self._next, self._ends[sequence])

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._ends.pop(sequence, None)

    def due(self) -> list[Sequence]:
        """Those whose time is up, the earliest first and each once."""
        now = time.perf_counter()
        if now < self._next:
            return []
        late = sorted((one for one, end in self._ends.items() if end <= now), key=self._ends.__getitem__)
        for sequence in late:
            del self._ends[sequence]
        self._next = min(self._ends.values(), default=math.inf)
        return late
