"""The cost of LoRA adapters that rows bring themselves: a package that takes adapters and a package that takes none.

    qsample export CHECKPOINT plain && qsample compile plain plain-int4 --weights int4
    qsample export CHECKPOINT lora --max-loras 4 && qsample compile lora lora-int4 --weights int4
    python benchmarks/lora.py plain-int4 lora-int4     # five minutes at 0.6 B parameters, two cores

The package without adapters has the graph of a merged model, so its steps are those of a merged model. Each round
continues a prompt of 8 tokens with 48 more, once for each case, in an order that changes; the ratio is the median of
the rounds' ratios to the package without adapters. The adapters are random. They change the query and value projections
("q, v"), or every linear layer ("all").
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import describe_machine, make_parser
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from qsample.runtime import CausalLM, SamplingParams, load

TOKENS = 48
ADAPTERS = 4
KINDS = {"q, v": ("q_proj", "v_proj"), "all": None}


def make_adapter(folder: Path, model: CausalLM, rank: int, kinds: tuple[str, ...] | None, seed: int) -> Path:
    """A folder as peft writes it, of small random matrices."""
    numbers, tensors = np.random.default_rng(seed), {}
    for target in model.interface.adapters:
        if kinds is None or target.kind in kinds:
            name = f"base_model.model.{target.path}"
            a, b = (rank, target.in_features), (target.out_features, rank)
            tensors[f"{name}.lora_A.weight"] = numbers.standard_normal(a, dtype=np.float32) / 32
            tensors[f"{name}.lora_B.weight"] = numbers.standard_normal(b, dtype=np.float32) / 32
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def seconds(model: CausalLM, names: list[str | None]) -> float:
    """Of a step."""
    params = [SamplingParams(temperature=0, max_new_tokens=TOKENS, eos_token_id=(), adapter=name) for name in names]
    output = model.generate([list(range(100, 108))] * len(names), params)
    return float(output.timing.decode_seconds) / (TOKENS - 1)


def cases(folder: Path, model: CausalLM, rows: int, ranks: list[int]) -> Iterator[tuple[str, str, list[str | None]]]:
    """Rank and layers, the number of adapters, and each row's adapter; the adapters are loaded."""
    yield "-", "none", [None] * rows
    for rank in ranks:
        for layers, kinds in KINDS.items():
            names = [f"{rank} {layers} {index}" for index in range(ADAPTERS)]
            for index, name in enumerate(names):
                if name not in model.adapters:
                    model.load_adapter(name, make_adapter(folder / name, model, rank, kinds, index))
            yield f"{rank}, {layers}", "1, one row", [names[0], *[None] * (rows - 1)]
            yield f"{rank}, {layers}", f"{ADAPTERS}", [names[row % ADAPTERS] for row in range(rows)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("plain", type=Path)
    parser.add_argument("adapted", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options, console = parser.parse_args(), Console()
    plain, adapted = (load(path, intra_op_num_threads=options.threads) for path in (options.plain, options.adapted))
    console.print(describe_machine(options.threads), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        measured = list(cases(Path(folder), adapted, options.rows, options.ranks))
        runs = [(plain, [None] * options.rows), *((adapted, names) for _, _, names in measured)]
        rounds = []
        for index in range(options.rounds + 1):
            order = range(len(runs)) if index % 2 else reversed(range(len(runs)))
            times = {number: seconds(*runs[number]) for number in order}
            rounds.append([times[number] for number in range(len(runs))])
    del rounds[0]  # it warms up
    table = Table("rank, layers", "adapters", "ms a step", "ratio", title=f"{options.rows} rows")
    labels = [("package without adapters", "-"), *((layers, count) for layers, count, _ in measured)]
    for number, label in enumerate(labels):
        step = 1e3 * statistics.median(times[number] for times in rounds)
        ratio = statistics.median(times[number] / times[0] for times in rounds)
        table.add_row(*label, f"{step:.2f}", f"{ratio:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
