"""A prompt in an engine: its handle, written on the engine's thread and read on any other, and all that readers get."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from qsample.checks import checked_timeout
from qsample.contract.arrays import Array
from qsample.errors import Failure, RequestFailedError, shown
from qsample.runtime.sequence import NO_DRAFTS, DraftStats, PrefixStats, Sequence

CANCELLED: Final = "cancelled"
TIME: Final = "time"


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and text of a request. Some deltas have tokens without text, because a character or a stop string is
    not complete; the last may have text without tokens.

    Attributes:
        token_ids: sampled tokens, a stop token included.
        text: the text that they make certain; None without a tokenizer.
        seconds: since the request was added.
        outputs: the optional outputs of the package by name, an entry a token.
    """

    token_ids: list[int]
    text: str | None
    seconds: float
    outputs: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of a request, `prompt_tokens` and `completion_tokens`. cached_tokens: prompt tokens that were
    not read again. drafts: all zeros without guessed tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafts: DraftStats = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds from a request's addition to its slot (`queue_seconds`), its first token (`first_token_seconds`) and its
    end (`total_seconds`); None for an event that never came."""

    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request at its end.

    Attributes:
        token_ids: sampled tokens, a stop token included, up to the token that completes a stop string.
        text: cut off before the stop string; None without a tokenizer.
        finish_reason: as in `GenerateOutput`, or "cancelled".
        stop_string: the stop string that ended it, or None.
        seed: reproduces the tokens.
        usage, timing: numbers of tokens, and seconds.
        outputs: the optional outputs of the package by name, an entry a token.
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
    """The requests of an engine at one moment.

    Attributes:
        slots, max_waiting: most requests that run, and that wait.
        running, waiting: requests in slots, and without a slot.
        running_adapters, waiting_adapters: the names of the adapters of these requests, sorted.
        prefixes: the prompt tokens so far that were not read again.
    """

    slots: int
    max_waiting: int
    running: int
    waiting: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    prefixes: PrefixStats


class Request:
    """A prompt in an engine; `Engine.add_request` makes it.

    Iterate over it for its `Delta`s, with `for` or `async for`; or wait for all of it, with `result()` or `await`. Any
    number of threads and tasks may do so at once, and each sees everything from the beginning. Deltas that are never
    read are kept as long as the request itself, and hold up no other request.

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
        """cancel: has the engine end a sequence, without a wait or lock. check_waiting: raises if a wait cannot end."""
        self._sequence = sequence
        self._cancel = cancel
        self._feed = _Feed(check_waiting, self.cancel if cancel_if_abandoned else None)
        self._callbacks: list[Callable[[Request], object]] = []
        self.added_at = time.perf_counter()

    @property
    def seed(self) -> int:
        """Reproduces the tokens."""
        return self._sequence.request.seed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._sequence.request.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens that have come so far."""
        return len(self._sequence.token_ids)

    @property
    def running(self) -> bool:
        """Whether it has a slot."""
        return self._sequence.placement.slot is not None

    @property
    def done(self) -> bool:
        """Whether it has ended, for any reason."""
        return self._feed.outcome is not None

    def add_done_callback(self, function: Callable[[Request], object]) -> None:
        """Call `function(request)` once it has ended, for any reason: on the engine's thread, so it must be quick; or
        at once if it has ended already. An exception of the function becomes a warning."""
        with self._feed.changed:
            if not self.done:
                self._callbacks.append(function)
                return
        self._call(function)

    def cancel(self) -> None:
        """End it with the tokens so far, finish reason "cancelled"; nothing happens if it has ended already."""
        if not self.done:
            self._cancel(self._sequence)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises TimeoutError after `timeout` seconds, RequestFailedError or EngineClosedError if the
        request failed, and RuntimeError if a function of a request waits for the engine that called it."""
        seconds = checked_timeout(timeout)
        reader = _Reader()
        self._feed.join(reader)
        try:
            if not self._feed.wait(reader, None, seconds):
                raise TimeoutError(
                    f"the request has not ended after {timeout} seconds; it goes on, or cancel() it"
                )
        finally:
            self._feed.leave(reader)
        return self._feed.result()

    def __iter__(self) -> Iterator[Delta]:
        feed = self._feed
        seen = 0
        reader = _Reader()
        feed.join(reader)
        try:
            while True:
                done = self.done  # read before the deltas, as none comes after the end
                new = feed.deltas[seen:]
                yield from new
                seen += len(new)
                if done:
                    feed.result()
                    return
                if not new:
                    feed.wait(reader, seen)
        finally:
            feed.abandon(reader)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _AsyncDeltas(self._feed)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._read_all().__await__()

    async def _read_all(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._feed.result()

    # The rest is for the engine's thread.

    def update(self) -> None:
        """Publish the tokens that were sampled since the last call."""
        known = len(self._sequence.token_ids)
        tokens, text = self._sequence.take()
        if tokens:
            self._publish(
                tokens, text, self._sequence.progress.outputs[known : known + len(tokens)]
            )

    def finish(self, reason: str) -> None:
        """End it with the tokens so far; `reason` is its finish reason."""
        try:
            outcome: RequestOutput | Failure = self._make_output(reason)
        except BaseException as error:  # a tokenizer's
            outcome = Failure.of(
                RequestFailedError, "the request's text cannot be decoded ({})", error
            )
        self._end(outcome)

    def fail(self, failure: Failure) -> None:
        """End it with the error `failure` for its readers."""
        self._end(failure)

    def _end(self, outcome: RequestOutput | Failure) -> None:
        self._feed.end(outcome)
        callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            with suppress(
                BaseException
            ):  # SystemExit, and warnings that are errors: other requests go on
                self._call(function)

    def _make_output(self, reason: str) -> RequestOutput:
        sequence, text = self._sequence, self._sequence.delivery.text
        rest = text.end() if text is not None else ""
        if rest:
            self._publish([], rest)
        now = time.perf_counter()
        tokens = sequence.token_ids
        admitted_at = sequence.progress.admitted_at
        queued = None if admitted_at is None else admitted_at - self.added_at
        first = self._feed.deltas[0].seconds if tokens else None
        return RequestOutput(
            token_ids=tokens,
            text=None if text is None else text.whole,
            finish_reason=reason,
            stop_string=None if text is None else text.stop_string,
            seed=sequence.request.seed,
            usage=Usage(
                len(sequence.request.prompt),
                len(tokens),
                sequence.placement.tokens_reused,
                sequence.progress.drafts,
            ),
            timing=RequestTiming(queued, first, now - self.added_at),
            outputs=_stacked(sequence.progress.outputs[: len(tokens)]),
        )

    def _call(self, function: Callable[[Request], object]) -> None:
        try:
            function(self)
        except BaseException as error:
            warnings.warn(
                f"a callback of a request raised {shown(error, 200)}", RuntimeWarning, stacklevel=2
            )
            if not isinstance(error, Exception):
                raise

    def _publish(
        self, tokens: list[int], text: str, outputs: list[Mapping[str, Array]] | None = None
    ) -> None:
        certain = None if self._sequence.delivery.text is None else text
        self._feed.put(
            Delta(tokens, certain, time.perf_counter() - self.added_at, _stacked(outputs or []))
        )


def _stacked(outputs: list[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several tokens by name, a row each."""
    return (
        {name: np.stack([output[name] for output in outputs]) for name in outputs[0]}
        if outputs
        else {}
    )


class _Reader:
    """A reader of a feed in a thread, which waits for the feed's condition."""

    def wake(self) -> None:
        """Tell the reader, from the engine's thread, that the feed changed."""


class _TaskReader(_Reader):
    """A reader in a coroutine, which waits for an event of its loop."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        # An error means most likely that the loop was closed, so nothing waits there any more.
        with suppress(BaseException):
            self._loop.call_soon_threadsafe(self.changed.set)


class _Feed:
    """The deltas of a request and its outcome, from the engine's thread to the request's readers.

    The engine's thread calls `put` for each delta, and `end` once. A reader calls `join`, then
    `wait` or `check_wait` before each wait, and in the end `abandon`; or `leave` if it only stops
    waiting. When the last reader abandons the feed, `abandoned` is called.

    Attributes:
        deltas: the deltas so far; none comes after the outcome.
        outcome: the output, or why there is none; None before the end.
        changed: guards `deltas` and `outcome`, and is notified when they change.
    """

    def __init__(
        self, check_waiting: Callable[[], None], abandoned: Callable[[], None] | None
    ) -> None:
        """check_waiting: raises if a wait cannot end. abandoned: None lets an abandoned request go
        on."""
        self.deltas: list[Delta] = []
        self.outcome: RequestOutput | Failure | None = None
        self.changed = threading.Condition()
        # A dict as a set. It is changed without a lock, as each operation is atomic: readers are
        # garbage collected at any time, also while this thread holds the lock.
        self._readers: dict[_Reader, None] = {}
        self._check_waiting = check_waiting
        self._abandoned = abandoned

    @property
    def has_readers(self) -> bool:
        return len(self._readers) > 0

    @property
    def ends_when_abandoned(self) -> bool:
        """Whether the request ends when its last reader abandons it."""
        return self._abandoned is not None

    def put(self, delta: Delta) -> None:
        """Publish a delta."""
        with self.changed:
            self.deltas.append(delta)
            self._notify()

    def end(self, outcome: RequestOutput | Failure) -> None:
        """Publish the outcome."""
        with self.changed:
            self.outcome = outcome
            self._notify()

    def _notify(self) -> None:
        self.changed.notify_all()
        for reader in self._readers.copy():
            reader.wake()

    def result(self) -> RequestOutput:
        """The output at the end, or its error."""
        assert self.outcome is not None
        if isinstance(self.outcome, Failure):
            raise self.outcome.error()
        return self.outcome

    def join(self, reader: _Reader) -> None:
        """Count `reader` among the readers."""
        self._readers[reader] = None

    def leave(self, reader: _Reader) -> None:
        """Forget `reader`, which stops waiting but has not given up."""
        self._readers.pop(reader, None)

    def abandon(self, reader: _Reader) -> None:
        """Forget `reader`, which has given up; nothing happens if it left before."""
        was_there = self._readers.pop(reader, ...) is not ...
        if was_there and self._abandoned is not None and not self._readers:
            self._abandoned()

    def wait(self, reader: _Reader, seen: int | None, seconds: float | None = None) -> bool:
        """Wait for the end, or, with `seen`, for more deltas than that. Returns whether it came in
        time."""
        if self.outcome is not None:
            return True
        self.check_wait(reader)

        def is_there() -> bool:
            return self.outcome is not None or (seen is not None and len(self.deltas) > seen)

        with self.changed:
            return self.changed.wait_for(is_there, seconds)

    def check_wait(self, reader: _Reader) -> None:
        """Raise if `reader` cannot wait; it then leaves, and has not given up."""
        try:
            self._check_waiting()
        except BaseException:
            self.leave(reader)
            raise


class _AsyncDeltas(AsyncIterator[Delta]):
    """The deltas of a request in a coroutine. This is not a generator, because Python finalizes
    those on their event loop, which may be closed."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed
        self._reader: _TaskReader | None = None  # since the first `anext`
        self._seen = 0  # deltas
        self._closed = False

    async def __anext__(self) -> Delta:
        feed = self._feed
        if self._reader is None:
            self._reader = _TaskReader()
            feed.join(self._reader)
        while not self._closed:
            self._reader.changed.clear()
            done = feed.outcome is not None  # read before the deltas, as none comes after it
            if self._seen < len(feed.deltas):
                self._seen += 1
                return feed.deltas[self._seen - 1]
            if done:
                self._close()
                feed.result()
                break
            feed.check_wait(self._reader)
            try:
                await self._reader.changed.wait()
            except BaseException:  # the task was cancelled
                if feed.ends_when_abandoned:
                    self._close()
                    self._reader.changed.set()  # for another task that waits here
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Give up."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._reader is not None and not self._closed:
            self._feed.abandon(self._reader)
        self._closed = True
