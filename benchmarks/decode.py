"""Decoding on the CPU: qsample, onnxruntime-genai, llama.cpp and transformers, on the same random weights.

    python -m venv peers && peers/bin/pip install onnxruntime-genai torch transformers llama-cpp-python gguf
    python benchmarks/decode.py --peers-python peers/bin/python          # the whole sweep: an hour or two
    python benchmarks/decode.py --peers-python peers/bin/python --batch 1 --prompt 64 --rounds 9

One checkpoint of random weights is built for every system, into --work, once; a peer that is not installed is left
out, and named. Each system runs in a process of its own with the same number of threads, and they take turns, round by
round, because a shared machine changes its speed: ratios are taken within a round, and the median of the rounds is
reported. qsample, onnxruntime-genai and llama.cpp have 4-bit weights in blocks of 32, transformers has float32. A run
adds to the results of earlier runs on the same machine, cell by cell, so that the sweep can be made in pieces.

`genai` runs with --threads like the others; `genai defaults` as it comes: onnxruntime-genai itself takes half of the
logical processors, at most 16, for what may be physical cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SHAPES, can_import, make_checkpoint, make_genai_model, make_gguf, run_quietly
from decode_report import Results, show, write
from machine import describe_machine
from mixes import EVERYTHING, FLAT
from mixes import MIXES as PLAIN_MIXES
from rich.console import Console

MIXES = PLAIN_MIXES | FLAT
PEERS = {
    "genai": ["onnxruntime_genai", "torch", "transformers"],
    "genai defaults": ["onnxruntime_genai", "torch", "transformers"],
    "llama.cpp": ["llama_cpp", "gguf"],
    "transformers": [],
}
PAUSE = 0.1  # seconds between two systems' turns: threads of the last one may still spin


class Worker:
    """A system in a process of its own; see `decode_worker.py`."""

    def __init__(self, system: str, model: Path, python: str, threads: int) -> None:
        script = str(Path(__file__).with_name("decode_worker.py"))
        command = [python, script, system, str(model), "--threads", str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.loaded = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"a worker ended early: {self._errors.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def qsample(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from qsample.cli import main; main()", *map(str, arguments)]


def build(
    shape: str, work: Path, systems: list[str], python: str, console: Console, *, with_float32: bool
) -> dict[str, Path]:
    """Build what is not there yet. Returns the model of each system."""
    folder = work / shape
    with console.status(f"{shape}: a checkpoint of random weights"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
    models = {"transformers": checkpoint, "qsample": folder / "int4", "qsample float32": folder / "float32"}
    with console.status(f"{shape}: packages for qsample"):
        if not (folder / "portable").exists():
            run_quietly(qsample("export", checkpoint, folder / "portable"), folder / "export.log")
        for weights in ("int4", "float32") if with_float32 else ("int4",):
            if not (folder / weights).exists():
                # Random weights are off by more than a trained model's, and how far is reported here.
                options = ["--weights", weights, "--ctx-len", "2048", "--max-divergence", "100"]
                command = qsample("compile", folder / "portable", folder / weights, *options)
                run_quietly(command, folder / f"{weights}.log")
    builders = {
        "genai": lambda: make_genai_model(checkpoint, folder / "genai", python),
        "genai defaults": lambda: make_genai_model(checkpoint, folder / "genai", python),
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
    }
    for system in builders.keys() & systems:
        with console.status(f"{shape}: a model for {system}"):
            try:
                models[system] = builders[system]()
            except RuntimeError as error:  # an architecture that its builder does not know
                console.print(f"{shape} without {system}: {error}", highlight=False)
    return models


def run_cells(
    workers: dict[str, Worker], results: Results, shape: str, options: argparse.Namespace, console: Console
) -> None:
    cells = [(prompt, batch, mix) for prompt in options.prompt for batch in options.batch for mix in options.mix]
    for number, (prompt, batch, mix) in enumerate(cells):
        console.print(f"[{number + 1}/{len(cells)}] {shape}, prompt {prompt}, {batch} rows, {mix}", highlight=False)
        first: dict[str, list[float]] = {name: [] for name in workers}
        steps: dict[str, list[float]] = {name: [] for name in workers}
        names = list(workers)
        for index in range(options.rounds + 1):
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                time.sleep(PAUSE)
                # The first round warms up: memory is taken, files are read.
                count = options.new_tokens if index else 4
                answer = workers[name].ask(rows=batch, prompt_tokens=prompt, new_tokens=count, sampling=MIXES[mix])
                if index:
                    first[name].append(1e3 * answer["first_token"])
                    steps[name].append(1e3 * float(np.median(answer["steps"])))
        for name in names:
            results.add_cell(shape, prompt, batch, mix, name, first[name], steps[name])
        results.save()


def run_overhead(worker: Worker, results: Results, shape: str, batches: list[int], steps: int) -> None:
    """The host's and the sampler's share of a step, in qsample's own loop."""
    for batch in batches:
        request = {"rows": batch, "prompt_tokens": 64, "new_tokens": steps, "sampling": {"temperature": 0.0}}
        worker.ask(**request | {"new_tokens": 8})
        answer = worker.ask(**request, everything=EVERYTHING)
        milliseconds = {name: 1e3 * float(np.median(values)) for name, values in answer.items()}
        pairs = zip(answer["everything"], answer["greedy"], strict=False)
        ratio = float(np.median([sampled / greedy for sampled, greedy in pairs]))
        results.add_overhead(shape, batch, milliseconds, ratio)


def check_tokens(models: dict[str, Path], results: Results, shape: str, threads: int) -> None:
    """Whether the float32 package's greedy tokens are those of `generate`."""
    # Many prompts and few steps: greedy text of a random model soon repeats one token.
    request = {"rows": 16, "prompt_tokens": 64, "new_tokens": 4, "sampling": {"temperature": 0.0}}
    tokens = []
    for system, model in (("qsample", models["qsample float32"]), ("transformers", models["transformers"])):
        worker = Worker(system, model, sys.executable, threads)
        tokens.append(np.array(worker.ask(**request)["tokens"]))
        worker.close()
    results.set_tokens(shape, compared=int(tokens[0].size), equal=int((tokens[0] == tokens[1]).sum()))


def describe_system(name: str, model: Path, worker: Worker, results: Results, shape: str) -> None:
    files = [model] if model.is_file() else [path for path in model.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    # After a step: until then, mapped weights are not in memory.
    memory = worker.ask(rows=1, prompt_tokens=16, new_tokens=4, sampling={"temperature": 0.0})["memory"]
    results.add_system(shape, name, worker.loaded["version"], size, worker.loaded["load_seconds"], memory)


def make_parser(
    description: str | None, shapes: list[str], mixes: list[str], batch: list[int], output: Path
) -> argparse.ArgumentParser:
    """The options of a run; shapes, mixes, batch, output: their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has the other systems")
    parser.add_argument("--work", type=Path, default=Path("build/decode"), help="folder for the models")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=shapes)
    parser.add_argument("--system", nargs="+", choices=list(PEERS), default=list(PEERS), help="beside qsample")
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=mixes)
    parser.add_argument("--batch", type=int, nargs="+", default=batch)
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24, help="of each row and round")
    parser.add_argument("--overhead-steps", type=int, default=120, help="0 leaves this part out")
    parser.add_argument("--no-tokens", action="store_true", help="leave out the comparison of greedy tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=output, help="file name without suffix")
    return parser


def run(parser: argparse.ArgumentParser, title: str) -> None:
    """Build, check, measure and report what the command line asks for."""
    options, console = parser.parse_args(), Console(stderr=True)
    if max(options.prompt) + options.new_tokens > 2040:
        parser.error("--prompt and --new-tokens together must stay below 2040, what the packages are compiled for")
    systems = []
    for name in options.system:
        python = sys.executable if name == "transformers" else options.peers_python
        missing = can_import(python, PEERS[name])
        if missing is None:
            systems.append(name)
        else:
            console.print(f"without {name}: {missing}", highlight=False)
    results = Results(options.output.with_suffix(".json"), describe_machine(options.threads))
    for shape in options.shape:
        python, with_float32 = options.peers_python, not options.no_tokens
        models = build(shape, options.work, systems, python, console, with_float32=with_float32)
        results.set_quantization(shape, json.loads((models["qsample"] / "qsample.json").read_text()))
        if not options.no_tokens:
            check_tokens(models, results, shape, options.threads)
        workers = {}
        for name in ["qsample", *(name for name in systems if name in models)]:
            python = sys.executable if name in ("qsample", "transformers") else options.peers_python
            workers[name] = Worker(name, models[name], python, options.threads)
            describe_system(name, models[name], workers[name], results, shape)
        run_cells(workers, results, shape, options, console)
        if options.overhead_steps:
            run_overhead(workers["qsample"], results, shape, [1, 4], options.overhead_steps)
        results.save()
        for worker in workers.values():
            worker.close()
    show(results, Console())
    write(results, options.output, title, parser.prog)
    console.print(f"wrote {options.output.with_suffix('.md')}")


def main() -> None:
    output = Path("docs/benchmarks/decode")
    run(make_parser(__doc__, ["qwen3-0.6b", "llama-3.2-1b"], list(MIXES), [1, 4, 8, 16], output), "Decode benchmark")


if __name__ == "__main__":
    main()
