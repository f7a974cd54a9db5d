"""Servers of OpenAI's API under 1 to 200 concurrent streams: `qsample serve`, onnxruntime-genai, llama-cpp-python.

    pip install -e '.[cpu,export,serve,bench]'
    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/serve.py --peers-python peers/bin/python

All systems serve the same random weights in 4 bits with the same number of threads, and take turns; the client is a
separate process on the same machine. The engine is also measured without a server, read by as many coroutines: the
difference in processor time per token is the server's share. Figures are written after every measurement. A run
continues an interrupted run, and starts no measurement after --budget-minutes.

--shape bundled runs qsample's bundled model, without peers: its cheap tokens show the server's share best.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
from checkpoints import (
    SHAPES,
    TOKEN_IDS,
    can_import,
    make_checkpoint,
    make_genai_model,
    make_gguf,
    make_package,
    qsample,
)
from common import add_output, describe_machine, make_parser, print_table
from rich.console import Console
from serve_report import ENGINE, HEADER, ServeResults, figures, notes, table_rows, write
from turns import GENAI as GENAI_MODULES

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 300
BUNDLED = "bundled"
PROMPT_TOKENS = 32
CTX_LEN = 256  # a slot's memory, which is reserved for each of 16 slots
LEAST_STREAMS = 32  # of a measurement: fewer concurrent streams run in several waves
QSAMPLE, GENAI, LLAMA = "qsample serve", "onnxruntime-genai", "llama-cpp-python"
NEEDED = {
    GENAI: [*GENAI_MODULES, "fastapi", "uvicorn"],
    LLAMA: ["llama_cpp.server", "gguf", "fastapi", "uvicorn", "sse_starlette", "starlette_context"],
}
OFF = {"top_p": 1.0, "min_p": 0.0, "top_k": 0}
EXPLANATION = f"""\
Made by `python benchmarks/serve.py`; `pip install -r benchmarks/peers.txt` installs the other systems with all their
packages. Each stream has its own prompt; tokens are sampled at temperature 0.8 from the whole distribution, and no
stream ends early.
`{ENGINE}` is qsample's engine, read by coroutines without a server; "over the engine's" compares the server's processor
time per token with the engine's.

- `{QSAMPLE}` and `{GENAI}` take token ids and send a token's id with its text.
- `{GENAI}` is its own Engine in a small FastAPI shell (`benchmarks/serve_shell.py`), with as many rows as qsample
  has slots. On the CPU that engine batches statically: a request that arrives while a batch runs waits for its end. The
  shell starts a batch after 5 ms without another request. Its model computes the logits of all tokens of a prompt:
  built with only the last token's logits (`prune_lm_head`), as in the generator's benchmarks, that engine returns no
  token.
- `{LLAMA}` is its own server, which takes text: prompts of as many letters, each a token of an artificial
  vocabulary. It answers requests in sequence; its default, to interrupt a stream when another request arrives, is
  switched off."""


def make_served(shape: str, folder: Path) -> tuple[Path, Path | None]:
    """The package, and the checkpoint of its model (None for the bundled model)."""
    from qsample.models.bundled import bundled_model

    if shape == BUNDLED:
        return bundled_model("cpu").package.path, None
    checkpoint = make_checkpoint(shape, folder / "checkpoint")
    return make_package(checkpoint, folder / f"int4-{CTX_LEN}", "int4", ctx_len=CTX_LEN), checkpoint


def write_requests(folder: Path, vocab_size: int, streams: list[int], new_tokens: int) -> dict[str, Path]:
    """Write the fields and prompts for each system; every stream has a different prompt."""
    generator = np.random.default_rng(0)
    count = max(LEAST_STREAMS, *streams)
    body = {"max_tokens": new_tokens, "temperature": 0.8}
    ids = generator.integers(3, vocab_size, (count, PROMPT_TOKENS)).tolist()
    letters = generator.integers(ord("a"), ord("z") + 1, (count, PROMPT_TOKENS), dtype=np.uint8)
    texts = [row.tobytes().decode() for row in letters]
    own = body | {"ignore_eos": True, "return_token_ids": True}
    special = {str(token): -100 for token in TOKEN_IDS.values()}  # these have no text, or end it
    llama = body | OFF | {"repeat_penalty": 1.0, "logit_bias": special}
    asked = {QSAMPLE: (own, ids), GENAI: (body | {"ignore_eos": True}, ids), LLAMA: (llama, texts)}
    files = {}
    for system, (fields, prompts) in asked.items():
        files[system] = folder / f"requests-{system.replace(' ', '-')}.json"
        files[system].write_text(json.dumps({"body": fields, "prompts": prompts, "prompt_tokens": PROMPT_TOKENS}))
    return files


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


def makers(
    package: Path, checkpoint: Path | None, requests: dict[str, Path], folder: Path, options: argparse.Namespace
) -> dict[str, Callable[[], System]]:
    """Functions that start each system, and build a peer's model first."""
    sizes = ["--slots", str(options.slots), "--threads", str(options.threads)]
    python = options.peers_python

    def log(system: str) -> Path:
        return folder / f"{system.replace(' ', '-')}.log"

    def engine() -> System:
        return EngineAlone(package, requests[QSAMPLE], sizes, log(ENGINE))

    def server() -> System:
        waiting = max(256, *options.streams)
        command = qsample("serve", package, "--port", "{port}", *sizes, "--max-waiting", waiting)
        return Server(command, requests[QSAMPLE], log(QSAMPLE))

    def genai() -> System:
        assert checkpoint is not None
        model = make_genai_model(checkpoint, folder / "genai", python)
        shell = str(Path(__file__).with_name("serve_shell.py"))
        return Server([python, shell, str(model), "--port", "{port}", *sizes], requests[GENAI], log(GENAI))

    def llama() -> System:
        assert checkpoint is not None
        model = make_gguf(checkpoint, folder / "q4_0-texts.gguf", python, texts=True)
        threads = str(options.threads)
        command = [python, "-m", "llama_cpp.server", "--model", str(model), "--host", "127.0.0.1", "--port", "{port}"]
        command += ["--n_threads", threads, "--n_threads_batch", threads, "--n_ctx", str(CTX_LEN)]
        command += ["--logits_all", "false", "--interrupt_requests", "false", "--verbose", "false"]
        return Server(command, requests[LLAMA], log(LLAMA))

    return {ENGINE: engine, QSAMPLE: server, GENAI: genai, LLAMA: llama}


def versions(systems: list[str], python: str) -> dict[str, str]:
    """The versions for the page."""
    packages = {ENGINE: ("qsample", sys.executable), QSAMPLE: ("onnxruntime", sys.executable)}
    packages |= {GENAI: ("onnxruntime-genai", python), LLAMA: ("llama-cpp-python", python)}
    found = {}
    for system in systems:
        name, interpreter = packages[system]
        if name == "qsample":
            from qsample import __version__

            found[name] = __version__
            continue
        code = f"from importlib.metadata import version; print(version({name!r}))"
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
        found[name] = done.stdout.strip() or "of unknown version"
    return found


def run(
    start: dict[str, Callable[[], System]], results: ServeResults, options: argparse.Namespace, console: Console
) -> bool:
    """Measure the missing rounds; False if the time ran out."""
    end = time.monotonic() + 60 * options.budget_minutes
    running: dict[str, System] = {}
    out_of_order: dict[str, str] = {}  # systems that did not start are not tried for every cell
    given_up: set[tuple[str, int]] = set()
    try:
        for number in range(options.rounds):
            for streams in options.streams:
                waves = math.ceil(LEAST_STREAMS / streams)
                for system in start:
                    if len(results.rounds(system, streams)) > number or (system, streams) in given_up:
                        continue
                    if time.monotonic() > end:
                        return False
                    console.print(f"round {number + 1}, {streams} streams, {system}", highlight=False)
                    try:
                        if system in out_of_order:
                            raise RuntimeError(out_of_order[system])
                        if system not in running:
                            running[system] = _started(start[system], out_of_order, system)
                        answer = running[system].measure(streams, waves, options.cell_seconds)
                        _check(answer, streams * waves, options.new_tokens)
                        results.add(system, streams, figures(answer) | {"round": number})
                    except RuntimeError as error:
                        console.print(f"  failed: {error}", highlight=False, markup=False)
                        results.fail(system, streams, str(error))
                        given_up.add((system, streams))
                        if system in running:  # the next measurement starts a new process
                            running.pop(system).close()
                    results.save()
    finally:
        for system_running in running.values():
            system_running.close()
    return True


def _started(start: Callable[[], System], out_of_order: dict[str, str], system: str) -> System:
    try:
        return start()
    except RuntimeError as error:
        out_of_order[system] = str(error)
        raise


def _check(answer: dict[str, Any], streams: int, new_tokens: int) -> None:
    """Check that every stream has all its tokens, except refused streams."""
    if answer["failed"]:
        raise RuntimeError(f"{len(answer['failed'])} of {streams} streams failed: {answer['failed'][0]}")
    counts = {sum(count for _, count in row) for row in answer["streams"]}
    if counts - {new_tokens}:
        raise RuntimeError(f"streams have {sorted(counts)} tokens in place of {new_tokens}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python with the packages of peers.txt")
    parser.add_argument("--work", type=Path, default=Path("build/serve"), help="folder for models and logs")
    parser.add_argument("--shape", choices=[BUNDLED, *SHAPES], default="qwen3-0.6b")
    parser.add_argument("--system", nargs="+", choices=[ENGINE, QSAMPLE, GENAI, LLAMA], default=None, help="all")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 200])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cell-seconds", type=float, default=180, help="the limit of a measurement")
    parser.add_argument("--budget-minutes", type=float, default=15, help="start no measurement later")
    add_output(parser, "serve")
    options, console = parser.parse_args(), Console(stderr=True)
    if PROMPT_TOKENS + options.new_tokens > CTX_LEN:
        parser.error(f"--new-tokens is {options.new_tokens}; give at most {CTX_LEN - PROMPT_TOKENS}")
    folder = options.work / options.shape
    folder.mkdir(parents=True, exist_ok=True)
    package, checkpoint = make_served(options.shape, folder)
    vocab_size = json.loads((package / "qsample.json").read_text())["interface"]["vocab_size"]
    requests = write_requests(folder, vocab_size, options.streams, options.new_tokens)
    settings = {"machine": describe_machine(options.threads), "shape": options.shape, "slots": options.slots}
    settings |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": options.new_tokens}
    try:
        results = ServeResults(options.output.with_suffix(".json"), settings)
    except ValueError as error:
        parser.error(str(error))
    start = makers(package, checkpoint, requests, folder, options)
    for system in list(start):
        missing = None
        if system in NEEDED and (options.system is None or system in options.system):
            missing = can_import(options.peers_python, NEEDED[system])
            if checkpoint is None:
                missing = "the bundled model has no file for it"
        if missing is not None:
            console.print(f"without {system}: {missing}", highlight=False)
            results.data["missing"][system] = missing
        elif options.system is None or system in options.system:
            results.data["missing"].pop(system, None)
            continue
        del start[system]
    results.data["versions"] |= versions(list(start), options.peers_python)
    done = run(start, results, options, console)
    write(results, options.output, "Servers", EXPLANATION)
    print_table(Console(), HEADER, table_rows(results))
    for line in notes(results):
        console.print(line, highlight=False, markup=False)
    if not done:
        console.print(f"{options.budget_minutes:g} minutes are over; run the same command to continue", highlight=False)


if __name__ == "__main__":
    main()
