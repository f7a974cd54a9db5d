"""Processes that answer messages, end, hang and are stopped."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.limited_process import (
    Ask,
    LimitedProcess,
    Message,
    ProcessEndedError,
    limit_memory,
    processor_time,
)
from tests.helpers.small_packages import throw

CHILD = "tests.helpers.limited_child"


@pytest.fixture
def process() -> Iterator[LimitedProcess]:
    made = LimitedProcess(CHILD, 600)
    yield made
    made.stop()


def asked(process: LimitedProcess, **fields: Any) -> Message:
    return process.ask(Message(fields))


def test_messages_have_fields_and_parts(process: LimitedProcess) -> None:
    array = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    parts = [b"", b"a\nb\0", bytearray(3), array.data]
    answer = process.ask(Message({"number": 0, "text": "ü\n", "none": None}, parts))
    assert {**answer.fields, "process": 0} == {
        "process": 0,
        "number": 0,
        "text": "ü\n",
        "none": None,
    }
    assert [bytes(part) for part in answer.parts] == [
        array.tobytes(),
        bytes(3),
        b"a\nb\0",
        b"",
    ]
    again = process.ask(Message({}, [b"x"]))
    assert again.fields == {"process": answer.fields["process"]}, "the same process"
    assert again.parts == [b"x"]


@pytest.mark.parametrize("work", ["end", "half"])
def test_the_next_message_after_an_end_starts_another(process: LimitedProcess, work: str) -> None:
    first = asked(process).fields["process"]
    with pytest.raises(ProcessEndedError) as raised:
        asked(process, work=work)
    assert not raised.value.is_late
    assert asked(process).fields["process"] != first


def test_the_time_by_the_clock(process: LimitedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(process)
    limits: list[float] = []
    plain = threading.Timer

    def noted(seconds: float, function: Any) -> threading.Timer:
        limits.append(seconds)
        return plain(seconds, function)

    monkeypatch.setattr(threading, "Timer", noted)
    process.max_seconds = 0.2
    with pytest.raises(ProcessEndedError) as raised:
        asked(process, work="sleep", number=600)
    assert raised.value.is_late
    process.max_seconds = 600
    assert asked(process, number=1).fields["number"] == 1
    assert limits == [0.2, 600]


@pytest.mark.skipif(sys.platform == "win32", reason="it has no timer of processor time")
def test_the_processor_time(process: LimitedProcess) -> None:
    with pytest.raises(ProcessEndedError) as raised:
        asked(process, work="spin", number=0.05)
    assert not raised.value.is_late
    # The limit ends with the work within.
    assert asked(process, work="within", number=0.05).fields["work"] == "within"
    # Waiting costs nothing.
    assert asked(process, work="sleep", number=0.1).fields["work"] == "sleep"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_the_memory(process: LimitedProcess) -> None:
    assert asked(process, work="take", number=1 << 20).fields["number"] == 1 << 20
    assert asked(process, work="take", number=1 << 30).fields == {"refused": True}
    assert asked(process, work="take", number=1 << 20).fields["number"] == 1 << 20


def test_any_thread_stops_it(process: LimitedProcess) -> None:
    asked(process)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            asked(process, work="sleep", number=600)
        except ProcessEndedError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    process.stop()
    thread.join(60)
    assert [type(error) for error in raised] == [ProcessEndedError]
    process.stop()  # Nothing is left to stop.


def test_nothing_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be an untrusted package's."""
    hostile = "open('was imported', 'w').close()\n"
    for name in ("json", "signal", "numpy", "qsample", "PIL", "tests"):
        (tmp_path / f"{name}.py").write_text(hostile)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    process = LimitedProcess(CHILD, 600)
    try:
        assert asked(process, number=3).fields["number"] == 3
    finally:
        process.stop()
    assert not (tmp_path / "was imported").exists()


def test_a_greeting_comes_first_each_time() -> None:
    greetings: list[Any] = []

    def greet(ask: Ask) -> None:
        greetings.append(ask(Message({"number": len(greetings)})).fields["number"])

    process = LimitedProcess(CHILD, 600, greet)
    try:
        asked(process)
        asked(process)
        assert greetings == [0]
        process.stop()
        asked(process)
        assert greetings == [0, 1]
    finally:
        process.stop()


def test_a_greeting_that_fails_ends_the_process() -> None:
    def greet(ask: Ask) -> None:
        ask(Message({"work": "end"}))

    process = LimitedProcess(CHILD, 600, greet)
    for _ in range(2):
        with pytest.raises(ProcessEndedError):
            asked(process)
        assert process._process is None


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux only")
def test_what_a_process_is_limited_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its addresses, in addition to those that it has; its stack, half of that of a server's
    threads; and no dump of its memory."""
    import resource

    limits: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    has = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    limit_memory(1 << 40)
    (kind, (most, highest)), *others = limits
    assert (kind, highest) == (resource.RLIMIT_AS, resource.RLIM_INFINITY)
    assert abs(most - (1 << 40) - has) < 1 << 28
    assert others == [
        (resource.RLIMIT_STACK, (4 * 1024 * 1024, resource.RLIM_INFINITY)),
        (resource.RLIMIT_CORE, (0, 0)),
    ]
    limits.clear()
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda *given, **more: throw(FileNotFoundError()))
        limit_memory(1 << 40)
    monkeypatch.setattr(sys, "platform", "darwin")
    limit_memory(1 << 40)
    assert limits == []


def test_processor_time_ends_with_the_work_even_if_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[Any] = []
    monkeypatch.setattr(signal, "setitimer", lambda *given: timers.append(given))
    with pytest.raises(LookupError), processor_time(0.5):
        raise LookupError
    assert timers == [(signal.ITIMER_PROF, 0.5), (signal.ITIMER_PROF, 0)]
    monkeypatch.setattr(sys, "platform", "win32")
    with processor_time(0.5):
        pass
    assert len(timers) == 2
