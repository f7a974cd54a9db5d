"""The cost of compiling a large checkpoint: seconds, disk and memory, and the quality of the package.

    python benchmarks/size.py --shape llama-3.1-8b

Writes a bfloat16 checkpoint of random weights, shard by shard. A worker process compiles it and generates from the
package, while this process samples the worker's anonymous memory and the use of the disk in addition to the checkpoint.
Linux only. The stages are printed as they begin; the figures go to standard output and, as JSON, to --output, also if
the run fails. --checkpoint keeps the random weights for another run.

A step of the gates reads every weight once, about 60 times in total. If the page cache cannot hold the checkpoint,
every step reads it from the disk.

With --portable, the portable package is exported first, and compiled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from checkpoints import ASSETS, SHAPES, TOKEN_IDS
from common import describe_machine, make_parser

SHARD: Final = 2 * 10**9  # bytes of a file
SPREAD: Final = 0.02  # of weights, as models are initialised
LOGITS: Final = 4.0  # their standard deviation, set by the last norm
INTERVAL: Final = 0.25  # seconds between two samples


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="instead of the shape's number")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--method", default="rtn", help="quantization method")
    parser.add_argument("--max-divergence", type=float, default=100.0, help="random weights are hard to round")
    parser.add_argument("--portable", action="store_true", help="export a portable package, and compile that")
    parser.add_argument("--folder", type=Path, help="folder for checkpoint and package (default: temporary)")
    parser.add_argument(
        "--checkpoint", type=Path, help="a folder that keeps the random weights, and is read if it exists"
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="size-"))
    try:
        checkpoint = arguments.checkpoint or folder / "checkpoint"
        if not (checkpoint / "config.json").is_file():  # which is written last
            make_checkpoint(arguments.shape, checkpoint, arguments.layers)
        figures = measure(arguments, folder, checkpoint.absolute())
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name}: {json.dumps(value)}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")
    if "failed" in figures:
        raise SystemExit(f"the worker ended with {figures['failed']}")


def make_checkpoint(shape: str, folder: Path, layers: int | None = None) -> Path:
    """Write a bfloat16 checkpoint of random weights to `folder`, with a single shard in memory at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.core_model_loading import revert_weight_conversion

    options = {**SHAPES[shape], **TOKEN_IDS, "dtype": "bfloat16"}
    if layers is not None:
        options["num_hidden_layers"] = layers
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True, exist_ok=True)
    generator, index = torch.Generator().manual_seed(0), {}
    last = LOGITS / (SPREAD * math.sqrt(config.hidden_size))

    def tensors() -> Iterator[tuple[str, Any]]:
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if weight.ndim == 1:
                drawn = torch.full(weight.shape, last if name == "model.norm.weight" else 1.0, dtype=torch.bfloat16)
            else:
                drawn = torch.empty(weight.shape, dtype=torch.bfloat16).normal_(0, SPREAD, generator=generator)
            # Like real checkpoints: each expert is a separate tensor.
            for part, tensor in revert_weight_conversion(model, {name: drawn}).items():
                yield part, tensor.clone()

    shard: dict[str, Any] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors():
        shard[name] = tensor
        if sum(part.nbytes for part in shard.values()) >= SHARD:
            flush()
    if shard:
        flush()
    weight_map = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    AutoTokenizer.from_pretrained(ASSETS).save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def work(arguments: argparse.Namespace) -> None:
    """Compile and generate in the observed process; prints a line of JSON at the beginning of each stage."""
    import qsample

    folder, start, said = arguments.folder, time.monotonic(), ""

    def progress(stage: str, fraction: float) -> None:
        nonlocal said
        if stage != said:
            said = stage
            say(stage=stage)

    def say(**figures: Any) -> None:
        print(json.dumps({"seconds": round(time.monotonic() - start, 1), **figures}), flush=True)

    model: Any = qsample.AutoModelForCausalLM.from_pretrained(arguments.checkpoint)
    if arguments.portable:
        model = model.export(folder / "portable", progress=progress)
    package = model.compile(
        folder / "package",
        ctx_len=1024,
        weights=arguments.weights,
        quantization_method=arguments.method,
        max_divergence=arguments.max_divergence,
        progress=progress,
    )
    del model
    manifest = package.package.manifest
    say(stage="generate")
    begun = time.monotonic()
    ids = package.generate([[5, 6, 7, 8]], max_new_tokens=8, do_sample=False).token_ids
    first = time.monotonic() - begun
    figures = {
        "first_generate_s": round(first, 2),
        "tokens": list(ids[0]),
        "parity": dict(manifest.parity or {}),
        "quantization": dict(manifest.compilation.quantization or {}),
    }
    say(stage="end", figures=figures)


def measure(arguments: argparse.Namespace, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Run `work` and sample the peaks of anonymous memory and disk use (without the checkpoint) of each stage."""
    command = [sys.executable, __file__, "--worker", "--folder", str(folder), "--checkpoint", str(checkpoint)]
    command += ["--weights", arguments.weights]
    command += ["--method", arguments.method, "--max-divergence", str(arguments.max_divergence)]
    command += ["--portable"] * arguments.portable
    temporary = folder / "temporary"
    temporary.mkdir()
    lines, begun = folder / "lines", time.monotonic()
    with lines.open("w") as output:
        worker = subprocess.Popen(command, stdout=output, env={**os.environ, "TMPDIR": str(temporary)})
        own = disk_bytes(checkpoint)
        inside = own if checkpoint.is_relative_to(folder.absolute()) else 0
        stages: dict[str, dict[str, float]] = {}
        try:
            while worker.poll() is None:
                time.sleep(INTERVAL)
                said = [json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}")]
                name = said[-1]["stage"] if said else "start"
                if name not in stages:
                    print(f"{time.monotonic() - begun:.0f} s: {name}", file=sys.stderr, flush=True)
                stage = stages.setdefault(name, {"memory_gb": 0.0, "disk_gb": 0.0})
                stage["memory_gb"] = max(stage["memory_gb"], anonymous_bytes(worker.pid) / 1e9)
                stage["disk_gb"] = max(stage["disk_gb"], (disk_bytes(folder) - inside) / 1e9)
        finally:
            worker.kill()
            worker.wait()
    said = [json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}")]
    begins = {line["stage"]: line["seconds"] for line in said}
    ended = {"failed": worker.returncode} if worker.returncode else said[-1]["figures"]
    parameters = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 2
    return {
        "machine": describe_machine(os.cpu_count() or 1),
        "parameters_b": round(parameters / 1e9, 2),
        "checkpoint_gb": round(own / 1e9, 2),
        "package_gb": round(disk_bytes(folder / "package") / 1e9, 2),
        "seconds": begins.get("generate"),
        "peak_disk_gb": round(max(stage["disk_gb"] for stage in stages.values()), 2),
        "peak_memory_gb": round(max(stage["memory_gb"] for stage in stages.values()), 2),
        **ended,
        "stages": {
            name: {"begins_s": begins.get(name, 0.0), **{key: round(value, 2) for key, value in stage.items()}}
            for name, stage in stages.items()
        },
    }


def anonymous_bytes(process: int) -> int:
    """The anonymous memory of a process; 0 after it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def disk_bytes(folder: Path) -> int:
    """The disk use of the files below `folder`."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:  # deleted meanwhile
                continue
    return total


if __name__ == "__main__":
    main()
