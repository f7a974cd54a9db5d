"""Decoding on the CPU: qsample's presets, onnxruntime-genai, llama.cpp and transformers, on the same random weights.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/decode.py --peers-python peers/bin/python                # some minutes on two cores
    python benchmarks/decode.py --peers-python peers/bin/python --whole        # long prompts, more models: an hour
    python benchmarks/decode.py --peers-python peers/bin/python --batch 1 --prompt 64 --rounds 9 --again
    cc -O2 -shared -fPIC -o build/avx2.so benchmarks/avx2.c                    # the same as an AVX2 processor
    LD_PRELOAD=$PWD/build/avx2.so python benchmarks/decode.py --peers-python avx2/bin/python

All systems run the same checkpoint of random weights, which is built once in --work; a peer that is not installed or
rejects a model is left out and named. Each system runs in its own process with the same number of threads. They take
turns, round by round, because a shared machine changes its speed: ratios are taken within a round, and the median of
the rounds is reported. A turn begins after a pause, with weights that the other systems' turns have driven from the
processor's caches. onnxruntime-genai and llama.cpp have 4-bit weights in blocks of 32, transformers has float32.

`qsample` is the preset "quick". Nothing is fitted to random weights here: a fit changes levels and scales, but no shape
and no kernel, so the packages of the other presets are rounded, with their block size and their table of bits. The
quality of the presets' bits and of the peers' is measured on trained models: `quality.py` writes it, and the tables
show it. With `--no-batch-invariant` a step of one row computes one row on every processor, as
in the peers; otherwise it computes two if the processor rounds one row differently (docs/devices.md).

Without --prompt, --batch and --mix the cells of CENTRAL are measured, or those of WHOLE: long prompts take most of the
time, and get few rounds. The page has a section for each shape, class of processor and number of threads. Results are
written after every cell, and a run continues an interrupted run: complete cells are skipped unless --again is given.
Delete the JSON file to measure everything again on the same machine.

AVX-512 can be hidden from a process (`avx2.c`), except from llama.cpp, whose extensions are chosen when it is compiled:
build the AVX2 peer with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON".

`genai` runs with --threads like the others; `genai defaults` runs with onnxruntime-genai's own choice: half of the
logical processors, at most 16. Its models are built with `prune_lm_head`: all systems compute only the logits of a
prompt's last token.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from checkpoints import CTX_LEN, SHAPES, make_checkpoint, make_genai_model, make_gguf, make_package
from decoders import OWN, Part, Results, add_options, build_each, remaining, run_cells, start, write
from report import (
    NOT_INVARIANT,
    count,
    describe_machine,
    make_parser,
    median,
    median_ratio,
    processor_class,
)
from rich.console import Console
from systems import EVERYTHING, FLAT, MIXES
from turns import PEERS, Worker, available, size_of

from qsample.compiler.quantize import PRESETS

ROUNDS: Final = 5
EVERY: Final = (*MIXES, *FLAT)  # some systems lack parameters of EVERYTHING
LARGEST_FLOAT32: Final = (
    2e9  # bytes of a bfloat16 checkpoint whose float32 package is compared with transformers
)
SLOW: Final = ("transformers", "genai defaults")
BALANCED, SPEED = f"{OWN}, balanced", f"{OWN}, speed"
ONE_ROW: Final = {name: f"{name}, {NOT_INVARIANT}" for name in (OWN, SPEED)}
# Package → the preset whose bits it has.
PRESET_OF: Final = {
    OWN: "quick",
    BALANCED: "balanced",
    SPEED: "speed",
    ONE_ROW[OWN]: "quick",
    ONE_ROW[SPEED]: "speed",
}
# System → the row in the results of `quality.py` that has its bits.
BITS: Final = {
    OWN: "int4 quick",
    BALANCED: "int4 balanced",
    SPEED: "int4 speed",
    "genai": "onnxruntime-genai default",
    "llama.cpp": "llama.cpp Q4_0",
}
PRESETS_ONLY: Final = (BALANCED, *ONE_ROW.values())
_CENTRAL: Final = ("greedy", "top-p 0.95", *FLAT)
CENTRAL: Final = (
    Part("qwen3-0.6b", (64,), (1,), _CENTRAL, ROUNDS),
    Part(
        "qwen3-0.6b", (64,), (4,), _CENTRAL, 3, tuple(ONE_ROW.values())
    ),  # with several rows they are the same
    Part("qwen3-0.6b", (1024,), (1,), ("greedy",), 2, (BALANCED, ONE_ROW[OWN])),
)
WHOLE: Final = (
    Part("qwen3-0.6b", (64,), (1, 4), EVERY, ROUNDS, PRESETS_ONLY),
    Part("qwen3-0.6b", (64,), (8, 16), EVERY, 3, (*SLOW, *PRESETS_ONLY)),
    Part("qwen3-0.6b", (1024,), (1, 4), EVERY, 2, (*SLOW, *PRESETS_ONLY)),
    Part("qwen3-0.6b", (1024,), (8, 16), ("greedy",), 1, (*SLOW, *PRESETS_ONLY)),
    Part("qwen3-0.6b", (4096,), (1,), ("greedy", *FLAT), 2, (*SLOW, *PRESETS_ONLY)),
    Part("qwen3-0.6b", (4096,), (4,), ("greedy",), 1, (*SLOW, *PRESETS_ONLY)),
    Part("llama-3.2-1b", (64,), (1, 4), EVERY, 3, ("transformers", *PRESETS_ONLY)),
    Part("qwen3-4b", (64,), (1,), EVERY, 3, (*SLOW, *PRESETS_ONLY)),
)
SYSTEMS: Final = """`qsample` is the preset "quick". genai and llama.cpp have 4-bit weights in blocks of 32. KL: of a
system's bits from float32, in nats, on held-out text of a trained model ([quality.md](quality.md)). With
--no-batch-invariant, a step of one row computes one row. `genai defaults` uses onnxruntime-genai's own number of
threads: half of the logical processors."""


def run_overhead(worker: Worker, results: Results, shape: str, steps: int) -> None:
    """Measure the host's and the sampler's share of a step, in qsample's own loop."""
    for batch in (1, 4):
        request = {"rows": batch, "prompt_tokens": 64}
        worker.ask(**request, new_tokens=8, sampling={"temperature": 0.0})
        answer = worker.ask("overhead", **request, new_tokens=steps, everything=EVERYTHING)
        milliseconds = {name: 1e3 * median(values) for name, values in answer.items()}
        pairs = min(len(answer["everything"]), len(answer["greedy"]))
        times = median_ratio(answer["everything"][:pairs], answer["greedy"][:pairs])
        results.shape(shape)["overhead"][str(batch)] = {
            "ms": milliseconds,
            "everything_over_greedy": times,
        }


def check_tokens(checkpoint: Path, results: Results, shape: str, threads: int) -> None:
    """Compare the greedy tokens of the float32 package with those of transformers."""
    package = make_package(checkpoint, checkpoint.with_name("float32"), "float32")
    tokens = []
    for system, model in (("qsample", package), ("transformers", checkpoint)):
        worker = Worker(system, model, sys.executable, threads)
        # Many prompts and few steps: greedy text of a random model soon repeats one token.
        answer = worker.ask(rows=16, prompt_tokens=64, new_tokens=4, sampling={"temperature": 0.0})
        tokens.append(np.array(answer["tokens"]))
        worker.close()
    equal = int((tokens[0] == tokens[1]).sum())
    results.shape(shape)["tokens"] = {"compared": int(tokens[0].size), "equal": equal}


def run_shape(
    shape: str, parts: list[Part], options: argparse.Namespace, results: Results, console: Console
) -> None:
    folder, python = options.work / shape, options.peers_python
    title = f"{shape}, {processor_class()}, {count(options.threads, 'thread')}"
    parts = [replace(part, shape=title) for part in parts]
    with console.status(f"{shape}: a checkpoint of random weights"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")

    def genai() -> Path:
        return make_genai_model(checkpoint, folder / "genai-last-logits", python, last_logits=True)

    def package(name: str) -> Path:
        preset, layers = PRESETS[PRESET_OF[name]], SHAPES[shape]["num_hidden_layers"]
        outer = dict.fromkeys(("layers.0.*", f"layers.{layers - 1}.*"), preset.outer)
        table = folder / f"{PRESET_OF[name]}.json"
        table.write_text(json.dumps({"lm_head": preset.head, **outer, "*": "int4"}), "utf-8")
        return make_package(
            checkpoint, folder / table.stem, str(table), "--block-size", str(preset.block_size)
        )

    builders = {
        **{name: lambda name=name: package(name) for name in PRESET_OF},
        "genai": genai,
        "genai defaults": genai,
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
        "transformers": lambda: checkpoint,
    }
    models = build_each(builders, [OWN, *options.system], title, results, console)
    facts = results.shape(title)
    if (
        options.tokens
        and (options.again or not facts["tokens"])
        and size_of(checkpoint) < LARGEST_FLOAT32
    ):
        with console.status(f"{shape}: greedy tokens against transformers'"):
            check_tokens(checkpoint, results, title, options.threads)
    overhead = options.overhead_steps and (options.again or not facts["overhead"])
    todo = remaining(results, parts, models, again=options.again)
    if not (todo or overhead):
        console.print(f"{shape}: measured before", highlight=False)
        return
    used = {
        name: model
        for name, model in models.items()
        if any(name not in part.without for part in parts)
    }
    workers = start(used, title, options, results, console)
    run_cells(workers, results, todo, options.new_tokens, console)
    if overhead:
        run_overhead(workers[OWN], results, title, options.overhead_steps)
    results.save()
    for worker in workers.values():
        worker.close()


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """The plan, or the grid of the options."""
    grid, plan = options.prompt or options.batch or options.mix, WHOLE if options.whole else CENTRAL
    planned = [part for part in plan if options.shape is None or part.shape in options.shape]
    if planned and not grid:
        return [replace(part, rounds=options.rounds or part.rounds) for part in planned]
    prompts, rows = tuple(options.prompt or [64]), tuple(options.batch or [1, 4])
    mixes, rounds = tuple(options.mix or EVERY), options.rounds or ROUNDS
    return [Part(shape, prompts, rows, mixes, rounds) for shape in options.shape or ["qwen3-0.6b"]]


def add_quality(facts: dict[str, Any], path: Path) -> None:
    """Give the systems of a section the KL of their bits, by the model that it was measured on."""
    models = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}
    for name, known in facts["systems"].items():
        system = "genai" if name.startswith("genai") else name.removesuffix(f", {NOT_INVARIANT}")
        measured = {
            model: quality["rows"].get(BITS.get(system)) for model, quality in models.items()
        }
        known["kl"] = {model: row["kl"][0] for model, row in measured.items() if row is not None}


def main() -> None:
    parser = make_parser(__doc__, "decode", work="build/decode", peers=True, again=True, threads=2)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES))
    parser.add_argument(
        "--whole", action="store_true", help="the cells of WHOLE, with the overhead and the tokens"
    )
    parser.add_argument(
        "--system", nargs="+", choices=[*PEERS, *list(PRESET_OF)[1:]], help="next to qsample"
    )
    add_options(parser)
    parser.set_defaults(new_tokens=0)
    parser.add_argument("--overhead-steps", type=int, help="0 leaves this part out")
    parser.add_argument(
        "--no-tokens", dest="tokens", action="store_false", help="do not compare greedy tokens"
    )
    parser.add_argument(
        "--no-amx", action="store_true", help="for llama.cpp where AMX is listed and cannot be used"
    )
    parser.add_argument(
        "--quality", type=Path, default=Path("docs/benchmarks/quality.json"), help="of quality.py"
    )
    options, console = parser.parse_args(), Console(stderr=True)
    parts = chosen_parts(options)
    options.tokens &= options.whole
    options.new_tokens = options.new_tokens or (24 if options.whole else 12)
    if options.overhead_steps is None:
        options.overhead_steps = 120 if options.whole else 0
    options.system = options.system or [
        *(PEERS if options.whole else ("genai", "llama.cpp")),
        *list(PRESET_OF)[1:],
    ]
    for part in parts:
        most = min(CTX_LEN, SHAPES[part.shape]["max_position_embeddings"]) - 8
        if options.new_tokens < 2 or max(part.prompts) + options.new_tokens > most:
            parser.error(
                f"{part.shape}: --new-tokens must be at least 2, and {most:,} at most with --prompt"
            )
    options.system = available(options.system, options.peers_python, console)
    results = Results(options.output.with_suffix(".json"), describe_machine())
    for shape in dict.fromkeys(part.shape for part in parts):
        run_shape(shape, [part for part in parts if part.shape == shape], options, results, console)
    for facts in results.data["shapes"].values():
        add_quality(facts, options.quality)
    results.save()
    write(results, options.output, "Decode benchmark", "decode.py", SYSTEMS)


if __name__ == "__main__":
    main()
