"""gpu.json, gpu.md and gpu.png, rewritten with every measurement, check and error that comes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CAPTURED = "captured"  # what is compared with all others; see gpu_systems.py


@dataclass(frozen=True)
class Cell:
    """One line of the table. seconds: a step, median of the rounds. floor: seconds to read the weights and the cache
    once; None where the device's bandwidth is not known."""

    shape: str
    system: str
    rows: int
    mix: str
    seconds: float
    floor: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def columns(self) -> list[str]:
        share = "" if self.floor is None else f"{self.floor / self.seconds:.0%}"
        figures = [f"{1e3 * self.seconds:.3f}", f"{self.tokens_per_second:.0f}", share]
        return [self.shape, self.system, str(self.rows), self.mix, *figures]


HEADER = ["shape", "system", "rows", "mix", "ms a step", "tokens/s", "share of the floor"]


def comparisons(cells: list[Cell]) -> list[str]:
    """What the cells say of one another: one line a comparison whose two sides were measured."""
    seconds = {(cell.shape, cell.system, cell.rows, cell.mix): cell.seconds for cell in cells}
    lines = []
    for shape, system, rows, mix in seconds:
        if not system.startswith(CAPTURED):
            continue
        here = f"{shape}, {system}, {rows} rows"
        own = seconds[shape, system, rows, mix]
        greedy = seconds.get((shape, system, rows, "greedy"))
        if mix != "greedy" and greedy is not None:
            lines.append(f"{here}: {mix} takes {own / greedy - 1:+.1%} over greedy")
        others = [other for other in dict.fromkeys(key[1] for key in seconds) if not other.startswith(CAPTURED)]
        for other in others if system == CAPTURED else ():
            theirs = seconds.get((shape, other, rows, mix))
            if theirs is not None:
                lines.append(f"{here}, {mix}: {theirs / own:.2f} times as fast as {other}")
    return lines


class Results:
    """The results of a run, on disk with each one: the machine may be gone before the run ends."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder, self._command = folder, command
        self.machine: dict[str, str] = {}
        self.checks: dict[str, list[str]] = {}
        self.cells: list[Cell] = []
        self.problems: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, kind: str, *values: Any) -> None:
        """What a part of the run reports; see `gpu_process.Reports`."""
        if kind == "machine":
            name, text = values
            self.machine[name] = text
        elif kind == "check":
            shape, line = values
            self.checks.setdefault(shape, []).append(line)
        elif kind == "cell":
            self.cells.append(values[0])
        else:
            self.problems.append(values[0])
        print(*(values[0].columns if kind == "cell" else values), sep=" | ", file=sys.stderr, flush=True)
        self.save()

    def save(self) -> None:
        """Write gpu.json and gpu.md."""
        rows = [asdict(cell) | {"tokens_per_second": cell.tokens_per_second} for cell in self.cells]
        document = {"machine": self.machine, "checks": self.checks, "problems": self.problems, "rows": rows}
        for name, text in (("gpu.json", json.dumps(document, indent=1)), ("gpu.md", "\n".join(self._page()))):
            written = self._folder / f"{name}.part"
            written.write_text(text + "\n")
            written.replace(self._folder / name)  # whole at any time

    def _page(self) -> list[str]:
        lines = ["# Decoding on a GPU", "", f"Written by `{self._command}`.", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()] + [""]
        for shape, said in self.checks.items():
            lines += [f"**{shape}**", "", *(f"- {line}" for line in said), ""]
        if self.problems:
            lines += ["**What did not work, or was left out**", "", *(f"- {line}" for line in self.problems), ""]
        if self.cells:
            lines += [f"| {' | '.join(HEADER)} |", "| --- " * len(HEADER) + "|"]
            lines += [f"| {' | '.join(cell.columns)} |" for cell in self.cells]
            lines += ["", *(f"- {line}" for line in comparisons(self.cells))]
        if (self._folder / "gpu.png").exists():
            lines += ["", "![tokens a second](gpu.png)"]
        return lines

    def plot(self, mix: str) -> None:
        """Write gpu.png: tokens a second over rows, of the cells with `mix`."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        cells = [cell for cell in self.cells if cell.mix == mix]
        shapes = list(dict.fromkeys(cell.shape for cell in cells))
        if not shapes:
            return
        figure, axes = plt.subplots(1, len(shapes), figsize=(6 * len(shapes), 4), squeeze=False)
        for axis, shape in zip(axes[0], shapes, strict=True):
            for system in dict.fromkeys(cell.system for cell in cells):
                points = [(c.rows, c.tokens_per_second) for c in cells if (c.shape, c.system) == (shape, system)]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), marker="o", label=system)
            axis.set(title=f"{shape}, {mix}", xlabel="rows", ylabel="tokens/s", xscale="log", yscale="log")
            axis.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(self._folder / "gpu.png", dpi=120)
        plt.close(figure)
        self.save()
