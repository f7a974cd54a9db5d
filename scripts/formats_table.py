"""Writes the table of docs/formats.md: what each format of packed weights becomes, and its bits a weight.

    python scripts/formats_table.py           rewrites the table
    python scripts/formats_table.py --check   exits with 1 if it is out of date

The bits in a package are those of the blocks that qsample itself makes of a matrix of such a type.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from qsample.addons.formats.gguf.file import TENSOR_TYPES
from qsample.addons.formats.gguf.types import FLOATS, unpack
from qsample.checkpoints.stored_matrices import IntegerWeight

PAGE = Path(__file__).resolve().parents[1] / "docs" / "formats.md"
BLOCK = re.compile(r"(<!-- formats -->\n)(.*?)(<!-- end of formats -->)", re.DOTALL)
ROWS, INPUTS = 32, 8192
# Format, type, bits of a level, inputs of a group (0: all), zero points, offsets, bits of a group in the file beside
# its levels. Scales, biases and the like have 16 bits, but where the format says otherwise.
INTEGERS = (
    ("GPTQ", "4 bits, groups of 128", 4, 128, True, False, 16 + 4),
    ("AWQ", "4 bits, groups of 128", 4, 128, True, False, 16 + 4),
    ("compressed-tensors", "W4A16, groups of 128", 4, 128, False, False, 16),
    ("compressed-tensors", "W4A16 asymmetric, groups of 128", 4, 128, True, False, 16 + 4),
    ("compressed-tensors", "W8A16, W8A8, channels", 8, 0, False, False, 16),
    ("compressed-tensors", "NVFP4", 8, 16, False, False, 8 - 4 * 16),
    ("compressed-tensors", "MXFP4", 8, 32, False, False, 8 - 4 * 32),
    *(
        ("MLX", f"{bits} bits, groups of 64", bits, 64, False, True, 32)
        for bits in (2, 3, 4, 5, 6, 8)
    ),
    ("MLX", "mxfp4", 8, 32, False, False, 8 - 4 * 32),
    ("MLX", "nvfp4", 8, 16, False, False, 8 - 4 * 16),
    ("bitsandbytes", "LLM.int8()", 8, 0, False, False, 32),
)
AS_FLOAT = (
    ("compressed-tensors", "FP8", 8.0),
    ("compressed-tensors, MLX", "MXFP8", 8 + 8 / 32),
    ("bitsandbytes", "NF4, FP4, with double quantization", 4 + 8 / 64),
)


def lines() -> Iterator[tuple[str, str, float, str, float]]:
    """Format, type, bits a weight in the file, its form in a package, bits there."""
    for kind in TENSOR_TYPES.values():
        if kind.name not in FLOATS:
            raw = np.zeros((ROWS, INPUTS // kind.size * kind.length), np.uint8)
            yield (
                "GGUF",
                kind.name,
                8 * kind.length / kind.size,
                *in_blocks(unpack(kind.name, raw)),
            )
    for name, kind, bits, group, zero_points, offsets, more in INTEGERS:
        shape = (ROWS, INPUTS // (group or INPUTS))
        weight = IntegerWeight(
            bits,
            np.zeros((ROWS, INPUTS), np.uint8),
            np.ones(shape, np.float32),
            np.ones(shape, np.uint8) if zero_points else None,
            np.ones(shape, np.float32) if offsets else None,
        )
        yield (name, kind, bits + more / (group or INPUTS), *in_blocks(weight))
    for name, kind, bits in AS_FLOAT:
        yield name, kind, bits, "float32", 32.0


def in_blocks(weight: IntegerWeight) -> tuple[str, float]:
    """The form of a matrix in a package, and its bits a weight."""
    blocks = weight.blocks(torch.float32)
    assert blocks is not None
    parts = [
        name
        for name in ("zero points", "offsets")
        if getattr(blocks, name.replace(" ", "_")) is not None
    ]
    form = ", ".join([f"{blocks.bits} bits, blocks of {blocks.block_size}", *parts])
    return form, 8 * blocks.nbytes / weight.levels.size


def table() -> str:
    """Markdown."""
    rows = [("file", "type", "bits a weight", "in a package", "bits a weight"), ("---",) * 5]
    rows += [
        (name, kind, f"{stored:.2f}", form, f"{held:.2f}")
        for name, kind, stored, form, held in lines()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    text = PAGE.read_text("utf-8")
    fresh = BLOCK.sub(lambda found: found[1] + table() + found[3], text)
    if "--check" in sys.argv[1:]:
        raise SystemExit(
            0 if fresh == text else f"{PAGE} is out of date: run python scripts/formats_table.py"
        )
    PAGE.write_text(fresh, "utf-8")


if __name__ == "__main__":
    main()
