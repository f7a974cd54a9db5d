"""Servers of OpenAI's API under 1 to 200 concurrent streams: `qsample serve`, onnxruntime-genai, llama-cpp-python.

    pip install -e '.[cpu,export,serve,bench]'
    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/serve.py --peers-python peers/bin/python

All systems serve the same random weights in 4 bits with the same number of threads, and take turns; the client is a
separate process on the same machine. The engine is also measured without a server, read by as many coroutines: the
difference in processor time per token is the server's share. Figures are written after every measurement, and a run
continues an interrupted run.

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
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import report
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
from report import Kept, describe_machine, make_parser, markdown, median, print_table
from rich.console import Console
from turns import GENAI as GENAI_MODULES
from turns import Worker

HERE: Final = Path(__file__).resolve().parent
START_SECONDS: Final = 300
BUNDLED: Final = "bundled"
PROMPT_TOKENS: Final = 32
CTX_LEN: Final = 256  # a slot's memory, which is reserved for each of 16 slots
LEAST_STREAMS: Final = 32  # of a measurement: fewer concurrent streams run in several waves
ENGINE, QSAMPLE, GENAI, LLAMA = (
    "engine alone",
    "qsample serve",
    "onnxruntime-genai",
    "llama-cpp-python",
)
NEEDED: Final = {
    GENAI: [*GENAI_MODULES, "fastapi", "uvicorn"],
    LLAMA: ["llama_cpp.server", "gguf", "fastapi", "uvicorn", "sse_starlette", "starlette_context"],
}
HEADER: Final = [
    "system",
    "streams",
    "tokens/s",
    "first token p50 / p99, ms",
    "gap p50 / p99, ms",
    "CPU, us a token",
]
EXPLANATION: Final = f"""\
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


def write_requests(
    folder: Path, vocab_size: int, streams: list[int], new_tokens: int
) -> dict[str, Path]:
    """Write the fields and prompts for each system; every stream has a different prompt."""
    generator = np.random.default_rng(0)
    size = max(LEAST_STREAMS, *streams), PROMPT_TOKENS
    body = {"max_tokens": new_tokens, "temperature": 0.8}
    ids = generator.integers(3, vocab_size, size).tolist()
    letters = generator.integers(ord("a"), ord("z") + 1, size, dtype=np.uint8)
    texts = [row.tobytes().decode() for row in letters]
    special = {str(token): -100 for token in TOKEN_IDS.values()}  # these have no text, or end it
    llama = {"top_p": 1.0, "min_p": 0.0, "top_k": 0, "repeat_penalty": 1.0, "logit_bias": special}
    endless = {"ignore_eos": True}
    more = {QSAMPLE: {**endless, "return_token_ids": True}, GENAI: endless, LLAMA: llama}
    files = {}
    for system, fields in more.items():
        asked = {
            "body": body | fields,
            "prompts": texts if system == LLAMA else ids,
            "prompt_tokens": PROMPT_TOKENS,
        }
        files[system] = folder / f"requests-{system.replace(' ', '-')}.json"
        files[system].write_text(json.dumps(asked))
    return files


class EngineAlone:
    """The engine without a server; see `systems/engine.py`."""

    def __init__(self, package: Path, requests: Path, options: argparse.Namespace) -> None:
        more = {"requests": str(requests), "slots": options.slots}
        self._worker = Worker(ENGINE, package, sys.executable, options.threads, "streams", **more)
        self.close = self._worker.close

    def measure(self, streams: int, waves: int, seconds: float) -> dict[str, Any]:
        """As `Server.measure`."""
        return self._worker.ask("measure", streams=streams, waves=waves)


class Server:
    """A server of OpenAI's API, once it answered a whole request; `{port}` in its command is a free port."""

    def __init__(self, command: list[str], requests: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        self._url, self._requests, self._log = f"http://127.0.0.1:{port}/v1", requests, log
        # Only qsample's process gets this path: a peer's Python has its own libraries.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if command[0] == sys.executable:
            given = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), given]))
        command = [part.format(port=port) for part in command]
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            self._wait()
            self._check()
        except BaseException:
            self.close()
            raise

    def _failure(self, message: str) -> RuntimeError:
        lines = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.strip()
        ]
        return RuntimeError(f"{message}{': ' if lines else ''}{' '.join(lines[-2:])[-300:]}")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self._url}/models", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        raise self._failure("the server did not start")

    def _check(self) -> None:
        """Check that it reads and writes as many tokens as the others; this also keeps its first request unmeasured."""
        asked = json.loads(self._requests.read_text())
        data = json.dumps(asked["body"] | {"prompt": asked["prompts"][0]}).encode()
        request = urllib.request.Request(
            f"{self._url}/completions", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                usage = json.load(answer)["usage"]
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RuntimeError(f"the server answers {error.code}: {text:.300}") from None
        except OSError as error:
            raise self._failure(f"the server does not answer ({error})") from None
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        if counts != (asked["prompt_tokens"], asked["body"]["max_tokens"]):
            raise RuntimeError(
                f"of {asked['prompt_tokens']} and {asked['body']['max_tokens']} tokens it has {counts}"
            )

    def _cpu_seconds(self) -> float:
        """The processor time of the process and of its children."""
        import psutil

        own = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        return float(sum(taken.user + taken.system for taken in times))

    def measure(self, streams: int, waves: int, seconds: float) -> dict[str, Any]:
        """The output of `serve_client.py`, and the system's `cpu_seconds`.

        Raises:
            RuntimeError: The server or the client failed, or took longer than `seconds`.
        """
        if self._process.poll() is not None:
            raise self._failure("the server ended")
        before = self._cpu_seconds()
        command = [
            sys.executable,
            str(HERE / "serve_client.py"),
            f"{self._url}/completions",
            str(self._requests),
        ]
        command += ["--streams", str(streams), "--waves", str(waves)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {seconds:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"the client failed: {done.stderr[-300:]}")
        if self._process.poll() is not None:
            raise self._failure("the server ended")
        return {**json.loads(done.stdout), "cpu_seconds": self._cpu_seconds() - before}


def makers(
    package: Path,
    checkpoint: Path | None,
    requests: dict[str, Path],
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, Callable[[], EngineAlone | Server]]:
    """Functions that start each system, and build a peer's model first."""
    threads, python = str(options.threads), options.peers_python
    sizes = ["--slots", str(options.slots), "--threads", threads]

    def server(system: str, command: list[str]) -> Server:
        return Server(command, requests[system], folder / f"{system.replace(' ', '-')}.log")

    def genai() -> Server:
        assert checkpoint is not None
        model = make_genai_model(checkpoint, folder / "genai", python)
        return server(
            GENAI, [python, str(HERE / "serve_shell.py"), str(model), "--port", "{port}", *sizes]
        )

    def llama() -> Server:
        assert checkpoint is not None
        model = make_gguf(checkpoint, folder / "q4_0-texts.gguf", python, texts=True)
        command = [
            python,
            "-m",
            "llama_cpp.server",
            "--model",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            "{port}",
        ]
        command += ["--n_threads", threads, "--n_threads_batch", threads, "--n_ctx", str(CTX_LEN)]
        command += ["--logits_all", "false", "--interrupt_requests", "false", "--verbose", "false"]
        return server(LLAMA, command)

    waiting = ["--max-waiting", max(256, *options.streams)]
    return {
        ENGINE: lambda: EngineAlone(package, requests[QSAMPLE], options),
        QSAMPLE: lambda: server(
            QSAMPLE, qsample("serve", package, "--port", "{port}", *sizes, *waiting)
        ),
        GENAI: genai,
        LLAMA: llama,
    }


def versions(systems: list[str], python: str) -> dict[str, str]:
    """The versions for the page."""
    packages = {ENGINE: ("qsample", sys.executable), QSAMPLE: ("onnxruntime", sys.executable)}
    packages |= {GENAI: ("onnxruntime-genai", python), LLAMA: ("llama-cpp-python", python)}
    found = {}
    for name, interpreter in (packages[system] for system in systems):
        code = f"from importlib.metadata import version; print(version({name!r}))"
        code = "import qsample; print(qsample.__version__)" if name == "qsample" else code
        done = subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, check=False
        )
        found[name] = done.stdout.strip() or "of unknown version"
    return found


class ServeResults(Kept):
    """The measurements with `settings`, per round; a failure is tried again by the next run.

    Raises:
        ValueError: The file has figures of other settings, which cannot share a table.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        super().__init__(
            path, {"settings": settings, "versions": {}, "cells": {}, "missing": {}}, same=()
        )
        found = self.data.get("settings", {})
        if differing := [key for key, value in settings.items() if found.get(key) != value]:
            raise ValueError(
                f"{path} was measured with other settings ({', '.join(differing)}); give another --output, or remove it"
            )

    def cell(self, system: str, streams: int) -> dict[str, Any]:
        cells = self.data["cells"].setdefault(system, {})
        cell: dict[str, Any] = cells.setdefault(str(streams), {"rounds": [], "failed": None})
        return cell


def run(
    start: dict[str, Callable[[], EngineAlone | Server]],
    results: ServeResults,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Measure the missing rounds; a system that failed in a cell leaves it, and starts anew for the next."""
    running: dict[str, EngineAlone | Server] = {}
    given_up: set[tuple[str, int]] = set()
    try:
        for number in range(options.rounds):
            for streams in options.streams:
                waves = math.ceil(LEAST_STREAMS / streams)
                for system in list(start):
                    cell = results.cell(system, streams)
                    if len(cell["rounds"]) > number or (system, streams) in given_up:
                        continue
                    console.print(
                        f"round {number + 1}, {streams} streams, {system}", highlight=False
                    )
                    try:
                        if system not in running:
                            running[system] = start[system]()
                        answer = running[system].measure(streams, waves, options.cell_seconds)
                        _check(answer, streams * waves, options.new_tokens)
                        cell["rounds"].append(figures(answer) | {"round": number})
                        cell["failed"] = None
                    except RuntimeError as error:
                        console.print(f"  failed: {error}", highlight=False, markup=False)
                        cell["failed"] = " ".join(str(error).split())
                        given_up.add((system, streams))
                        if system in running:
                            running.pop(system).close()
                        else:  # it does not start
                            del start[system]
                    results.save()
    finally:
        for system_running in running.values():
            system_running.close()


def _check(answer: dict[str, Any], streams: int, new_tokens: int) -> None:
    """Check that every stream has all its tokens, except refused streams."""
    if answer["failed"]:
        raise RuntimeError(
            f"{len(answer['failed'])} of {streams} streams failed: {answer['failed'][0]}"
        )
    counts = {sum(count for _, count in row) for row in answer["streams"]}
    if counts - {new_tokens}:
        raise RuntimeError(f"streams have {sorted(counts)} tokens in place of {new_tokens}")


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    """The figures of a measurement; a stream is a list of (moment, tokens)."""
    streams = [row for row in answer["streams"] if row]
    tokens = sum(count for row in streams for _, count in row)
    gaps = [np.diff([moment for moment, _ in row]) for row in streams if len(row) > 1]
    first = [row[0][0] for row in streams]
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / sum(answer["seconds"]),
        "first_ms": (1e3 * np.percentile(first, [50, 99])).tolist() if first else None,
        "gap_ms": (1e3 * np.percentile(np.concatenate(gaps), [50, 99])).tolist() if gaps else None,
        "cpu_us_per_token": 1e6 * answer["cpu_seconds"] / max(tokens, 1),
        "refused": answer["refused"],
    }


def summary(data: dict[str, Any], system: str, streams: str) -> dict[str, Any] | None:
    """The medians of a cell's rounds, and of the ratios within a round (`over_engine`); None = not measured."""
    rounds = data["cells"][system][streams]["rounds"]
    if not rounds:
        return None
    medians: dict[str, Any] = {"refused": sum(one["refused"] for one in rounds)}
    for name in ("tokens_per_second", "cpu_us_per_token", "first_ms", "gap_ms"):
        values = [one[name] for one in rounds if one[name] is not None]
        medians[name] = np.median(values, axis=0).tolist() if values else None
    of_engine = data["cells"].get(ENGINE, {}).get(streams, {"rounds": []})["rounds"]
    engine = {one["round"]: one["cpu_us_per_token"] for one in of_engine}
    ratios = [
        one["cpu_us_per_token"] / engine[one["round"]] for one in rounds if one["round"] in engine
    ]
    medians["over_engine"] = median(ratios) if ratios else None
    return medians


def table_rows(data: dict[str, Any]) -> report.Rows:
    def pair(values: list[float] | None) -> str:
        return "" if values is None else " / ".join(f"{value:.1f}" for value in values)

    lines = []
    for system in sorted(
        data["cells"], key=lambda name: name != ENGINE
    ):  # the reference comes first
        for streams in sorted(data["cells"][system], key=int):
            one = summary(data, system, streams)
            if one is None:
                lines.append([system, streams, "failed", *[""] * 5])
                continue
            ratio = (
                ""
                if system == ENGINE or one["over_engine"] is None
                else f"{one['over_engine']:.2f}"
            )
            latencies = [pair(one["first_ms"]), pair(one["gap_ms"])]
            costs = [f"{one['cpu_us_per_token']:.0f}", ratio, str(one["refused"])]
            lines.append([system, streams, f"{one['tokens_per_second']:.1f}", *latencies, *costs])
    return [*HEADER, "over the engine's", "refused"], lines


def notes(data: dict[str, Any]) -> list[str]:
    """The reasons for missing parts of the table."""
    lines = [f"Without {system}: {reason}" for system, reason in data["missing"].items()]
    for system, cells in data["cells"].items():
        failed = {streams: cell["failed"] for streams, cell in cells.items() if cell["failed"]}
        lines += [
            f"{system} failed at {streams} streams: {reason}" for streams, reason in failed.items()
        ]
    return lines


def write(data: dict[str, Any], output: Path) -> None:
    """Print the table, and write the page and the plot."""
    print_table(*table_rows(data))
    settings = data["settings"]
    rounds = max(
        (len(cell["rounds"]) for cells in data["cells"].values() for cell in cells.values()),
        default=0,
    )
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    head = (
        f"# Servers\n\n{settings['machine']}, {settings['slots']} slots, {settings['shape']}, prompts of "
        f"{settings['prompt_tokens']} tokens, {settings['new_tokens']} new tokens per stream; medians of {rounds} "
        f"rounds; {versions}.\n\n{EXPLANATION}\n\n"
    )
    missing = "".join(f"{line}\n\n" for line in notes(data))
    table = "\n".join(markdown(*table_rows(data)))
    output.with_suffix(".md").write_text(
        f"{head}{table}\n\n{missing}![Tokens per second]({output.name}.png)\n"
    )
    plot(data, output.with_suffix(".png"))


def plot(data: dict[str, Any], path: Path) -> None:
    """Speed and latencies by streams."""
    systems = data.get("results") or {  # older files have the summaries alone
        system: {streams: summary(data, system, streams) for streams in found}
        for system, found in data["cells"].items()
    }
    figure, axes = report.new_figure(1, 3, (4.2, 3.8), sharex=True)
    counts = sorted({int(streams) for found in systems.values() for streams in found})
    axes[0][1].sharey(axes[0][2])  # both are milliseconds
    kinds = (
        ("tokens_per_second", "tokens per second"),
        ("first_ms", "median ms to the first token"),
    )
    for axis, (field, title) in zip(
        axes[0], (*kinds, ("gap_ms", "median ms between tokens")), strict=True
    ):
        lacking = []
        for system, found in systems.items():
            known = {number: (found.get(str(number)) or {}).get(field) for number in counts}
            points = [
                (n, value[0] if isinstance(value, list) else value)
                for n, value in known.items()
                if value
            ]
            axis.plot(*zip(*points, strict=True), **report.line_style(system)) if points else None
            lacking += [f"{system} at {n}" for n, value in known.items() if not value]
        axis.set(
            xscale="log",
            xlabel=f"streams{report.missing_line(lacking)}",
            title=title,
            xticks=counts,
        )
        axis.set_xticklabels(counts)
        axis.minorticks_off()
    axes[0][0].set_ylim(bottom=0)
    axes[0][1].set_yscale("log")
    report.save_figure(figure, path)


def main() -> None:
    parser = make_parser(__doc__, "serve", work="build/serve", peers=True, threads=2)
    parser.add_argument("--shape", choices=[BUNDLED, *SHAPES], default="qwen3-0.6b")
    systems = [ENGINE, QSAMPLE, GENAI, LLAMA]
    parser.add_argument("--system", nargs="+", choices=systems, default=systems)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 200])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument(
        "--cell-seconds", type=float, default=180, help="the limit of a measurement"
    )
    options, console = parser.parse_args(), Console(stderr=True)
    if PROMPT_TOKENS + options.new_tokens > CTX_LEN:
        parser.error(
            f"--new-tokens is {options.new_tokens}; give at most {CTX_LEN - PROMPT_TOKENS}"
        )
    folder = options.work / options.shape
    folder.mkdir(parents=True, exist_ok=True)
    package, checkpoint = make_served(options.shape, folder)
    vocab_size = json.loads((package / "qsample.json").read_text())["interface"]["vocab_size"]
    requests = write_requests(folder, vocab_size, options.streams, options.new_tokens)
    settings = {
        "machine": describe_machine(options.threads),
        "shape": options.shape,
        "slots": options.slots,
    }
    settings |= {"prompt_tokens": PROMPT_TOKENS, "new_tokens": options.new_tokens}
    try:
        results = ServeResults(options.output.with_suffix(".json"), settings)
    except ValueError as error:
        parser.error(str(error))
    every = makers(package, checkpoint, requests, folder, options)
    start = {}
    for system in options.system:
        missing = can_import(options.peers_python, NEEDED[system]) if system in NEEDED else None
        if system in NEEDED and checkpoint is None:
            missing = "the bundled model has no file for it"
        results.data["missing"].pop(system, None)
        if missing is None:
            start[system] = every[system]
        else:
            console.print(f"without {system}: {missing}", highlight=False)
            results.data["missing"][system] = missing
    results.data["versions"] |= versions(list(start), options.peers_python)
    run(start, results, options, console)
    write(results.data, options.output)


if __name__ == "__main__":
    main()
