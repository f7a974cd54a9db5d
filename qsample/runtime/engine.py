"""Continuous batching: prompts come at any time, from any thread, and their tokens are delivered as
they are sampled.

The engine runs the decode loop on a separate thread. If readers of requests drove the loop, all
requests would wait while a reader is busy, and an event loop would be blocked during every step.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections import abc, deque
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from qsample.checks import as_path, check_count, checked_timeout, from_keywords
from qsample.errors import (
    EngineClosedError,
    Failure,
    QsampleError,
    QueueFullError,
    RequestFailedError,
    shown,
)
from qsample.request.sampling_params import NUM_SEEDS, SamplingParams
from qsample.request.vllm import with_own_names
from qsample.runtime.call import Call
from qsample.runtime.callbacks import LOGITS_PROCESSOR_ADVICE, Guide
from qsample.runtime.causal_lm import CausalLM
from qsample.runtime.decode.loop import DecodeLoop, choose_flush_every
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.decode.stored_prefixes import DEFAULT_BYTES, StoredPrefixes
from qsample.runtime.request import (
    CANCELLED_REASON,
    TIME_REASON,
    EngineStats,
    Request,
    RequestOutput,
)
from qsample.runtime.sequence import Sequence

DEFAULT_SLOTS: Final = 8  # This holds if neither the caller nor the package chooses.
# Tokens of a slot, if neither the caller nor the package chooses; fewer if the model knows fewer
# positions.
_DEFAULT_CTX_LEN: Final = 4096
# Exceptions that are not the fault of a prompt: `map` raises them even if it returns the errors of
# prompts.
_ENGINE_ERRORS: Final[tuple[type[Exception], ...]] = (EngineClosedError, ImportError, MemoryError)


class EngineKeywords(TypedDict, total=False):
    """The keywords of `Engine`. `EngineOptions` has their defaults."""

    slots: int | None
    max_waiting: int
    prefill_chunk_size: int | None
    flush_every: int | None
    double_buffering: bool
    saved_states: int | None
    reuse_sampled_tokens: bool
    prefixes: abc.Sequence[str | Path]
    prefix_cache_dir: str | Path | None
    prefix_cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The keywords of `Engine`, where they are described. Raises ValueError for a wrong value."""

    slots: int | None = None
    max_waiting: int = 64
    prefill_chunk_size: int | None = None
    flush_every: int | None = None
    double_buffering: bool = True
    saved_states: int | None = None
    reuse_sampled_tokens: bool = False
    prefixes: abc.Sequence[str | Path] = ()
    prefix_cache_dir: str | Path | None = None
    prefix_cache_bytes: int = DEFAULT_BYTES

    def __post_init__(self) -> None:
        check_count("slots", self.slots)
        check_count("max_waiting", self.max_waiting, 0)
        check_count("prefill_chunk_size", self.prefill_chunk_size)
        check_count("saved_states", self.saved_states, 0)
        if self.prefix_cache_dir is not None and self.reuse_sampled_tokens:
            raise ValueError(
                "prefix_cache_dir keeps tokens that were read, and reuse_sampled_tokens continues from sampled tokens, "
                "which may give others; leave either out"
            )
        if isinstance(self.prefixes, str | Path):
            raise ValueError(f"prefixes is {shown(self.prefixes)}; give a list of files")
        for path in self.prefixes:
            as_path("prefixes", path)
        if self.prefix_cache_dir is not None:
            as_path("prefix_cache_dir", self.prefix_cache_dir)


class Engine:
    r"""Runs many requests in the slots of a batch; a request joins when a slot is free, and leaves
    when it ends.

    A request's tokens depend on its prompt, parameters and seed only: not on its neighbours, its
    slot, the time at which it joined, or earlier requests. docs/serving.md lists the exceptions: in
    some kernels, a last bit differs. If a prompt begins like the prompt of another request, which
    may have ended, only its other tokens are read. Sampled tokens are read again if a prompt
    repeats them, unless `reuse_sampled_tokens` is set.

    >>> with Engine(load("package"), slots=8) as engine:
    ...     request = engine.add_request("In the beginning", max_new_tokens=64, temperature=0.8, stop_strings="\n\n")
    ...     for delta in request:
    ...         print(delta.text, end="")
    ...     print(request.result().finish_reason)
    """

    def __init__(self, model: CausalLM, **options: Unpack[EngineKeywords]) -> None:
        """Allocate the batch's memory and start the thread.

        Args:
            model: the model to run. Its ctx_len (see `load`) is the capacity of a slot; without it,
                at most 4096 tokens.
            slots: the number of rows of the batch; by default the number that the package was
                compiled for, or 8.
            max_waiting: the number of requests that may wait for a slot, by default 64; see
                `add_request`.
            prefill_chunk_size: the most prompt tokens between two decode steps, in whole pieces of
                64 tokens on the CPU (256 after the first 1,024) and 512 elsewhere; by default a
                piece, the least. A prompt is only cut where its pieces end. A larger number reads a
                prompt faster, a smaller one holds up running requests for a shorter time.
            flush_every, double_buffering: as in `CausalLM.generate`.
            saved_states: the number of copies of recurrent states to keep, for prompts that begin
                alike; by default two per slot.
            reuse_sampled_tokens: whether a prompt that repeats sampled tokens continues from them;
                by default False. With True, tokens depend on earlier requests: sampling a token
                runs other kernels than reading it does.
            prefixes: the files of `CausalLM.save_prefix`: prompts that begin with their tokens do
                not read these again.
            prefix_cache_dir: a folder that keeps the prompts of requests that ended, for this and
                other processes of the machine; it is made if it is missing. By default, only slots
                keep them.
            prefix_cache_bytes: the most bytes of that folder. The prompts that were used longest
                ago are deleted first.
            options: the keywords above, from slots on.

        Raises ValueError for a wrong argument, TypeError for an unknown keyword, PackageError for a
        wrong prefix or a folder that cannot be written to.
        """
        chosen = from_keywords(EngineOptions, "Engine", options)
        max_rows = model.batch_size
        if chosen.slots is not None and max_rows is not None and chosen.slots > max_rows:
            raise ValueError(
                f"slots is {chosen.slots} and the package was compiled for {max_rows} rows at most; compile it again"
            )
        self._stored = _open_stored_prefixes(model, chosen)
        default_slots = DEFAULT_SLOTS if max_rows is None else max_rows
        self.slots = default_slots if chosen.slots is None else chosen.slots
        self.max_waiting = chosen.max_waiting
        self.capacity = model.capacity(_DEFAULT_CTX_LEN)
        self._model = model
        loop = self._make_loop(chosen)
        self._prefixes = loop.prefixes
        self._changed = threading.Condition()  # It guards the next six.
        self._requests: dict[Sequence, Request] = {}  # A request is here until its end.
        self._added: list[Sequence] = []
        # Whether a request that ended, and is no longer in `_requests`, is still being finished.
        self._finishing = False
        self._closed = False
        self._draining = False
        self._failure: Failure | None = None
        # Not guarded, because a caller that cancels may hold any lock. While a request exists, the
        # thread looks here after each step, so it needs no waking.
        self._cancelled: deque[Sequence] = deque()
        self._process = os.getpid()
        # The threads that add requests write it, the engine's thread reads it.
        self._guides: dict[Sequence, Guide] = {}
        # Only the engine's thread uses these two.
        self._deadlines: dict[Sequence, float] = {}  # On the clock of `time.perf_counter`.
        self._loop: DecodeLoop | None = loop
        self._thread = threading.Thread(target=self._serve, name="qsample-engine", daemon=True)
        self._thread.start()
        # No thread may be inside the graph when the interpreter ends.
        atexit.register(self.close)

    def _make_loop(self, options: EngineOptions) -> DecodeLoop:
        """The decode loop over the engine's slots."""
        sessions = self._model.sessions
        saved_states = options.saved_states
        if saved_states is None:
            saved_states = 2 * self.slots
        flush_every = choose_flush_every(sessions, options.flush_every)
        config = SchedulerConfig.of(
            sessions,
            flush_every=flush_every,
            prefill_chunk_size=sessions.prompts.piece_size
            if options.prefill_chunk_size is None
            else options.prefill_chunk_size,
            saved_states=saved_states,
            reuse_sampled=options.reuse_sampled_tokens,
        )
        device = Slots(
            sessions,
            self.slots,
            self.capacity,
            saved_states=saved_states,
            flush_every=flush_every,
        )
        return DecodeLoop(
            device,
            Scheduler(self.slots, config),
            self._deliver,
            double_buffering=options.double_buffering,
            stored=self._stored,
        )

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
        allowed_tokens: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        cancel_if_abandoned: bool = True,
        **options: Any,
    ) -> Request:
        """Add a prompt, and return at once if the queue has room.

        Args:
            inputs: a text, token ids, or chat messages.
            params, seed, stop_strings, options: as in `CausalLM.generate`, options of chat messages
                included. max_time counts from the addition, so it includes the waiting.
            allowed_tokens: as in `CausalLM.generate`, for a batch of this row. The engine's thread
                calls a function between two steps, so all requests wait for it. Its exceptions only
                end this request. If it waits for the engine that calls it, that raises
                RuntimeError.
            timeout: the seconds to wait while `slots` requests run and `max_waiting` wait; by
                default without limit; 0 = no wait.
            priority: the rank among waiting requests. The lowest number gets a slot first; among
                equal numbers, the earliest request does.
            cancel_if_abandoned: whether the request is cancelled when its last reader gives up, see
                `Request`; False lets it go on.
            options: also prompt_logprobs; True makes a request that samples nothing, and whose
                `RequestOutput.prompt_outputs` score the tokens of the prompt. It needs a package
                with the feature, and reads the prompt in whole pieces; another request with the
                prompt then continues from its cache. logprob_token_ids, a list of up to 128 token
                ids, makes a request that scores these tokens after the prompt instead, in their
                order. Other parameters than the adapter have no effect on such requests.

        The calling thread computes the features of the prompt's images, after the engine has taken
        the request.

        Raises ValueError if an argument is wrong or the prompt does not fit, QueueFullError after
        `timeout`, and EngineClosedError if the engine takes no requests any more, or in a fork of
        the engine's process.
        """
        options = with_own_names(options)
        if options.get("num_return_sequences") not in (None, 1):
            raise ValueError(
                "add_request adds one request; add_requests takes num_return_sequences"
            )
        options["num_return_sequences"] = 1
        call = self._model.read(inputs, params, seed=seed, allowed_tokens=allowed_tokens, **options)
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
        allowed_tokens: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        cancel_if_abandoned: bool = True,
        **options: Any,
    ) -> list[Request]:
        """Add several requests of a prompt, all of them or none. The prompt is read once, and the
        other slots get copies. Arguments and errors are as in `add_request`, except for these.

        Args:
            num_return_sequences: the number of requests, at most `slots` and `max_waiting`
                together. Greedy requests raise ValueError, because they would all be the same.
            seed: the seed of the first request, after which the seeds of the next requests are
                counted; or a list with a seed for each. With that seed, `add_request` gives the
                same tokens.
            allowed_tokens: as in `CausalLM.generate`, for a batch of these rows. An exception of a
                function ends all requests.
        """
        call = self._model.read(
            inputs,
            params,
            num_return_sequences=num_return_sequences,
            seed=seed,
            allowed_tokens=allowed_tokens,
            **options,
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

        `prompts` and `each` are read ahead of the outputs, as far as the engine has room. Outputs
        that have to wait for an earlier prompt are kept. Closing the iterator cancels the prompts
        whose outputs it has not yielded.

        Args:
            prompts: the prompts, each as in `add_request`.
            params, options: arguments of `add_request`, for every prompt.
            each: a mapping for each prompt, with further arguments of `add_request`, which take
                precedence.
            seed: the seed of the first prompt, after which the seeds of the next prompts are
                counted; by default fresh seeds.
            return_errors: True yields the exception of a prompt that is invalid or failed in place
                of its output, and goes on. False raises it, and ends.

        Raises EngineClosedError if the engine closes or fails, and ImportError and MemoryError,
        even with `return_errors`; ValueError if `each` is shorter or longer than `prompts`.

        >>> for output in engine.map(["In the beginning", "Blessed are"], max_new_tokens=16, seed=1):
        ...     print(output.text)
        """
        raised = _ENGINE_ERRORS if return_errors else (Exception,)
        own_arguments = itertools.repeat({}) if each is None else each
        pairs = zip(prompts, own_arguments, strict=each is not None)
        outputs = _OrderedOutputs(raised)
        try:
            for index, (prompt, own) in enumerate(pairs):
                arguments = {"params": params, **options}
                if seed is not None:
                    arguments["seed"] = (seed + index) % NUM_SEEDS
                arguments.update(own)
                outputs.add(partial(self.add_request, prompt, **arguments))
                if outputs.fails:
                    break
                while outputs.is_next_there:
                    yield outputs.take_next()
            while outputs:
                yield outputs.take_next()
        finally:
            outputs.cancel()

    def add(
        self,
        call: Call,
        *,
        timeout: float | None = None,
        priority: int = 0,
        cancel_if_abandoned: bool = True,
    ) -> list[Request]:
        """Add the requests of a call with a single prompt, all of them or none, with the arguments
        and errors of `add_request`. call: a result of `CausalLM.read`, or made by the caller."""
        self._check_waiting()
        if self.closed:
            raise self._closed_error()
        _check_call(call)
        if not isinstance(priority, int):
            raise ValueError(
                f"priority is {shown(priority)}; give an integer, the lowest for those that go first"
            )
        sequences, guide = self._model.prepare(call, self.capacity, priority=priority)
        count = call.num_return_sequences
        if len(sequences) != count:
            raise ValueError(f"{len(sequences) // count} prompts were given; add them one by one")
        seconds = checked_timeout(timeout)
        if count > self._max_requests:
            raise ValueError(
                f"num_return_sequences is {count} and this engine takes {self._max_requests}; raise max_waiting"
            )
        if guide is not None:
            guide.start()
        requests: dict[Sequence, Request] = {}
        for sequence in sequences:
            requests[sequence] = Request(
                sequence,
                self._cancelled.append,
                self._check_waiting,
                cancel_if_abandoned=bool(cancel_if_abandoned),
            )
        has_images = sequences[0].images is not None
        with self._changed:
            self._wait_for_room(count, seconds)
            if guide is not None:
                self._guides.update(dict.fromkeys(sequences, guide))
            self._requests.update(requests)
            if not has_images:
                self._added += sequences
                self._changed.notify_all()
        if has_images:
            self._add_with_images(sequences)
        return list(requests.values())

    @property
    def _max_requests(self) -> int:
        """The most requests that run and wait together."""
        return self.slots + self.max_waiting

    def _wait_for_room(self, count: int, seconds: float | None) -> None:
        """Wait until the engine takes `count` more requests, at most `seconds`. Raises
        EngineClosedError and QueueFullError. The caller holds `_changed`."""
        is_room = self._changed.wait_for(
            lambda: self.closed or len(self._requests) + count <= self._max_requests, seconds
        )
        if self.closed:
            raise self._closed_error()
        if not is_room:
            raise QueueFullError(
                f"{self.slots} requests run and {self.max_waiting} wait, which is all that this engine takes; try "
                "again later, give a longer timeout, or raise max_waiting"
            )

    def _add_with_images(self, sequences: list[Sequence]) -> None:
        """Compute the image features of requests that the engine has taken, and let the requests
        wait for slots. If that fails, cancel them."""
        try:
            self._model.images.compute_features(sequences)
        except BaseException:
            with self._changed:
                self._cancelled.extend(sequences)
                self._changed.notify_all()
            raise
        with self._changed:
            # The engine may have closed meanwhile.
            self._added += [sequence for sequence in sequences if sequence in self._requests]
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more requests: it was closed or drained, or its graph
        failed."""
        return self._closed or self._draining

    def stats(self) -> EngineStats:
        """The numbers of requests that run and wait, their adapters, and prompt tokens that were
        not read again."""
        with self._changed:
            requests = list(self._requests.items())
        running = [sequence for sequence, request in requests if request.running]
        waiting = [sequence for sequence, request in requests if not request.running]
        return EngineStats(
            slots=self.slots,
            max_waiting=self.max_waiting,
            running=len(running),
            waiting=len(waiting),
            running_adapters=_adapters_of(running),
            waiting_adapters=_adapters_of(waiting),
            prefixes=replace(self._prefixes),
        )

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until the added requests have ended; then `close` the
        engine. Returns whether they have ended. timeout: the most seconds to wait; by default
        without limit."""
        seconds = checked_timeout(timeout)
        self._check_waiting()
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._requests and not self._finishing, seconds
            )

    def close(self) -> None:
        """Cancel all requests, end the thread and release the batch's memory. The model remains
        usable. On the engine's thread, in a function of a request, this does not wait. In a fork it
        does nothing; the engine goes on."""
        if os.getpid() == self._process:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            if threading.current_thread() is not self._thread:
                self._thread.join()
        # If ctrl-C ended the wait, this is not reached, and the interpreter's end waits again.
        atexit.unregister(self.close)

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
        failure = self._failure
        if failure is None:
            failure = Failure(EngineClosedError, "the engine is closed; make a new one")
        return failure.error()

    # Only the engine's thread calls the methods below.

    def _serve(self) -> None:
        """Run the loop until the engine is closed."""
        assert self._loop is not None
        try:
            with self._loop as loop:
                while self._take_changes(loop):
                    loop.step()
        except BaseException as error:  # No reader may be left waiting.
            self._failure = Failure.of(
                EngineClosedError,
                "the engine ended because its graph failed ({}); make a new one",
                error,
            )
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sequence in list(self._requests):
            self._end(sequence, self._failure or CANCELLED_REASON)
        self._loop = None
        if self._stored is not None:
            self._stored.close()

    def _take_changes(self, loop: DecodeLoop) -> bool:
        """Wait for something to do, and bring the loop up to date. Returns False if the engine has
        to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._added or self._cancelled or loop.busy
            )
            if self._closed:
                return False
            # Cancelled requests first: they were added before, so they are in `_added` or in the
            # loop; or their images are still computed, and they will not be added.
            cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
            added = self._added
            self._added = []
        for sequence in added:
            max_time = sequence.request.max_time
            if max_time is not None:
                self._deadlines[sequence] = self._requests[sequence].added_at + max_time
            loop.add(sequence)
        for sequence in cancelled:
            self._leave(loop, sequence, CANCELLED_REASON)
        now = time.perf_counter()
        late = [(end, sequence) for sequence, end in self._deadlines.items() if end <= now]
        for _, sequence in sorted(late, key=lambda item: item[0]):
            self._leave(loop, sequence, TIME_REASON)
        return True

    def _leave(self, loop: DecodeLoop, sequence: Sequence, reason: str) -> None:
        """Take a sequence out of the loop and end its request, unless it has ended meanwhile."""
        if sequence in self._requests:
            loop.leave(sequence)
            self._end(sequence, reason)

    def _deliver(self, sequence: Sequence) -> None:
        """Publish the new tokens of a sequence, write its next mask, and end it if it has ended."""
        assert self._loop is not None
        request = self._requests[sequence]
        guide = self._guides.get(sequence)
        affected = [sequence]  # An error ends all of these.
        message = "the request's text cannot be decoded ({})"
        try:
            request.update()
            if guide is not None and not sequence.ended:
                message = "the request's function for allowed_tokens raised {}"
                affected = [one for one in guide.sequences if one in self._requests]
                guide.update(self._loop.set_parameter, self._loop.read_outputs)
        except BaseException as error:  # Other requests go on, even after a SystemExit.
            for one in affected:
                self._loop.leave(one)
                self._end(one, Failure.of(RequestFailedError, message, error))
            return
        if sequence.ended:
            self._loop.leave(sequence)
            self._end(sequence, sequence.finish_reason)

    def _end(self, sequence: Sequence, reason: str | Failure) -> None:
        """End a request. It is removed before it is finished, so that a caller who sees it end can
        add another request."""
        self._guides.pop(sequence, None)
        self._deadlines.pop(sequence, None)
        with self._changed:
            request = self._requests.pop(sequence)
            self._finishing = True
        if isinstance(reason, Failure):
            request.fail(reason)
        else:
            request.finish(reason)
        with self._changed:
            self._finishing = False
            self._changed.notify_all()


class _OrderedOutputs:
    """Requests and their outputs in the order in which they were added.

    An error takes the place of an output: it is returned, or raised if it is among `raised`.
    """

    def __init__(self, raised: tuple[type[Exception], ...]) -> None:
        self._raised = raised
        self._pending: deque[Request | Exception] = deque()

    def __bool__(self) -> bool:
        return len(self._pending) > 0

    def add(self, add_request: abc.Callable[[], Request]) -> None:
        """Add a request, or the error of adding it."""
        try:
            self._pending.append(add_request())
        except Exception as error:
            self._pending.append(error)

    @property
    def fails(self) -> bool:
        """Whether the newest item is an error that will be raised."""
        return isinstance(self._pending[-1], self._raised)

    @property
    def is_next_there(self) -> bool:
        """Whether `take_next` returns an output without waiting for it."""
        if not self._pending:
            return False
        first = self._pending[0]
        return isinstance(first, Exception) or first.done

    def take_next(self) -> RequestOutput | Exception:
        """Wait for the next output, or raise its error."""
        request = self._pending.popleft()
        try:
            if isinstance(request, Exception):
                raise request
            return request.result()
        except self._raised:
            raise
        except Exception as error:
            return error

    def cancel(self) -> None:
        """Cancel the requests whose outputs were not taken."""
        for request in self._pending:
            if isinstance(request, Request):
                request.cancel()


def _open_stored_prefixes(model: CausalLM, options: EngineOptions) -> StoredPrefixes | None:
    """The prefixes on disk; None if there are none. Raises PackageError."""
    if not options.prefixes and options.prefix_cache_dir is None:
        return None
    return StoredPrefixes(
        model.package,
        model.sessions,
        options.prefixes,
        options.prefix_cache_dir,
        options.prefix_cache_bytes,
    )


def _check_call(call: Call) -> None:
    """Raise ValueError for callbacks that only `generate` calls."""
    if call.stopping_criteria is not None:
        raise ValueError("stopping_criteria are for generate; cancel() ends a request of an engine")
    if call.logits_processor is not None:
        raise ValueError(f"logits_processor is for generate; {LOGITS_PROCESSOR_ADVICE}")


def _adapters_of(sequences: abc.Iterable[Sequence]) -> tuple[str, ...]:
    """The names of the adapters of some sequences, sorted."""
    adapters = [sequence.request.adapter for sequence in sequences]
    return tuple(sorted({adapter.name for adapter in adapters if adapter is not None}))
