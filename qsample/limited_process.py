"""A process of qsample's own that works on input of strangers: it answers messages, within limits,
and may end at any moment without harm to its parent.

A message has fields, which are JSON, and parts, which are bytes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Final, TypeAlias

# The threads of a server have twice this stack.
_MAX_STACK_BYTES: Final = 4 << 20
# `python -m` would import libraries from the current folder, which may be a stranger's: the process
# has the places of this one.
_START: Final = (
    "import sys; sys.path[:] = {path!r}; "
    "import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
# Parts may be arrays, which are written without a copy.
_Bytes: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True)
class Message:
    """What a process is asked, or answers.

    Attributes:
        fields: values that JSON can hold.
        parts: bytes.
    """

    fields: Mapping[str, Any]
    parts: Sequence[_Bytes] = field(default=())


class ProcessEndedError(Exception):
    """The process ended before it answered.

    Attributes:
        is_late: whether it was ended because of its time.
    """

    def __init__(self, *, is_late: bool) -> None:
        super().__init__("the process ended before it answered")
        self.is_late = is_late


Ask: TypeAlias = Callable[[Message], Message]


class LimitedProcess:
    """A process that starts with the first message, and after its end with the next one. One thread
    at a time may ask it; any thread may stop it.

    Attributes:
        max_seconds: the time for an answer.
    """

    def __init__(
        self, module: str, max_seconds: float, greet: Callable[[Ask], object] | None = None
    ) -> None:
        """
        Args:
            module: the module whose `__main__` calls `answer_messages`.
            max_seconds: the time for an answer.
            greet: a function that asks a process that has just started what it needs to begin,
                without a limit of time. If it raises an error, the process ends.
        """
        self._module = module
        self.max_seconds = max_seconds
        self._greet = greet
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, message: Message) -> Message:
        """The answer to a message.

        Raises:
            ProcessEndedError: the process ended, or it took more than `max_seconds` and was ended.
        """
        process = self._process
        if process is None:
            process = self._start()
        timer = threading.Timer(self.max_seconds, process.kill)
        timer.start()
        try:
            answer = _exchange(process, message)
        finally:
            is_in_time = timer.is_alive()
            timer.cancel()
        if answer is None:
            self.stop()
            process.wait()
            raise ProcessEndedError(is_late=not is_in_time)
        return answer

    def stop(self) -> None:
        """End the process and its work on a message. The next message starts another process."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START.format(path=sys.path, module=self._module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process  # From here on, `stop` ends it.

        def ask(message: Message) -> Message:
            answer = _exchange(process, message)
            if answer is None:
                raise ProcessEndedError(is_late=False)
            return answer

        if self._greet is not None:
            try:
                self._greet(ask)
            except BaseException:
                self.stop()
                raise
        return process


def _exchange(process: subprocess.Popen[bytes], message: Message) -> Message | None:
    """The answer to a message; None if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _write(process.stdin, message)
        return _read(process.stdout)
    except (BrokenPipeError, ValueError):  # The pipe is closed.
        return None


def _write(stream: IO[bytes], message: Message) -> None:
    parts = [memoryview(part).cast("B") for part in message.parts]
    head = {"fields": message.fields, "sizes": [len(part) for part in parts]}
    stream.write(json.dumps(head).encode() + b"\n")
    for part in parts:
        stream.write(part)
    stream.flush()


def _read(stream: IO[bytes]) -> Message | None:
    """The next message; None if there is none, or only the beginning of one."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    parts = []
    for size in head["sizes"]:
        part = bytearray(size)
        if stream.readinto(part) != size:  # type: ignore[attr-defined]
            return None
        parts.append(part)
    return Message(head["fields"], parts)


def next_message() -> Message | None:
    """In the process: the next message of its parent; None at the end."""
    return _read(sys.stdin.buffer)


def answer_message(answer: Message) -> None:
    """In the process: the answer to the last message."""
    _write(sys.stdout.buffer, answer)


def limit_memory(max_bytes: int) -> None:
    """In the process: bound its memory and its stack, on systems that can.

    Args:
        max_bytes: the memory that the process may take in addition to what it has.
    """
    if sys.platform != "linux":
        return
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # There is no /proc.
        return
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + max_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_STACK, (_MAX_STACK_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """In the process: end it if the work within takes more processor time, on systems that can.
    Unlike a time by the clock, it is the same on a busy machine."""
    if sys.platform == "win32":
        yield
        return
    # Its signal ends the process, even within native code.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
