"""The quality of each quantization preset for the bundled model, on held-out text.

    python benchmarks/quality.py                                # docs/quantization.md's table
    python benchmarks/quality.py --model CHECKPOINT --text held_out.txt --calibration-text other.txt

Without --text, the evaluation uses the chapters that `scripts/train_tiny_lm.py` held out of the bundled model's
training, and the calibration uses chapters of the training; both come from the program `bible` (Debian's bible-kjv).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from report import make_parser, markdown

import qsample
from qsample.compiler.quantize import PRESETS
from qsample.evaluation import Evaluation
from qsample.evaluation.plot import draw
from qsample.models.bundled import TINY_LM
from scripts.train_tiny_lm import kjv_documents, split

SEED = 1611  # of the bundled model's training, which selects the held-out chapters
CALIBRATION_CHAPTERS = 24
WAYS = [
    *((weights, preset) for weights in ("int8", "int4", "int4_mixed") for preset in PRESETS),
]


def texts(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The texts for the evaluation and for the calibration."""
    if options.text:
        return ([path.read_text("utf-8") for path in paths] for paths in (options.text, options.calibration_text))
    training, held_out = split(kjv_documents(), SEED)
    return held_out, training[:CALIBRATION_CHAPTERS]


def table(found: Evaluation) -> list[str]:
    rows = []
    for package in found.packages:
        weights, _, preset = Path(package.path).name.partition(".")
        cells = [weights, preset, f"{package.bytes / 1e3:,.0f}", f"{package.perplexity.value:.3f}"]
        for comparison in package.comparisons:
            for interval, digits in ((comparison.kl, 5), (comparison.agreement.map(lambda value: 100 * value), 1)):
                cells.append(f"{interval.value:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}")
        rows.append([*cells, *[""] * (6 - len(cells))])
    return markdown(["weights", "preset", "size, kB", "perplexity", "KL, nats", "top-1, %"], rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=str(TINY_LM), help="checkpoint folder or hub id (default: bundled)")
    parser.add_argument("--text", type=Path, nargs="+", help="UTF-8 files to evaluate on")
    parser.add_argument(
        "--calibration-text", type=Path, nargs="+", help="UTF-8 files to fit weights to; needed with --text"
    )
    parser.add_argument("--ctx-len", type=int, default=512)
    parser.add_argument("--block-size", type=int, help="in place of the presets'")
    parser.add_argument("--work", type=Path, help="folder that keeps the packages; existing packages are reused")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them: a .png or .svg file")
    options = parser.parse_args()
    if bool(options.text) != bool(options.calibration_text):
        parser.error("--text and --calibration-text require each other, and must be different texts")
    held_out, calibration = texts(options)
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        model = qsample.AutoModelForCausalLM.from_pretrained(options.model).export(work / "portable", overwrite=True)
        packages = []
        for weights, preset in (*WAYS, ("float32", "")):
            path = work / f"{weights}.{preset}".rstrip(".")
            packages.append(path)
            if path.exists():
                continue
            print(f"compiling {path.name}", file=sys.stderr)
            chosen = {"preset": preset, "block_size": options.block_size} if preset else {}
            if preset and PRESETS[preset].fitted:
                chosen["calibration_text"] = calibration
            model.compile(path, weights=weights, ctx_len=options.ctx_len, **chosen)
        print("evaluating", file=sys.stderr)
        found = qsample.evaluate(packages[:-1], held_out, against=packages[-1], batch_size=16)
        print("\n".join(table(found)))
        print(f"\n{found.tokens:,} tokens, windows of {found.max_length}, {found.stride} apart", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
        if options.plot:
            draw(found, options.plot)


if __name__ == "__main__":
    main()
