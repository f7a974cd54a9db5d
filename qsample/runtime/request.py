"""The handle of a prompt in an engine: written on the engine's thread, read on any other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qsample.contract import RUNNING, STATUS_NAMES
from qsample.errors import Failure, QsampleError
from qsample.runtime.sequence import Sequence
from qsample.runtime.session.options import checked_timeout
from qsample.tensors import Array

CANCELLED = "cancelled"


class RequestFailedError(QsampleError):
    """A function that came with the request raised, or its text could not be decoded. The cause is what was raised."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the delta before.

    token_ids: sampled tokens, a stop token included. text: what they make certain; None without a tokenizer. There may
    be tokens without text, where a character or a stop string is not complete, and at the end text without tokens.
    seconds: since the request was added.
    """

    token_ids: list[int]
    text: str | None
    seconds: float


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
    string; None without a tokenizer. finish_reason: "stop" (a stop token or a stop string), "length", "invalid" (the
    model gave NaN or infinite logits) or "cancelled". stop_string: the one that ended it. seed: reproduces the tokens.
    outputs: the optional outputs that the package has, by name, one entry a token.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    stop_string: str | None
    seed: int
    usage: Usage
    timing: RequestTiming
    outputs: Mapping[str, Array]


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
        self._added = time.perf_counter()
        self._changed = threading.Condition()
        # Changed without a lock: readers are garbage collected at any time, also while this thread holds one.
        self._readers: set[_Reader] = set()
        self._deltas: list[Delta] = []
        self._output: RequestOutput | None = None
        self._failure: Failure | None = None

    @property
    def seed(self) -> int:
        return self._sequence.seed

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._output is not None or self._failure is not None

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
            reader = _Reader()
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
        seen, reader = 0, _Reader()
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
        return _AsyncDeltas(self)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._wait().__await__()

    async def _wait(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._result()

    def _may_wait(self, reader: _Reader) -> None:
        """Let `reader` wait, or raise; it has not given up then."""
        try:
            self._check_waiting()
        except BaseException:
            self._readers.discard(reader)
            raise

    def _leave(self, reader: _Reader) -> None:
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

    def update(self) -> bool:
        """Publish what was sampled since the last call. Returns whether the request has ended."""
        tokens, text = self._sequence.take()
        if tokens:
            self._publish(tokens, text)
        if self._sequence.status == RUNNING:
            return False
        self.finish(STATUS_NAMES[self._sequence.status])
        return True

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

    def _make_output(self, reason: str) -> RequestOutput:
        sequence, text = self._sequence, self._sequence.text
        rest = text.end() if text is not None else ""
        if rest:
            self._publish([], rest)
        now = time.perf_counter()
        tokens, outputs = sequence.token_ids, sequence.outputs
        queued = None if sequence.admitted_at is None else sequence.admitted_at - self._added
        first = self._deltas[0].seconds if tokens else None
        return RequestOutput(
            token_ids=tokens,
            text=None if text is None else text.whole,
            finish_reason=reason,
            stop_string=None if text is None else text.stop_string,
            seed=sequence.seed,
            usage=Usage(len(sequence.prompt), len(tokens), sequence.reused),
            timing=RequestTiming(queued, first, now - self._added),
            outputs={name: np.stack([output[name] for output in outputs]) for name in outputs[0]} if outputs else {},
        )

    def fail(self, failure: Failure) -> None:
        """End it with an error, which its readers get."""
        with self._changed:
            self._failure = failure
            self._notify()

    def _publish(self, tokens: list[int], text: str) -> None:
        delta = Delta(tokens, None if self._sequence.text is None else text, time.perf_counter() - self._added)
        with self._changed:
            self._deltas.append(delta)
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for reader in self._readers.copy():
            reader.wake()


class _Reader:
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


class _AsyncDeltas(AsyncIterator[Delta]):
    """The deltas of a request in a coroutine. No generator: those wait for their event loop to be collected."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._reader: _Reader | None = None  # since the first `anext`
        self._seen = 0
        self._closed = False

    async def __anext__(self) -> Delta:
        request = self._request
        if self._reader is None:
            self._reader = _Reader(asyncio.get_running_loop())
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
