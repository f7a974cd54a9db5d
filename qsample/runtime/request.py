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
from qsample.runtime.sequence import Sequence
from qsample.tensors import Array

CANCELLED = "cancelled"


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
    """

    def __init__(self, sequence: Sequence, cancel: Callable[[Sequence], None]) -> None:
        self._sequence = sequence
        self._cancel = cancel
        self._added = time.perf_counter()
        self._changed = threading.Condition()
        self._listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._deltas: list[Delta] = []
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None

    @property
    def seed(self) -> int:
        return self._sequence.seed

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._output is not None or self._error is not None

    def cancel(self) -> None:
        """End it with what it has, finish reason "cancelled"; nothing happens where it has ended already."""
        self._cancel(self._sequence)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end. Raises TimeoutError after `timeout` seconds, and what made the request fail."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended after {timeout} seconds; it goes on, or cancel() it")
        return self._result()

    def __iter__(self) -> Iterator[Delta]:
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._deltas) > seen or self.done)  # noqa: B023
                new, done = self._deltas[seen:], self.done
            yield from new
            seen += len(new)
            if done:
                self._result()
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        listener = asyncio.get_running_loop(), asyncio.Event()
        seen = 0
        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                listener[1].clear()
                with self._changed:
                    new, done = self._deltas[seen:], self.done
                for delta in new:
                    yield delta
                seen += len(new)
                if done:
                    self._result()
                    return
                await listener[1].wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._wait().__await__()

    async def _wait(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._result()

    def _result(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
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
        sequence, text = self._sequence, self._sequence.text
        rest = text.end() if text is not None else ""
        if rest:
            self._publish([], rest)
        now = time.perf_counter()
        tokens, outputs = sequence.token_ids, sequence.outputs
        queued = None if sequence.admitted_at is None else sequence.admitted_at - self._added
        first = self._deltas[0].seconds if tokens else None
        output = RequestOutput(
            token_ids=tokens,
            text=None if text is None else text.whole,
            finish_reason=reason,
            stop_string=None if text is None else text.stop_string,
            seed=sequence.seed,
            usage=Usage(len(sequence.prompt), len(tokens), sequence.reused),
            timing=RequestTiming(queued, first, now - self._added),
            outputs={name: np.stack([output[name] for output in outputs]) for name in outputs[0]} if outputs else {},
        )
        with self._changed:
            self._output = output
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End it with an error, which its readers get."""
        with self._changed:
            self._error = error
            self._notify()

    def _publish(self, tokens: list[int], text: str) -> None:
        delta = Delta(tokens, None if self._sequence.text is None else text, time.perf_counter() - self._added)
        with self._changed:
            self._deltas.append(delta)
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for loop, event in self._listeners:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:  # its event loop was closed, so nobody waits there any more
                continue
