"""Ray Data with 1 and 2 actors, compared with a single process on the same rows with the same tokens.

    pip install -e '.[cpu,export,ray,bench]'
    RAY_AUTH_MODE=disabled python benchmarks/ray_data.py

The cluster consists of this machine only, so the benchmark shows the cost of Ray, not the gain from more machines. Two
actors with a CPU each are compared with a process with two threads, and with an actor with two CPUs. Every system
processes half of the rows, then all: the difference excludes the time to start actors and load models, which is
reported separately. The rows with the same tokens as in the single process are counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SHAPES
from report import describe_machine, make_parser, markdown, print_table, write_json
from rich.console import Console
from serve import BUNDLED, make_served

PROMPT_TOKENS = 32
PROCESS = "single process"
HEADER = ["", "threads", "tokens/s", "relative", "start, s", "rows with the same tokens"]
Rows = list[dict[str, Any]]
Tokens = dict[int, list[int]]


def make_rows(count: int, vocab_size: int, new_tokens: int) -> Rows:
    """Prompts of token ids; as in a dataset, a third of the rows is short and a third long."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(3, vocab_size, (count, PROMPT_TOKENS)).tolist()
    lengths = [new_tokens // 2, new_tokens, new_tokens + new_tokens // 2]
    return [
        {"id": number, "prompt": prompt, "sampling_params": {"max_new_tokens": lengths[number % 3]}}
        for number, prompt in enumerate(prompts)
    ]


def in_process(package: Path, rows: Rows, threads: int, slots: int) -> Tokens:
    """Process the rows with an engine in this process."""
    from qsample.addons.ray.processor import request_of
    from qsample.runtime import Engine, load

    config = {"session.intra_op.allow_spinning": "0"}  # like an actor
    model = load(package, intra_op_num_threads=threads, session_config=config)
    prompts, each = zip(*(request_of(row, {"eos_token_id": ()}, "id") for row in rows), strict=True)
    with Engine(model, slots=slots) as engine:
        outputs = engine.map(prompts, each=each)
        return {row["id"]: output.token_ids for row, output in zip(rows, outputs, strict=True)}


def with_actors(
    package: Path, rows: Rows, actors: int, cpus: int, slots: int, batch_size: int
) -> Tokens:
    """Process the rows with Ray Data."""
    import ray

    from qsample.addons.ray import QsampleProcessorConfig, build_processor

    config = QsampleProcessorConfig(
        package=str(package),
        concurrency=actors,
        num_cpus=cpus,
        slots=slots,
        batch_size=batch_size,
        sampling_params={"eos_token_id": ()},
    )
    dataset = ray.data.from_items(rows, override_num_blocks=max(1, len(rows) // batch_size))
    done = build_processor(config)(dataset).take_all()
    return {int(row["id"]): [int(token) for token in row["generated_tokens"]] for row in done}


def measure(work: Callable[[Rows], Tokens], rows: Rows) -> tuple[dict[str, float], Tokens]:
    """The tokens per second of the second half and the seconds before any work; and the tokens."""
    seconds, tokens = [], Tokens()
    half = rows[: len(rows) // 2]
    work(rows[:2])  # reads files and loads libraries
    for part in (half, rows):
        start = time.perf_counter()
        tokens = work(part)
        seconds.append(time.perf_counter() - start)
    short, long = (sum(len(tokens[row["id"]]) for row in part) for part in (half, rows))
    if seconds[1] <= seconds[0]:
        raise SystemExit(
            f"{len(rows)} rows took no longer than half of them; use more --rows, or a quieter machine"
        )
    speed = (long - short) / (seconds[1] - seconds[0])
    return {
        "tokens_per_second": speed,
        "start_seconds": max(0.0, seconds[0] - short / speed),
    }, tokens


def table_rows(results: dict[str, Any]) -> list[list[str]]:
    base = results[PROCESS]["tokens_per_second"]
    lines = []
    for system, found in results.items():
        speed, share = (
            f"{found['tokens_per_second']:.1f}",
            f"{found['tokens_per_second'] / base:.2f}",
        )
        lines.append(
            [
                system,
                found["threads"],
                speed,
                share,
                f"{found['start_seconds']:.1f}",
                found["equal_rows"],
            ]
        )
    return lines


def write(output: Path, about: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the figures as JSON, and the page."""
    write_json(output.with_suffix(".json"), {**about, "results": results})
    text = (
        f"# Ray Data on one machine\n\n{about['machine']}, shape {about['shape']}, {about['slots']} slots in all, "
        f"{about['rows']} rows. Made by `python benchmarks/ray_data.py`, whose docstring describes the method. "
        "Two actors share the cores of a single machine, a thread each: the table shows the cost of Ray relative to a "
        "single process with all threads, not the gain from a second machine.\n\n"
    )
    output.with_suffix(".md").write_text(
        text + "\n".join([*markdown(HEADER, table_rows(results)), ""])
    )


def main() -> None:
    parser = make_parser(__doc__, "ray", work="build/serve", threads=2)
    parser.add_argument("--shape", choices=[BUNDLED, *SHAPES], default="qwen3-0.6b")
    parser.add_argument(
        "--rows", type=int, default=192, help="in total; the first half is processed twice"
    )
    parser.add_argument("--new-tokens", type=int, default=24, help="of a row, on average")
    parser.add_argument("--slots", type=int, default=16, help="in total; several actors share them")
    parser.add_argument("--batch-size", type=int, default=16)
    options, console = parser.parse_args(), Console(stderr=True)
    # Actors import this folder's modules and qsample from the same places as this process.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    folder = options.work / options.shape
    folder.mkdir(parents=True, exist_ok=True)
    package, _ = make_served(options.shape, folder)
    package = package.resolve()
    vocab_size = json.loads((package / "qsample.json").read_text())["interface"]["vocab_size"]
    rows = make_rows(options.rows, vocab_size, options.new_tokens)
    threads, slots, batch = options.threads, options.slots, options.batch_size
    systems: dict[str, tuple[str, Callable[[Rows], Tokens]]] = {
        PROCESS: (str(threads), lambda part: in_process(package, part, threads, slots)),
        "Ray Data, 1 actor": (
            str(threads),
            lambda part: with_actors(package, part, 1, threads, slots, batch),
        ),
        "Ray Data, 2 actors": (
            f"2 x {threads // 2}",
            lambda part: with_actors(package, part, 2, threads // 2, slots // 2, batch),
        ),
    }
    about = {
        "machine": describe_machine(threads),
        "shape": options.shape,
        "slots": slots,
        "rows": options.rows,
    }
    results: dict[str, Any] = {}
    expected: Tokens = {}
    for system, (shown_threads, work) in systems.items():
        console.print(system, highlight=False)
        if system != PROCESS and len(results) == 1:
            import ray

            # An additional CPU for the tasks that read and write rows.
            ray.init(num_cpus=threads + 1, object_store_memory=200 * 2**20, log_to_driver=False)
        measured, tokens = measure(work, rows)
        expected = expected or tokens
        equal = sum(tokens[number] == row for number, row in expected.items())
        results[system] = {
            **measured,
            "threads": shown_threads,
            "equal_rows": f"{equal} of {len(expected)}",
        }
        write(options.output, about, results)
    print_table(HEADER, table_rows(results))


if __name__ == "__main__":
    main()
