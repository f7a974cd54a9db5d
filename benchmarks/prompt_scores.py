"""Log-probabilities of prompts: sampled a token a step, or read in whole pieces.

    qsample export CHECKPOINT serving --for-serving && qsample compile serving serving-cpu
    python benchmarks/prompt_scores.py serving-cpu

Each round scores fresh random prompts in both ways, and reads other prompts of the same length without scores, in an
order that changes; the first round warms up. A ratio is the median of the rounds' ratios, with quartiles. Five minutes
at 135 M parameters on two cores. `benchmarks/features.py packages` compares the steps of packages with and without the
feature.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from report import describe_machine, make_parser, print_table

from qsample.addons.serve.answers import ForcedTokens
from qsample.runtime import Engine, Request, SamplingParams, load

HEADER = (
    "tokens", "prompts at once",
    "sampled, s", "in pieces, s", "read only, s", "times as fast", "quartiles", "of reading",
)  # fmt: skip
Prompt = list[int]


def sampled(engine: Engine, ids: Prompt) -> Request:
    """As packages without the feature score a prompt."""
    params = SamplingParams(temperature=0.0, max_new_tokens=len(ids) - 1, eos_token_id=())
    forced = ForcedTokens(ids[1:])
    outputs = ["logprobs", "top_logprob_ids", "top_logprobs"]
    return engine.add_request([ids[:1]], params, allowed_tokens=forced, outputs=outputs)


def in_pieces(engine: Engine, ids: Prompt) -> Request:
    return engine.add_request([ids], prompt_logprobs=True)


def read_only(engine: Engine, ids: Prompt) -> Request:
    return engine.add_request([ids], max_new_tokens=1, outputs=[])


def seconds(
    way: Callable[[Engine, Prompt], Request], engine: Engine, prompts: Sequence[Prompt]
) -> float:
    began = time.perf_counter()
    requests = [way(engine, ids) for ids in prompts]
    for request in requests:
        request.result()
    return time.perf_counter() - began


def measure(engine: Engine, options: argparse.Namespace, length: int, count: int) -> list[str]:
    """A row of the table."""
    random = np.random.default_rng(length)
    ways = (sampled, in_pieces, read_only)
    rounds: list[list[float]] = []
    for index in range(options.rounds + 1):
        times = {}
        for way in ways if index % 2 else ways[::-1]:
            # No way finds the prompts of another in a slot.
            shape = (count, length)
            prompts = random.integers(0, options.vocab_size, shape).tolist()
            times[way] = seconds(way, engine, prompts)
        rounds.append([times[way] for way in ways])
    rounds = rounds[1:]
    ratios = [before / after for before, after, _ in rounds]
    low, middle, high = statistics.quantiles(ratios, n=4)
    overhead = statistics.median(after / plain for _, after, plain in rounds)
    medians = [f"{statistics.median(column):.3f}" for column in zip(*rounds, strict=True)]
    quartiles = f"{low:.1f} to {high:.1f}"
    return [str(length), str(count), *medians, f"{middle:.1f}", quartiles, f"{overhead:.2f}"]


def main() -> None:
    parser = make_parser(__doc__, threads=2)
    parser.add_argument("package", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=7, help="at least 2")
    options = parser.parse_args()
    model = load(options.package, intra_op_num_threads=options.threads)
    options.vocab_size = model.interface.vocab_size
    table = []
    for count in options.at_once:
        with Engine(model, slots=count) as engine:
            table += [measure(engine, options, length, count) for length in options.lengths]
    print_table(HEADER, table, f"{options.package}: scores of prompts")
    print(describe_machine(), flush=True)


if __name__ == "__main__":
    main()
