"""The cost of features that no request uses: a package with them and a package without, in turns.

    qsample export CHECKPOINT plain && qsample compile plain plain-int4 --weights int4
    qsample export CHECKPOINT serving --for-serving && qsample compile serving serving-int4 --weights int4
    python benchmarks/features.py plain-int4 serving-int4     # three minutes at 0.6 B parameters, two cores

Each round continues a prompt of 64 tokens with 64 more on both packages, in an order that changes; the ratio is the
median of the rounds' ratios.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from common import describe_machine, make_parser
from rich.console import Console
from rich.table import Table

from qsample.runtime import CausalLM, SamplingParams, load

TOKENS = 64


def seconds(model: CausalLM, rows: int, params: SamplingParams) -> float:
    start = time.perf_counter()
    model.generate([list(range(100, 100 + TOKENS))] * rows, params, seed=1)
    return time.perf_counter() - start


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("plain", type=Path)
    parser.add_argument("featured", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options, console = parser.parse_args(), Console()
    models = [load(path, intra_op_num_threads=options.threads) for path in (options.plain, options.featured)]
    console.print(describe_machine(options.threads), highlight=False)
    table = Table("rows", "parameters", "without, ms a token", "with, ms a token", "ratio")
    for rows in options.rows:
        for name, given in (("greedy", {"temperature": 0.0}), ("top-p 0.95", {"temperature": 0.8, "top_p": 0.95})):
            params = SamplingParams(max_new_tokens=TOKENS, eos_token_id=(), **given)
            rounds = []
            for index in range(options.rounds + 1):
                order = models if index % 2 else models[::-1]
                times = {id(model): seconds(model, rows, params) for model in order}
                rounds.append([times[id(model)] for model in models])
            measured = np.array(rounds[1:])  # after a round that warms up
            without, featured = 1e3 * np.median(measured, axis=0) / TOKENS
            ratio = np.median(measured[:, 1] / measured[:, 0])
            table.add_row(str(rows), name, f"{without:.2f}", f"{featured:.2f}", f"{ratio:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
