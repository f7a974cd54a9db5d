"""Decoding on an NVIDIA GPU: checks the captured graph, and times it beside what else there is.

    python benchmarks/gpu.py                                   # 0.6B and 1B shapes, every batch and mix
    python benchmarks/gpu.py --shapes qwen3-0.6b --batch 1 32  # less of it
    python benchmarks/gpu.py --provider cpu --shapes tiny --batch 1 4   # a try of this script without a GPU

One call makes a checkpoint of random weights, exports and compiles it on the machine, and prints and writes a table and
a plot (docs/benchmarks/gpu.*). Ways to decode, in turn, round by round, the median of the rounds counting:

- captured: the sampler in the graph, replayed as one CUDA graph, read every 1, 4 and 16 steps
- uncaptured: the same graph, its kernels launched one by one
- host: the package exported with include_sampler=False; logits are copied to the host and sampled there
- transformers: `generate` with a static cache, compiled
- genai: onnxruntime-genai, where --genai names a model built for it (its CUDA wheel is not on PyPI for every platform)

The share of the floor is the time that reading the weights and the cache once takes, at the bandwidth that a copy on
this device reaches, over the time of a step.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SHAPES, make_checkpoint, prompt_ids
from mixes import EVERYTHING
from mixes import MIXES as PLAIN_MIXES
from rich.console import Console
from rich.table import Table

import qsample
from qsample.package import Package
from qsample.runtime import CausalLM, SamplingParams, load

MIXES = {**PLAIN_MIXES, "everything": EVERYTHING}
MIXED = "half greedy, half everything"
OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
PROMPT_TOKENS = 64
CTX_LEN = 1024

Decode = Callable[[int, str, int], float]  # rows, mix, new tokens → seconds a step


@dataclass(frozen=True)
class Row:
    """One line of the table: seconds a step, median of the rounds."""

    shape: str
    system: str
    rows: int
    mix: str
    seconds: float
    floor: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "llama-3.2-1b"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--weights", choices=("int4", "int8"), help="quantize the weights, too")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 32, 64])
    parser.add_argument("--mix", nargs="+", choices=[*MIXES, MIXED], default=[*MIXES, MIXED])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--genai", type=Path, help="a model folder for onnxruntime-genai, of the first shape")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps checkpoints and packages (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, default=OUTPUT, help="folder for gpu.json, gpu.md and gpu.png")
    return parser.parse_args()


def build(shape: str, folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Path]:
    """Checkpoint, portable and compiled packages; what is there is kept."""
    places = {name: folder / name for name in ("checkpoint", "portable", "compiled", "host-portable", "host")}
    with console.status(f"{shape}: checkpoint"):
        make_checkpoint(shape, places["checkpoint"])
    chosen: dict[str, Any] = {"provider": options.provider, "ctx_len": CTX_LEN, "weights": options.weights}
    if options.provider == "cuda":
        chosen["dtype"] = options.dtype
    for portable, compiled, sampler in (("portable", "compiled", True), ("host-portable", "host", False)):
        with console.status(f"{shape}: {portable} and {compiled} package"):
            if not places[portable].exists():
                model = qsample.AutoModelForCausalLM.from_pretrained(places["checkpoint"], include_sampler=sampler)
                model.export(places[portable])
            if not places[compiled].exists():
                package = qsample.AutoModelForCausalLM.from_pretrained(places[portable], include_sampler=sampler)
                # Random weights are off by more than a trained model's.
                package.compile(places[compiled], max_divergence=100, **chosen)
    return places


def check(places: dict[str, Path], options: argparse.Namespace) -> list[str]:
    """What the compiled package was seen to do right, in words."""
    package = qsample.package.read_package(places["compiled"])
    assert package.manifest.compilation is not None
    test = package.manifest.compilation.self_test
    found = [f"{test['agreeing']} of {test['tokens']} tokens are those of the portable graph in float32 on the CPU"]
    model = load(places["compiled"], verify=False)
    rows = [SamplingParams(**MIXES[mix], max_new_tokens=48, eos_token_id=()) for mix in MIXES]
    prompts = [row.tolist() for row in prompt_ids(len(rows), 16, model.interface.vocab_size)]
    wanted = model.generate(prompts, rows, seed=1, flush_every=1, double_buffering=False).new_token_ids
    for flush_every in (4, 16):
        got = model.generate(prompts, rows, seed=1, flush_every=flush_every).new_token_ids
        found.append(f"flush_every={flush_every}: {'the same tokens' if got == wanted else 'OTHER TOKENS'}")
    alone = [
        model.generate([p], r, seed=1 + i).new_token_ids[0] for i, (p, r) in enumerate(zip(prompts, rows, strict=True))
    ]
    equal = sum(a == b for a, b in zip(alone, wanted, strict=True))
    found.append(f"{equal} of {len(rows)} rows have the tokens that they have alone")
    if options.provider == "cuda":
        plain = load(places["compiled"], provider_options={"enable_cuda_graph": "0"}, verify=False)
        got = plain.generate(prompts, rows, seed=1).new_token_ids
        found.append(f"without capture: {'the same tokens' if got == wanted else 'OTHER TOKENS'}")
    return found


def sampling(mix: str, rows: int, new_tokens: int) -> list[SamplingParams]:
    names = ["greedy" if row % 2 else "everything" for row in range(rows)] if mix == MIXED else [mix] * rows
    return [SamplingParams(**MIXES[name], max_new_tokens=new_tokens, eos_token_id=()) for name in names]


def ours(model: CausalLM, flush_every: int) -> Decode:
    def decode(rows: int, mix: str, new_tokens: int) -> float:
        prompts = prompt_ids(rows, PROMPT_TOKENS, model.interface.vocab_size)
        params = sampling(mix, rows, new_tokens)
        timing = model.generate(list(prompts), params, seed=0, flush_every=flush_every).timing
        return timing.decode_seconds / timing.steps

    return decode


def transformers_generate(checkpoint: Path, dtype: str) -> Decode:
    """`generate` over a static cache, which transformers compiles; a step is the difference of two lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to("cuda").eval()

    def run(ids: Any, count: int, options: dict[str, Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                cache_implementation="static",
                pad_token_id=0,
                **options,
            )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def decode(rows: int, mix: str, new_tokens: int) -> float:
        if mix == MIXED:
            return float("nan")  # one setting for a batch
        options: dict[str, Any] = {"do_sample": mix != "greedy"}
        if mix != "greedy":
            supported = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            options |= {"top_k": 0} | {name: MIXES[mix][name] for name in supported if name in MIXES[mix]}
        ids = torch.from_numpy(prompt_ids(rows, PROMPT_TOKENS, model.config.vocab_size)).to("cuda")
        run(ids, 4, options)  # compiles
        short, long = run(ids, 4, options), run(ids, 4 + new_tokens, options)
        return (long - short) / new_tokens

    return decode


def genai(folder: Path) -> Decode:
    import onnxruntime_genai as og

    model = og.Model(str(folder))
    vocab_size = json.loads((folder / "genai_config.json").read_text())["model"]["vocab_size"]

    def decode(rows: int, mix: str, new_tokens: int) -> float:
        if mix in (MIXED, "everything"):
            return float("nan")
        length = PROMPT_TOKENS + new_tokens + 1
        params = og.GeneratorParams(model)
        options: dict[str, Any] = {"batch_size": rows, "max_length": length, "min_length": length}
        options |= {"do_sample": mix != "greedy", **({} if mix == "greedy" else {"top_k": 0} | MIXES[mix])}
        params.set_search_options(**options)
        generator = og.Generator(model, params)
        generator.append_tokens(prompt_ids(rows, PROMPT_TOKENS, vocab_size).astype(np.int32))
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(new_tokens):
            generator.generate_next_token()
            generator.get_next_tokens()
        return (time.perf_counter() - start) / new_tokens

    return decode


def systems(places: dict[str, Path], options: argparse.Namespace, genai_model: Path | None) -> dict[str, Decode]:
    found: dict[str, Decode] = {}
    compiled = load(places["compiled"], verify=False)
    name = "captured" if options.provider == "cuda" else "baked"
    for flush_every in (1, 4, 16):
        found[f"{name}, read every {flush_every}"] = ours(compiled, flush_every)
    if options.provider == "cuda":
        plain = load(places["compiled"], provider_options={"enable_cuda_graph": "0"}, verify=False)
        found["uncaptured, read every 4"] = ours(plain, 4)
        found["transformers, static cache"] = transformers_generate(places["checkpoint"], options.dtype)
    found["host"] = ours(load(places["host"], verify=False), 1)
    if genai_model is not None:
        found["genai"] = genai(genai_model)
    return found


def bandwidth(provider: str) -> float | None:
    """Bytes a second that a copy on the device reads and writes; None on the CPU."""
    if provider != "cuda":
        return None
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / float(np.median(seconds))


def floor_seconds(package: Package, rows: int, new_tokens: int, rate: float | None) -> float | None:
    """Seconds to read the weights, and the cache of half the new tokens, once."""
    if rate is None:
        return None
    weights = package.manifest.files["decoder.onnx.data"].bytes
    element = {"int8": 1}.get(package.interface.kv_cache_dtype or "", 2)
    token = sum(2 * layer.num_key_value_heads * layer.head_dim * element for layer in package.interface.key_values)
    return (weights + rows * token * (PROMPT_TOKENS + new_tokens / 2)) / rate


def measure(shape: str, places: dict[str, Path], options: argparse.Namespace, console: Console) -> list[Row]:
    package, rate = qsample.package.read_package(places["compiled"]), bandwidth(options.provider)
    genai_model = options.genai if shape == options.shapes[0] else None
    found: list[Row] = []
    decoders = systems(places, options, genai_model)
    for rows in options.batch:
        floor = floor_seconds(package, rows, options.new_tokens, rate)
        for mix in options.mix:
            taken: dict[str, list[float]] = {name: [] for name in decoders}
            with console.status(f"{shape}, {rows} rows, {mix}"):
                for number in range(options.rounds + 1):
                    for name, decode in decoders.items():
                        seconds = decode(rows, mix, options.new_tokens)
                        if number:  # the first round captures and warms up
                            taken[name].append(seconds)
            found += [Row(shape, name, rows, mix, float(np.median(t)), floor) for name, t in taken.items()]
    return [row for row in found if np.isfinite(row.seconds)]


def table(found: list[Row]) -> Table:
    shown = Table("shape", "system", "rows", "mix", "ms a step", "tokens/s", "share of the floor")
    for row in found:
        share = "" if row.floor is None else f"{row.floor / row.seconds:.0%}"
        figures = [f"{1e3 * row.seconds:.3f}", f"{row.tokens_per_second:.0f}", share]
        shown.add_row(row.shape, row.system, str(row.rows), row.mix, *figures)
    return shown


def write(found: list[Row], checks: dict[str, list[str]], machine: dict[str, str], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row.__dict__ | {"tokens_per_second": row.tokens_per_second} for row in found]
    (folder / "gpu.json").write_text(json.dumps({"machine": machine, "checks": checks, "rows": rows}, indent=1) + "\n")
    lines = ["# Decoding on a GPU", "", "Written by `python benchmarks/gpu.py`.", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()] + [""]
    for shape, said in checks.items():
        lines += [f"**{shape}**", "", *(f"- {line}" for line in said), ""]
    lines += ["| shape | system | rows | mix | ms a step | tokens/s | share of the floor |", "| --- " * 7 + "|"]
    for row in found:
        share = "" if row.floor is None else f"{row.floor / row.seconds:.0%}"
        figures = f"{1e3 * row.seconds:.3f} | {row.tokens_per_second:.0f} | {share}"
        lines.append(f"| {row.shape} | {row.system} | {row.rows} | {row.mix} | {figures} |")
    (folder / "gpu.md").write_text("\n".join([*lines, "", "![tokens a second](gpu.png)", ""]))

    shapes = sorted({row.shape for row in found})
    figure, axes = plt.subplots(1, len(shapes), figsize=(6 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for system in dict.fromkeys(row.system for row in found):
            points = [
                (r.rows, r.tokens_per_second)
                for r in found
                if (r.shape, r.system, r.mix) == (shape, system, "everything")
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=system)
        axis.set(title=f"{shape}, everything switched on", xlabel="rows", ylabel="tokens/s", xscale="log", yscale="log")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "gpu.png", dpi=120)


def describe(provider: str) -> dict[str, str]:
    packages = (
        "onnxruntime-gpu",
        "onnxruntime",
        "torch",
        "transformers",
        "onnxruntime-genai-cuda",
        "onnxruntime-genai",
    )
    found = {"device": platform.processor() or platform.machine()}
    if provider == "cuda":
        import torch

        found["device"] = torch.cuda.get_device_name()
    for name in packages:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def main() -> None:
    options = parse_arguments()
    console = Console()
    machine = describe(options.provider)
    found: list[Row] = []
    checks: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for shape in options.shapes:
            places = build(shape, work / shape, options, console)
            checks[shape] = check(places, options)
            console.print(f"[bold]{shape}[/bold]", *checks[shape], sep="\n  ", highlight=False)
            found += measure(shape, places, options, console)
            console.print(table([row for row in found if row.shape == shape]))
            options.out.mkdir(parents=True, exist_ok=True)
            write(found, checks, machine, options.out)  # after each shape: the machine may be gone before the last


if __name__ == "__main__":
    main()
