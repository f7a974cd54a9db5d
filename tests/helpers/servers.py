"""`qsample serve` as a real process of its own."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx

_START: Final = "from qsample.cli import main; main()"
_READY: Final = re.compile(r"Serving .* on (https?://\S+)")
# Of /health, if each process has a core; otherwise longer in proportion. On a quiet machine it takes below a second,
# and without the server's limits as long as the attack.
MOST_SECONDS: Final = 5.0
MOST_MEMORY: Final = 1536  # MiB
_PATIENCE: Final = 120  # seconds; a busy machine takes long to import and load

TOOL_TEMPLATE: Final = (
    "{% if tools %}tools, called as <tool_call>{...}</tool_call>:{% for tool in tools %} {{ tool.function.name }}"
    "{% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ServerProcess:
    """A server on a free port of this machine, once it answers; `client` asks it, and waits as long as a busy machine
    takes."""

    def __init__(
        self,
        *arguments: str | Path,
        trust: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """trust: a certificate for https; None = those of the system. environment: more variables; a PYTHONPATH is put
        before the own one."""
        more = dict(environment or {})
        if "PYTHONPATH" in more:
            paths = (more["PYTHONPATH"], os.environ.get("PYTHONPATH"))
            more["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, "serve", *map(str, arguments), "--port", "0"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "ORT_DISABLE_TELEMETRY": "1", **more},
        )
        self.log: list[str] = []
        self._found = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._found.wait(_PATIENCE), f"the server did not start: {self.log}"
        assert self.url, f"the server ended: {self.log}"
        # The address is known before the first answer.
        # A connection for each request: the server closes idle ones at any moment.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        trusted: Any = True if trust is None else ssl.create_default_context(cafile=trust)
        self.client = httpx.Client(
            base_url=self.url, timeout=_PATIENCE, limits=limits, verify=trusted
        )
        assert self.client.get("/health").status_code == 200

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := _READY.search(line):
                self.url = match[1]
                self._found.set()
        self._found.set()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.client.get("/metrics").text
        return sum(
            float(value)
            for value in re.findall(rf"^qsample:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(_PATIENCE)
        finally:
            self.process.kill()
            self._reader.join()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.client.close()
        self.stop()


def post_all(url: str, bodies: Sequence[object]) -> list[httpx.Response]:
    """The answers to several requests that are sent at once."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(bodies)) as pool, httpx.Client(timeout=_PATIENCE) as client:
        return list(pool.map(lambda body: client.post(url, json=body), bodies))


class Health:
    """Asks for /health all the time; the longest answer in seconds, and the server's largest memory in MiB."""

    def __init__(self, server: ServerProcess) -> None:
        self.longest, self.memory, self.failures = 0.0, 0, 0
        self._server, self._going = server, True
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with httpx.Client(timeout=120) as client:
            going = True
            while going:  # once more after the end
                going = self._going
                began = time.monotonic()
                try:
                    self.failures += client.get(self._server.url + "/health").status_code != 200
                except httpx.HTTPError:
                    self.failures += 1
                self.longest = max(self.longest, time.monotonic() - began)
                with open(f"/proc/{self._server.process.pid}/status", encoding="ascii") as status:
                    found = re.search(r"VmRSS:\s+(\d+)", status.read())
                self.memory = max(self.memory, int(found[1]) // 1024 if found else 0)
                time.sleep(0.02)

    def stop(self) -> None:
        self._going = False
        self._thread.join()


@contextmanager
def watched(server: ServerProcess) -> Iterator[None]:
    """What happens within leaves the server alive, quick and small."""
    health = Health(server)
    try:
        yield
    finally:
        health.stop()
    most = MOST_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    print(f"/health {health.longest:.2f} s of {most:.2f}, {health.memory} MiB")
    assert server.process.poll() is None
    assert health.failures == 0
    assert health.longest < most
    assert health.memory < MOST_MEMORY
