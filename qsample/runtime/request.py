"""A prompt in an engine: its handle, which the engine's thread writes and any thread reads, and the
objects that readers get."""

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
from qsample.contract.tensors import PROMPT_LOGPROBS
from qsample.errors import Failure, RequestFailedError, shown
from qsample.runtime.sequence import NO_DRAFTS, DraftStats, PrefixStats, Sequence

CANCELLED_REASON: Final = "cancelled"
TIME_REASON: Final = "time"


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and text of a request. A delta has tokens without text if a character or a stop
    string is not complete; the last delta may have text without tokens.

    Attributes:
        token_ids: the sampled tokens, a stop token included.
        text: the text that they make certain; None without a tokenizer.
        seconds: the time since the request was added.
        outputs: the optional outputs of the package by name, with an entry for each token.
    """

    token_ids: list[int]
    text: str | None
    seconds: float
    outputs: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of tokens of a request.

    Attributes:
        prompt_tokens: the tokens of the prompt.
        completion_tokens: the sampled tokens.
        cached_tokens: the prompt tokens that were not read again.
        drafts: how the guessed tokens fared; all zeros without guessed tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    drafts: DraftStats = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """The times of a request, counted from its addition.

    Attributes:
        queue_seconds: the time until it got a slot; None if it got none.
        first_token_seconds: the time until its first token; None without tokens.
        total_seconds: the time until its end.
    """

    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request at its end.

    Attributes:
        token_ids: the sampled tokens, a stop token included, up to the token that completes a stop
            string.
        text: the text, cut off before the stop string; None without a tokenizer.
        finish_reason: a reason of `GenerateOutput`, or "cancelled".
        stop_string: the stop string that ended the request, or None.
        seed: the seed, which reproduces the tokens.
        usage, timing: the numbers of tokens, and the times.
        outputs: the optional outputs of the package by name, with an entry for each token.
        prompt_outputs: the scores of the prompt by name, with an entry for each token from the
            second on: `prompt_logprobs` [n - 1, 1] float32 and `prompt_ranks` [n - 1, 1] int32, 1
            for the likeliest; `prompt_top_logprob_ids` and `prompt_top_logprobs`, [n - 1, M], if
            the package has them. Of a request with logprob_token_ids, an entry for each of these.
            Empty for other requests.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    stop_string: str | None
    seed: int
    usage: Usage
    timing: RequestTiming
    outputs: Mapping[str, Array]
    prompt_outputs: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The requests of an engine at one moment.

    Attributes:
        slots, max_waiting: the most requests that run, and that wait.
        running, waiting: the numbers of requests in slots, and without a slot.
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

    Iterate over it for its `Delta`s, with `for` or `async for`; or wait for its end, with
    `result()` or `await`. Any number of threads and tasks may do so at the same time, and each sees
    everything from the beginning. Deltas that are never read are kept as long as the request
    itself, and hold up no other request.

    A request is cancelled if its last reader gives up before its end. A reader gives up if it
    leaves its `for` or `async for` (the iterator is closed or garbage collected), or if its task is
    cancelled while it awaits the request or the next `Delta`. A `result()` that timed out has not
    given up. With `add_request(..., cancel_if_abandoned=False)`, the request goes on.
    """

    def __init__(
        self,
        sequence: Sequence,
        cancel: Callable[[Sequence], None],
        check_waiting: Callable[[], None],
        *,
        cancel_if_abandoned: bool = True,
    ) -> None:
        """Make the handle of a sequence.

        Args:
            sequence: the sequence in the engine.
            cancel: makes the engine end a sequence; it neither waits nor locks.
            check_waiting: raises if a wait for the engine cannot end.
            cancel_if_abandoned: whether the request ends when its last reader gives up.
        """
        self._sequence = sequence
        self._cancel = cancel
        self._feed = _Feed(check_waiting, self.cancel if cancel_if_abandoned else None)
        self._callbacks: list[Callable[[Request], object]] = []
        self.added_at = time.perf_counter()

    @property
    def seed(self) -> int:
        """The seed, which reproduces the tokens."""
        return self._sequence.request.seed

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return self._sequence.request.num_prompt_tokens

    @property
    def scored_tokens(self) -> int:
        """The number of tokens of the prompt that have been scored so far."""
        scores = self._sequence.progress.scores
        return sum(len(piece[PROMPT_LOGPROBS.name]) for piece in scores)

    @property
    def completion_tokens(self) -> int:
        """The number of tokens that have come so far."""
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
        """Call `function(request)` when the request has ended, for any reason. The engine's thread
        calls it, so it must be quick; if the request has ended already, it is called at once. An
        exception of the function becomes a warning."""
        with self._feed.changed:
            if not self.done:
                self._callbacks.append(function)
                return
        self._call(function)

    def cancel(self) -> None:
        """End the request with the tokens so far and the finish reason "cancelled". Nothing happens
        if it has ended already."""
        if not self.done:
            self._cancel(self._sequence)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises TimeoutError after `timeout` seconds, RequestFailedError or
        EngineClosedError if the request failed, and RuntimeError if a function of a request waits
        for the engine that called it."""
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
                done = self.done  # This comes before the deltas: none is published after the end.
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

    # Only the engine's thread calls the methods below.

    def update(self) -> None:
        """Publish the tokens that were sampled since the last call."""
        known = len(self._sequence.token_ids)
        tokens, text = self._sequence.take()
        if tokens:
            self._publish(
                tokens, text, self._sequence.progress.outputs[known : known + len(tokens)]
            )

    def finish(self, reason: str) -> None:
        """End the request with the tokens so far. reason: the finish reason."""
        try:
            outcome: RequestOutput | Failure = self._make_output(reason)
        except BaseException as error:  # Tokenizers raise any kind.
            outcome = Failure.of(
                RequestFailedError, "the request's text cannot be decoded ({})", error
            )
        self._end(outcome)

    def fail(self, failure: Failure) -> None:
        """End the request with `failure`, whose error its readers get."""
        self._end(failure)

    def _end(self, outcome: RequestOutput | Failure) -> None:
        self._feed.end(outcome)
        callbacks = self._callbacks
        self._callbacks = []
        for function in callbacks:
            # Other requests go on after a SystemExit, and after warnings that are errors.
            with suppress(BaseException):
                self._call(function)

    def _make_output(self, reason: str) -> RequestOutput:
        sequence = self._sequence
        text = sequence.delivery.text
        rest = "" if text is None else text.end()
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
                sequence.request.num_prompt_tokens,
                len(tokens),
                sequence.placement.tokens_reused,
                sequence.progress.drafts,
            ),
            timing=RequestTiming(queued, first, now - self.added_at),
            outputs=_stacked(sequence.progress.outputs[: len(tokens)]),
            prompt_outputs=_joined(sequence.progress.scores),
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
        seconds = time.perf_counter() - self.added_at
        has_text = self._sequence.delivery.text is not None
        self._feed.put(Delta(tokens, text if has_text else None, seconds, _stacked(outputs or [])))


def _stacked(outputs: list[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several tokens by name, with a row for each token."""
    if not outputs:
        return {}
    return {name: np.stack([output[name] for output in outputs]) for name in outputs[0]}


def _joined(pieces: list[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several pieces of a prompt by name, one below the other."""
    if not pieces:
        return {}
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


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
    """The deltas of a request in a coroutine. This is not an asynchronous generator, because only
    its event loop closes such a generator after it was abandoned."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed
        self._reader: _TaskReader | None = None  # The first `anext` makes it.
        self._seen = 0  # deltas
        self._closed = False

    async def __anext__(self) -> Delta:
        feed = self._feed
        if self._reader is None:
            self._reader = _TaskReader()
            feed.join(self._reader)
        while not self._closed:
            self._reader.changed.clear()
            done = feed.outcome is not None  # This comes before the deltas: see `__iter__`.
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
            except BaseException:  # The task was cancelled.
                if feed.ends_when_abandoned:
                    self._close()
                    self._reader.changed.set()  # Another task may wait here, too.
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
