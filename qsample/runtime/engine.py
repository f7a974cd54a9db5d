"""Continuous batching: prompts come at any time, from any thread, and their tokens go out as they are sampled.

The engine runs the decode loop on a separate thread. If readers of requests drove the loop, all requests would wait
while a reader is busy elsewhere, and an event loop would be blocked during every step.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import abc, deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from qsample.checks import check_count, checked_timeout
from qsample.errors import (
    EngineClosedError,
    Failure,
    QsampleError,
    QueueFullError,
    RequestFailedError,
    shown,
)
from qsample.request.sampling_params import SEEDS, SamplingParams
from qsample.runtime.call import Call
from qsample.runtime.callbacks import INSTEAD, Guide
from qsample.runtime.causal_lm import CausalLM
from qsample.runtime.decode.loop import DecodeLoop, choose_flush_every
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.decode.stored_prefixes import DEFAULT_BYTES, StoredPrefixes
from qsample.runtime.request import CANCELLED, TIME, EngineStats, Request, RequestOutput
from qsample.runtime.sequence import Sequence

DEFAULT_SLOTS: Final = 8  # if neither the caller nor the package chooses
_CTX_LEN: Final = 4096  # likewise; less if the model knows fewer positions

_NO_FAULT_OF_A_PROMPT: Final[tuple[type[Exception], ...]] = (
    EngineClosedError,
    ImportError,
    MemoryError,
)


class Engine:
    r"""Runs many requests in the slots of one batch; each joins when a slot is free and leaves when it ends.

    A request's tokens depend on its prompt, parameters and seed only: not on its neighbours, its slot, the time at
    which it joined, or earlier requests; docs/serving.md lists the exceptions, a last bit in some kernels. Of a prompt
    that begins like another, of a request that runs or that ended, only the rest is read. Sampled tokens are read again
    if a prompt repeats them, unless `reuse_sampled_tokens` is set.

    >>> with Engine(load("package"), slots=8) as engine:
    ...     request = engine.add_request("In the beginning", max_new_tokens=64, temperature=0.8, stop_strings="\n\n")
    ...     for delta in request:
    ...         print(delta.text, end="")
    ...     print(request.result().finish_reason)
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        slots: int | None = None,
        max_waiting: int = 64,
        prefill_chunk_size: int | None = None,
        flush_every: int | None = None,
        double_buffering: bool = True,
        saved_states: int | None = None,
        reuse_sampled_tokens: bool = False,
        prefixes: abc.Sequence[str | Path] = (),
        prefix_cache_dir: str | Path | None = None,
        prefix_cache_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """Allocate the batch's memory and start the thread.

        Args:
            model: its ctx_len (see `load`) is the capacity of a slot; without it, at most 4096 tokens.
            slots: rows of the batch; by default the number that the package was compiled for, or 8.
            max_waiting: requests that may wait for a slot; see `add_request`.
            prefill_chunk_size: most prompt tokens between two decode steps, in whole pieces of 64 tokens on the CPU
                (256 after the first 1,024) and 512 elsewhere; at least a piece, the default: a prompt is cut at their
                ends only. More read a prompt faster, fewer hold up running requests for a shorter time.
            flush_every, double_buffering: as in `CausalLM.generate`.
            saved_states: copies of recurrent states to keep, for prompts that begin alike; by default two a slot.
            reuse_sampled_tokens: continue from sampled tokens, too, if a prompt repeats them. Tokens then depend on
                earlier requests: sampling a token runs other kernels than reading it does.
            prefixes: files of `CausalLM.save_prefix`: prompts that begin with their tokens are not read again.
            prefix_cache_dir: a folder that keeps the prompts of requests that ended, for this and other processes of
                the machine; made if it is missing. By default, slots alone keep them.
            prefix_cache_bytes: most bytes of that folder; the prompts that were used longest ago go.

        Raises ValueError for a wrong argument, PackageError for a wrong prefix or a folder that cannot be written to.
        """
        check_count("slots", slots)
        check_count("max_waiting", max_waiting, 0)
        check_count("prefill_chunk_size", prefill_chunk_size)
        check_count("saved_states", saved_states, 0)
        most = model.batch_size
        if slots is not None and most is not None and slots > most:
            raise ValueError(
                f"slots is {slots} and the package was compiled for {most} rows at most; compile it again"
            )
        if prefix_cache_dir is not None and reuse_sampled_tokens:
            raise ValueError(
                "prefix_cache_dir keeps tokens that were read, and reuse_sampled_tokens continues from sampled tokens, "
                "which may give others; leave either out"
            )
        stored = None
        if prefixes or prefix_cache_dir is not None:
            if isinstance(prefixes, str | Path):
                raise ValueError(f"prefixes is {shown(prefixes)}; give a list of files")
            stored = StoredPrefixes(
                model.package, model.sessions, prefixes, prefix_cache_dir, prefix_cache_bytes
            )
        self._stored = stored
        self.slots = slots or most or DEFAULT_SLOTS
        self.max_waiting = max_waiting
        self.capacity = model.capacity(_CTX_LEN)
        self._model = model
        saved_states = 2 * self.slots if saved_states is None else saved_states
        flush_every = choose_flush_every(model.sessions, flush_every)
        config = SchedulerConfig.of(
            model.sessions,
            flush_every=flush_every,
            prefill_chunk_size=prefill_chunk_size or model.sessions.prompts.piece_size,
            saved_states=saved_states,
            reuse_sampled=reuse_sampled_tokens,
        )
        device = Slots(
            model.sessions,
            self.slots,
            self.capacity,
            saved_states=saved_states,
            flush_every=flush_every,
        )
        loop = DecodeLoop(
            device,
            Scheduler(self.slots, config),
            self._deliver,
            double_buffering=double_buffering,
            stored=stored,
        )
        self._prefixes = loop.prefixes
        self._changed = threading.Condition()  # guards the next six
        self._requests: dict[Sequence, Request] = {}  # until they end
        self._added: list[Sequence] = []
        self._telling = (
            False  # a request that ended is being finished; it is not among them any more
        )
        self._closed = False
        self._draining = False
        self._failure: Failure | None = None
        # Not guarded: a caller that cancels may hold any lock. While a request is there, the thread looks here after
        # each step, so it needs no waking.
        self._cancelled: deque[Sequence] = deque()
        self._process = os.getpid()
        self._guides: dict[Sequence, Guide] = {}  # put in by the threads that add requests
        # For the engine's thread alone.
        self._deadlines: dict[Sequence, float] = {}  # on `time.perf_counter`
        self._loop: DecodeLoop | None = loop
        self._thread = threading.Thread(target=self._serve, name="qsample-engine", daemon=True)
        self._thread.start()
        atexit.register(
            self.close
        )  # a thread must not be inside the graph when the interpreter goes

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._requests)} requests"
        return f"Engine({self._model!r}, {self.slots} slots of {self.capacity} tokens, {state})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def add_request(
        self,
        inputs: Any,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        stop_strings: str | abc.Sequence[str] | None = None,
        allowed_tokens: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        cancel_if_abandoned: bool = True,
        **options: Any,
    ) -> Request:
        """Add a prompt, and return at once if the queue has room.

        Args:
            inputs: a text, token ids, or chat messages.
            params, seed, stop_strings, options: as in `CausalLM.generate`, options of chat messages included. max_time
                counts from now on, waiting included.
            allowed_tokens: as in `CausalLM.generate`, for a batch of this row. A function is called on the engine's
                thread between two steps, so all requests wait for it. Its exceptions end this request alone. It must
                not wait for the engine that calls it: RuntimeError.
            timeout: seconds to wait while `slots` requests run and `max_waiting` wait; by default without limit; 0 =
                not at all.
            priority: waiting requests with the lowest number get slots first, and of equals the earliest.
            cancel_if_abandoned: cancel the request when its last reader gives up, see `Request`; False lets it go on.

        Images of the prompt are computed in the calling thread, once it has its place among those that run or wait.

        Raises ValueError if an argument is wrong or the prompt does not fit, QueueFullError after `timeout`, and
        EngineClosedError if the engine takes no requests any more, or in a fork of the engine's process.
        """
        if options.get("num_return_sequences") not in (None, 1):
            raise ValueError(
                "add_request adds one request; add_requests takes num_return_sequences"
            )
        options |= {"seed": seed, "stop_strings": stop_strings, "allowed_tokens": allowed_tokens}
        call = self._model.read(inputs, params, **{**options, "num_return_sequences": 1})
        return self.add(
            call, timeout=timeout, priority=priority, cancel_if_abandoned=cancel_if_abandoned
        )[0]

    def add_requests(
        self,
        inputs: Any,
        params: SamplingParams | None = None,
        *,
        num_return_sequences: int,
        seed: int | abc.Sequence[int] | None = None,
        stop_strings: str | abc.Sequence[str] | None = None,
        allowed_tokens: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        cancel_if_abandoned: bool = True,
        **options: Any,
    ) -> list[Request]:
        """Add several requests of one prompt, all of them or none; it is read once, and the other slots get copies.
        Arguments and errors are as in `add_request`, but for these.

        Args:
            num_return_sequences: how many, at most `slots` and `max_waiting` together. Greedy requests would all be the
                same: ValueError.
            seed: of the first, the next requests taking the numbers after it; or a list with a seed for each. Each
                gives the tokens that `add_request` gives with that seed.
            allowed_tokens: as in `CausalLM.generate`, for a batch of these rows. An exception of a function ends all.
        """
        options |= {"seed": seed, "stop_strings": stop_strings, "allowed_tokens": allowed_tokens}
        call = self._model.read(
            inputs, params, **options, num_return_sequences=num_return_sequences
        )
        return self.add(
            call, timeout=timeout, priority=priority, cancel_if_abandoned=cancel_if_abandoned
        )

    def map(
        self,
        prompts: abc.Iterable[Any],
        params: SamplingParams | None = None,
        *,
        each: abc.Iterable[abc.Mapping[str, Any]] | None = None,
        seed: int | None = None,
        return_errors: bool = False,
        **options: Any,
    ) -> abc.Iterator[RequestOutput | Exception]:
        """Continue many prompts, and yield their outputs in the order of the prompts.

        `prompts` and `each` are read ahead of the outputs, as far as the engine has room; outputs that have to wait for
        an earlier prompt are kept. Closing the iterator cancels the prompts whose outputs it has not yielded.

        Args:
            prompts: each as in `add_request`.
            params, options: arguments of `add_request`, for every prompt.
            each: for each prompt a mapping of further, or other, arguments of `add_request`.
            seed: of the first prompt, by default fresh; the next prompts take the numbers after it.
            return_errors: yield the exception of a prompt that is not valid or failed in place of its output, and go
                on. False raises it at its place, and ends.

        Raises EngineClosedError if the engine closes or fails, and ImportError and MemoryError, even with
        `return_errors`; ValueError if `each` is shorter or longer than `prompts`.

        >>> for output in engine.map(["In the beginning", "Blessed are"], max_new_tokens=16, seed=1):
        ...     print(output.text)
        """
        raised = _NO_FAULT_OF_A_PROMPT if return_errors else (Exception,)
        pairs = (
            ((prompt, {}) for prompt in prompts)
            if each is None
            else zip(prompts, each, strict=True)
        )
        pending: deque[Request | Exception] = deque()

        def next_output() -> RequestOutput | Exception:
            request = pending.popleft()
            try:
                if isinstance(request, Exception):
                    raise request
                return request.result()
            except raised:
                raise
            except Exception as error:
                return error

        try:
            for index, (prompt, own) in enumerate(pairs):
                seeded = {} if seed is None else {"seed": (seed + index) % SEEDS}
                try:
                    pending.append(
                        self.add_request(prompt, **{"params": params, **options, **seeded, **own})
                    )
                except Exception as error:
                    pending.append(error)
                    if isinstance(error, raised):
                        break
                while pending and (isinstance(pending[0], Exception) or pending[0].done):
                    yield next_output()
            while pending:
                yield next_output()
        finally:
            for request in pending:
                if isinstance(request, Request):
                    request.cancel()

    def add(
        self,
        call: Call,
        *,
        timeout: float | None = None,
        priority: int = 0,
        cancel_if_abandoned: bool = True,
    ) -> list[Request]:
        """Add the requests of a call with a single prompt, all of them or none, with the arguments and errors of
        `add_request`. call: from `CausalLM.read`, or made by the caller."""
        self._check_waiting()
        if self.closed:
            raise self._closed_error()
        if call.stopping_criteria is not None:
            raise ValueError(
                "stopping_criteria are for generate; cancel() ends a request of an engine"
            )
        if call.logits_processor is not None:
            raise ValueError(f"logits_processor is for generate; {INSTEAD}")
        sequences, guide = self._model.prepare(call, self.capacity, priority=priority)
        count, most = call.num_return_sequences, self.slots + self.max_waiting
        if len(sequences) != count:
            raise ValueError(f"{len(sequences) // count} prompts were given; add them one by one")
        if not isinstance(priority, int):
            raise ValueError(
                f"priority is {shown(priority)}; give an integer, the lowest for those that go first"
            )
        seconds = checked_timeout(timeout)
        if count > most:
            raise ValueError(
                f"num_return_sequences is {count} and this engine takes {most}; raise max_waiting"
            )
        if guide is not None:
            guide.start()
        requests = [
            Request(
                one,
                self._cancelled.append,
                self._check_waiting,
                cancel_if_abandoned=bool(cancel_if_abandoned),
            )
            for one in sequences
        ]
        with self._changed:
            room = self._changed.wait_for(
                lambda: self.closed or len(self._requests) + count <= most, seconds
            )
            if self.closed:
                raise self._closed_error()
            if not room:
                taken = f"{self.slots} requests run and {self.max_waiting} wait, which is all that this engine takes"
                raise QueueFullError(
                    f"{taken}; try again later, give a longer timeout, or raise max_waiting"
                )
            for sequence, request in zip(sequences, requests, strict=True):
                if guide is not None:
                    self._guides[sequence] = guide
                self._requests[sequence] = request
            if sequences[0].images is None:
                self._added += sequences
                self._changed.notify_all()
        if sequences[0].images is not None:
            self._see(sequences)
        return requests

    def _see(self, sequences: list[Sequence]) -> None:
        """Compute the image features of requests, which have their room, and let them wait for slots; none of them if
        that fails."""
        try:
            self._model.images.see(sequences)
        except BaseException:
            with self._changed:
                self._cancelled.extend(sequences)
                self._changed.notify_all()
            raise
        with self._changed:
            self._added += [
                one for one in sequences if one in self._requests
            ]  # the engine may have closed
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether it takes no requests any more: it was closed or drained, or its graph failed."""
        return self._closed or self._draining

    def stats(self) -> EngineStats:
        """The numbers of requests that run and wait, their adapters, and prompt tokens that were not read again."""
        with self._changed:
            requests = list(self._requests.items())
        running = [sequence for sequence, request in requests if request.running]
        waiting = [sequence for sequence, request in requests if not request.running]
        counts = self.slots, self.max_waiting, len(running), len(waiting)
        return EngineStats(
            *counts, _adapters_of(running), _adapters_of(waiting), replace(self._prefixes)
        )

    def drain(self, timeout: float | None = None) -> bool:
        """Take no requests any more, and wait until the added requests have ended; then `close` it. Returns whether
        they have, after `timeout` seconds at most, by default without limit."""
        seconds = checked_timeout(timeout)
        self._check_waiting()
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._requests and not self._telling, seconds)

    def close(self) -> None:
        """Cancel all requests, end the thread and release the batch's memory. The model remains usable. On the engine's
        own thread, in a function of a request, it does not wait. In a fork it does nothing; the engine goes on."""
        if os.getpid() == self._process:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            if threading.current_thread() is not self._thread:
                self._thread.join()
        atexit.unregister(self.close)  # not where ctrl-C ended the wait

    def __reduce__(self) -> Any:
        raise TypeError(
            "an Engine cannot be pickled; pickle its model, and make an engine of that there"
        )

    def _check_waiting(self) -> None:
        """Raise if the engine's thread could not end the wait."""
        if os.getpid() != self._process:
            raise EngineClosedError(
                f"the engine runs in process {self._process}, and this is a fork of it; make an engine here"
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a function for allowed_tokens waits for the engine that calls it, for ever; use another thread"
            )

    def _closed_error(self) -> QsampleError:
        return (
            self._failure or Failure(EngineClosedError, "the engine is closed; make a new one")
        ).error()

    # From here on, the engine's thread.

    def _serve(self) -> None:
        assert self._loop is not None
        try:
            with self._loop as loop:
                while self._take_changes(loop):
                    loop.step()
        except BaseException as error:  # no reader may be left waiting
            self._failure = Failure.of(
                EngineClosedError,
                "the engine ended because its graph failed ({}); make a new one",
                error,
            )
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sequence in list(self._requests):
            self._end(sequence, self._failure or CANCELLED)
        self._loop = None
        if self._stored is not None:
            self._stored.close()

    def _take_changes(self, loop: DecodeLoop) -> bool:
        """Wait for something to do, and bring the loop up to date. False if the engine is to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._added or self._cancelled or loop.busy
            )
            if self._closed:
                return False
            # These first: a request that is cancelled was added before, and is then among the added or in the loop, or
            # its images are still computed, and it will not be added.
            cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
            added, self._added = self._added, []
        for sequence in added:
            max_time = sequence.request.max_time
            if max_time is not None:
                self._deadlines[sequence] = self._requests[sequence].added_at + max_time
            loop.add(sequence)
        now = time.perf_counter()
        late = sorted(
            (one for one, end in self._deadlines.items() if end <= now),
            key=self._deadlines.__getitem__,
        )
        for reason, ending in ((CANCELLED, cancelled), (TIME, late)):
            for sequence in ending:
                if sequence in self._requests:  # it has not ended meanwhile
                    loop.leave(sequence)
                    self._end(sequence, reason)
        return True

    def _deliver(self, sequence: Sequence) -> None:
        assert self._loop is not None
        request, guide = self._requests[sequence], self._guides.get(sequence)
        together = [sequence]  # an error ends all of these
        failed = "the request's text cannot be decoded ({})"
        try:
            request.update()
            if guide is not None and not sequence.ended:
                failed = "the request's function for allowed_tokens raised {}"
                together = [each for each in guide.sequences if each in self._requests]
                guide.update(self._loop.set_parameter, self._loop.read_outputs)
        except BaseException as error:  # SystemExit, too: other requests go on
            for one in together:
                self._loop.leave(one)
                self._end(one, Failure.of(RequestFailedError, failed, error))
            return
        if sequence.ended:
            self._loop.leave(sequence)
            self._end(sequence, sequence.finish_reason)

    def _end(self, sequence: Sequence, why: str | Failure) -> None:
        """Remove the request before finishing it, so that a caller who sees it end can add another."""
        self._guides.pop(sequence, None)
        self._deadlines.pop(sequence, None)
        with self._changed:
            request, self._telling = self._requests.pop(sequence), True
        request.fail(why) if isinstance(why, Failure) else request.finish(why)
        with self._changed:
            self._telling = False
            self._changed.notify_all()


def _adapters_of(sequences: abc.Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(
        sorted(
            {
                sequence.request.adapter.name
                for sequence in sequences
                if sequence.request.adapter is not None
            }
        )
    )
