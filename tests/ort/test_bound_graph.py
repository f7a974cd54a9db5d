"""Graphs over bound memory: inputs that a provider wants in memory of its own."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from qsample.ort import small_graphs
from qsample.ort.bound_graph import DeviceThread, _foreign_inputs
from qsample.runtime import CausalLM


def test_inputs_in_memory_of_the_providers_own_are_bound_before_every_run(model: CausalLM) -> None:
    """ONNX Runtime copies such an input when it is bound; this session says so of all that a step reads."""

    class Foreign:
        def __init__(self, session: Any) -> None:
            self._session = session

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def get_input_memory_infos(self) -> list[Any]:
            return [SimpleNamespace(name="OpenVINO_shared_CPU") for _ in self._session.get_inputs()]

    session: Any = Foreign(model.sessions.decoder)
    assert _foreign_inputs(session) == {value.name for value in model.sessions.decoder.get_inputs()}
    assert _foreign_inputs(model.sessions.decoder) == set()


def test_runs_come_in_order_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []
    thread = DeviceThread("test")
    futures = [
        thread.submit(lambda n=n: (seen.append((n, threading.get_ident())), n)[1])  # type: ignore[misc]
        for n in range(20)
    ]
    thread.shutdown()
    assert [future.result(0) for future in futures] == list(range(20))
    assert [n for n, _ in seen] == list(range(20))
    assert {ident for _, ident in seen} - {threading.get_ident()} == {seen[0][1]}


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), KeyboardInterrupt()])
def test_what_a_run_raises_comes_to_who_waits_and_the_next_one_runs(error: BaseException) -> None:
    def fail() -> None:
        raise error

    thread = DeviceThread("test")
    failing, fine = thread.submit(fail), thread.submit(lambda: 5)
    assert failing.exception(60) is error
    assert fine.result(60) == 5
    thread.shutdown()
    thread.shutdown()
    with pytest.raises(RuntimeError, match="has ended"):
        thread.submit(lambda: 5)


def test_the_interpreter_waits_for_one_whose_end_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = DeviceThread("test")
    with monkeypatch.context() as patched:

        def interrupted(timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        patched.setattr(thread._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.shutdown()
    assert thread._end.alive
    with pytest.raises(RuntimeError, match="has ended"):
        thread.submit(lambda: 5)
    thread.shutdown()
    assert not thread._end.alive
    assert not thread._thread.is_alive()


def test_one_whose_beginning_was_interrupted_ends(
    monkeypatch: pytest.MonkeyPatch, only_new_garbage: None
) -> None:
    started: list[threading.Thread] = []
    plain = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        plain(self)
        started.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            DeviceThread("test")
    gc.collect()
    started[0].join(60)
    assert not started[0].is_alive()


def test_it_ends_with_its_owner_and_keeps_nothing(only_new_garbage: None) -> None:
    class Result:
        pass

    thread = DeviceThread("ends with its owner")
    result = thread.submit(Result).result(60)
    kept = weakref.ref(result)
    thread.submit(lambda: None).result(60)
    del result
    gc.collect()
    assert kept() is None
    (running,) = (
        one for one in threading.enumerate() if one.name.startswith("ends with its owner")
    )
    del thread
    gc.collect()
    running.join(60)
    assert not running.is_alive()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone has it")
def test_a_thread_keeps_to_its_processors() -> None:
    """And so do the threads that ONNX Runtime starts there."""
    (processor, *_) = sorted(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    thread = DeviceThread("bound", [processor])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    session = thread.submit(
        lambda: ort.InferenceSession(small_graphs.identity(1), options)
    ).result()
    started = set(os.listdir("/proc/self/task")) - before
    assert len(started) == 3  # the thread, and two of the session
    assert all(os.sched_getaffinity(int(task)) == {processor} for task in started)
    del session
    thread.shutdown()
