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

import numpy as np
from checkpoints import CTX_LEN, SHAPES, can_import, make_checkpoint, make_genai_model, qsample
from common import FLAT, MIXES, add_peer_options, describe_machine, make_parser, markdown
from decode import ROUNDS, Part, add_options, remaining, run_cells, start
from decode_report import OWN, Results, show, write
from rich.console import Console
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
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # The kernel keeps a single maximum for all children, which hides a smaller peak.
    return {"seconds": time.perf_counter() - start, "peak_bytes": float(most * 1024 if most > before else 0)}


def build(options: argparse.Namespace, results: Results, console: Console) -> dict[str, Path]:
    """The model of each system; the results record the cost of baking if the package is new."""
    shape, folder = options.shape, options.work / options.shape
    with console.status("a checkpoint of random weights, and onnxruntime-genai's file of it"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
        foreign = make_genai_model(checkpoint, folder / "genai", options.peers_python)
    baked, compiled = folder / "baked", folder / "baked-cpu"
    known = results.shape(shape)
    if options.again or not compiled.exists() or "bake" not in known:
        with console.status("qsample bake, qsample compile"):
            facts: dict[str, Any] = {"file_bytes": size_of(foreign)}
            facts["bake"] = timed(qsample("bake", foreign, baked, "--overwrite"), folder / "bake.log")
            length = min(CTX_LEN, SHAPES[shape]["max_position_embeddings"])
            more = ["--ctx-len", length, "--max-divergence", "100", "--overwrite"]
            facts["compile"] = timed(qsample("compile", baked, compiled, *more), folder / "compile.log")
        known["bake"] = facts
        results.save()
    return {"qsample": compiled, "genai": foreign, **dict.fromkeys(HOSTS, foreign)}


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """Greedy to everything on, at 1, 4 and 16 rows, unless the options name others."""
    mixes = tuple(options.mix or (*MIXES, *FLAT, EVERYTHING))
    prompts = tuple(options.prompt or [64])
    parts = []
    for rows in options.batch or [1, 4, 16]:
        rounds = options.rounds or (ROUNDS if rows < 8 else 3)
        for mix in mixes:
            without = ("genai",) if mix == EVERYTHING else ()
            parts.append(Part(options.shape, prompts, (rows,), (mix,), rounds, without))
    return parts


def main() -> None:
    parser = make_parser(__doc__)
    add_peer_options(parser, "bake")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    add_options(parser)
    options, console = parser.parse_args(), Console(stderr=True)
    if missing := can_import(options.peers_python, PEERS["genai"]):
        raise SystemExit(f"onnxruntime-genai writes the file: {missing}")
    ends = time.perf_counter() + 60 * options.minutes

    results = Results(options.output.with_suffix(".json"), describe_machine(options.threads))
    models = build(options, results, console)
    todo = remaining(results, chosen_parts(options), list(models), again=options.again)
    workers = start(models if todo else {}, options.shape, options, results, console)
    run_cells(workers, results, todo, options.new_tokens, console, ends=ends)
    for worker in workers.values():
        worker.close()
    results.save()
    show(results, Console())
    write(results, options.output, "The gain from baking", "bake.py", SYSTEMS)
    gains = markdown(*gain_rows(results, options.shape))
    with options.output.with_suffix(".md").open("a") as page:
        page.write("\n".join(["", "## A step, in short", "", *gains, ""]))
        page.write(describe(options.shape, results.shape(options.shape)["bake"]))
    console.print(f"wrote {options.output.with_suffix('.md')}")


def gain_rows(results: Results, shape: str) -> tuple[list[str], list[list[str]]]:
    """A line per mix and number of rows, at the shortest prompt: the baked step, and multiples of it for the others."""
    cells = results.shape(shape)["cells"]
    others = [*HOSTS, "genai"]
    order = [*MIXES, *FLAT, EVERYTHING]
    keys = {(cell["mix"], cell["batch"]) for cell in cells}
    prompt = min((cell["prompt"] for cell in cells), default=0)
    lines = []
    for mix, rows in sorted(keys, key=lambda key: (order.index(key[0]), key[1])):
        own = results.cell(shape, prompt, rows, mix, OWN)
        if own is not None:
            ratios = [results.ratio(shape, prompt, rows, mix, name, "decode") for name in others]
            texts = ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
            lines.append([mix, str(rows), f"{np.median(own['step_ms']):.1f}", *texts])
    return ["sampling", "rows", "baked, ms a step", *others], lines


def describe(shape: str, facts: dict[str, Any]) -> str:
    """The cost of baking, for the page."""
    size, baking = facts["file_bytes"], facts["bake"]
    text = f"\n`qsample bake` of the {shape} file ({size / 1e6:,.0f} MB) took {baking['seconds']:.1f} s"
    if baking["peak_bytes"]:
        times = baking["peak_bytes"] / size
        text += (
            f" and {baking['peak_bytes'] / 1e6:,.0f} MB of memory, mapped files included ({times:.2f} times the file)"
        )
    return text + f"; compiling it for the CPU {facts['compile']['seconds']:.1f} s.\n"


if __name__ == "__main__":
    main()
