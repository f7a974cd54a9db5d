r"""Trains a second small model, for measurements of quality beside the bundled model: Python's standard library.

    python benchmarks/second_model.py --out build/second                # 5 minutes of one core
    python benchmarks/quality.py --model build/second --heldout build/second/heldout.txt \
        --calibration-text build/second/train.txt

Llama, hidden 256, feed-forward 768, 4 layers, 3.7 million parameters in float32. Blocks of 32 to 256 divide its widths;
the bundled model's 160 is divided by 32 alone. Its tokenizer and its training are those of
`scripts/train_tiny_lm.py`. The same Python, torch and --steps give the same weights. `heldout.txt` has modules that the
training never saw, and `train.txt` modules that it did.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console

from scripts.train_tiny_lm import (
    Recipe,
    Stream,
    build_model,
    evaluate,
    save,
    split,
    train,
    train_tokenizer,
)

SEED: Final = 1991
LEFT_OUT: Final = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "encodings",
}
TEXT_BYTES: Final = 60_000  # of heldout.txt and of train.txt: about 20,000 tokens


def modules() -> list[str]:
    """The sources of the standard library, without its tests and tables, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if not LEFT_OUT & {*path.relative_to(root).parts}
    )
    return [
        text
        for path in paths
        if (text := path.read_text(encoding="utf-8", errors="replace")).strip()
    ]


def excerpt(documents: list[str], most: int = 6000) -> str:
    """The beginnings of documents, `most` characters each, up to about TEXT_BYTES in all."""
    parts = [document[:most].rpartition("\n")[0] + "\n" for document in documents]
    return "".join(parts[: TEXT_BYTES // most])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/second"), help="folder to write")
    parser.add_argument("--steps", type=int, default=250, help="of 1,024 tokens")
    parser.add_argument(
        "--seconds", type=float, help="end earlier, after this time: other weights each time"
    )
    options, console = parser.parse_args(), Console()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    training, held_out = split(modules(), SEED)
    tokenizer, texts = (
        train_tokenizer(training),
        {"heldout.txt": excerpt(held_out), "train.txt": excerpt(training)},
    )
    streams = [Stream.of(part, tokenizer) for part in (training, [texts["heldout.txt"]])]
    model = build_model(tokenizer, hidden=256, intermediate=768)
    recipe = Recipe(
        options.steps, options.seconds and options.seconds / 60, SEED, batch=2, learning_rate=5e-3
    )
    steps, seconds, loss = train(model, *streams, recipe, console)
    facts = f"{model.num_parameters():,} parameters, {steps} steps in {seconds:.0f} s, loss {loss:.3f}, held out "
    facts += f"{(held := evaluate(model.eval(), streams[1])):.3f} nats a token (perplexity {math.exp(held):.2f})"
    card = f"# A small model of Python's standard library\n\nMade by benchmarks/second_model.py: {facts}.\n"
    save(model, tokenizer, card, options.out, dtype=torch.float32, more=texts)
    console.print(facts, highlight=False)


if __name__ == "__main__":
    main()
