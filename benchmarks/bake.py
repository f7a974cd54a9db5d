"""The gain from baking: a decoder file with its logits copied to the host, in onnxruntime-genai, and baked.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/bake.py --peers-python peers/bin/python                  # about ten minutes on two cores
    python benchmarks/bake.py --peers-python peers/bin/python --batch 1 --mix greedy everything

onnxruntime-genai's builder writes a checkpoint of random weights as a file of 4-bit weights. Four hosts run the file:
two with the file itself under ONNX Runtime, which sample its logits with NumPy or with transformers' processors, as
hosts do today; onnxruntime-genai; and qsample, with the package that `qsample bake` and `qsample compile` make of it.
They take turns, as in decode.py, and a run continues an interrupted run. Time and memory of baking are measured in a
separate process, when the package is made.

"everything" switches all sampling parameters on: temperature, top-k, top-p, min-p, and the three penalties.
onnxruntime-genai lacks some of them, and does not take part.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from checkpoints import CTX_LEN, SHAPES, can_import, make_checkpoint, make_genai_model, qsample
from decode import ROUNDS
from decoders import (
    OWN,
    STEP,
    Facts,
    Part,
    Results,
    add_options,
    cell_of,
    cells_in,
    ratio,
    remaining,
    run_cells,
    start,
    write,
)
from report import Rows, describe_machine, make_parser, markdown, median
from rich.console import Console
from systems import ALL
from turns import PEERS, size_of

HOSTS: Final = ("logits to NumPy", "logits to transformers")
SYSTEMS: Final = """All systems run the same file of 4-bit weights in blocks of 32; qsample's package was baked and
compiled from it. The hosts in the last columns copy the logits, and sample with NumPy, or with transformers' processors
and torch."""
EVERYTHING: Final = "everything"


def timed(command: list[str], log: Path) -> dict[str, float]:
    """Run a command; returns its seconds and its peak memory in bytes, including mapped files (0 = unknown)."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # The kernel keeps a single maximum for all children, which hides a smaller peak.
    return {
        "seconds": time.perf_counter() - start,
        "peak_bytes": float(most * 1024 if most > before else 0),
    }


def build(options: argparse.Namespace, results: Results, console: Console) -> dict[str, Path]:
    """The model of each system; the results record the cost of baking if the package is new."""
    shape, folder = options.shape, options.work / options.shape
    with console.status("a checkpoint of random weights, and onnxruntime-genai's file of it"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
        foreign = make_genai_model(checkpoint, folder / "genai", options.peers_python)
    baked, compiled, known = folder / "baked", folder / "baked-cpu", results.shape(shape)
    if options.again or not compiled.exists() or "bake" not in known:
        with console.status("qsample bake, qsample compile"):
            facts: dict[str, Any] = {"file_bytes": size_of(foreign)}
            facts["bake"] = timed(
                qsample("bake", foreign, baked, "--overwrite"), folder / "bake.log"
            )
            length = min(CTX_LEN, SHAPES[shape]["max_position_embeddings"])
            more = ["--ctx-len", length, "--max-divergence", "100", "--overwrite"]
            facts["compile"] = timed(
                qsample("compile", baked, compiled, *more), folder / "compile.log"
            )
        known["bake"] = facts
        results.save()
    return {OWN: compiled, "genai": foreign, **dict.fromkeys(HOSTS, foreign)}


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """Greedy to everything on, at 1, 4 and 16 rows, unless the options name others."""
    parts = []
    for rows in options.batch or [1, 4, 16]:
        rounds = options.rounds or (ROUNDS if rows < 8 else 3)
        for mix in options.mix or ALL:
            without = ("genai",) if mix == EVERYTHING else ()
            parts.append(
                Part(options.shape, tuple(options.prompt or [64]), (rows,), (mix,), rounds, without)
            )
    return parts


def gain_rows(facts: Facts) -> Rows:
    """A line per mix and number of rows, at the shortest prompt: the baked step, and multiples of it for the others."""
    others, order = [*HOSTS, "genai"], list(ALL)
    prompt = min((cell["prompt"] for cell in facts["cells"]), default=0)
    lines = []
    for cell in sorted(cells_in(facts), key=lambda cell: (order.index(cell.mix), cell.rows)):
        own = cell_of(facts, cell, OWN)
        if cell.prompt == prompt and own is not None:
            ratios = [ratio(facts, cell, name, STEP) for name in others]
            texts = ["" if times is None else f"{times:.2f}x" for times in ratios]
            lines.append([cell.mix, str(cell.rows), f"{median(own[STEP]):.1f}", *texts])
    return ["sampling", "rows", "baked, ms a step", *others], lines


def describe(shape: str, facts: dict[str, Any]) -> str:
    """The cost of baking, for the page."""
    size, baking = facts["file_bytes"], facts["bake"]
    text = f"\n`qsample bake` of the {shape} file ({size / 1e6:,.0f} MB) took {baking['seconds']:.1f} s"
    if peak := baking["peak_bytes"]:
        text += f" and {peak / 1e6:,.0f} MB of memory, mapped files included ({peak / size:.2f} times the file)"
    return text + f"; compiling it for the CPU {facts['compile']['seconds']:.1f} s.\n"


def main() -> None:
    parser = make_parser(__doc__, "bake", work="build/decode", peers=True, again=True, threads=2)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    add_options(parser)
    options, console = parser.parse_args(), Console(stderr=True)
    if missing := can_import(options.peers_python, PEERS["genai"]):
        raise SystemExit(f"onnxruntime-genai writes the file: {missing}")
    results = Results(options.output.with_suffix(".json"), describe_machine(options.threads))
    models = build(options, results, console)
    todo = remaining(results, chosen_parts(options), models, again=options.again)
    workers = start(models if todo else {}, options.shape, options, results, console)
    run_cells(workers, results, todo, options.new_tokens, console)
    for worker in workers.values():
        worker.close()
    results.save()
    write(results, options.output, "The gain from baking", "bake.py", SYSTEMS)
    facts = results.shape(options.shape)
    with options.output.with_suffix(".md").open("a") as page:
        page.write("\n".join(["", "## A step, in short", "", *markdown(*gain_rows(facts)), ""]))
        page.write(describe(options.shape, facts["bake"]))


if __name__ == "__main__":
    main()
