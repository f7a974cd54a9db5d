"""The systems that `serve.py` measures, each in its own process: the engine alone, and servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import psutil

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300


class System(Protocol):
    """A measured system.

    `measure` returns the output of `serve_client.py` and the system's `cpu_seconds`, or raises RuntimeError.
    """

    def measure(self, streams: int, waves: int, seconds: float) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Process:
    """A process whose output goes to a log."""

    def __init__(self, command: list[str], log: Path, **options: Any) -> None:
        self._log = log
        with log.open("w") as file:
            # Only qsample's process gets this path: a peer's Python has its own libraries.
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            if command[0] == sys.executable:
                environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":")
            self.process: subprocess.Popen[str] = subprocess.Popen(
                command, stderr=file, env=environment, text=True, **({"stdout": file} | options)
            )

    def failure(self, message: str) -> RuntimeError:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return RuntimeError(f"{message}{': ' if lines else ''}{' '.join(lines[-2:])[-300:]}")

    def cpu_seconds(self) -> float:
        """The processor time of the process and of its children."""
        own = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return float(sum(taken.user + taken.system for taken in times))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class EngineAlone:
    """The engine without a server; see `serve_engine.py`."""

    def __init__(self, package: Path, requests: Path, options: list[str], log: Path) -> None:
        script = str(Path(__file__).with_name("serve_engine.py"))
        command = [sys.executable, script, str(package), str(requests), *options]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._worker = Process(command, log, **pipes)
        self._answer("it did not start")
        self.measure(1, 1, 0)  # allocates memory and reads files

    def measure(self, streams: int, waves: int, seconds: float) -> dict[str, Any]:
        assert self._worker.process.stdin is not None
        self._worker.process.stdin.write(json.dumps({"streams": streams, "waves": waves}) + "\n")
        self._worker.process.stdin.flush()
        return self._answer("it ended early")

    def _answer(self, failure: str) -> dict[str, Any]:
        assert self._worker.process.stdout is not None
        line = self._worker.process.stdout.readline()
        if not line:
            self._worker.process.wait()
            raise self._worker.failure(failure)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._worker.close()


class Server:
    """A server of OpenAI's API, measured by `serve_client.py`."""

    def __init__(self, command: list[str], requests: Path, log: Path) -> None:
        """Start a server, wait until it answers, and read a whole answer.

        Args:
            command: The command; `{port}` is replaced by a free port.
            requests: The file of requests.
            log: The file for the server's output.
        """
        port = free_port()
        self._url, self._requests = f"http://127.0.0.1:{port}/v1", requests
        self._process = Process([part.format(port=port) for part in command], log)
        try:
            self._wait()
            self._check()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self._process.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self._url}/models", timeout=5).close()
                return
            except OSError:
                if time.monotonic() > end:
                    break
                time.sleep(0.2)
        raise self._process.failure("the server did not start")

    def _check(self) -> None:
        """Check that it reads and writes as many tokens as the others; this also keeps its first request unmeasured."""
        asked = json.loads(self._requests.read_text())
        data = json.dumps(asked["body"] | {"prompt": asked["prompts"][0]}).encode()
        request = urllib.request.Request(f"{self._url}/completions", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                usage = json.load(answer)["usage"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"the server answers {error.code}: {error.read().decode(errors='replace'):.300}"
            ) from None
        except OSError as error:
            raise self._process.failure(f"the server does not answer ({error})") from None
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        if counts != (asked["prompt_tokens"], asked["body"]["max_tokens"]):
            raise RuntimeError(f"of {asked['prompt_tokens']} and {asked['body']['max_tokens']} tokens it has {counts}")

    def measure(self, streams: int, waves: int, seconds: float) -> dict[str, Any]:
        if self._process.process.poll() is not None:
            raise self._process.failure("the server ended")
        before = self._process.cpu_seconds()
        script = str(Path(__file__).with_name("serve_client.py"))
        command = [sys.executable, script, f"{self._url}/completions", str(self._requests)]
        command += ["--streams", str(streams), "--waves", str(waves)]
        with tempfile.TemporaryFile("w+") as errors:
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=seconds)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"not done after {seconds:.0f} s") from None
            if done.returncode:
                errors.seek(0)
                raise RuntimeError(f"the client failed: {errors.read()[-300:]}")
        if self._process.process.poll() is not None:
            raise self._process.failure("the server ended")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer | {"cpu_seconds": self._process.cpu_seconds() - before}

    def close(self) -> None:
        self._process.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port
