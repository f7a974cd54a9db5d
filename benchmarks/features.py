"""The cost of optional parts of a package or of the runtime: cases in turns.

    qsample export CHECKPOINT plain && qsample compile plain plain-int4 --weights int4
    qsample export CHECKPOINT serving --for-serving && qsample compile serving serving-int4 --weights int4
    python benchmarks/features.py packages plain-int4 serving-int4      # a package, and one with features no row uses,
                                                                        # whose outputs are read for no row, and for all
    python benchmarks/features.py one-row plain-int4 …                  # with and without `batch_invariant`

    qsample export CHECKPOINT lora --max-loras 4 && qsample compile lora lora-int4 --weights int4
    python benchmarks/features.py lora plain-int4 lora-int4             # adapters that rows bring themselves

Each round runs each case once, in an order that changes; the first round warms up. A ratio is the median of the rounds'
ratios to the first case. Two to five minutes at 0.6 B parameters on two cores.

On a processor whose products round a single row otherwise than several, a step over one row computes two: `one-row`
measures the price. The package without adapters has the graph of a merged model, so its steps are those of a merged
model; the adapters are random, and change the query and value projections ("q, v") or every linear layer ("all").
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from report import describe_machine, make_parser, print_table
from rich.console import Console
from systems import MIXES

from qsample.runtime import CausalLM, SamplingParams, load

ADAPTERS: Final = 4
KINDS: Final = {"q, v": ("q_proj", "v_proj"), "all": None}
Cases = dict[str, Callable[[], float]]  # name → runs once; seconds of a step


def step_seconds(
    model: CausalLM,
    options: argparse.Namespace,
    rows: int,
    adapters: Any = None,
    outputs: tuple[str, ...] | None = (),
    **params: Any,
) -> float:
    names = adapters or [None] * rows
    endless = {"max_new_tokens": options.new_tokens, "eos_token_id": (), **params}
    prompts = [list(range(100, 100 + options.prompt))] * rows
    output = model.generate(
        prompts,
        [SamplingParams(**endless, adapter=name) for name in names],
        seed=1,
        outputs=outputs,
    )
    return float(output.timing.decode_seconds) / (options.new_tokens - 1)


def compare(cases: Cases, rounds: int, title: str) -> None:
    names, measured = list(cases), []
    for index in range(rounds + 1):
        order = names if index % 2 else names[::-1]
        times = {name: cases[name]() for name in order}
        measured.append([times[name] for name in names])
    table = []
    for name, *times in zip(names, *measured[1:], strict=True):  # after the round that warms up
        ratios = [time / row[0] for time, row in zip(times, measured[1:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        table.append(
            [
                name,
                f"{1e3 * statistics.median(times):.2f}",
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
            ]
        )
    print_table(("case", "ms a step", "ratio", "quartiles"), table, title)


def make_adapter(
    folder: Path, model: CausalLM, rank: int, kinds: tuple[str, ...] | None, seed: int
) -> Path:
    """A folder as peft writes it, of small random matrices."""
    from safetensors.numpy import save_file

    numbers, tensors = np.random.default_rng(seed), {}
    for target in model.interface.adapters:
        if kinds is None or target.kind in kinds:
            name = f"base_model.model.{target.path}"
            a, b = (rank, target.in_features), (target.out_features, rank)
            tensors[f"{name}.lora_A.weight"] = numbers.standard_normal(a, dtype=np.float32) / 32
            tensors[f"{name}.lora_B.weight"] = numbers.standard_normal(b, dtype=np.float32) / 32
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    )
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def lora_cases(
    models: list[CausalLM], options: argparse.Namespace, rows: int, folder: Path
) -> Cases:
    plain, adapted = models
    chosen: dict[str, list[str | None]] = {"adapters, none used": [None] * rows}
    for rank in options.ranks:
        for layers, kinds in KINDS.items():
            names = [f"{rank} {layers} {index}" for index in range(ADAPTERS)]
            for index, name in enumerate(names):
                if name not in adapted.adapters:
                    adapted.load_adapter(
                        name, make_adapter(folder / name, adapted, rank, kinds, index)
                    )
            chosen[f"rank {rank}, {layers}: 1, one row"] = [names[0], *[None] * (rows - 1)]
            chosen[f"rank {rank}, {layers}: {ADAPTERS}"] = [
                names[row % ADAPTERS] for row in range(rows)
            ]
    cases: Cases = {
        "package without adapters": lambda: step_seconds(plain, options, rows, temperature=0.0)
    }
    for case, adapters in chosen.items():
        cases[case] = lambda names=adapters: step_seconds(
            adapted, options, rows, names, temperature=0.0
        )  # type: ignore[misc]
    return cases


def main() -> None:
    parser = make_parser(__doc__, threads=2)
    parser.add_argument("what", choices=("packages", "one-row", "lora"))
    parser.add_argument("packages", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16], help="of adapters")
    parser.add_argument("--rounds", type=int, default=12)
    options, console = parser.parse_args(), Console()
    if options.what != "one-row" and len(options.packages) != 2:
        parser.error(f"{options.what} compares two packages")
    console.print(describe_machine(options.threads), highlight=False)
    invariant = (False, True) if options.what == "one-row" else (True,)
    models = {
        f"{path}{', batch invariant' * (promise and len(invariant) > 1)}": load(
            path, intra_op_num_threads=options.threads, batch_invariant=promise, verify=False
        )
        for path in options.packages
        for promise in invariant
    }
    for name, model in models.items():
        if model.sessions.rounding is not None:
            console.print(f"{name}: {model.sessions.rounding.described()}", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        for rows in options.rows:
            for mix in ("greedy", "top-p 0.95") if options.what == "packages" else ("greedy",):
                cases: Cases = {}
                for name, model in models.items():
                    step = partial(step_seconds, model, options, rows, **MIXES[mix])
                    cases[name] = step
                    if options.what == "packages" and model.interface.token_outputs:
                        cases[f"{name}, outputs read"] = partial(step, outputs=None)
                if options.what == "lora":
                    cases = lora_cases(list(models.values()), options, rows, Path(folder))
                compare(
                    cases, options.rounds, f"{rows} rows, {mix}, {options.prompt} tokens of prompt"
                )


if __name__ == "__main__":
    main()
