"""What ends one request, all of them, or the engine; and what is refused."""

from __future__ import annotations

import gc
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.package.package import Package
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import (
    CausalLM,
    Engine,
    EngineClosedError,
    QueueFullError,
    Request,
    RequestFailedError,
    SamplingParams,
    load,
)
from qsample.runtime.decode.slots import Slots
from tests.helpers.fake_package import VOCAB
from tests.helpers.memory import resident
from tests.helpers.requests import (
    ENDLESS,
    FREE,
    expected,
    outcome,
    random_prompt,
    wait_for_token,
    wait_until,
)


def test_what_fits_is_decided_by_the_slot_and_not_by_the_request(
    fake: Callable[..., Package],
) -> None:
    """A model without a limit of its own could hold more tokens than the slots of an engine do."""
    unlimited = load(fake(manifest={"max_position_embeddings": None}).path)
    with Engine(unlimited, slots=1) as engine:
        assert engine.capacity == 4096
        with pytest.raises(
            ValueError, match="prompt has 4096 tokens and the context length is 4096"
        ):
            engine.add_request([5] * 4096, max_new_tokens=10)
        request = engine.add_request([5] * 4090, max_new_tokens=50, eos_token_id=(), temperature=0)
        assert (request.result().finish_reason, len(request.result().token_ids)) == ("length", 6)


def test_a_row_without_tokens_to_sample_leaves_nothing_behind(
    fake_model: Callable[..., CausalLM],
) -> None:
    """Its last chunk was not committed, so the steps of others wrote where its keys and values would be."""
    prompt = [9, 200, 31, 4, 5, 6]
    with Engine(fake_model(allowed_tokens=True), slots=2, prefill_chunk_size=2) as engine:
        running = engine.add_request([5], ENDLESS, seed=0)
        wait_for_token(running)
        nothing = np.zeros(-(-VOCAB // 32), dtype=np.int32)
        assert outcome(engine.add_request(prompt, FREE, allowed_tokens=nothing)) == ([], "invalid")
        seen = running.completion_tokens
        wait_until(lambda: running.completion_tokens > seen + 3)
        longer = [*prompt, 7, 8]
        assert outcome(engine.add_request(longer, FREE, seed=1)) == expected(longer, FREE, 1)
        assert not running.done


def test_back_pressure(model: CausalLM, gate: threading.Semaphore) -> None:
    with Engine(model, slots=1, max_waiting=2) as engine:
        requests = [engine.add_request([5], FREE, seed=n) for n in range(3)]
        for timeout in (0, 0.01):
            with pytest.raises(QueueFullError, match="1 requests run and 2 wait"):
                engine.add_request([5], FREE, timeout=timeout)
        late: list[Request] = []
        thread = threading.Thread(target=lambda: late.append(engine.add_request([6], FREE, seed=9)))
        thread.start()
        assert late == []
        gate.release(1000)
        thread.join(60)
        assert outcome(late[0]) == expected([6], FREE, 9)
        assert [outcome(request) for request in requests] == [
            expected([5], FREE, n) for n in range(3)
        ]


def test_a_graph_that_fails_ends_every_request_with_its_error(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = threading.Event()

    def decode(self: Slots, rows: range, *, wait: bool = True) -> None:
        added.wait(60)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Slots, "decode", decode)
    for double_buffering in (True, False):
        added.clear()
        with Engine(model, slots=1, double_buffering=double_buffering) as engine:
            requests = [engine.add_request([5], FREE) for _ in range(3)]
            added.set()
            for request in requests:
                with pytest.raises(
                    EngineClosedError, match=r"its graph failed \(RuntimeError: out of memory\)"
                ):
                    request.result(60)
            with pytest.raises(EngineClosedError, match="out of memory"):
                engine.add_request([5], FREE)


def test_an_error_does_not_grow_with_those_who_see_it(fake_model: Callable[..., CausalLM]) -> None:
    """Each of them gets an exception of its own, with the same cause, whose frames are gone."""

    def broken(step: Any, mask: np.ndarray) -> None:
        if step is not None:
            raise RuntimeError("no more rules")

    def frames(error: BaseException) -> int:
        return sum(1 for _ in traceback.walk_tb(error.__traceback__))

    with Engine(fake_model(allowed_tokens=True), slots=1) as engine:
        request = engine.add_request([5], FREE, allowed_tokens=broken)
        errors: list[RequestFailedError] = []
        for read in [request.result, lambda: list(request)] * 20:
            try:
                read()
            except RequestFailedError as error:
                errors.append(error)
        cause = errors[0].__cause__
        assert len({id(error) for error in errors}) == len(errors) == 40
        assert {frames(error) for error in errors[::2]} == {frames(errors[0])}
        assert {error.__context__ for error in errors} == {None}
        assert {error.__cause__ for error in errors} == {cause}
        assert cause is not None
        assert (cause.__traceback__, cause.__context__) == (None, None)
        assert all(
            len(error.__notes__) == 1 and "in broken" in error.__notes__[0] for error in errors
        )


def test_an_error_keeps_nothing_of_the_engine(
    fake_model: Callable[..., CausalLM], only_new_garbage: None
) -> None:
    def broken(step: Any, mask: np.ndarray) -> None:
        try:
            raise KeyError("first")
        except KeyError:
            if step is not None:
                raise RuntimeError("second")  # noqa: B904

    engine = Engine(fake_model(allowed_tokens=True), slots=1)
    assert engine._loop is not None
    memory = weakref.ref(engine._loop._slots)
    request = engine.add_request([5], FREE, allowed_tokens=broken)
    with pytest.raises(RequestFailedError, match="RuntimeError: second") as raised:
        request.result(60)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert isinstance(raised.value.__cause__.__context__, KeyError)
    engine.close()
    gc.collect()
    assert memory() is None
    assert request.done


def test_a_text_that_cannot_be_decoded_fails_its_request_alone(
    model: CausalLM, gate: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Rust library panics with a BaseException; also when a cancelled request's last text is decoded."""

    class Panic(BaseException):
        pass

    def decode(self: Tokenizer, ids: Any, **options: Any) -> str:
        return end() if 99 in ids else plain(self, ids, **options)

    def end() -> str:
        raise Panic("index out of range")

    plain = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", decode)
    with Engine(model, slots=3) as engine:
        healthy = engine.add_request([6], FREE, seed=1)
        failing = [engine.add_request([token], FREE, seed=0) for token in (99, 98)]
        gate.release(2)
        wait_for_token(failing[1])
        monkeypatch.setattr(failing[1]._sequence.delivery.text._decoder, "end", end)  # type: ignore[union-attr]
        failing[1].cancel()
        gate.release(1000)
        for request in failing:
            with pytest.raises(
                RequestFailedError, match=r"text cannot be decoded \(Panic: index out of range\)"
            ):
                request.result(60)
        assert outcome(healthy) == expected([6], FREE, 1)
        assert outcome(engine.add_request([7], FREE, seed=2)) == expected([7], FREE, 2)


def test_timeouts_beyond_those_of_threads(model: CausalLM) -> None:
    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], FREE, seed=1)
        for far in (float("inf"), 10**400, np.float32(1e30)):
            assert request.result(far).finish_reason == "length"
            engine.add_request([5], FREE, timeout=far)


def test_of_requests_with_a_function_those_that_ended_do_not_fail(
    fake_model: Callable[..., CausalLM], gate: threading.Semaphore
) -> None:
    fails = threading.Event()

    def function(step: Any, mask: np.ndarray) -> None:
        if fails.is_set():
            raise RuntimeError("no more rules")

    with Engine(fake_model(allowed_tokens=True), slots=3) as engine:
        cancelled, *failed = engine.add_requests(
            [5], FREE, num_return_sequences=3, allowed_tokens=function
        )
        cancelled.cancel()
        gate.release(2)
        assert cancelled.result(60).finish_reason == "cancelled"
        fails.set()
        gate.release(1000)
        for request in failed:
            with pytest.raises(RequestFailedError, match="no more rules"):
                request.result(60)
        assert outcome(engine.add_request([7], FREE, seed=2)) == expected([7], FREE, 2)


def test_closing_cancels_and_releases_everything(model: CausalLM, only_new_garbage: None) -> None:
    before = threading.active_count()
    engine = Engine(model, slots=1, max_waiting=1)
    assert engine._loop is not None
    memory = weakref.ref(engine._loop._slots)
    requests = [engine.add_request([5], ENDLESS, seed=n) for n in range(2)]
    refused: list[BaseException] = []

    def wait_for_room() -> None:
        try:
            for _ in range(100):
                engine.add_request([6], ENDLESS)
        except EngineClosedError as error:
            refused.append(error)

    thread = threading.Thread(target=wait_for_room)
    thread.start()
    wait_for_token(requests[0])
    engine.close()
    thread.join(60)
    assert len(refused) == 1
    assert requests[0].result(0).finish_reason in ("cancelled", "length")
    assert requests[1].done
    engine.close()
    with pytest.raises(EngineClosedError, match="the engine is closed; make a new one"):
        engine.add_request([5])
    gc.collect()
    assert memory() is None
    assert threading.active_count() == before
    assert len(model.generate([5], FREE, seed=0).token_ids[0]) == 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("count", [800, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_stays_flat(
    count: int, fake: Callable[..., Package], only_new_garbage: None
) -> None:
    generator = random.Random(1)
    with Engine(load(fake().path, ctx_len=64, intra_op_num_threads=1), slots=8) as engine:
        readings = []
        for index in range(count):
            params = SamplingParams(temperature=1.0, max_new_tokens=generator.randrange(1, 6))
            request = engine.add_request(random_prompt(generator), params, seed=index)
            if index % 7 == 0:
                request.cancel()
            if index % (count // 4) == count // 4 - 1:
                request.result(60)
                gc.collect()
                readings.append(resident())
        assert len(engine._requests) <= 72
    # A leak of one row's state, 4 KiB and more, in each request of the last three quarters.
    assert readings[-1] - readings[0] < 0.6 * count * 4096
