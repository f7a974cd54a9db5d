"""Whole decoders that take turns: measuring their cells, and the pages and plots; shared by decode, bake and models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import report
from report import (
    PEERS,
    Kept,
    Rows,
    count,
    find,
    markdown,
    median,
    median_ratio,
    one_line,
    print_table,
    put,
)
from rich.console import Console
from systems import ALL
from turns import PEERS as MODULES
from turns import WARM_UP_TOKENS, Cell, Worker, size_of, take_turns

OWN: Final = "qsample"
REAL: Final = "dithered"  # the folder of the real model on which `quality.py` measures bits
FIRST, STEP = "first_token_ms", "step_ms"
Facts = dict[str, Any]  # of a shape


@dataclass(frozen=True)
class Part:
    """Cells of a shape: every prompt length with every number of rows and every mix.

    `without` lists systems that would take too long, or too much memory.
    """

    shape: str
    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    mixes: tuple[str, ...]
    rounds: int
    without: tuple[str, ...] = ()

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*key) for key in product(self.prompts, self.rows, self.mixes)]


class Results(Kept):
    """All measurements on a machine. `missing` of a shape: system → the reason why it cannot run the shape."""

    def __init__(self, path: Path, machine: str) -> None:
        super().__init__(path, {"machine": machine, "shapes": {}})

    def shape(self, shape: str) -> Facts:
        empty = {"systems": {}, "cells": [], "overhead": {}, "tokens": None, "missing": {}}
        facts: Facts = self.data["shapes"].setdefault(shape, empty)
        facts.setdefault("missing", {})
        return facts

    def fail(self, shape: str, system: str, error: Exception, console: Console) -> None:
        """Record why a system cannot run a shape; qsample's own error is raised."""
        if system == OWN:
            raise error
        reason = str(error).strip().splitlines()[-1]
        self.shape(shape)["missing"][system] = one_line(reason)
        self.save()
        console.print(f"{shape} without {system}: {reason}", highlight=False)

    def is_complete(self, shape: str, cell: Cell, systems: Iterable[str], rounds: int) -> bool:
        """Whether all of `systems` that can run the shape have `rounds` rounds of the cell."""
        facts = self.shape(shape)
        cells = [cell_of(facts, cell, name) for name in systems if name not in facts["missing"]]
        return all(found is not None and len(found[STEP]) == rounds for found in cells)

    def save(self) -> None:
        for facts in self.data["shapes"].values():
            facts["cells"].sort(
                key=lambda cell: (cell["prompt"], cell["batch"], cell["mix"], cell["system"])
            )
        super().save()


def cell_of(facts: Facts, cell: Cell, system: str) -> dict[str, Any] | None:
    return find(facts["cells"], prompt=cell.prompt, batch=cell.rows, mix=cell.mix, system=system)


def ratio(facts: Facts, cell: Cell, system: str, field: str, own_name: str = OWN) -> float | None:
    """The time of `system` over qsample's: the median of the rounds' ratios."""
    own, other = cell_of(facts, cell, own_name), cell_of(facts, cell, system)
    return None if own is None or other is None else median_ratio(other[field], own[field])


def build_each(
    builders: Mapping[str, Callable[[], Path]],
    systems: Iterable[str],
    shape: str,
    results: Results,
    console: Console,
) -> dict[str, Path]:
    """The models of `systems`; the results record peers whose builder does not know the architecture."""
    models = {}
    for name in systems:
        with console.status(f"{shape}: a model for {name}"):
            try:
                models[name] = builders[name]()
            except RuntimeError as error:
                results.fail(shape, name, error, console)
    return models


def start(
    models: dict[str, Path],
    shape: str,
    options: argparse.Namespace,
    results: Results,
    console: Console,
) -> dict[str, Worker]:
    """Load the systems; record versions, sizes, and memory after a few steps, or why one cannot run its model."""
    workers: dict[str, Worker] = {}
    facts = results.shape(shape)
    for name, model in models.items():
        python = options.peers_python if MODULES.get(name) else sys.executable
        try:
            more = (
                {"amx": False} if name == "llama.cpp" and getattr(options, "no_amx", False) else {}
            )
            worker = Worker(name, model, python, options.threads, **more)
            # The first steps load mapped weights into memory.
            answer = worker.ask(
                rows=1, prompt_tokens=WARM_UP_TOKENS, new_tokens=8, sampling={"temperature": 0.0}
            )
        except RuntimeError as error:
            results.fail(shape, name, error, console)
            continue
        workers[name] = worker
        known = {"version": worker.loaded["version"], "bytes": size_of(model)}
        facts["systems"][name] = known | {
            "load_seconds": worker.loaded["load_seconds"],
            "memory": answer["memory"],
        }
        facts["missing"].pop(name, None)
    return workers


def remaining(
    results: Results, parts: Iterable[Part], systems: Iterable[str], *, again: bool
) -> list[tuple[Part, Cell]]:
    """The cells that lack rounds of a system that takes part and can run them."""
    todo = []
    for part in parts:
        taking_part = [name for name in systems if name not in part.without]
        for cell in part.cells:
            if again or not results.is_complete(part.shape, cell, taking_part, part.rounds):
                todo.append((part, cell))
    return todo


def run_cells(
    workers: dict[str, Worker],
    results: Results,
    todo: list[tuple[Part, Cell]],
    new_tokens: int,
    console: Console,
    after_round: Callable[[], None] = lambda: None,
    after_cell: Callable[[Cell], None] = lambda cell: None,
) -> None:
    """Measure cells of a shape; a system that fails is recorded and leaves."""
    for number, (part, cell) in enumerate(todo):
        console.print(f"[{number + 1}/{len(todo)}] {part.shape}, {cell}", highlight=False)
        running = {name: worker for name, worker in workers.items() if name not in part.without}

        def failed(name: str, error: RuntimeError, shape: str = part.shape) -> None:
            del workers[name]
            results.fail(shape, name, error, console)

        first, steps = take_turns(
            running,
            cell,
            ALL[cell.mix],
            part.rounds,
            new_tokens,
            failed=failed,
            after_round=after_round,
        )
        for name in running:
            key = {"prompt": cell.prompt, "batch": cell.rows, "mix": cell.mix, "system": name}
            put(results.shape(part.shape)["cells"], key, **{FIRST: first[name], STEP: steps[name]})
        after_cell(cell)
        results.save()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decode and bake share."""
    parser.add_argument("--mix", nargs="+", choices=list(ALL), help="how to sample")
    parser.add_argument("--batch", type=int, nargs="+", help="rows")
    parser.add_argument("--prompt", type=int, nargs="+", help="tokens of each row's prompt")
    parser.add_argument("--rounds", type=int, help="of every cell, in place of the planned number")
    parser.add_argument("--new-tokens", type=int, default=24, help="of each row and round")


def cells_in(facts: Facts) -> list[Cell]:
    keys = dict.fromkeys((cell["prompt"], cell["batch"], cell["mix"]) for cell in facts["cells"])
    return [Cell(*key) for key in keys]


def cell_rows(facts: Facts) -> Rows:
    """A line per prompt, batch and mix: ms to the first token and per step, with multiples of qsample's."""
    systems = [OWN, *sorted({cell["system"] for cell in facts["cells"]} - {OWN})]
    rows = []
    for cell in cells_in(facts):
        row = [f"{cell.prompt:,}", str(cell.rows), cell.mix]
        for name in systems:
            found, texts = cell_of(facts, cell, name), []
            for field in (FIRST, STEP) if found is not None else ():
                times = ratio(facts, cell, name, field)
                multiple = "" if name == OWN else " (?)" if times is None else f" ({times:.2f}x)"
                texts.append(f"{median(found[field]):.1f}{multiple}")  # type: ignore[index]
            row.append(", ".join(texts))
        rows.append(row)
    return [
        "prompt",
        "rows",
        "sampling",
        *(f"{_titled(facts, name)}: TTFT, step" for name in systems),
    ], rows


def _titled(facts: Facts, name: str) -> str:
    """A system with the divergence of its bits on the bundled model, if it is known."""
    kl = facts["systems"].get(name, {}).get("kl", {}).get(REAL)
    return f"{name} (KL {kl:.4f})" if kl else name


def beside_rows(facts: Facts) -> Rows:
    """How many times as long as each package of qsample a step of each peer takes; nothing if there is one package."""
    systems = sorted({cell["system"] for cell in facts["cells"]})
    ours = [name for name in systems if name.partition(",")[0] == OWN]
    peers, rows = [name for name in systems if name not in ours], []
    for cell, own in product(cells_in(facts), ours if len(ours) > 1 else []):
        if found := cell_of(facts, cell, own):
            times = [ratio(facts, cell, peer, STEP, own) for peer in peers]
            texts = ["" if value is None else f"{value:.2f}" for value in times]
            rows.append(
                [
                    f"{cell.prompt:,}",
                    str(cell.rows),
                    cell.mix,
                    own,
                    f"{median(found[STEP]):.1f}",
                    *texts,
                ]
            )
    return [
        "prompt",
        "rows",
        "sampling",
        "package",
        "step, ms",
        *(f"{peer} ÷ it" for peer in peers),
    ], rows


def system_rows(facts: Facts) -> Rows:
    rows = []
    texts = list(
        dict.fromkeys(text for known in facts["systems"].values() for text in known.get("kl", {}))
    )
    for name, known in facts["systems"].items():
        memory = known["memory"]
        held = [
            f"{memory[kind] / 1e6:.0f}" if kind in memory else ""
            for kind in ("anonymous", "mapped")
        ]
        far = [f"{known['kl'][text]:.4f}" if text in known.get("kl", {}) else "" for text in texts]
        sizes = [f"{known['bytes'] / 1e6:.0f}", f"{known['load_seconds']:.2f}"]
        rows.append([name, known["version"], *sizes, *held, *far])
    header = [
        "system",
        "version",
        "files, MB",
        "load, s",
        "anonymous memory, MB",
        "mapped files in memory, MB",
    ]
    return [*header, *(f"KL of its bits, {text}" for text in texts)], rows


def overhead_rows(facts: Facts) -> Rows:
    """The cost of the sampler and the host, as shares of a greedy step."""
    rows = []
    for batch, found in facts["overhead"].items():
        extra = found["everything_over_greedy"] - 1
        rows.append(
            [batch, f"{extra:.1%}", f"{found['ms']['greedy_host'] / found['ms']['greedy']:.1%}"]
        )
    return ["rows", "every sampling step, over greedy", "host's share of a step"], rows


def notes(facts: Facts) -> list[str]:
    """Equal tokens."""
    if found := facts["tokens"]:
        equal = f"{found['equal']:,} of {found['compared']:,}"
        return [f"Greedy tokens of the float32 package equal to transformers': {equal}."]
    return []


def write(results: Results, output: Path, title: str, script: str, systems: str) -> None:
    """Print the tables, and write the page and the plot.

    Args:
        results: The measurements.
        output: The path of the page without a suffix.
        title: The page's title.
        script: The file in benchmarks/ that measured.
        systems: A paragraph on the systems.
    """
    lines = [
        f"# {title}",
        "",
        f"{results.data['machine']}. Made by `python benchmarks/{script}`, whose docstring describes the method;",
        PEERS,
        "For each system: ms until every row has its first token (TTFT), and ms per later step, medians of the rounds;",
        "in brackets the multiple of qsample's time, the median of the ratios within each round.",
        systems,
        "Flat: a temperature that leaves no peak.",
        "",
    ]
    for shape in results.data["shapes"]:
        facts = results.shape(shape)
        lines += [f"## {shape}", ""]
        for kind, (header, rows) in {
            "ms (multiple of qsample's)": cell_rows(facts),
            "peers over qsample": beside_rows(facts),
            "loaded": system_rows(facts),
            "overhead": overhead_rows(facts),
        }.items():
            if rows:
                print_table(header, rows, f"{shape}: {kind}")
                lines += [*markdown(header, rows), ""]
        lines += [f"{line}\n" for line in notes(facts)]
        lines += [
            f"{name} does not run it: {reason.replace('|', '/')}\n"
            for name, reason in facts["missing"].items()
        ]
    if any(facts["cells"] for facts in results.data["shapes"].values()):
        lines += [f"![Tokens per second]({output.name}.png)", ""]
        plot(results.data, output.with_suffix(".png"))
    output.with_suffix(".md").write_text("\n".join(lines))


def plot(data: dict[str, Any], path: Path) -> None:
    """Tokens per second of all rows, at the shortest prompt; a line of panels per shape, a panel per mix."""
    shapes = {name: facts for name, facts in data["shapes"].items() if facts["cells"]}
    every = [cell for facts in shapes.values() for cell in facts["cells"]]
    mixes = list(dict.fromkeys(cell["mix"] for cell in every))
    systems = [OWN, *sorted({cell["system"] for cell in every} - {OWN})]
    figure, axes = report.new_figure(len(shapes), len(mixes), (3.6, 2.9), sharey="row")
    for (shape, facts), line in zip(shapes.items(), axes, strict=True):
        prompt = min(cell["prompt"] for cell in facts["cells"])
        for mix, axis in zip(mixes, line, strict=True):
            batches = sorted({cell["batch"] for cell in facts["cells"] if cell["mix"] == mix})
            heights = {
                name: [
                    1e3 * rows / median(cell[STEP]) if cell else None
                    for rows in batches
                    for cell in [cell_of(facts, Cell(prompt, rows, mix), name)]
                ]
                for name in systems
            }
            report.grouped_bars(axis, [count(rows, "row") for rows in batches], heights)
            axis.set_title(f"{shape}: {mix}", fontsize="medium")
        line[0].set_ylabel(f"tokens/s, prompt of {prompt}")
    report.save_figure(figure, path)
