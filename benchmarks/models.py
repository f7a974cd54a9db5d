"""Hybrids and mixtures of experts on the CPU: first token, step and memory, compared with other systems.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/models.py --peers-python peers/bin/python          # about twenty minutes on two cores
    python benchmarks/models.py --peers-python peers/bin/python --shape qwen3.5-0.8b --again

The models have random weights in the shapes of current models: the whole Qwen3.5-0.8B, and slices of
Qwen3-Next-80B-A3B, Qwen3-30B-A3B and gpt-oss-20b, which have a few layers in full size and the same share of the
vocabulary. They are built once, in --work. Systems take turns, round by round, as in `decode.py`; ratios are taken
within a round. qsample, onnxruntime-genai and llama.cpp have 4-bit weights in blocks of 32, transformers has float32.

Results are written after every cell, and a run continues an interrupted run: complete cells are skipped unless --again
is given. A system that rejects a model is named with its reason.

Two more parts compare the bytes that a step of a single row reads with the speed of the memory in the same rounds; and,
with --scan, a prompt of 1,024 tokens through the layers of Qwen3.5 as a loop over its tokens (the fallback of layers
without operators) with the operators.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import plots
from checkpoints import SHAPES, make_checkpoint, make_genai_model, make_gguf, make_package
from common import add_peer_options, describe_machine, make_parser, markdown, print_table
from decode import build_each, note_failure, start
from decode_report import OWN, Results
from memory_speed import active_bytes, measure
from rich.console import Console
from turns import PAUSE, Cell, Worker, available, take_turns

MODELS: Final = ("qwen3.5-0.8b", "qwen3-next-slice", "qwen3-30b-a3b-slice", "gpt-oss-20b-slice")
SYSTEMS: Final = ("genai", "llama.cpp", "transformers")
CELLS: Final = (Cell(64, 1, "greedy"), Cell(64, 4, "greedy"), Cell(1024, 1, "greedy"))
GREEDY: Final = {"temperature": 0.0}
SCANNED: Final = "qwen3.5-slice"
CTX_LEN: Final = 2048
# Treats every layer as a layer without operators.
AS_A_LOOP: Final = "from qsample.transforms import recurrent; recurrent.recurrence_of = lambda module: None; "
NONE: Final = "no"  # in place of a figure; the reason is below the table
LABELS: Final = {"transformers": "transformers, float32", "genai": "onnxruntime-genai"}
ORDER: Final = (OWN, "genai", "llama.cpp", "transformers")
# The lines of a table: prompt, rows, the field of a cell, its label.
LINES: Final = (
    (64, 1, "first_token_ms", "first token, 64 tokens"),
    (1024, 1, "first_token_ms", "first token, 1,024 tokens"),
    (64, 1, "step_ms", "step, 1 row"),
    (64, 4, "step_ms", "step, 4 rows"),
    (1024, 1, "step_ms", "step, 1 row, after 1,024 tokens"),
)
Rows: TypeAlias = tuple[list[str], list[list[str]]]


def build(shape: str, systems: list[str], options: argparse.Namespace, results: ModelResults, console: Console) -> Any:
    """The model of each system, built unless it exists; the results record systems that reject the shape."""
    folder, python = options.work / shape, options.peers_python
    with console.status(f"{shape}: a checkpoint of random weights"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
    builders = {
        "qsample": lambda: make_package(checkpoint, folder / "int4", "int4", ctx_len=CTX_LEN),
        "genai": lambda: make_genai_model(checkpoint, folder / "genai", python),
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
        "transformers": lambda: checkpoint,
    }
    return build_each(builders, systems, shape, results, console)


def run_cell(
    workers: dict[str, Worker],
    results: ModelResults,
    shape: str,
    cell: Cell,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Measure a cell in rounds; a system that fails is recorded and leaves."""
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
    running = start(models, shape, options, results, console)
    for cell in cells:
        console.print(f"{shape}: {cell}", highlight=False)
        run_cell(running, results, shape, cell, options, console)
    for worker in running.values():
        worker.close()


def run_scan(options: argparse.Namespace, results: ModelResults, console: Console) -> None:
    """Measure the first token of 1,024 tokens: layers as a loop, layers with operators, and transformers; float32."""
    folder = options.work / SCANNED
    with console.status(f"{SCANNED}: packages"):
        checkpoint = make_checkpoint(SCANNED, folder / "checkpoint")
        models = {
            "operators": make_package(checkpoint, folder / "float32", "float32", ctx_len=CTX_LEN),
            "loop": make_package(checkpoint, folder / "loop", "float32", ctx_len=CTX_LEN, before=AS_A_LOOP),
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


class ModelResults(Results):
    """Results with the bytes of a step and the speed of the memory.

    A shape has `active` (prompt → bytes) and `speed` (prompt → bytes per second, per round).
    """

    def set_active(self, shape: str, prompt: int, count: int) -> None:
        self.shape(shape).setdefault("active", {})[str(prompt)] = count

    def add_speed(self, shape: str, prompt: int, speeds: list[float]) -> None:
        self.shape(shape).setdefault("speed", {})[str(prompt)] = speeds

    def line(self, shape: str, prompt: int, rows: int, field: str, system: str) -> str:
        """The median of the rounds with its multiple of qsample's, or the mark of a missing figure."""
        cell = self.cell(shape, prompt, rows, "greedy", system)
        if cell is None:
            return NONE if system in self.shape(shape).get("missing", {}) else ""
        text = f"{np.median(cell[field]):.1f}"
        if system == OWN:
            return text
        ratio = self.ratio(shape, prompt, rows, "greedy", system, "decode" if field == "step_ms" else "prefill")
        return text if ratio is None else f"{text} ({ratio:.2f}x)"


def time_rows(results: ModelResults, shape: str) -> Rows:
    """A line for each time and for the memory, a column for each system."""
    facts = results.shape(shape)
    systems = [name for name in ORDER if name in facts["systems"] or name in facts.get("missing", {})]
    rows = [[label, *(results.line(shape, *key, name) for name in systems)] for *key, label in LINES]
    for label, text in (("files, MB", _files), ("memory, MB: own + mapped files", _memory)):
        cells = [text(facts["systems"][name]) if name in facts["systems"] else NONE for name in systems]
        rows.append([label, *cells])
    return ["", *(LABELS.get(name, name) for name in systems)], rows


def _files(system: dict[str, Any]) -> str:
    return f"{system['bytes'] / 1e6:,.0f}"


def _memory(system: dict[str, Any]) -> str:
    memory = system["memory"]
    return " + ".join(f"{memory[kind] / 1e6:,.0f}" for kind in ("anonymous", "mapped") if kind in memory)


def missing_lines(results: ModelResults, shape: str) -> list[str]:
    missing = results.shape(shape).get("missing", {})
    return [f"{LABELS.get(name, name)} does not run it: {_one_line(reason)}" for name, reason in missing.items()]


def _one_line(reason: str) -> str:
    """A peer's message without the paths of this machine and the separators of a table."""
    reason = re.sub(r"(/[\w.+-]+){2,}/", "", reason)
    return " ".join(reason.replace("|", "/").split())[:300]


def floor_rows(results: ModelResults) -> Rows:
    """The bytes that a step of a single row reads, the memory's time for them, and the time of the step."""
    rows = []
    for shape, facts in results.data["shapes"].items():
        for prompt, count in facts.get("active", {}).items():
            cell, speeds = results.cell(shape, int(prompt), 1, "greedy", OWN), facts.get("speed", {}).get(prompt)
            if cell is None or not speeds:
                continue
            speed, step = float(np.median(speeds)), float(np.median(cell["step_ms"]))
            # Pairs of the same round, if the numbers agree: the machine's speed varies.
            pairs = zip(cell["step_ms"], speeds, strict=len(cell["step_ms"]) == len(speeds))
            share = float(np.median([ms * bytes_per_second / 1e3 / count for ms, bytes_per_second in pairs]))
            floor = 1e3 * count / speed
            figures = [f"{count / 1e6:.1f}", f"{speed / 1e9:.1f}", f"{floor:.2f}", f"{step:.2f}", f"{share:.2f}"]
            rows.append([shape, f"{int(prompt):,}", *figures])
    return ["model", "prompt", "read per step, MB", "memory, GB/s", "floor, ms", "step, ms", "step / floor"], rows


def scan_rows(results: ModelResults) -> Rows:
    """The first token of 1,024 tokens, with the recurrent layers as a loop and as operators."""
    found = results.data.get("scan")
    if not found:
        return [], []
    times = found["first_token_ms"]
    rows = []
    for name, label in (("loop", "a loop (Scan)"), ("operators", "operators"), ("transformers", "transformers")):
        ratios = np.divide(times[name], times["operators"])
        rows.append([label, f"{np.median(times[name]):.0f}", f"{np.median(ratios):.2f}x"])
    return ["recurrent layers as", "first token of 1,024, ms", "over operators"], rows


def show(results: ModelResults, console: Console) -> None:
    """Print every table."""
    tables = [(f"{shape}: ms (multiple of qsample's)", time_rows(results, shape)) for shape in results.data["shapes"]]
    tables += [("One row: bytes of a step", floor_rows(results)), ("Loop and operators", scan_rows(results))]
    for title, (header, rows) in tables:
        if rows:
            print_table(console, header, rows, title)
    for shape in results.data["shapes"]:
        for line in missing_lines(results, shape):
            console.print(f"{shape}: {line}", highlight=False)


def write(results: ModelResults, output: Path) -> None:
    """Write the page and the plot."""
    shapes = [name for name, facts in results.data["shapes"].items() if facts["cells"]]
    lines = [
        "# Hybrids and mixtures of experts",
        "",
        f"{results.data['machine']}. Made by `python benchmarks/models.py`, whose docstring describes the method;",
        "`pip install -r benchmarks/peers.txt` installs the other systems with all their packages.",
        "Milliseconds, medians of the rounds; in brackets the multiple of qsample's time, the median of the ratios",
        "within each round. Greedy, random weights; all systems except transformers (float32) have 4-bit weights in",
        "blocks of 32.",
        "A slice has a few of its model's layers and the same share of its vocabulary.",
        "",
    ]
    for shape in shapes:
        lines += [f"## {shape}", "", *markdown(*time_rows(results, shape)), ""]
        lines += [f"{line}\n" for line in missing_lines(results, shape)]
        versions = (facts["version"] for facts in results.shape(shape)["systems"].values())
        lines += [f"Measured with {', '.join(dict.fromkeys(versions))}.", ""]
    if floor_rows(results)[1]:
        lines += ["## Bytes that a step reads", "", *markdown(*floor_rows(results)), ""]
        lines += [
            "For a single row: weights (of a mixture only the active experts), keys and values, and recurrent states.",
            "The floor is the time in which the memory delivers them, at the speed measured in each round",
            "(`benchmarks/memory_speed.py`).",
            "",
        ]
    if scan_rows(results)[1]:
        lines += ["## A loop over the tokens, compared with operators", "", *markdown(*scan_rows(results)), ""]
        lines += [f"{results.data['scan']['shape']}, float32, a single row.", ""]
    if shapes:
        lines += [f"![Times by system]({output.name}.png)", ""]
        plot(results, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def plot(results: ModelResults, path: Path) -> None:
    """A panel for each time, a line for each shape, a point for each system: the times differ a hundredfold, which bars
    from zero cannot show."""
    shapes = [name for name, facts in results.data["shapes"].items() if facts["cells"]]
    figure, axes = plots.new_figure(2, 2, (5, 2.9), sharey=True, sharex="row")
    for (prompt, rows, field, label), axis in zip(LINES[:4], axes.flat, strict=True):
        for index, name in enumerate(ORDER):
            cells = [results.cell(shape, prompt, rows, "greedy", name) for shape in shapes]
            places = [place + (index - 1.5) * 0.15 for place in range(len(shapes))]
            points = [(float(np.median(cell[field])), place) for place, cell in zip(places, cells, strict=True) if cell]
            lacking = [place for place, cell in zip(places, cells, strict=True) if not cell]
            look = plots.line_style(LABELS.get(name, name)) | {"linestyle": "", "markersize": 8}
            axis.plot([x for x, _ in points], [y for _, y in points], **look)
            crosses = look | {"marker": "x", "markersize": 6, "label": f"{look['label']}: {plots.MISSING}"}
            if lacking:
                axis.plot([0.015] * len(lacking), lacking, transform=axis.get_yaxis_transform(), **crosses)
        axis.set(title=f"{label}, ms", xscale="log", yticks=range(len(shapes)), ylim=(len(shapes) - 0.4, -0.6))
        axis.set_yticklabels(shapes)
        axis.grid(visible=True, which="both", axis="x", alpha=0.2)
    plots.legend(figure)
    plots.save(figure, path)


def main() -> None:
    parser = make_parser(__doc__)
    add_peer_options(parser, "models", "build/models")
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=list(MODELS))
    parser.add_argument("--system", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), help="next to qsample")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24, help="of each row and round")
    parser.add_argument(
        "--scan", action=argparse.BooleanOptionalAction, default=True, help="the loop and the operators"
    )
    options, console = parser.parse_args(), Console(stderr=True)
    if options.rounds < 1 or options.new_tokens < 2:
        parser.error("--rounds must be at least 1 and --new-tokens at least 2")
    systems = [OWN, *available(options.system, options.peers_python, console)]
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
