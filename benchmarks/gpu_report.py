"""gpu.json, gpu.md and gpu.png, rewritten with every measurement, check and error that comes."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


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


class Results:
    """The results of a run, on disk at any time: the machine may be gone before the run ends."""

    def __init__(self, folder: Path, command: str) -> None:
        self._folder, self._command = folder, command
        self.machine: dict[str, str] = {}
        self.checks: dict[str, list[str]] = {}
        self.cells: list[Cell] = []
        self.problems: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A part of the run. What goes wrong in it is noted, and ends this part alone."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.problems.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split()):.300}")
        finally:
            self.save()

    def check(self, shape: str, line: str) -> None:
        self.checks.setdefault(shape, []).append(line)

    def save(self) -> None:
        """Write gpu.json and gpu.md."""
        rows = [asdict(cell) | {"tokens_per_second": cell.tokens_per_second} for cell in self.cells]
        document = {"machine": self.machine, "checks": self.checks, "problems": self.problems, "rows": rows}
        (self._folder / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
        (self._folder / "gpu.md").write_text("\n".join(self._page()) + "\n")

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
