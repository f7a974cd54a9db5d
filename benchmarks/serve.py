"""Servers of OpenAI's API under 1 to 200 concurrent streams: `qsample serve`, and llama-cpp-python's.

    pip install -e '.[cpu,export,serve,bench]'
    python -m venv peers && peers/bin/pip install 'llama-cpp-python[server]' gguf
    python benchmarks/serve.py --peers-python peers/bin/python

All systems serve the same random weights in 4 bits, one after another, with the same number of threads. The client is a
process of its own on the same machine. Beside them stands the engine without a server, read by as many coroutines: what
a token costs more in processor time is the server's share. `--shape tiny` takes the bundled model, whose tokens
cost so little that this share shows best.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from checkpoints import SHAPES, can_import, make_checkpoint, make_gguf
from decode_report import markdown
from machine import describe_machine
from rich.console import Console
from rich.table import Table

TINY = "tiny"
PROMPT_TOKENS = 32
HEADER = [
    "system",
    "streams",
    "tokens/s",
    "first token p50 / p99, ms",
    "gap p50 / p99, ms",
    "CPU, us a token",
    "refused",
]


def make_package(shape: str, work: Path) -> tuple[Path, Path | None]:
    """The package, and the checkpoint that it was made from."""
    from qsample import AutoModelForCausalLM
    from qsample.bundled import bundled_model

    if shape == TINY:
        return bundled_model("cpu").package.path, None
    checkpoint, package = make_checkpoint(shape, work / "checkpoint"), work / "int4"
    if not package.exists():
        AutoModelForCausalLM.from_pretrained(checkpoint).compile(
            package, provider="cpu", weights="int4", ctx_len=1024, max_divergence=100
        )
    return package, checkpoint


class Server:
    """A server in a process of its own, and the processor time that it takes."""

    def __init__(self, command: list[str], url: str | None, log: Path) -> None:
        """url: where it will answer; None = it says so."""
        self._log = log.open("w+")
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        self.url = url or self._said(log)
        self._wait(log)

    def _said(self, log: Path) -> str:
        end = time.monotonic() + 300
        while time.monotonic() < end and self._process.poll() is None:
            if match := re.search(r"Serving .* on (http://\S+)", log.read_text()):
                return match[1]
            time.sleep(0.1)
        raise SystemExit(f"a server did not start: {log.read_text()[-1000:]}")

    def _wait(self, log: Path) -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise SystemExit(f"a server does not answer: {log.read_text()[-1000:]}")

    def cpu_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def measure(server: Server, body: Path, streams: int) -> dict[str, Any]:
    before = server.cpu_seconds()
    command = [sys.executable, str(Path(__file__).with_name("serve_client.py")), f"{server.url}/v1/completions"]
    done = subprocess.run([*command, str(body), "--streams", str(streams)], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    return figures(answer["moments"], answer["seconds"], server.cpu_seconds() - before) | {"refused": answer["refused"]}


def engine_alone(package: Path, body: dict[str, Any], options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    """The same streams, read from the engine by coroutines of this process."""
    from qsample.runtime import Engine, SamplingParams, load

    model = load(package, intra_op_num_threads=options.threads, session_config={"session.intra_op.allow_spinning": "0"})
    params = SamplingParams(max_new_tokens=body["max_tokens"], temperature=body["temperature"], eos_token_id=())

    async def read(engine: Engine, seed: int) -> list[float]:
        start = time.perf_counter()
        request = engine.add_request(body["prompt"], params, seed=seed, timeout=0)
        return [time.perf_counter() - start async for delta in request if delta.token_ids]

    async def every(engine: Engine, streams: int) -> list[list[float]]:
        return list(await asyncio.gather(*(read(engine, seed) for seed in range(streams))))

    results = {}
    with Engine(model, slots=options.slots, max_waiting=max(options.streams)) as engine:
        asyncio.run(every(engine, 1))
        for streams in options.streams:
            cpu, start = time.process_time(), time.perf_counter()
            moments = asyncio.run(every(engine, streams))
            results[streams] = figures(moments, time.perf_counter() - start, time.process_time() - cpu)
    return results


def figures(moments: list[list[float]], seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """moments: of each stream's events, in seconds since it was sent."""
    tokens = sum(map(len, moments))
    gaps = np.concatenate([np.zeros(1) if len(row) < 2 else np.diff(row) for row in moments or [[]]])
    first = [row[0] for row in moments if row] or [float("nan")]
    return {
        "tokens_per_second": tokens / seconds,
        "first_ms": (1e3 * np.percentile(first, [50, 99])).tolist(),
        "gap_ms": (1e3 * np.percentile(gaps, [50, 99])).tolist(),
        "cpu_us_per_token": 1e6 * cpu_seconds / max(tokens, 1),
        "refused": 0,
    }


def rows(results: dict[str, dict[int, dict[str, Any]]]) -> list[list[str]]:
    lines = []
    for system, cells in results.items():
        for streams, one in cells.items():
            pairs = [" / ".join(f"{value:.1f}" for value in one[name]) for name in ("first_ms", "gap_ms")]
            speed, cost = f"{one['tokens_per_second']:.1f}", f"{one['cpu_us_per_token']:.0f}"
            lines.append([system, str(streams), speed, *pairs, cost, str(one["refused"])])
    return lines


def write(output: Path, shape: str, options: argparse.Namespace, results: dict[str, dict[int, dict[str, Any]]]) -> None:
    """The figures as JSON, a page and a plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": describe_machine(options.threads), "shape": shape, "slots": options.slots}
    output.with_suffix(".json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    text = (
        f"# Servers\n\n{about['machine']}, {options.slots} slots, {shape}. Made by `python benchmarks/serve.py`, which "
        f"says how it measures: prompts of {PROMPT_TOKENS} tokens, {options.new_tokens} new tokens a stream.\n\n"
    )
    output.with_suffix(".md").write_text(
        text + "\n".join([*markdown(HEADER, rows(results)), "", f"![Tokens per second]({output.name}.png)", ""])
    )
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for system, cells in results.items():
        axes[0].plot(list(cells), [one["tokens_per_second"] for one in cells.values()], marker="o", label=system)
        axes[1].plot(list(cells), [one["first_ms"][0] for one in cells.values()], marker="o", label=system)
    for axis, title in zip(axes, ("tokens a second", "median ms to the first token"), strict=True):
        axis.set(xscale="log", xlabel="streams", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(output.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has llama_cpp.server")
    parser.add_argument("--work", type=Path, default=Path("build/serve"))
    parser.add_argument("--shape", choices=[TINY, *SHAPES], default="qwen3-0.6b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 200])
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/serve"), help="file name without suffix")
    options, console = parser.parse_args(), Console(stderr=True)
    work = options.work / options.shape
    work.mkdir(parents=True, exist_ok=True)
    package, checkpoint = make_package(options.shape, work)
    vocab_size = json.loads((package / "qsample.json").read_text())["interface"]["vocab_size"]
    prompt = np.random.default_rng(0).integers(3, vocab_size, PROMPT_TOKENS).tolist()
    body = {"prompt": prompt, "max_tokens": options.new_tokens, "temperature": 0.8}
    ours, theirs = work / "body.json", work / "body-llama.json"
    ours.write_text(json.dumps(body | {"ignore_eos": True}))
    theirs.write_text(json.dumps(body))

    results: dict[str, dict[int, dict[str, Any]]] = {"engine alone": engine_alone(package, body, options)}
    command = [sys.executable, "-c", "from qsample.cli import main; main()", "serve", str(package), "--port", "0"]
    command += ["--slots", str(options.slots), "--threads", str(options.threads), "--max-waiting", "256"]
    servers = {"qsample serve": (command, None, ours)}
    missing = can_import(options.peers_python, ["llama_cpp.server.app", "gguf"])
    if missing is None and checkpoint is not None:
        model = make_gguf(checkpoint, work / "q4_0.gguf", options.peers_python)
        url = "http://127.0.0.1:8391"
        command = [options.peers_python, "-m", "llama_cpp.server", "--model", str(model), "--port", "8391"]
        command += ["--n_threads", str(options.threads), "--n_ctx", "1024"]
        servers["llama-cpp-python"] = (command, url, theirs)
    else:
        console.print(f"without llama-cpp-python: {missing or 'it has no file of the bundled model'}", highlight=False)
    for name, (command, url, file) in servers.items():
        server = Server(command, url, work / f"{name.replace(' ', '-')}.log")
        try:
            measure(server, file, 1)
            results[name] = {}
            for streams in options.streams:
                console.print(f"{name}, {streams} streams", highlight=False)
                results[name][streams] = measure(server, file, streams)
        finally:
            server.close()
        write(options.output, options.shape, options, results)
    table = Table(*HEADER)
    for line in rows(results):
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    main()
