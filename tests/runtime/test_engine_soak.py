"""Hundreds of requests with random faults: every healthy token is right, and nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from qsample.errors import Failure
from qsample.request.text.generated_text import GeneratedText
from qsample.runtime import CausalLM, Engine, QueueFullError, Request, RequestFailedError
from qsample.runtime.callbacks import Guide
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.request import _AsyncDeltas, _Feed
from qsample.runtime.sequence import Sequence
from tests.helpers.fake_package import POISON, VOCAB
from tests.helpers.memory import resident
from tests.helpers.readers import COROUTINES, THREADED, left_pending_by_its_loop
from tests.helpers.requests import random_params, random_prompt, wait_until

KEPT_BY_NOBODY = (
    Request,
    Sequence,
    GeneratedText,
    Guide,
    Failure,
    _AsyncDeltas,
    _Feed,
    RequestFailedError,
)
BAD: list[dict[str, Any]] = [
    {"inputs": [2**70]}, {"inputs": [-1]}, {"inputs": [VOCAB]}, {"inputs": "\ud800"}, {"inputs": [5.5]},
    {"inputs": [{"role": "user", "content": 5}]}, {"inputs": [5] * 300}, {"inputs": [5], "seed": -1},
    {"inputs": [5], "stop_strings": ["a"] * 70_000}, {"inputs": [5], "temperature": float("nan")},
    {"inputs": [5], "eos_token_id": 2**70}, {"inputs": [5], "allowed_tokens": np.zeros(3, np.int32)},
    {"inputs": [5], "timeout": float("nan")},
]  # fmt: skip


class Unexpected(BaseException):
    """Neither an Exception nor one of Python's own."""


@dataclass
class Case:
    """One request: what is asked, drawn from a number, and what became of it."""

    number: int
    tokens: list[int] | None = None  # as far as they came
    whole: bool = False  # nothing was to keep it from its end
    options: dict[str, Any] = field(default_factory=dict)  # beside prompt, params and seed

    def __post_init__(self) -> None:
        self.random = random.Random(self.number)
        self.prompt = random_prompt(self.random)
        self.params = random_params(self.random)


def only_even(step: Any, mask: np.ndarray) -> None:
    """A mask that never changes its mind."""
    mask[:] = 0x55555555


def raising(case: Case) -> Callable[..., None]:
    error = case.random.choice(
        [
            RuntimeError("no"),
            SystemExit(1),
            KeyboardInterrupt(),
            GeneratorExit(),
            MemoryError(),
            Unexpected(),
        ]
    )
    when, calls = case.random.randrange(4), [0]

    def function(step: Any, mask: np.ndarray) -> None:
        calls[0] += 1
        if calls[0] > when:
            raise error

    return function


class Soak:
    """Runs cases against one engine, from several threads and one event loop."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.loop = engine, loop
        self.kinds: Counter[str] = Counter()
        self.full = 0  # times that a queue was full
        self.ways: list[Callable[[Case], None]] = [
            self.result, self.iterate, self.deltas_in_a_coroutine, self.await_, self.late, self.stop_string,
            self.guided, self.goes_on, self.impatient, self.poisoned, self.cancel, *[self.given_up] * 6, self.raising,
            self.waiting, self.wrong,
        ]  # fmt: skip

    def run(self, case: Case) -> Case:
        way = case.random.choice(self.ways)
        self.kinds[way.__name__] += 1
        way(case)
        return case

    def add(self, case: Case, **options: Any) -> Request:
        case.options = {
            name: value
            for name, value in options.items()
            if name in ("stop_strings", "allowed_tokens")
        }
        return self.engine.add_request(case.prompt, case.params, seed=case.number, **options)

    def coroutine(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(120)

    def ended(self, case: Case, request: Request) -> None:
        output = request.result(120)
        case.tokens = output.token_ids
        assert output.finish_reason in (
            ("stop", "length") if case.whole else ("stop", "length", "cancelled")
        )
        assert [token for delta in request for token in delta.token_ids] == output.token_ids
        assert "".join(delta.text or "" for delta in request) == output.text

    # What ends well.

    def result(self, case: Case, **options: Any) -> None:
        case.whole = True
        self.ended(case, self.add(case, **options))

    def iterate(self, case: Case) -> None:
        case.whole = True
        request = self.add(case)
        assert [token for delta in request for token in delta.token_ids] == request.result(
            0
        ).token_ids
        self.ended(case, request)

    def deltas_in_a_coroutine(self, case: Case) -> None:
        async def read(request: Request) -> None:
            case.tokens = [token async for delta in request for token in delta.token_ids]

        case.whole = True
        self.coroutine(read(self.add(case)))

    def await_(self, case: Case) -> None:
        async def read(request: Request) -> None:
            case.tokens = (await request).token_ids

        case.whole = True
        self.coroutine(read(self.add(case)))

    def late(self, case: Case) -> None:
        case.whole = True
        request = self.add(case)
        wait_until(lambda: request.done)
        self.ended(case, request)

    def stop_string(self, case: Case) -> None:
        self.result(case, stop_strings=[chr(case.random.randrange(33, 127)), "\ufffd\ufffd", "ab"])

    def guided(self, case: Case) -> None:
        self.result(case, allowed_tokens=only_even)

    def goes_on(self, case: Case) -> None:
        case.whole = True
        request = self.add(case, cancel_if_abandoned=False)
        next(iter(request))
        self.ended(case, request)

    def impatient(self, case: Case) -> None:
        case.whole = True
        while True:
            try:
                request = self.add(case, timeout=case.random.choice([0, 0.001]))
            except QueueFullError:
                self.full += 1
                continue
            break
        with suppress(TimeoutError):
            request.result(0.001)
        self.ended(case, request)

    # What does not.

    def poisoned(self, case: Case) -> None:
        output = self.engine.add_request(
            [*case.prompt, POISON], case.params, seed=case.number
        ).result(120)
        assert (output.token_ids, output.finish_reason) == ([], "invalid")

    def cancel(self, case: Case) -> None:
        request = self.add(case)
        for _, _ in zip(range(case.random.randrange(4)), request, strict=False):
            pass
        request.cancel()
        self.ended(case, request)

    def given_up(self, case: Case) -> None:
        how = case.random.choice([*THREADED, *COROUTINES])
        request = self.add(case)

        with suppress(StopIteration, StopAsyncIteration, pytest.fail.Exception):  # it ended first
            if how is left_pending_by_its_loop:
                asyncio.run(how(request))
            elif how in COROUTINES:
                self.coroutine(how(request))  # type: ignore[arg-type]
            else:
                how(request)
        self.ended(case, request)

    def raising(self, case: Case) -> None:
        self.fails(case, raising(case))

    def waiting(self, case: Case) -> None:
        def function(step: Any, mask: np.ndarray) -> None:
            if step is not None:
                self.engine.add_request([5], timeout=60)

        self.fails(case, function)

    def fails(self, case: Case, function: Callable[..., None]) -> None:
        try:
            request = self.engine.add_request(
                case.prompt, case.params, seed=case.number, allowed_tokens=function
            )
        except BaseException:  # it raised at once, here
            return
        for read in (lambda: request.result(120), lambda: list(request)):
            try:
                read()
            except RequestFailedError as error:
                assert "function for allowed_tokens raised" in str(error)  # noqa: PT017
            else:
                assert request.result(0).finish_reason in ("stop", "length")  # before it would have

    def wrong(self, case: Case) -> None:
        options = {"timeout": 120} | case.random.choice(BAD)
        with pytest.raises(ValueError, match=r"\w{3}"):
            self.engine.add_request(**options)


def check(model: CausalLM, cases: list[Case]) -> None:
    """The tokens are those of `generate` with that seed, or, of a request that was given up, the first of them."""
    cases = [case for case in cases if case.tokens is not None]
    plain = [case for case in cases if not case.options]
    outputs = model.generate(
        [case.prompt for case in plain],
        [case.params for case in plain],
        seed=[case.number for case in plain],
    ).token_ids
    for case in cases:
        if case.options:
            outputs.append(
                model.generate(
                    case.prompt, case.params, seed=case.number, **case.options
                ).token_ids[0]
            )
    for case, output in zip(
        [*plain, *(case for case in cases if case.options)], outputs, strict=True
    ):
        assert case.tokens is not None
        assert case.tokens == (output if case.whole else output[: len(case.tokens)]), case
    assert sum(case.whole for case in cases) > len(cases) / 3


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def kept() -> Counter[str]:
    """How many objects of KEPT_BY_NOBODY there are, by the names of their types."""
    return Counter(
        type(one).__name__ for one in gc.get_objects() if isinstance(one, KEPT_BY_NOBODY)
    )


@pytest.mark.parametrize("count", [160, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_with_random_faults(
    count: int, fake_model: Callable[..., CausalLM], only_new_garbage: None
) -> None:
    model = fake_model(allowed_tokens=True)
    readings: list[tuple[int, int, int]] = []
    gc.collect()
    threads_before = threading.active_count()
    of_others = kept()  # by tests that ran before in this process
    with (
        event_loop() as loop,
        ThreadPoolExecutor(6) as threads,
        Engine(model, slots=3, max_waiting=1, flush_every=2) as engine,
    ):
        soak = Soak(engine, loop)
        for phase in range(4):
            numbers = range(phase * count // 4, (phase + 1) * count // 4)
            cases = list(threads.map(soak.run, map(Case, numbers)))
            wait_until(lambda: gc.collect() >= 0 and not engine._requests)
            check(model, cases)
            del cases
            gc.collect()
            assert kept() == of_others
            assert [*engine._guides, *engine._cancelled, *engine._added] == []
            readings.append((len(gc.get_objects()), sys.getallocatedblocks(), resident()))
        assert set(soak.kinds) == {way.__name__ for way in soak.ways}
        assert soak.full > 0
        assert sum(isinstance(one, DecodeLoop) for one in gc.get_objects()) == 1
    assert threading.active_count() <= threads_before
    objects, blocks, memory = (
        last - second for second, last in zip(readings[1], readings[-1], strict=True)
    )
    # A leak of one object in each request would be count / 2 between the two readings. Blocks come and go a little.
    assert objects < count / 4
    assert blocks < count / 2 + 400
    assert memory < 12e6
