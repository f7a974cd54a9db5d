"""Draws the plots of docs/benchmarks again, from the JSON files next to them.

python benchmarks/plots.py
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# JSON file → the benchmark whose `plot(data, path)` draws it.
DRAWN_BY: Final = {
    "decode": "decoders",
    "bake": "decoders",
    "gpu": "gpu_report",
    "serve_tiny": "serve",
}
DRAWN_BY.update(
    (name, name) for name in ("export", "long_context", "models", "sampler", "serve", "serving")
)


def redraw(folder: Path) -> Iterator[Path]:
    """Draw the plots of the JSON files in `folder`; yields the paths."""
    for name, benchmark in DRAWN_BY.items():
        path = folder / f"{name}.json"
        if path.exists():
            importlib.import_module(benchmark).plot(
                json.loads(path.read_text()), path.with_suffix(".png")
            )
            yield path.with_suffix(".png")


if __name__ == "__main__":
    for written in redraw(Path("docs/benchmarks")):
        print(written)
