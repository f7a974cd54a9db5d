"""Hybrids and mixtures of experts on the CPU: first token, step and memory, beside other systems.

    python -m venv peers && peers/bin/pip install onnxruntime-genai onnx_ir torch transformers llama-cpp-python gguf
    python benchmarks/models.py --peers-python peers/bin/python          # some twenty minutes on two cores
    python benchmarks/models.py --peers-python peers/bin/python --shape qwen3.5-0.8b --again

Random weights in the shapes of today's models: Qwen3.5-0.8B whole, and slices of Qwen3-Next-80B-A3B, Qwen3-30B-A3B and
gpt-oss-20b, which have a few of their layers in full size and the same share of the vocabulary. What is built lies in
--work and is built once. Systems take turns, round by round, as in `decode.py`; ratios are taken within a round.
qsample, onnxruntime-genai and llama.cpp have 4-bit weights in blocks of 32, transformers has float32.

Results are written after every cell, and a run goes on where the one before it stopped: a cell that has its rounds is
left as it is, unless --again is given. A system that cannot take a model is named with its reason.

Two more parts: the bytes that a step of one row reads, beside the speed of the memory in the same rounds; and with
--scan a prompt of 1,024 tokens through the layers of Qwen3.5 as a loop over its tokens (what a layer falls back to
that has no operators) beside the operators.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

from active_bytes import active_bytes
from checkpoints import SHAPES, can_import, make_checkpoint, make_genai_model, make_gguf, run_quietly
from decode import note_failure
from machine import describe_machine
from memory_speed import measure
from models_report import ModelResults, show, write
from rich.console import Console
from turns import PAUSE, PEERS, Cell, Worker, qsample, take_turns

MODELS: Final = ("qwen3.5-0.8b", "qwen3-next-slice", "qwen3-30b-a3b-slice", "gpt-oss-20b-slice")
SYSTEMS: Final = ("genai", "llama.cpp", "transformers")
CELLS: Final = (Cell(64, 1, "greedy"), Cell(64, 4, "greedy"), Cell(1024, 1, "greedy"))
GREEDY: Final = {"temperature": 0.0}
SCANNED: Final = "qwen3.5-slice"
CTX_LEN: Final = 2048
# Takes every layer for one that no operators are known for.
AS_A_LOOP: Final = (
    "from qsample.transforms import recurrent; recurrent.recurrence_of = lambda module: None; "
    "from qsample.cli import main; main()"
)


def build_package(checkpoint: Path, package: Path, weights: str | None, *, as_a_loop: bool = False) -> Path:
    """Export and compile the checkpoint, unless `package` is there. as_a_loop: its recurrent layers are Scans."""
    if not package.exists():
        portable = package.with_name(f"{package.name}.portable")
        export = qsample("export", checkpoint, portable, "--overwrite")
        if as_a_loop:
            export[2] = AS_A_LOOP
        run_quietly(export, package.with_suffix(".export.log"))
        # Random weights are off by more than a trained model's.
        options = ["--ctx-len", CTX_LEN, *(["--weights", weights, "--max-divergence", "100"] if weights else [])]
        run_quietly(qsample("compile", portable, package, *options), package.with_suffix(".log"))
        shutil.rmtree(portable)  # float32, and not needed again
    return package


def build(shape: str, systems: list[str], options: argparse.Namespace, results: ModelResults, console: Console) -> Any:
    """What each system runs, built where it is not there; a system that cannot take it is noted in `results`."""
    folder, python = options.work / shape, options.peers_python
    with console.status(f"{shape}: a checkpoint of random weights"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
    builders = {
        "qsample": lambda: build_package(checkpoint, folder / "int4", "int4"),
        "genai": lambda: make_genai_model(checkpoint, folder / "genai", python),
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
        "transformers": lambda: checkpoint,
    }
    models = {}
    for name in systems:
        with console.status(f"{shape}: a model for {name}"):
            try:
                models[name] = builders[name]()
            except RuntimeError as error:
                if name == "qsample":
                    raise
                note_failure(results, shape, name, error, console)
    return models


def start(
    name: str, model: Path, shape: str, options: argparse.Namespace, results: ModelResults, console: Console
) -> Worker | None:
    """The system, loaded, with its size and memory noted; None where it cannot run the model."""
    python = sys.executable if name in ("qsample", "transformers") else options.peers_python
    try:
        worker = Worker(name, model, python, options.threads)
        results.describe(shape, name, model, worker)
    except RuntimeError as error:
        note_failure(results, shape, name, error, console)
        return None
    results.clear_missing(shape, name)
    return worker


def run_cell(
    workers: dict[str, Worker],
    results: ModelResults,
    shape: str,
    cell: Cell,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Rounds in which the systems take turns; a system that fails is noted, and out."""
    speeds: list[float] = []

    def failed(name: str, error: RuntimeError) -> None:
        note_failure(results, shape, name, error, console)

    def after_round() -> None:
        if cell.rows == 1:
            speeds.append(measure(options.threads))

    first, steps = take_turns(
        workers, cell, GREEDY, options.rounds, options.new_tokens, failed=failed, after_round=after_round
    )
    for name in workers:
        results.add_cell(shape, cell.prompt, cell.rows, cell.mix, name, first[name], steps[name])
    if speeds:
        results.add_speed(shape, cell.prompt, speeds)
    results.save()


def run_shape(
    shape: str, systems: list[str], options: argparse.Namespace, results: ModelResults, console: Console
) -> None:
    models = build(shape, systems, options, results, console)
    cells = [
        cell for cell in CELLS if options.again or not results.is_complete(shape, cell, list(models), options.rounds)
    ]
    if not cells:
        console.print(f"{shape}: measured before", highlight=False)
        return
    manifest = json.loads((models["qsample"] / "qsample.json").read_text())
    results.set_quantization(shape, manifest)
    choices = SHAPES[shape].get("num_experts_per_tok", 0)
    for prompt in {cell.prompt for cell in CELLS if cell.rows == 1}:
        results.set_active(shape, prompt, active_bytes(models["qsample"], choices, history=prompt + 1))
    workers = {name: start(name, model, shape, options, results, console) for name, model in models.items()}
    running = {name: worker for name, worker in workers.items() if worker is not None}
    for cell in cells:
        console.print(f"{shape}: {cell}", highlight=False)
        run_cell(running, results, shape, cell, options, console)
    for worker in running.values():
        worker.close()


def run_scan(options: argparse.Namespace, results: ModelResults, console: Console) -> None:
    """First token of 1,024 tokens: layers as a loop, layers with operators, and transformers; float32."""
    folder = options.work / SCANNED
    with console.status(f"{SCANNED}: packages"):
        checkpoint = make_checkpoint(SCANNED, folder / "checkpoint")
        models = {
            "operators": build_package(checkpoint, folder / "float32", None),
            "loop": build_package(checkpoint, folder / "loop", None, as_a_loop=True),
            "transformers": checkpoint,
        }
    workers = {
        name: Worker("transformers" if name == "transformers" else "qsample", model, sys.executable, options.threads)
        for name, model in models.items()
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    for index in range(options.rounds + 1):
        for name, worker in workers.items():
            time.sleep(PAUSE)
            answer = worker.ask(rows=1, prompt_tokens=1024, new_tokens=2, sampling=GREEDY)
            if index:
                times[name].append(1e3 * answer["first_token"])
    for worker in workers.values():
        worker.close()
    results.data["scan"] = {"shape": SCANNED, "first_token_ms": times}
    results.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has the other systems")
    parser.add_argument("--work", type=Path, default=Path("build/models"), help="folder for the models")
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=list(MODELS))
    parser.add_argument("--system", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), help="beside qsample")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24, help="of each row and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument(
        "--scan", action=argparse.BooleanOptionalAction, default=True, help="the loop and the operators"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/models"), help="file name without suffix")
    options, console = parser.parse_args(), Console(stderr=True)
    if options.rounds < 1 or options.new_tokens < 2:
        parser.error("--rounds must be at least 1 and --new-tokens at least 2")
    systems = ["qsample"]
    for name in options.system:
        missing = can_import(sys.executable if name == "transformers" else options.peers_python, PEERS[name])
        if missing is None:
            systems.append(name)
        else:
            console.print(f"without {name}: {missing}", highlight=False)
    results = ModelResults(options.output.with_suffix(".json"), describe_machine(options.threads))
    for shape in options.shape:
        run_shape(shape, systems, options, results, console)
        write(results, options.output)
    if options.scan and (options.again or "scan" not in results.data):
        run_scan(options, results, console)
    show(results, Console())
    write(results, options.output)
    console.print(f"wrote {options.output.with_suffix('.md')}")


if __name__ == "__main__":
    main()
