"""The handle of a prompt in an engine: written on the engine's thread, read on any other."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from typing import Any

from qsample.errors import Failure, shown
from qsample.runtime.request.errors import RequestFailedError
from qsample.runtime.request.outputs import Delta, RequestOutput, RequestTiming, Usage, stacked
from qsample.runtime.request.readers import AsyncDeltas, Reader
from qsample.runtime.sequence import Sequence
from qsample.tensors import Array
from qsample.values import checked_timeout

CANCELLED = "cancelled"
TIME = "time"


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
