"""Decoding on the CPU: qsample, onnxruntime-genai, llama.cpp and transformers, on the same random weights.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/decode.py --peers-python peers/bin/python                # half an hour on two cores
    python benchmarks/decode.py --peers-python peers/bin/python --minutes 10   # as many cells as fit, and stop
    python benchmarks/decode.py --peers-python peers/bin/python --batch 1 --prompt 64 --rounds 9 --again

All systems run the same checkpoint of random weights, which is built once in --work; a peer that is not installed or
rejects a model is left out and named. Each system runs in its own process with the same number of threads. They take
turns, round by round, because a shared machine changes its speed: ratios are taken within a round, and the median of
the rounds is reported. qsample, onnxruntime-genai and llama.cpp have 4-bit weights in blocks of 32, transformers has
float32.

Without --prompt, --batch and --mix the cells of PLAN are measured: long prompts take most of the time, and get few
rounds. Results are written after every cell, and a run continues an interrupted run: complete cells are skipped unless
--again is given. Delete the JSON file to measure everything again on the same machine.

`genai` runs with --threads like the others; `genai defaults` runs with onnxruntime-genai's own choice: half of the
logical processors, at most 16. Its models are built with `prune_lm_head`: all systems compute only the logits of a
prompt's last token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from checkpoints import CTX_LEN, SHAPES, make_checkpoint, make_genai_model, make_gguf, make_package
from common import ALL, EVERYTHING, FLAT, MIXES, add_peer_options, describe_machine, make_parser
from decode_report import OWN, Results, show, write
from rich.console import Console
from turns import PEERS, Cell, Worker, available, expected_seconds, size_of, take_turns

ROUNDS: Final = 5
EVERY: Final = (*MIXES, *FLAT)  # some systems lack parameters of EVERYTHING
LARGEST_FLOAT32: Final = 2e9  # bytes of a bfloat16 checkpoint whose float32 package is compared with transformers


@dataclass(frozen=True)
class Part:
    """Cells of a shape: every prompt length with every number of rows and every mix.

    `without` lists systems that would take too long, or too much memory.
    """

    shape: str
    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    mixes: tuple[str, ...]
    rounds: int
    without: tuple[str, ...] = ()

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*key) for key in product(self.prompts, self.rows, self.mixes)]


SLOW: Final = ("transformers", "genai defaults")
PLAN: Final = (
    Part("qwen3-0.6b", (64,), (1, 4), EVERY, ROUNDS),
    Part("qwen3-0.6b", (64,), (8, 16), EVERY, 3, SLOW),
    Part("qwen3-0.6b", (1024,), (1, 4), EVERY, 2, SLOW),
    Part("qwen3-0.6b", (1024,), (8, 16), ("greedy",), 1, SLOW),
    Part("qwen3-0.6b", (4096,), (1,), ("greedy", *FLAT), 2, SLOW),
    Part("qwen3-0.6b", (4096,), (4,), ("greedy",), 1, SLOW),
    Part("llama-3.2-1b", (64,), (1, 4), EVERY, 3, ("transformers",)),
    Part("qwen3-4b", (64,), (1,), EVERY, 3, SLOW),
)


def build(shape: str, options: argparse.Namespace, results: Results, console: Console) -> dict[str, Path]:
    """The model of each system, built unless it exists; the results record systems that reject the shape."""
    folder, python = options.work / shape, options.peers_python
    with console.status(f"{shape}: a checkpoint of random weights"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
    with console.status(f"{shape}: a package for qsample"):
        models = {"qsample": make_package(checkpoint, folder / "int4", "int4"), "transformers": checkpoint}

    def genai() -> Path:
        return make_genai_model(checkpoint, folder / "genai-last-logits", python, last_logits=True)

    builders = {
        "genai": genai,
        "genai defaults": genai,
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
    }
    models |= build_each(builders, builders.keys() & options.system, shape, results, console)
    return {name: models[name] for name in (OWN, *options.system) if name in models}


def build_each(
    builders: Mapping[str, Callable[[], Path]], systems: Iterable[str], shape: str, results: Results, console: Console
) -> dict[str, Path]:
    """The models of `systems`; the results record peers whose builder does not know the architecture."""
    models = {}
    for name in systems:
        with console.status(f"{shape}: a model for {name}"):
            try:
                models[name] = builders[name]()
            except RuntimeError as error:
                if name == OWN:
                    raise
                note_failure(results, shape, name, error, console)
    return models


def note_failure(results: Results, shape: str, system: str, error: Exception, console: Console) -> None:
    reason = str(error).strip().splitlines()[-1]
    results.set_missing(shape, system, reason)
    results.save()
    console.print(f"{shape} without {system}: {reason}", highlight=False)


def start(
    models: dict[str, Path], shape: str, options: argparse.Namespace, results: Results, console: Console
) -> dict[str, Worker]:
    """Load the systems and record their size and memory; leaves out systems that cannot run their model."""
    workers: dict[str, Worker] = {}
    for name, model in models.items():
        python = options.peers_python if PEERS.get(name) else sys.executable
        try:
            workers[name] = Worker(name, model, python, options.threads)
            results.describe(shape, name, model, workers[name])
        except RuntimeError as error:
            workers.pop(name, None)
            if name == OWN:
                raise
            note_failure(results, shape, name, error, console)
        else:
            results.clear_missing(shape, name)
    return workers


def remaining(results: Results, parts: list[Part], systems: list[str], *, again: bool) -> list[tuple[Part, Cell]]:
    """The incomplete cells: those that lack rounds of a system that takes part and can run them."""
    todo = []
    for part in parts:
        taking_part = [name for name in systems if name not in part.without]
        cells = [
            cell for cell in part.cells if again or not results.is_complete(part.shape, cell, taking_part, part.rounds)
        ]
        todo += [(part, cell) for cell in cells]
    return todo


def run_cells(
    workers: dict[str, Worker],
    results: Results,
    todo: list[tuple[Part, Cell]],
    new_tokens: int,
    console: Console,
    *,
    ends: float = float("inf"),
) -> bool:
    """Measure cells of a shape; False if `ends`, a moment of `perf_counter`, came first."""

    def seconds(part: Part, cell: Cell) -> float:
        taking_part = {name: worker for name, worker in workers.items() if name not in part.without}
        return expected_seconds(taking_part, cell, part.rounds, new_tokens)

    if todo:
        minutes = sum(seconds(*cell) for cell in todo) / 60
        console.print(f"{todo[0][0].shape}: {len(todo)} cells, about {minutes:.1f} minutes", highlight=False)
    for number, (part, cell) in enumerate(todo):
        if time.perf_counter() + seconds(part, cell) > ends:
            console.print(f"time is up before {cell}; run the same command to continue", highlight=False)
            return False
        console.print(f"[{number + 1}/{len(todo)}] {part.shape}, {cell}", highlight=False)
        running = {name: worker for name, worker in workers.items() if name not in part.without}

        def failed(name: str, error: RuntimeError, shape: str = part.shape) -> None:
            del workers[name]
            if name == OWN:
                raise error
            note_failure(results, shape, name, error, console)

        first, steps = take_turns(running, cell, ALL[cell.mix], part.rounds, new_tokens, failed=failed)
        for name in running:
            results.add_cell(part.shape, cell.prompt, cell.rows, cell.mix, name, first[name], steps[name])
        results.save()
    return True


def run_overhead(worker: Worker, results: Results, shape: str, batches: list[int], steps: int) -> None:
    """Measure the host's and the sampler's share of a step, in qsample's own loop."""
    for batch in batches:
        request = {"rows": batch, "prompt_tokens": 64, "new_tokens": steps, "sampling": {"temperature": 0.0}}
        worker.ask(**request | {"new_tokens": 8})
        answer = worker.ask(**request, everything=EVERYTHING)
        milliseconds = {name: 1e3 * float(np.median(values)) for name, values in answer.items()}
        pairs = zip(answer["everything"], answer["greedy"], strict=False)
        ratio = float(np.median([sampled / greedy for sampled, greedy in pairs]))
        results.add_overhead(shape, batch, milliseconds, ratio)


def check_tokens(checkpoint: Path, results: Results, shape: str, threads: int) -> None:
    """Compare the greedy tokens of the float32 package with those of transformers."""
    package = make_package(checkpoint, checkpoint.with_name("float32"), "float32")
    # Many prompts and few steps: greedy text of a random model soon repeats one token.
    request = {"rows": 16, "prompt_tokens": 64, "new_tokens": 4, "sampling": {"temperature": 0.0}}
    tokens = []
    for system, model in (("qsample", package), ("transformers", checkpoint)):
        worker = Worker(system, model, sys.executable, threads)
        tokens.append(np.array(worker.ask(**request)["tokens"]))
        worker.close()
    results.set_tokens(shape, compared=int(tokens[0].size), equal=int((tokens[0] == tokens[1]).sum()))


def run_shape(
    shape: str, parts: list[Part], options: argparse.Namespace, results: Results, console: Console, ends: float
) -> bool:
    """Measure all parts of a shape; False if the time is up."""
    models = build(shape, options, results, console)
    facts, checkpoint = results.shape(shape), options.work / shape / "checkpoint"
    results.set_quantization(shape, json.loads((models["qsample"] / "qsample.json").read_text()))
    if options.tokens and (options.again or not facts["tokens"]) and size_of(checkpoint) < LARGEST_FLOAT32:
        with console.status(f"{shape}: greedy tokens against transformers'"):
            check_tokens(checkpoint, results, shape, options.threads)
    overhead = options.overhead_steps and (options.again or not facts["overhead"])
    todo = remaining(results, parts, list(models), again=options.again)
    if not (todo or overhead):
        console.print(f"{shape}: measured before", highlight=False)
        return True
    used = {name: model for name, model in models.items() if any(name not in part.without for part in parts)}
    workers = start(used, shape, options, results, console)
    done = run_cells(workers, results, todo, options.new_tokens, console, ends=ends)
    if overhead and done:
        run_overhead(workers["qsample"], results, shape, [1, 4], options.overhead_steps)
    results.save()
    for worker in workers.values():
        worker.close()
    return done


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """The plan, or the grid of the options."""
    grid = options.prompt or options.batch or options.mix
    planned = [part for part in PLAN if options.shape is None or part.shape in options.shape]
    if planned and not grid:
        return [replace(part, rounds=options.rounds or part.rounds) for part in planned]
    prompts, rows = tuple(options.prompt or [64]), tuple(options.batch or [1, 4])
    mixes, rounds = tuple(options.mix or EVERY), options.rounds or ROUNDS
    return [Part(shape, prompts, rows, mixes, rounds) for shape in options.shape or ["qwen3-0.6b"]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the benchmarks of whole decoders share."""
    parser.add_argument("--mix", nargs="+", choices=list(ALL), help="how to sample")
    parser.add_argument("--batch", type=int, nargs="+", help="rows")
    parser.add_argument("--prompt", type=int, nargs="+", help="tokens of each row's prompt")
    parser.add_argument("--rounds", type=int, help="of every cell, in place of the planned number")
    parser.add_argument("--new-tokens", type=int, default=24, help="of each row and round")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell that would end later")


def main() -> None:
    parser = make_parser(__doc__)
    add_peer_options(parser, "decode")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES))
    parser.add_argument("--system", nargs="+", choices=list(PEERS), default=list(PEERS), help="next to qsample")
    add_options(parser)
    parser.add_argument("--overhead-steps", type=int, default=120, help="0 leaves this part out")
    parser.add_argument("--no-tokens", dest="tokens", action="store_false", help="do not compare greedy tokens")
    options, console = parser.parse_args(), Console(stderr=True)
    parts = chosen_parts(options)
    check_lengths(parser, parts, options)
    ends = time.perf_counter() + 60 * options.minutes
    options.system = available(options.system, options.peers_python, console)
    results = Results(options.output.with_suffix(".json"), describe_machine(options.threads))
    for shape in dict.fromkeys(part.shape for part in parts):
        of_shape = [part for part in parts if part.shape == shape]
        if not run_shape(shape, of_shape, options, results, console, ends):
            break
    show(results, Console())
    write(results, options.output, "Decode benchmark", "decode.py")
    console.print(f"wrote {options.output.with_suffix('.md')}")


def check_lengths(parser: argparse.ArgumentParser, parts: list[Part], options: argparse.Namespace) -> None:
    if options.new_tokens < 2 or (options.rounds is not None and options.rounds < 1):
        parser.error("--new-tokens must be at least 2 and --rounds at least 1")
    for part in parts:
        most = min(CTX_LEN, SHAPES[part.shape]["max_position_embeddings"]) - 8
        longest = max(part.prompts) + options.new_tokens
        if min(part.prompts) < 1 or min(part.rows) < 1 or longest > most:
            parser.error(
                f"{part.shape}: --prompt and --batch must be at least 1, and --prompt and --new-tokens together are "
                f"{longest:,}; {most:,} is the most"
            )


if __name__ == "__main__":
    main()
