"""The price of a row whose tokens do not depend on its batch: steps with and without `batch_invariant`, in turns.

    python benchmarks/one_row.py PACKAGE [PACKAGE …]      # two minutes a package at 0.6 B parameters, two cores

On a processor whose products round a single row otherwise than several, a step over one row computes two. Each round
continues a prompt of --prompt tokens with 32 more, once for each package with the promise and once without, in an order
that changes. A ratio is the median of the rounds' ratios to the first package without the promise.
"""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path

from common import describe_machine, make_parser, print_table
from rich.console import Console

from qsample.runtime import CausalLM, SamplingParams, load

TOKENS = 32


def step_seconds(model: CausalLM, rows: int, prompt: int) -> float:
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS, eos_token_id=())
    output = model.generate([list(range(100, 100 + prompt))] * rows, params)
    return float(output.timing.decode_seconds) / (TOKENS - 1)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("packages", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options, console = parser.parse_args(), Console()
    cases = list(product(options.packages, (False, True)))
    models = [
        load(path, intra_op_num_threads=options.threads, batch_invariant=invariant, verify=False)
        for path, invariant in cases
    ]
    console.print(describe_machine(options.threads), highlight=False)
    for path, model in zip(options.packages, models[1::2], strict=True):
        assert model.sessions.rounding is not None
        console.print(f"{path}: {model.sessions.rounding.described()}", highlight=False)
    rounds = []
    for index in range(options.rounds + 1):
        order = range(len(models)) if index % 2 else reversed(range(len(models)))
        times = {number: step_seconds(models[number], options.rows, options.prompt) for number in order}
        rounds.append([times[number] for number in range(len(models))])
    del rounds[0]  # it warms up
    table = []
    for (path, invariant), *pairs in zip(
        cases, *([(row[i], row[0]) for i in range(len(row))] for row in rounds), strict=True
    ):
        ratios = [time / first for time, first in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1000 * statistics.median(time for time, _ in pairs)
        table.append(
            [
                str(path),
                "yes" if invariant else "no",
                f"{milliseconds:.2f}",
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        )
    header = ("package", "batch invariant", "ms a step", "ratio", "quartiles")
    print_table(console, header, table, f"{options.rows} rows, {options.prompt} tokens of prompt")


if __name__ == "__main__":
    main()
