"""Continuous batching, static batching and onnxruntime-genai: requests of mixed lengths at random moments.

    pip install -e '.[cpu,export,bench]'
    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/serving.py --peers-python peers/bin/python    # five minutes on two cores

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
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import report
from checkpoints import make_checkpoint, make_genai_model, make_package
from report import Kept, Rows, describe_machine, make_parser, markdown, print_table
from rich.console import Console
from turns import Worker, available

LABELS: Final = {
    "continuous": "qsample, continuous",
    "static": "qsample, static",
    "genai": "onnxruntime-genai, static",
}
HEADER: Final = ("", "tokens/s", "time, s", "runs of the graph", "first token p50 / p90 / p99, s")
SAME_SHAPE, SAME_REQUESTS = "tiny", 128
PERCENTILES: Final = (50, 90, 99)
Load = list[tuple[float, int, int]]


def make_load(requests: int, rate: float, seed: int) -> Load:
    """[(arrival in seconds, prompt tokens, new tokens)]: exponential gaps, log-normal lengths."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1 / rate, requests)) - 1 / rate
    prompts = np.clip(generator.lognormal(np.log(16), 0.8, requests), 4, 128).astype(int)
    outputs = np.clip(generator.lognormal(np.log(32), 1.1, requests), 4, 256).astype(int)
    return list(zip(arrivals.clip(0).tolist(), prompts.tolist(), outputs.tolist(), strict=True))


def measure(system: str, options: argparse.Namespace, load: Load) -> dict[str, Any]:
    """The figures of a system."""
    folder = options.work / options.shape
    checkpoint = make_checkpoint(options.shape, folder / "checkpoint")
    if system == "genai":
        python, model = (
            options.peers_python,
            make_genai_model(checkpoint, folder / "genai", options.peers_python),
        )
    else:
        python, model = sys.executable, make_package(checkpoint, folder / "int4", "int4")
    worker = Worker(system, model, python, options.threads, "load")
    answer = worker.ask("serve", load=load, slots=options.slots)
    worker.close()
    return {"graph_runs": answer["runs"], **figures(load, answer["moments"])}


def figures(load: Load, moments: list[list[float]]) -> dict[str, Any]:
    """Throughput from the first arrival to the last token, and percentiles of the two latencies."""
    end = max(arrival + row[-1] for (arrival, _, _), row in zip(load, moments, strict=True))
    first = np.percentile([row[0] for row in moments], PERCENTILES)
    gaps = np.percentile(np.concatenate([np.diff(row) for row in moments]), PERCENTILES)
    return {
        "requests": len(load),
        "seconds": end - load[0][0],
        "tokens_per_second": sum(map(len, moments)) / (end - load[0][0]),
        "ttft_seconds": dict(zip(map(str, PERCENTILES), first.tolist(), strict=True)),
        "inter_token_ms": dict(zip(map(str, PERCENTILES), (1e3 * gaps).tolist(), strict=True)),
    }


def same_tokens(
    package: Path, options: argparse.Namespace, new_tokens: int = 32
) -> list[list[str]]:
    """Count the requests with the same tokens in the engine as alone; half of them are greedy."""
    from systems.load import SAMPLING

    from qsample.runtime import Engine, SamplingParams, load

    model, generator = load(package, intra_op_num_threads=options.threads), np.random.default_rng(0)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, SAMPLING]
    rows = [
        (
            generator.integers(3, model.interface.vocab_size, generator.integers(4, 40)),
            SamplingParams(
                **kinds[index % 2], max_new_tokens=new_tokens, eos_token_id=(), seed=index
            ),
        )
        for index in range(SAME_REQUESTS)
    ]
    alone = [model.generate(*row).token_ids[0] for row in rows]
    with Engine(model, slots=options.slots, max_waiting=len(rows)) as engine:
        together = [
            request.result().token_ids for request in [engine.add_request(*row) for row in rows]
        ]
    equal = [bool(np.array_equal(*pair)) for pair in zip(alone, together, strict=True)]
    names = ("greedy", "top-k 50, top-p 0.95")
    return [
        [name, str(len(equal[kind::2])), str(sum(equal[kind::2]))]
        for kind, name in enumerate(names)
    ]


def table_rows(results: dict[str, dict[str, Any]]) -> Rows:
    rows = []
    for system, result in results.items():
        first = " / ".join(f"{value:.2f}" for value in result["ttft_seconds"].values())
        gaps = " / ".join(f"{value:.0f}" for value in result["inter_token_ms"].values())
        speed, taken, runs = (
            f"{result['tokens_per_second']:.1f}",
            f"{result['seconds']:.1f}",
            str(result["graph_runs"]),
        )
        rows.append([LABELS[system], speed, taken, runs, first, gaps])
    return [*HEADER, "between tokens p50 / p90 / p99, ms"], rows


def same_rows(found: dict[str, list[list[str]]]) -> Rows:
    header = ["weights", "sampling", "requests", "same tokens as alone"]
    return header, [[weights, *row] for weights, rows in found.items() for row in rows]


def write(data: dict[str, Any], output: Path) -> None:
    """Write the page and the plot."""
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
        *markdown(*table_rows(results)),
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
        lines += [
            "## Influence of the batch on a request's tokens",
            "",
            *markdown(*same_rows(data["same_tokens"])),
            "",
        ]
        lines += [
            f"Shape {SAME_SHAPE}, 32 tokens each, alone and in the engine.",
            "[serving.md](../serving.md#the-same-tokens-as-alone) explains the measures for this and the remaining",
            "differences.",
            "",
        ]
    output.with_suffix(".md").write_text("\n".join(lines))
    plot(data, output.with_suffix(".png"))


def plot(data: dict[str, Any], path: Path) -> None:
    """Speed, and percentiles of both latencies."""
    results = {
        name: data["results"][system]
        for system, name in LABELS.items()
        if system in data["results"]
    }
    figure, axes = report.new_figure(1, 3, (3.8, 3.6))
    speeds = {name: [found["tokens_per_second"]] for name, found in results.items()}
    report.grouped_bars(axes[0][0], ["all requests"], speeds)
    for axis, field in ((axes[0][1], "ttft_seconds"), (axes[0][2], "inter_token_ms")):
        groups = list(next(iter(results.values()))[field])
        rows = {name: list(found[field].values()) for name, found in results.items()}
        report.grouped_bars(axis, [f"p{group}" for group in groups], rows)
    titles = ("tokens per second", "seconds to the first token", "ms between a request's tokens")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize="medium")
    report.save_figure(figure, path)


def main() -> None:
    parser = make_parser(__doc__, "serving", work="build/decode", peers=True, again=True, threads=2)
    parser.add_argument("--shape", default="qwen3-0.6b", help="a shape of checkpoints.py")
    parser.add_argument("--systems", nargs="+", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument(
        "--rate", type=float, default=16.0, help="requests per second; 16 exceeds the capacity"
    )
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument(
        "--no-same-tokens", dest="same_tokens", action="store_false", help="leave out the last part"
    )
    options, console = parser.parse_args(), Console(stderr=True)
    about = {
        "machine": describe_machine(options.threads),
        "slots": options.slots,
        "rate": options.rate,
    }
    about |= {"seed": options.seed, "requests": options.requests, "shape": options.shape}
    measured: dict[str, Any] = {"results": {}, "same_tokens": {}}
    kept = Kept(options.output.with_suffix(".json"), about | measured, same=tuple(about))
    if options.again:
        kept.data |= measured
    data, load = kept.data, make_load(options.requests, options.rate, options.seed)
    for system in available(options.systems, options.peers_python, console):
        if system not in data["results"]:
            data["results"][system] = measure(system, options, load)
            kept.save()
            write(data, options.output)
    if options.same_tokens and not data["same_tokens"]:
        checkpoint = make_checkpoint(SAME_SHAPE, options.work / SAME_SHAPE / "checkpoint")
        for weights in ("float32", "int4"):
            package = make_package(checkpoint, options.work / SAME_SHAPE / weights, weights)
            data["same_tokens"][weights] = same_tokens(package, options)
        kept.save()
        write(data, options.output)
    print_table(*table_rows(data["results"]))
    print_table(*same_rows(data["same_tokens"]))


if __name__ == "__main__":
    main()
