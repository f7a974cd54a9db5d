"""Continuous batching, static batching and onnxruntime-genai: requests of mixed lengths at random moments.

    pip install -e '.[cpu,export,bench]'
    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/serving.py --genai-python peers/bin/python    # five minutes on two cores

Requests arrive as a Poisson process; prompts and outputs have log-normal lengths, with many short and few long. Every
request runs to its length, and all have the same sampling parameters, because onnxruntime-genai takes them per batch.
Three systems serve the same load from the same weights in sequence, each in its own process: the engine of qsample; the
same graph and loop with static batches, which begin after the previous batch has ended; and onnxruntime-genai with
static batches. Models are built once, in --work. Results are written after every system, and a run continues an
interrupted run; another load, machine or number of slots starts again.

The last part compares the tokens that requests get alone and in the engine, for a model of two layers in float32 and
int4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import plots
from checkpoints import make_checkpoint, make_genai_model, make_package
from common import Kept, add_output, describe_machine, make_parser, markdown, print_table
from rich.console import Console

LABELS = {"continuous": "qsample, continuous", "static": "qsample, static", "genai": "onnxruntime-genai, static"}
HEADER = ("", "tokens/s", "time, s", "runs of the graph", "first token p50 / p90 / p99, s")
HEADER += ("between tokens p50 / p90 / p99, ms",)
SAME_HEADER = ("weights", "sampling", "requests", "same tokens as alone")
SAME_SHAPE, SAME_REQUESTS = "tiny", 128
Rows = list[list[str]]
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
    """An int4 model of the checkpoint for a system, built in `work` unless it exists."""
    checkpoint = make_checkpoint(shape, work / shape / "checkpoint")
    if system == "genai":
        return make_genai_model(checkpoint, work / shape / "genai", python)
    return make_package(checkpoint, work / shape / "int4", "int4")


def measure(system: str, python: str, model: Path, work: Path, options: argparse.Namespace) -> None:
    """Run a system; `serving_worker.py` describes its output."""
    out = work / f"{system}.json"
    command = [python, str(Path(__file__).with_name("serving_worker.py")), system, str(model)]
    command += [str(work / "load.json"), str(out), f"--threads={options.threads}", f"--slots={options.slots}"]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root if system != "genai" else ""}
    subprocess.run(command, check=True, env=environment)


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
        "ttft_seconds": dict(zip(map(str, percentiles), np.percentile(first, percentiles).tolist(), strict=True)),
        "inter_token_ms": dict(
            zip(map(str, percentiles), (1e3 * np.percentile(gaps, percentiles)).tolist(), strict=True)
        ),
    }


def table_rows(results: dict[str, dict[str, Any]]) -> Rows:
    rows = []
    for system, result in results.items():
        first = " / ".join(f"{value:.2f}" for value in result["ttft_seconds"].values())
        gaps = " / ".join(f"{value:.0f}" for value in result["inter_token_ms"].values())
        speed, taken, runs = f"{result['tokens_per_second']:.1f}", f"{result['seconds']:.1f}", str(result["graph_runs"])
        rows.append([LABELS[system], speed, taken, runs, first, gaps])
    return rows


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Speed, and percentiles of both latencies."""
    figure, axes = plots.new_figure(1, 3, (3.8, 3.6))
    for axis, field, title in (
        (axes[0][0], "tokens_per_second", "tokens per second"),
        (axes[0][1], "ttft_seconds", "seconds to the first token"),
        (axes[0][2], "inter_token_ms", "ms between a request's tokens"),
    ):
        found = {LABELS[system]: results[system][field] for system in LABELS if system in results}
        columns = list(next(iter(found.values()))) if field != "tokens_per_second" else []
        groups = [f"p{column}" for column in columns] or ["all requests"]
        rows = {name: [one[column] for column in columns] if columns else [one] for name, one in found.items()}
        plots.grouped_bars(axis, groups, rows)
        axis.set_title(title, fontsize="medium")
    plots.legend(figure)
    plots.save(figure, path)


def same_tokens(package: Path, slots: int, threads: int, requests: int, new_tokens: int = 32) -> Rows:
    """Count the requests with the same tokens in the engine as alone; half of them are greedy."""
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
    lines = []
    for kind, name in enumerate(("greedy", "top-k 50, top-p 0.95")):
        pairs = list(zip(alone, together, strict=True))[kind::2]
        equal = sum(bool(np.array_equal(*pair)) for pair in pairs)
        lines.append([name, str(len(pairs)), str(equal)])
    return lines


def write(output: Path, kept: Kept) -> None:
    """Write the figures as JSON, and the page."""
    kept.save()
    data = kept.data
    results = data["results"]
    lines = [
        "# Serving: continuous batching, static batching, onnxruntime-genai",
        "",
        f"{data['machine']}, {data['slots']} slots, shape {data['shape']}, int4.",
        "Made by `python benchmarks/serving.py`, whose docstring describes the method:",
        f"{data['requests']} requests, {data['rate']:g} per second (seed {data['seed']}), prompts with a median of 16",
        "tokens (4 to 128) and outputs with a median of 32 (4 to 256). A request joins qsample's engine as soon as a",
        "row is free; the static systems begin a batch after the previous batch has ended.",
        "",
        *markdown(list(HEADER), table_rows(results)),
        "",
    ]
    if {"continuous", "static"} <= results.keys():
        times = results["continuous"]["tokens_per_second"] / results["static"]["tokens_per_second"]
        lines += [
            f"Continuous batching serves {times:.2f} times as many tokens per second as static batching. The gain",
            "depends on the lengths, and on the share of prompts in the load, which cost the same either way.",
            "",
        ]
    lines += [f"![tokens by time]({output.name}.png)", ""]
    if data["same_tokens"]:
        rows = [[weights, *row] for weights, found in data["same_tokens"].items() for row in found]
        lines += ["## Influence of the batch on a request's tokens", "", *markdown(list(SAME_HEADER), rows), ""]
        lines += [
            f"Shape {SAME_SHAPE}, 32 tokens each, alone and in the engine.",
            "[serving.md](../serving.md#the-same-tokens-as-alone) explains the measures for this and the remaining",
            "differences.",
            "",
        ]
    output.with_suffix(".md").write_text("\n".join(lines))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/decode"), help="folder for the models")
    parser.add_argument("--shape", default="qwen3-0.6b", help="a shape of checkpoints.py")
    parser.add_argument(
        "--genai-python", help="a Python with the packages of peers.txt; otherwise onnxruntime-genai is left out"
    )
    parser.add_argument("--systems", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second; 16 exceeds the capacity")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="repeat complete measurements")
    parser.add_argument("--no-same-tokens", dest="same_tokens", action="store_false", help="leave out the last part")
    add_output(parser, "serving")
    options, console = parser.parse_args(), Console()
    for folder in (options.work, options.output.parent):
        folder.mkdir(parents=True, exist_ok=True)

    about = {"machine": describe_machine(options.threads), "slots": options.slots, "rate": options.rate}
    about |= {"seed": options.seed, "requests": options.requests, "shape": options.shape}
    measured = {"results": {}, "same_tokens": {}}
    kept = Kept(options.output.with_suffix(".json"), about | measured, same=tuple(about))
    if options.again:
        kept.data |= measured
    data = kept.data
    load = make_load(options.requests, options.rate, options.seed)
    (options.work / "load.json").write_text(json.dumps(load))
    for system in options.systems:
        python = options.genai_python if system == "genai" else sys.executable
        done = options.work / f"{system}.json"
        if python is None:
            continue
        if not (system in data["results"] and done.exists()):
            model = make_model(system, options.shape, options.work, python)
            measure(system, python, model, options.work, options)
        found = json.loads(done.read_text())
        data["results"][system] = {"graph_runs": found["runs"], **figures(load, found["moments"])}
        plot(data["results"], options.output.with_suffix(".png"))
        write(options.output, kept)
    if options.same_tokens and not data["same_tokens"]:
        checkpoint = make_checkpoint(SAME_SHAPE, options.work / SAME_SHAPE / "checkpoint")
        for weights in ("float32", "int4"):
            package = make_package(checkpoint, options.work / SAME_SHAPE / weights, weights)
            data["same_tokens"][weights] = same_tokens(package, options.slots, options.threads, SAME_REQUESTS)
        write(options.output, kept)
    for header, rows in (
        (HEADER, table_rows(data["results"])),
        (SAME_HEADER, [[weights, *row] for weights, found in data["same_tokens"].items() for row in found]),
    ):
        print_table(console, header, rows)


if __name__ == "__main__":
    main()
