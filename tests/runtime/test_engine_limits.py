"""Times, priorities and the end of an engine, and who is told."""

from __future__ import annotations

import atexit
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.runtime import CausalLM, Engine, EngineClosedError, Request, RequestFailedError
from qsample.runtime.decode.scheduler import SchedulerConfig
from tests.helpers.fake_package import MAX_POSITIONS, PIECE_SIZE
from tests.helpers.requests import wait_until


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_ends_when_its_time_is_over(
    model: CausalLM, gate: threading.Semaphore, waits: bool
) -> None:
    with Engine(model, slots=1) as engine:
        other = engine.add_request([5], max_new_tokens=6) if waits else None
        request = engine.add_request([6], max_new_tokens=6, max_time=0.01)
        later = engine.add_request([7], max_new_tokens=6, max_time=600, eos_token_id=(), seed=1)
        time.sleep(0.05)
        gate.release(1000)  # the thread looks at the time after the step that it is in
        output = request.result(60)
        assert output.finish_reason == "time"
        assert len(output.token_ids) < 6
        timed, plain = (
            later.result(60),
            engine.add_request([7], max_new_tokens=6, eos_token_id=(), seed=1).result(60),
        )
        assert (timed.token_ids, timed.finish_reason) == (plain.token_ids, "length")
        if other is not None:
            assert (other.result(60).finish_reason, output.token_ids) == ("length", [])


def test_the_earliest_deadline_ends_first(model: CausalLM, gate: threading.Semaphore) -> None:
    ended: list[float] = []
    with Engine(model, slots=1) as engine:
        engine.add_request([5], max_new_tokens=4)
        for seconds in (0.02, 0.01, 0.015):
            request = engine.add_request([6], max_new_tokens=6, max_time=seconds)
            late = request.added_at + seconds
            request.add_done_callback(lambda request, late=late: ended.append(late))  # type: ignore[misc]
        time.sleep(0.03)
        gate.release(1000)
        assert engine.drain(60)
    assert len(ended) == 3
    assert ended == sorted(ended)


def test_the_choices_of_a_caller_and_those_without_one(model: CausalLM) -> None:
    with Engine(model) as engine:
        assert (engine.slots, engine.max_waiting, engine.capacity) == (8, 64, MAX_POSITIONS)
        assert engine._loop is not None
        assert engine._loop._device is not None
        assert engine._loop._scheduler._config == SchedulerConfig.of(
            model.sessions, flush_every=1, prefill_chunk_size=PIECE_SIZE, saved_states=16
        )
        assert engine.drain(60), "nothing runs"
    choices: dict[str, Any] = {"flush_every": 4, "prefill_chunk_size": 8, "saved_states": 5}
    with Engine(model, slots=3, saved_states=0) as engine:
        assert engine._loop is not None
        assert engine._loop._scheduler._config.saved_states == 0
    with Engine(
        model, slots=3, double_buffering=False, reuse_sampled_tokens=True, **choices
    ) as engine:
        assert engine._loop is not None
        assert engine._loop._device is None
        assert engine._loop._scheduler._config == SchedulerConfig.of(
            model.sessions, **choices, reuse_sampled=True
        )


def test_the_lowest_priority_gets_the_next_slot(model: CausalLM, gate: threading.Semaphore) -> None:
    ended: list[str] = []
    with Engine(model, slots=1) as engine:
        requests = {"running": engine.add_request([5], max_new_tokens=3)}
        while engine.stats().running == 0:
            time.sleep(0.001)
        for name, priority in (
            ("late", 1),
            ("first", -1),
            ("second", -1),
            ("last", 2),
            ("plain", None),
        ):
            options = {} if priority is None else {"priority": priority}
            requests[name] = engine.add_request([5], max_new_tokens=3, **options)  # type: ignore[arg-type]
        for name, request in requests.items():
            request.add_done_callback(lambda request, name=name: ended.append(name))  # type: ignore[misc]
        assert (engine.stats().running, engine.stats().waiting) == (1, 5)
        gate.release(1000)
        for request in requests.values():
            request.result(60)
        assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    assert ended == ["running", "first", "second", "plain", "late", "last"]


def test_who_is_told_of_an_end_finds_its_room(model: CausalLM) -> None:
    room: list[tuple[int, int]] = []
    with Engine(model, slots=1) as engine:

        def look(request: Request) -> None:
            stats = engine.stats()
            room.append((stats.running, stats.waiting))

        for options in ({}, {"stop_strings": ["a", "e", " "]}, {"max_time": 1e-9}):
            request = engine.add_request([5], max_new_tokens=40, seed=3, **options)  # type: ignore[arg-type]
            request.add_done_callback(look)
            request.result(60)
    assert room == [(0, 0)] * 3


def test_a_drained_engine_has_finished_all_requests(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = Request.finish

    def slowly(self: Request, reason: str) -> None:
        time.sleep(0.05)
        finished(self, reason)

    monkeypatch.setattr(Request, "finish", slowly)
    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], max_new_tokens=2)
        assert engine.drain(60)
        assert request.done


def test_an_engine_is_not_drained_while_its_last_request_is_finished(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is asked only then, when the request counts as running no more."""
    begun, goes_on = threading.Event(), threading.Event()
    finished = Request.finish

    def slowly(self: Request, reason: str) -> None:
        begun.set()
        assert goes_on.wait(60)
        finished(self, reason)

    monkeypatch.setattr(Request, "finish", slowly)
    with Engine(model, slots=1) as engine:
        request = engine.add_request([5], max_new_tokens=2)
        assert begun.wait(60)
        assert engine.stats().running == 0
        assert not engine.drain(0.01)
        assert not request.done
        goes_on.set()
        assert engine.drain(60)
        assert request.done


def test_nothing_is_kept_of_a_request_with_a_deadline_and_a_function(
    fake_model: Callable[..., CausalLM], only_new_garbage: None
) -> None:
    with Engine(fake_model(allowed_tokens=True), slots=1) as engine:
        request = engine.add_request(
            [5], max_new_tokens=2, max_time=1e6, allowed_tokens=lambda step, mask: None
        )
        request.result(60)
        kept = weakref.ref(request._sequence.delivery.text)
        request.add_done_callback(lambda request: None)
        del request
        wait_until(lambda: gc.collect() >= 0 and kept() is None)


@pytest.mark.parametrize("end", [Engine.close, Engine.drain])
def test_a_caller_that_waits_for_room_gets_the_error_of_a_closed_engine(
    end: Callable[[Engine], object], model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=1, max_waiting=0, saved_states=0) as engine:
        engine.add_request([5], max_new_tokens=3)
        closing = threading.Timer(0.1, end, [engine])
        closing.start()
        with pytest.raises(EngineClosedError):
            engine.add_request([5], max_new_tokens=3, timeout=60)
        gate.release(1000)
        closing.join()


def test_drain_lets_requests_end_and_takes_no_more(
    model: CausalLM, gate: threading.Semaphore
) -> None:
    with Engine(model, slots=1) as engine:
        requests = [engine.add_request([5], max_new_tokens=3) for _ in range(3)]
        assert not engine.closed
        assert not engine.drain(0.01)  # none can end
        assert engine.closed
        with pytest.raises(EngineClosedError):
            engine.add_request([5])
        gate.release(1000)
        assert engine.drain(60)
        assert [request.result(0).finish_reason for request in requests] == ["length"] * 3


def test_callbacks_are_called_once_however_a_request_ends(
    model: CausalLM, fake_model: Callable[..., CausalLM], gate: threading.Semaphore
) -> None:
    ended: list[Request] = []
    with Engine(model, slots=1) as engine:
        done = engine.add_request([5], max_new_tokens=2)
        cancelled = engine.add_request([5], max_new_tokens=2)
        for request in (done, cancelled):
            request.add_done_callback(ended.append)
        cancelled.cancel()
        gate.release(1000)
        done.result(60)
        cancelled.result(60)
        done.add_done_callback(ended.append)  # it has ended: at once
    assert sorted(map(id, ended)) == sorted(map(id, [done, done, cancelled]))

    guided = fake_model(allowed_tokens=True)
    with Engine(guided, slots=1) as engine:

        def fail(step: object, mask: np.ndarray) -> None:
            if step is not None:
                raise KeyError("of the caller")

        failed = engine.add_request([5], max_new_tokens=4, allowed_tokens=fail)
        failed.add_done_callback(ended.append)
        with pytest.raises(RequestFailedError):
            failed.result(60)
    assert ended[-1] is failed


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_of_a_callback_does_not_end_the_engine(
    kind: type[BaseException], model: CausalLM, gate: threading.Semaphore
) -> None:
    def fail(request: Request) -> None:
        raise kind

    ended: list[Request] = []
    with Engine(model, slots=1) as engine, warnings.catch_warnings(record=True) as caught:
        for action in ("always", "error"):
            warnings.simplefilter(action)  # type: ignore[arg-type]
            request = engine.add_request([5], max_new_tokens=2)
            request.add_done_callback(fail)
            request.add_done_callback(ended.append)
            gate.release(1000)
            request.result(60)
        assert any(
            f"a callback of a request raised {kind.__name__}" in str(one.message) for one in caught
        )
        assert engine.add_request([5], max_new_tokens=2).result(60).finish_reason == "length"
        assert ended[1:] == [request]
        with pytest.raises((kind, RuntimeWarning)):  # at once, so on the thread of whoever adds it
            request.add_done_callback(fail)


def test_an_engine_whose_close_was_interrupted_is_closed_at_exit(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter must not go while the thread is inside the graph, however impatient somebody is."""
    at_exit: list[object] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    engine = Engine(model, slots=1)
    with monkeypatch.context() as patched:

        def interrupted(timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        patched.setattr(engine._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert at_exit == [engine.close]
    engine.close()
    assert at_exit == []
    assert not engine._thread.is_alive()
