"""Continuous batching against static batching and onnxruntime-genai: requests of mixed lengths at random moments.

    pip install -e '.[cpu,export,bench]'
    python benchmarks/serving.py --genai-python PYTHON_WITH_ONNXRUNTIME_GENAI

Requests arrive as a Poisson process; prompts and outputs have log-normal lengths, many short ones and few long ones.
Every request runs to its length, and all are sampled alike, because onnxruntime-genai takes one setting for a batch.
Three systems serve the same load from the same weights, one after another, each in a process of its own: the engine of
qsample; the same graph and loop, with a new batch only when the last one has ended; and onnxruntime-genai with batches
made likewise. Model, packages and results go to --work. What is there already is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine
from rich.console import Console
from rich.table import Table

LABELS = {"continuous": "qsample, continuous", "static": "qsample, static", "genai": "onnxruntime-genai, static"}
CTX_LEN = 1024
Load = list[tuple[float, int, int]]


def make_load(requests: int, rate: float, seed: int) -> Load:
    """[(arrival in seconds, prompt tokens, new tokens)]: exponential gaps, log-normal lengths."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1 / rate, requests)) - 1 / rate
    prompts = np.clip(generator.lognormal(np.log(16), 0.8, requests), 4, 128).astype(int)
    outputs = np.clip(generator.lognormal(np.log(32), 1.1, requests), 4, 256).astype(int)
    return [
        (max(0.0, float(arrival)), int(prompt), int(output))
        for arrival, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]


def make_model(system: str, shape: str, work: Path, python: str) -> Path:
    """A model for one system in `work`, unless it is there: int4, from one checkpoint of random weights."""
    from checkpoints import make_checkpoint, make_genai_model

    checkpoint, folder = work / "checkpoint", work / ("genai" if system == "genai" else "int4")
    if system == "genai":
        return make_genai_model(make_checkpoint(shape, checkpoint), folder, python)
    if not (folder / "qsample.json").exists():
        from qsample import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(make_checkpoint(shape, checkpoint))
        model.compile(folder, provider="cpu", weights="int4", ctx_len=CTX_LEN)
    return folder


def measure(
    system: str, python: str, model: Path, work: Path, options: argparse.Namespace
) -> tuple[int, list[list[float]]]:
    """Run one system; how often it ran its graph, and the moments of each request's tokens since it came."""
    out = work / f"{system}.json"
    command = [python, str(Path(__file__).with_name("serving_worker.py")), system, str(model)]
    command += [str(work / "load.json"), str(out), f"--threads={options.threads}", f"--slots={options.slots}"]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root if system != "genai" else ""}
    subprocess.run(command, check=True, env=environment)
    measured = json.loads(out.read_text())
    return measured["runs"], measured["moments"]


def figures(load: Load, moments: list[list[float]]) -> dict[str, Any]:
    """Throughput from the first arrival to the last token, and percentiles of the two latencies."""
    end = max(arrival + row[-1] for (arrival, _, _), row in zip(load, moments, strict=True))
    first = [row[0] for row in moments]
    gaps = np.concatenate([np.diff(row) for row in moments])
    percentiles = (50, 90, 99)
    return {
        "requests": len(load),
        "seconds": end - load[0][0],
        "tokens_per_second": sum(map(len, moments)) / (end - load[0][0]),
        "ttft_seconds": dict(zip(percentiles, np.percentile(first, percentiles).tolist(), strict=True)),
        "inter_token_ms": dict(zip(percentiles, (1e3 * np.percentile(gaps, percentiles)).tolist(), strict=True)),
    }


def make_table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(
        "", "tokens/s", "time, s", "graph runs", "first token p50 / p90 / p99, s", "between tokens p50 / p90 / p99, ms"
    )
    for system, result in results.items():
        first = " / ".join(f"{value:.2f}" for value in result["ttft_seconds"].values())
        gaps = " / ".join(f"{value:.0f}" for value in result["inter_token_ms"].values())
        speed, taken, runs = f"{result['tokens_per_second']:.1f}", f"{result['seconds']:.1f}", str(result["graph_runs"])
        table.add_row(LABELS[system], speed, taken, runs, first, gaps)
    return table


def plot(load: Load, moments: dict[str, list[list[float]]], path: Path) -> None:
    """Tokens served over time, and the distribution of the two latencies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.8))
    for system, rows in moments.items():
        absolute = np.sort(
            np.concatenate([np.add(row, arrival) for (arrival, _, _), row in zip(load, rows, strict=True)])
        )
        axes[0].plot(absolute, np.arange(1, len(absolute) + 1), label=LABELS[system])
        for axis, values in (
            (axes[1], np.sort([row[0] for row in rows])),
            (axes[2], np.sort(1e3 * np.concatenate([np.diff(row) for row in rows]))),
        ):
            axis.plot(values, np.linspace(0, 1, len(values)), label=LABELS[system])
    for axis, title, label in (
        (axes[0], "tokens served", "seconds"),
        (axes[1], "requests with a first token", "seconds since arrival"),
        (axes[2], "gaps between a request's tokens", "milliseconds"),
    ):
        axis.set(title=title, xlabel=label)
        axis.grid(alpha=0.3)
    axes[2].set_xscale("log")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def step_times(package: Path, batches: list[int], threads: int) -> Table:
    """Time and graph runs of a decode step, by the number of rows: every other row greedy, the rest sampled."""
    from serving_worker import load_package

    from qsample.runtime import SamplingParams
    from qsample.runtime.bench import LockStep
    from qsample.runtime.parameters import parameter_arrays

    model = load_package(package, threads)
    greedy = SamplingParams(temperature=0, eos_token_id=())
    random = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1, eos_token_id=())
    table = Table("rows, half of them greedy", "graph runs a step", "ms a step", "ms a row")
    for rows in batches:
        prompts = list(np.random.default_rng(0).integers(3, model.interface.vocab_size, (rows, 8)))
        params = [(greedy, random)[row % 2] for row in range(rows)]
        capacity = model.capacity(CTX_LEN)
        arrays = parameter_arrays(model.interface, params, [8] * rows, capacity, ())
        loop = LockStep(model.sessions, arrays, list(range(rows)), capacity)
        loop.prefill(prompts)
        before, times = model.sessions.decoder.runs, []
        for _ in range(23):
            start = time.perf_counter()
            loop.decode()
            times.append(time.perf_counter() - start)
        taken = 1e3 * float(np.median(times[3:]))
        runs = (model.sessions.decoder.runs - before) / len(times)
        table.add_row(str(rows), f"{runs:g}", f"{taken:.1f}", f"{taken / rows:.1f}")
    return table


def same_tokens(package: Path, slots: int, threads: int, requests: int, new_tokens: int = 32) -> Table:
    """How many requests get the tokens in the engine that each gets alone; every other one greedy."""
    from serving_worker import SAMPLING, load_package

    from qsample.runtime import Engine, SamplingParams

    model = load_package(package, threads)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, model.interface.vocab_size, generator.integers(4, 40)) for _ in range(requests)]
    kinds: list[dict[str, Any]] = [{"temperature": 0}, SAMPLING]
    params = [
        SamplingParams(**kinds[index % 2], max_new_tokens=new_tokens, eos_token_id=(), seed=index)
        for index in range(requests)
    ]
    rows = list(zip(prompts, params, strict=True))
    alone = [model.generate(*row).token_ids[0] for row in rows]
    with Engine(model, slots=slots, max_waiting=requests) as engine:
        together = [request.result().token_ids for request in [engine.add_request(*row) for row in rows]]
    table = Table("sampling", "requests", "with the same tokens", "tokens before the first that differs, median")
    for kind, name in enumerate(("greedy", "top-k 50, top-p 0.95")):
        pairs = list(zip(alone, together, strict=True))[kind::2]
        first = [np.flatnonzero(np.not_equal(*pair)) for pair in pairs]
        differing = [int(indices[0]) for indices in first if len(indices)]
        middle = f"{np.median(differing):g}" if differing else "none differs"
        table.add_row(name, str(len(pairs)), str(len(pairs) - len(differing)), middle)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/serving"), help="folder for models and results")
    parser.add_argument("--shape", default="qwen3-0.6b", help="a shape of checkpoints.py")
    parser.add_argument("--package", type=Path, help="a compiled package to use instead of making one")
    parser.add_argument("--genai-model", type=Path, help="a model of onnxruntime-genai to use instead of making one")
    parser.add_argument(
        "--genai-python", help="a Python with onnxruntime-genai, torch and transformers; without, it is left out"
    )
    parser.add_argument("--systems", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second; 4 is more than can be served")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps-only", action="store_true", help="only the time of a step by the number of rows")
    parser.add_argument("--same-tokens", action="store_true", help="only whether a batch changes a request's tokens")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    console = Console()

    if options.steps_only or options.same_tokens:
        package = options.package or make_model("continuous", options.shape, work, sys.executable)
        if options.steps_only:
            console.print(step_times(package, options.batch, options.threads))
        if options.same_tokens:
            console.print(same_tokens(package, options.slots, options.threads, options.requests))
        return

    load = make_load(options.requests, options.rate, options.seed)
    (work / "load.json").write_text(json.dumps(load))
    results, moments = {}, {}
    for system in options.systems:
        python = options.genai_python if system == "genai" else sys.executable
        if python is None:
            continue
        given = options.genai_model if system == "genai" else options.package
        model = given or make_model(system, options.shape, work, python)
        runs, moments[system] = measure(system, python, model, work, options)
        results[system] = {"graph_runs": runs, **figures(load, moments[system])}
    console.print(make_table(results))
    plot(load, moments, work / "serving.png")
    about = {"machine": describe_machine(options.threads), "slots": options.slots}
    about |= {"rate": options.rate, "seed": options.seed, "shape": options.shape}
    (work / "serving.json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
