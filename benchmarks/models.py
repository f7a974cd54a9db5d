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
import sys
from typing import Any, Final

import report
from checkpoints import SHAPES, make_checkpoint, make_genai_model, make_gguf, make_package
from decoders import (
    FIRST,
    OWN,
    STEP,
    Facts,
    Part,
    Results,
    build_each,
    cell_of,
    ratio,
    remaining,
    run_cells,
    start,
)
from memory_speed import active_bytes, measure
from report import (
    PEERS,
    Rows,
    describe_machine,
    make_parser,
    markdown,
    median,
    median_ratio,
    one_line,
    print_table,
)
from rich.console import Console
from turns import Cell, Worker, available, take_turns

MODELS: Final = ("qwen3.5-0.8b", "qwen3-next-slice", "qwen3-30b-a3b-slice", "gpt-oss-20b-slice")
SYSTEMS: Final = ("genai", "llama.cpp", "transformers")
CELLS: Final = (((64,), (1, 4)), ((1024,), (1,)))  # prompts and rows
GREEDY: Final = {"temperature": 0.0}
SCANNED: Final = "qwen3.5-slice"
CTX_LEN: Final = 2048
# Treats every layer as a layer without operators.
AS_A_LOOP: Final = (
    "from qsample.transforms import recurrent; recurrent.recurrence_of = lambda module: None; "
)
NONE: Final = "no"  # in place of a figure; the reason is below the table
LABELS: Final = {"transformers": "transformers, float32", "genai": "onnxruntime-genai"}
ORDER: Final = (OWN, "genai", "llama.cpp", "transformers")
# The lines of a table: the cell, the field, its label.
LINES: Final = (
    (Cell(64, 1, "greedy"), FIRST, "first token, 64 tokens"),
    (Cell(1024, 1, "greedy"), FIRST, "first token, 1,024 tokens"),
    (Cell(64, 1, "greedy"), STEP, "step, 1 row"),
    (Cell(64, 4, "greedy"), STEP, "step, 4 rows"),
    (Cell(1024, 1, "greedy"), STEP, "step, 1 row, after 1,024 tokens"),
)


def run_shape(
    shape: str, systems: list[str], options: argparse.Namespace, results: Results, console: Console
) -> None:
    folder, python = options.work / shape, options.peers_python
    with console.status(f"{shape}: a checkpoint of random weights"):
        checkpoint = make_checkpoint(shape, folder / "checkpoint")
    builders = {
        OWN: lambda: make_package(checkpoint, folder / "int4", "int4", ctx_len=CTX_LEN),
        "genai": lambda: make_genai_model(checkpoint, folder / "genai", python),
        "llama.cpp": lambda: make_gguf(checkpoint, folder / "q4_0.gguf", python),
        "transformers": lambda: checkpoint,
    }
    models = build_each(builders, systems, shape, results, console)
    parts = [Part(shape, prompts, rows, ("greedy",), options.rounds) for prompts, rows in CELLS]
    todo = remaining(results, parts, models, again=options.again)
    if not todo:
        console.print(f"{shape}: measured before", highlight=False)
        return
    facts, choices = results.shape(shape), SHAPES[shape].get("num_experts_per_tok", 0)
    for (prompt,), _ in CELLS:
        facts.setdefault("active", {})[str(prompt)] = active_bytes(
            models[OWN], choices, history=prompt + 1
        )
    speeds: list[float] = []

    def keep_speeds(cell: Cell) -> None:
        if cell.rows == 1:
            facts.setdefault("speed", {})[str(cell.prompt)] = speeds[-options.rounds :]

    running = start(models, shape, options, results, console)
    speed = lambda: speeds.append(measure(options.threads))  # noqa: E731
    run_cells(running, results, todo, options.new_tokens, console, speed, keep_speeds)
    for worker in running.values():
        worker.close()


def run_scan(options: argparse.Namespace, results: Results, console: Console) -> None:
    """Measure the first token of 1,024 tokens: layers as a loop, layers with operators, and transformers; float32."""
    folder = options.work / SCANNED
    with console.status(f"{SCANNED}: packages"):
        checkpoint = make_checkpoint(SCANNED, folder / "checkpoint")
        models = {
            "operators": make_package(checkpoint, folder / "float32", "float32", ctx_len=CTX_LEN),
            "loop": make_package(
                checkpoint, folder / "loop", "float32", ctx_len=CTX_LEN, before=AS_A_LOOP
            ),
            "transformers": checkpoint,
        }
    workers = {
        name: Worker(
            "transformers" if name == "transformers" else OWN,
            model,
            sys.executable,
            options.threads,
        )
        for name, model in models.items()
    }

    def failed(name: str, error: RuntimeError) -> None:
        raise error

    first, _ = take_turns(
        workers, Cell(1024, 1, "greedy"), GREEDY, options.rounds, 2, failed=failed
    )
    for worker in workers.values():
        worker.close()
    results.data["scan"] = {"shape": SCANNED, "first_token_ms": first}
    results.save()


def _figure(facts: Facts, cell: Cell, field: str, system: str) -> str:
    """The median of the rounds with its multiple of qsample's, or the mark of a missing figure."""
    found = cell_of(facts, cell, system)
    if found is None:
        return NONE if system in facts.get("missing", {}) else ""
    text, times = f"{median(found[field]):.1f}", ratio(facts, cell, system, field)
    return text if system == OWN or times is None else f"{text} ({times:.2f}x)"


def time_rows(facts: Facts) -> Rows:
    """A line for each time and for the memory, a column for each system."""
    known = facts["systems"]
    systems = [name for name in ORDER if name in known or name in facts.get("missing", {})]
    rows = [
        [label, *(_figure(facts, cell, field, name) for name in systems)]
        for cell, field, label in LINES
    ]
    for label, text in (("files, MB", _files), ("memory, MB: own + mapped files", _memory)):
        rows.append([label, *(text(known[name]) if name in known else NONE for name in systems)])
    return ["", *(LABELS.get(name, name) for name in systems)], rows


def _files(system: dict[str, Any]) -> str:
    return f"{system['bytes'] / 1e6:,.0f}"


def _memory(system: dict[str, Any]) -> str:
    memory = system["memory"]
    return " + ".join(
        f"{memory[kind] / 1e6:,.0f}" for kind in ("anonymous", "mapped") if kind in memory
    )


def missing_lines(facts: Facts) -> list[str]:
    missing = facts.get("missing", {})
    return [
        f"{LABELS.get(name, name)} does not run it: {one_line(reason)}"
        for name, reason in missing.items()
    ]


def floor_rows(shapes: dict[str, Facts]) -> Rows:
    """The bytes that a step of a single row reads, the memory's time for them, and the time of the step."""
    rows = []
    for shape, facts in shapes.items():
        for prompt, size in facts.get("active", {}).items():
            cell, speeds = (
                cell_of(facts, Cell(int(prompt), 1, "greedy"), OWN),
                facts.get("speed", {}).get(prompt),
            )
            if cell is None or not speeds:
                continue
            speed, step = median(speeds), median(cell[STEP])
            # Pairs of the same round, if the numbers agree: the machine's speed varies.
            pairs = zip(cell[STEP], speeds, strict=len(cell[STEP]) == len(speeds))
            share = median([milliseconds * rate / 1e3 / size for milliseconds, rate in pairs])
            figures = [f"{size / 1e6:.1f}", f"{speed / 1e9:.1f}", f"{1e3 * size / speed:.2f}"]
            rows.append([shape, f"{int(prompt):,}", *figures, f"{step:.2f}", f"{share:.2f}"])
    return [
        "model",
        "prompt",
        "read per step, MB",
        "memory, GB/s",
        "floor, ms",
        "step, ms",
        "step / floor",
    ], rows


def scan_rows(times: dict[str, list[float]]) -> Rows:
    """The first token of 1,024 tokens, with the recurrent layers as a loop and as operators."""
    rows = []
    for name, label in (
        ("loop", "a loop (Scan)"),
        ("operators", "operators"),
        ("transformers", "transformers"),
    ):
        over = median_ratio(times[name], times["operators"])
        rows.append([label, f"{median(times[name]):.0f}", f"{over:.2f}x"])
    return ["recurrent layers as", "first token of 1,024, ms", "over operators"], rows


def write(results: Results, output: Any, *, show: bool = False) -> None:
    """Write the page and the plot; with `show`, print the tables."""
    data = results.data
    shapes = {name: facts for name, facts in data["shapes"].items() if facts["cells"]}
    lines = [
        "# Hybrids and mixtures of experts",
        "",
        f"{data['machine']}. Made by `python benchmarks/models.py`, whose docstring describes the method;",
        PEERS,
        "Milliseconds, medians of the rounds; in brackets the multiple of qsample's time, the median of the ratios",
        "within each round. Greedy, random weights; all systems except transformers (float32) have 4-bit weights in",
        "blocks of 32.",
        "A slice has a few of its model's layers and the same share of its vocabulary.",
        "",
    ]

    def table(title: str, rows: Rows) -> None:
        lines.extend([f"## {title}", "", *markdown(*rows), ""])
        if show:
            print_table(*rows, title)

    for shape, facts in shapes.items():
        table(shape, time_rows(facts))
        lines += [f"{line}\n" for line in missing_lines(facts)]
        versions = (known["version"] for known in facts["systems"].values())
        lines += [f"Measured with {', '.join(dict.fromkeys(versions))}.", ""]
    if floor_rows(shapes)[1]:
        table("Bytes that a step reads", floor_rows(shapes))
        lines += [
            "For a single row: weights (of a mixture only the active experts), keys and values, and recurrent states.",
            "The floor is the time in which the memory delivers them, at the speed measured in each round",
            "(`benchmarks/memory_speed.py`).",
            "",
        ]
    if scan := data.get("scan"):
        table("A loop over the tokens, compared with operators", scan_rows(scan["first_token_ms"]))
        lines += [f"{scan['shape']}, float32, a single row.", ""]
    if shapes:
        lines += [f"![Times by system]({output.name}.png)", ""]
        plot(data, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def plot(data: dict[str, Any], path: Any) -> None:
    """A panel for each time, a line for each shape, a point for each system: the times differ a hundredfold, which bars
    from zero cannot show."""
    shapes = {name: facts for name, facts in data["shapes"].items() if facts["cells"]}
    figure, axes = report.new_figure(2, 2, (5, 2.9), sharey=True, sharex="row")
    for (cell, field, label), axis in zip(LINES[:4], axes.flat, strict=True):
        for index, name in enumerate(ORDER):
            cells = [cell_of(facts, cell, name) for facts in shapes.values()]
            places = [place + (index - 1.5) * 0.15 for place in range(len(shapes))]
            points = [
                (median(found[field]), place)
                for place, found in zip(places, cells, strict=True)
                if found
            ]
            lacking = [place for place, found in zip(places, cells, strict=True) if not found]
            look = report.line_style(LABELS.get(name, name)) | {"linestyle": "", "markersize": 8}
            axis.plot([x for x, _ in points], [y for _, y in points], **look)
            crosses = look | {
                "marker": "x",
                "markersize": 6,
                "label": f"{look['label']}: {report.MISSING}",
            }
            if lacking:
                axis.plot(
                    [0.015] * len(lacking), lacking, transform=axis.get_yaxis_transform(), **crosses
                )
        axis.set(
            title=f"{label}, ms",
            xscale="log",
            yticks=range(len(shapes)),
            ylim=(len(shapes) - 0.4, -0.6),
        )
        axis.set_yticklabels(list(shapes))
        axis.grid(visible=True, which="both", axis="x", alpha=0.2)
    report.save_figure(figure, path)


def main() -> None:
    parser = make_parser(__doc__, "models", work="build/models", peers=True, again=True, threads=2)
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=list(MODELS))
    parser.add_argument(
        "--system", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), help="next to qsample"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24, help="of each row and round")
    parser.add_argument(
        "--no-scan", dest="scan", action="store_false", help="leave out the loop and the operators"
    )
    options, console = parser.parse_args(), Console(stderr=True)
    systems = [OWN, *available(options.system, options.peers_python, console)]
    results = Results(options.output.with_suffix(".json"), describe_machine(options.threads))
    for shape in options.shape:
        run_shape(shape, systems, options, results, console)
        write(results, options.output)
    if options.scan and (options.again or "scan" not in results.data):
        run_scan(options, results, console)
    write(results, options.output, show=True)


if __name__ == "__main__":
    main()
