"""Packed weights on the CPU: files of llama.cpp and of compressed-tensors, exported, compiled and run as they are.

    python -m venv llama && llama/bin/pip install llama-cpp-python gguf torch safetensors
    python -m venv compressed && compressed/bin/pip install compressed-tensors transformers torch
    python benchmarks/packed.py --peers-python llama/bin/python --compressed-python compressed/bin/python
    python benchmarks/packed.py --products              # only the products of the forms of weights, in seconds

A checkpoint of random weights in a named shape is quantized by llama.cpp itself and by compressed-tensors' own library.
`qsample compile` makes a package of each, and of the checkpoint with --weights int4, each in a separate process:
seconds and anonymous memory are the process's (Linux only). Then all packages, and llama.cpp with the same
GGUF files, take turns with greedy steps of a single row; ratios are taken within a round.

The products: a vector of 2,048 numbers times a matrix of 3,072 rows on one thread, with the operators that a package
for the CPU has for a form of weights, in turns; the least of the rounds. MatMulBnb4 is ONNX Runtime's operator for the
4-bit floats of bitsandbytes, which packages do not use.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from checkpoints import SHAPES, make_checkpoint, make_gguf, qsample, run_quietly
from export import disk_bytes, measure
from report import (
    Kept,
    Rows,
    describe_machine,
    make_parser,
    markdown,
    median,
    median_ratio,
    print_table,
)
from rich.console import Console
from systems import MIXES
from turns import Cell, Worker, size_of, take_turns

OWN: Final = "int4"
CTX_LEN, LIMIT = "2048", 900.0  # tokens, seconds of a compilation
FILES: Final = {"Q4_0": "q4_0.gguf", "Q4_K_M": "q4_k_m.gguf", "Q8_0": "q8_0.gguf", "W4A16": "w4a16"}
N, K, BATCH, TURNS = 3072, 2048, 20, 30
# Form → bits, block size, zero points, offsets.
FORMS: Final = {
    "4 bits, blocks of 32 (Q4_0)": (4, 32, False, False),
    "4 bits, blocks of 128 (W4A16)": (4, 128, False, False),
    "4 bits, blocks of 128, zero points (GPTQ, AWQ, W4A16 asymmetric)": (4, 128, True, False),
    "4 bits, blocks of 32, zero points and offsets (Q4_K)": (4, 32, True, True),
    "4 bits, blocks of 64, zero points and offsets (MLX)": (4, 64, True, True),
    "8 bits, blocks of 32 (Q8_0, Q5_0, MXFP4)": (8, 32, False, False),
    "8 bits, blocks of 16 (Q6_K, NVFP4)": (8, 16, False, False),
    "8 bits, blocks of 32, zero points and offsets (Q5_K)": (8, 32, True, True),
    "float32": (32, 0, False, False),
    "MatMulBnb4, blocks of 64 (nf4)": (0, 64, False, False),
}


def product(bits: int, block: int, zero_points: bool, offsets: bool) -> Any:
    """A session of the product with such a matrix."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    rng, make, count = np.random.default_rng(0), helper.make_node, K // block if block else 0
    attributes: dict[str, Any] = {"domain": "com.microsoft", "K": K, "N": N, "block_size": block}
    scales = rng.random(N * count, np.float32)
    if bits == 32:
        held = {"w": rng.standard_normal((K, N), np.float32)}
        nodes = [make("MatMul", ["x", "w"], ["y"])]
    elif bits == 0:
        held = {"w": rng.integers(0, 256, N * K // 2, np.uint8), "s": scales}
        nodes = [make("MatMulBnb4", ["x", "w", "s"], ["y"], quant_type=1, **attributes)]
    else:
        held = {"w": rng.integers(0, 256, (N, count, block * bits // 8), np.uint8), "s": scales}
        if zero_points:
            held["z"] = rng.integers(0, 256, N * -(-count * bits // 8), np.uint8)
        out = "p" if offsets else "y"
        nodes = [
            make("MatMulNBits", ["x", *held], [out], bits=bits, accuracy_level=4, **attributes)
        ]
        if offsets:
            held |= {"blocks": np.array([1, count, block]), "last": np.array([-1])}
            held["o"] = rng.random((count, N), np.float32)
            nodes += [
                make("Reshape", ["x", "blocks"], ["b"]),
                make("ReduceSum", ["b", "last"], ["sums"], keepdims=0),
            ]
            nodes += [make("MatMul", ["sums", "o"], ["more"]), make("Add", ["p", "more"], ["y"])]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, n])
        for name, n in (("x", K), ("y", N))
    )
    graph = helper.make_graph(
        nodes, "g", [x], [y], [numpy_helper.from_array(a, name) for name, a in held.items()]
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def time_products() -> dict[str, float]:
    """Form → milliseconds of a product."""
    sessions = {name: product(*form) for name, form in FORMS.items()}
    feed, least = (
        {"x": np.random.default_rng(1).standard_normal((1, K), np.float32)},
        dict.fromkeys(FORMS, np.inf),
    )
    for _ in range(TURNS):
        for name, session in sessions.items():
            for _ in range(1 if 5 < least[name] < np.inf else BATCH):
                start = time.perf_counter()
                session.run(None, feed)
                least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
    return least


def make_files(shape: str, options: argparse.Namespace) -> dict[str, Path]:
    """The checkpoint under `OWN`, and its quantized forms."""
    folder = options.work / shape
    checkpoint = make_checkpoint(shape, folder / "checkpoint")
    found = {OWN: checkpoint}
    for kind in options.file:
        found[kind] = path = folder / FILES[kind]
        if path.suffix == ".gguf":
            make_gguf(checkpoint, path, options.peers_python, kind, texts=True)
        elif not path.exists():
            script = str(Path(__file__).with_name("compressed_model.py"))
            command = [options.compressed_python, script, str(checkpoint), str(path), kind]
            run_quietly(command, path.with_suffix(".log"))
    return found


def compile_each(
    files: dict[str, Path], facts: dict[str, Any], options: argparse.Namespace
) -> dict[str, Path]:
    """Compile each file in turn, for the figures; returns the packages."""
    packages = {}
    for name, source in files.items():
        packages[name] = out = source.with_name(f"{source.name}-package")
        if out.exists() and name in facts:
            continue
        shutil.rmtree(out, ignore_errors=True)
        more = ["--weights", "int4"] if name == OWN else []
        command = qsample(
            "compile", source, out, "--json", "--ctx-len", CTX_LEN, "--max-divergence", "100", *more
        )
        figures = measure(command, source.with_name(f"{source.name}.log"), limit=LIMIT, memory=1e11)
        facts[name] = figures | {"file": size_of(source), "package": disk_bytes(out)}
    return packages


def run_shape(shape: str, options: argparse.Namespace, results: Kept, console: Console) -> None:
    facts = results.data["shapes"].setdefault(shape, {"compiled": {}, "steps": {}})
    with console.status(f"{shape}: a checkpoint and its quantized files"):
        files = make_files(shape, options)
    with console.status(f"{shape}: qsample compile"):
        packages = compile_each(files, facts["compiled"], options)
    results.save()
    workers = {
        name: Worker("qsample", path, sys.executable, options.threads)
        for name, path in packages.items()
    }
    for name, path in files.items():
        if path.suffix == ".gguf":
            amx = not options.no_amx
            workers[f"{name}, llama.cpp"] = Worker(
                "llama.cpp", path, options.peers_python, options.threads, amx=amx
            )

    def failed(name: str, error: RuntimeError) -> None:
        console.print(f"{shape} without {name}: {error}", highlight=False)

    with console.status(f"{shape}: greedy steps"):
        cell, mix = Cell(64, 1, "greedy"), MIXES["greedy"]
        _, facts["steps"] = take_turns(
            workers, cell, mix, options.rounds, options.new_tokens, failed=failed
        )
    for worker in workers.values():
        worker.close()
    results.save()


def table_rows(facts: dict[str, Any]) -> Rows:
    rows, steps = [], facts["steps"]
    for name, figures in facts["compiled"].items():
        own, other = steps[name], steps.get(f"{name}, llama.cpp")
        beside = [median_ratio(other, own) if other else None, median_ratio(steps[OWN], own)]
        sizes = [f"{figures[key] / 1e6:,.0f}" for key in ("file", "package", "peak_anonymous")]
        ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in beside]
        theirs = f"{median(other):.1f}" if other else ""
        rows.append(
            [name, *sizes, f"{figures['seconds']:.1f}", f"{median(own):.1f}", theirs, *ratios]
        )
    header = [
        "weights",
        "file, MB",
        "package, MB",
        "anonymous memory, MB",
        "compile, s",
        "step, ms",
        "llama.cpp, ms",
    ]
    return [*header, "llama.cpp / qsample", f"{OWN} / it"], rows


def main() -> None:
    parser = make_parser(__doc__, "packed", work="build/packed", peers=True, threads=2)
    parser.add_argument(
        "--compressed-python", default=sys.executable, help="a Python with compressed-tensors"
    )
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b"])
    parser.add_argument("--file", nargs="*", choices=list(FILES), default=["Q4_K_M", "W4A16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument(
        "--no-amx", action="store_true", help="for llama.cpp where AMX is listed and cannot be used"
    )
    parser.add_argument("--products", action="store_true", help="measure the products alone")
    options, console = parser.parse_args(), Console(stderr=True)
    results = Kept(
        options.output.with_suffix(".json"),
        {"machine": describe_machine(options.threads), "shapes": {}},
    )
    for shape in () if options.products else options.shape:
        run_shape(shape, options, results, console)
    with console.status("products"):
        results.data["products"] = time_products()
    results.save()
    lines = [
        "# Packed weights",
        "",
        f"{results.data['machine']}. Made by `python benchmarks/packed.py`.",
        "",
    ]
    for shape, facts in results.data["shapes"].items():
        print_table(*table_rows(facts), shape)
        lines += [f"## {shape}", "", *markdown(*table_rows(facts)), ""]
    products = results.data["products"]
    first = next(iter(products.values()))
    rows = [[name, f"{ms:.3f}", f"{ms / first:.2f}"] for name, ms in products.items()]
    print_table(["form", "ms", "of the first"], rows, "products")
    lines += ["## Products", "", *markdown(["form", "ms", "of the first"], rows), ""]
    options.output.with_suffix(".md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
