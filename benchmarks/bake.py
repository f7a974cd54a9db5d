"""A decoder file of onnxruntime-genai's: with its logits copied to the host, in onnxruntime-genai, and baked.

    python -m venv peers && peers/bin/pip install onnxruntime-genai onnx-ir torch transformers
    python benchmarks/bake.py --peers-python peers/bin/python

One checkpoint of random weights becomes one file of 4-bit weights, written by onnxruntime-genai's builder. Four hosts
run it: the file itself under ONNX Runtime, its logits sampled with NumPy or with transformers' processors;
onnxruntime-genai; and what `qsample bake` and `qsample compile` make of it. They take turns, as in decode.py. Time and
memory of baking are measured as well, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from checkpoints import SHAPES, can_import, make_checkpoint, make_genai_model
from decode import MIXES, PEERS, Worker, describe_system, qsample, run_cells
from decode_report import Results, show, write
from machine import describe_machine
from rich.console import Console

OWN = ("qsample", "logits to NumPy", "logits to transformers")
SYSTEMS = "All run one file of 4-bit weights in blocks of 32; qsample's was baked and compiled from it."
DEFAULT_MIXES = ["greedy", "top-p 0.95", "top-p 0.95, flat"]


def timed(command: list[str], log: Path) -> dict[str, float]:
    """Run a command; its seconds, and the most memory of it in bytes, mapped files included."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr[-1000:]}")
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # The kernel keeps one maximum for all children; a smaller one than before cannot be told.
    return {"seconds": time.perf_counter() - start, "peak_bytes": float(most * 1024 if most > before else 0)}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def build(shape: str, work: Path, python: str, console: Console) -> tuple[dict[str, Path], dict[str, Any]]:
    """The model of each system, and what baking took."""
    folder = work / shape
    with console.status("a checkpoint of random weights, and onnxruntime-genai's file of it"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
        foreign = make_genai_model(checkpoint, folder / "genai", python)
    baked, compiled = folder / "baked", folder / "baked-cpu"
    with console.status("qsample bake"):
        facts: dict[str, Any] = {"file_bytes": size_of(foreign)}
        facts["bake"] = timed(qsample("bake", foreign, baked, "--overwrite"), folder / "bake.log")
        options = ["--ctx-len", "2048", "--max-divergence", "100", "--overwrite"]
        facts["compile"] = timed(qsample("compile", baked, compiled, *options), folder / "compile.log")
    models = {"qsample": compiled, "genai": foreign}
    return models | {"logits to NumPy": foreign, "logits to transformers": foreign}, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True, help="a Python that has onnxruntime-genai")
    parser.add_argument("--work", type=Path, default=Path("build/decode"), help="folder for the models")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=DEFAULT_MIXES)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=24, help="of each row and round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/bake"), help="file name without suffix")
    options, console = parser.parse_args(), Console(stderr=True)
    if missing := can_import(options.peers_python, PEERS["genai"]):
        raise SystemExit(f"the file is written by onnxruntime-genai: {missing}")

    models, facts = build(options.shape, options.work, options.peers_python, console)
    results = Results(options.output.with_suffix(".json"), describe_machine(options.threads))
    compilation = json.loads((models["qsample"] / "qsample.json").read_text())["compilation"]
    results.shape(options.shape)["bake"] = facts | {"divergence": compilation.get("divergence")}
    workers = {}
    for name, model in models.items():
        python = sys.executable if name in OWN else options.peers_python
        workers[name] = Worker(name, model, python, options.threads)
        describe_system(name, model, workers[name], results, options.shape)
    run_cells(workers, results, options.shape, options, console)
    for worker in workers.values():
        worker.close()
    results.save()
    show(results, Console())
    write(results, options.output, "A decoder file of onnxruntime-genai, baked", "bake.py", SYSTEMS)
    with options.output.with_suffix(".md").open("a") as page:
        page.write(describe(options.shape, facts))
    console.print(f"wrote {options.output.with_suffix('.md')}")


def describe(shape: str, facts: dict[str, Any]) -> str:
    """What baking took, for the page."""
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
