r"""The quality of bits: qsample's presets beside the peers' bits, on a real model and on small ones.

    python scripts/real_model.py                                               # SmolLM2-135M-Instruct
    python benchmarks/quality.py --peers-python peers/bin/python               # its dithered weights
    python benchmarks/quality.py --peers-python peers/bin/python --model build/smollm2/checkpoint
    python benchmarks/quality.py --peers-python peers/bin/python --model qsample/assets/tiny_lm
    python benchmarks/second_model.py --out build/second                       # another small model
    python benchmarks/quality.py --peers-python peers/bin/python --model build/second \
        --heldout build/second/heldout.txt --calibration-text build/second/train.txt

All bits run in qsample's runtime, so the table compares bits, not engines: each product rounds activations to 8 bits.
The peers' files are made by the peers: llama.cpp's quantizer writes GGUF files, whose integers an export keeps, in
the types that it chooses for each matrix; onnxruntime-genai's builder writes decoders that are baked, and by default
rounds as Q4_0 does, with scales in float32. Fitted presets fit to text that the model writes; rows "to text" fit to
--calibration-text. Sizes are of packages, and of the peers' own files.

A real model reads the beginning of a page of these docs, and the answers of its float package to the questions of
`answers.py`. Without --heldout, the texts of the bundled model are chapters that `scripts/train_tiny_lm.py` held out of
its training, and chapters of the training; both come from the program `bible` (Debian's bible-kjv). The results of each
model are kept in the JSON file, where `decode.py` finds them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from answers import ROWS, chats_of, on_answers
from checkpoints import can_import, make_genai_model, make_gguf
from report import Kept, describe_machine, make_parser, markdown, one_line, processor_class
from tokenizers import Tokenizer
from turns import PEERS, size_of

import qsample
from qsample.addons.evaluate.plot import draw
from qsample.compiler.quantize import PRESETS
from qsample.errors import QsampleError
from qsample.models.bundled import TINY_LM
from qsample.models.model import PackagedModel
from qsample.package.divergence import Divergence
from qsample.package.package import read_package
from qsample.package.statistics import Estimate
from scripts.real_model import CHECKPOINT, DITHERED, FOLDER
from scripts.train_tiny_lm import kjv_documents, split

SEED: Final = 1611  # of the bundled model's training, which selects the held-out chapters
CALIBRATION_CHAPTERS: Final = 24
FLOAT, TO_TEXT = "float32", "to text"
MOST_DIVERGENCE: Final = 100.0  # nats: what is bad is measured, too
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
PAGE_CHARACTERS: Final = 9_000
TITLES: Final = {CHECKPOINT: "SmolLM2-135M-Instruct", DITHERED: "SmolLM2-135M-Instruct, dithered"}
OWN: Final = [f"{weights} {preset}" for weights in ("int8", "int4") for preset in PRESETS]
# Worse bits on purpose: how far compile's figure tells them apart.
BLOCKED: Final = {f"int4 quick, blocks of {size}": size for size in (16, 64, 128)}
WORSE: Final = [*BLOCKED, "int2 quick"]
FITTED: Final = [f"int4 {preset}, {TO_TEXT}" for preset, point in PRESETS.items() if point.fitted]
GGUF: Final = {
    f"llama.cpp {kind}": kind for kind in ("Q8_0", "Q5_K_M", "Q4_K_M", "IQ4_NL", "Q4_1", "Q4_0")
}
GENAI: Final = {
    f"onnxruntime-genai {algorithm}": algorithm for algorithm in ("default", "k_quant_mixed")
}
ORDER: Final = [*OWN, *WORSE, *FITTED, *GGUF, *GENAI, FLOAT]


def texts(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The texts for the evaluation and for the calibration."""
    calibration = [path.read_text("utf-8") for path in options.calibration_text or []]
    if options.heldout:
        return [path.read_text("utf-8") for path in options.heldout], calibration
    if options.model.resolve() == TINY_LM:
        training, held_out = split(kjv_documents(), SEED)
        return held_out, training[:CALIBRATION_CHAPTERS]
    return [PAGE.read_text("utf-8")[:PAGE_CHARACTERS]], calibration


def peers(
    options: argparse.Namespace, checkpoint: Path, work: Path
) -> dict[str, Callable[[], tuple[Path, Any]]]:
    """System → its own file, and a model to compile; of the installed peers."""
    python = options.peers_python

    def gguf(kind: str) -> tuple[Path, Any]:
        path = make_gguf(checkpoint, work / f"{kind}.gguf", python, kind, pure=False)
        return path, qsample.AutoModelForCausalLM.from_pretrained(path, tokenizer=str(checkpoint))

    def genai(algorithm: str) -> tuple[Path, Any]:
        path = make_genai_model(
            checkpoint, work / f"genai-{algorithm}", python, algorithm=algorithm
        )
        return path, qsample.AutoModelForCausalLM.from_pretrained(path)

    found = {}
    for peer, make, files in (("llama.cpp", gguf, GGUF), ("genai", genai, GENAI)):
        if missing := can_import(python, PEERS[peer]):
            print(f"without {peer}: {missing}", file=sys.stderr)
            continue
        found |= {name: lambda make=make, kind=kind: make(kind) for name, kind in files.items()}
    return found


def figures(
    found: Any, sizes: dict[str, int], chat: dict[str, dict[str, Estimate]]
) -> dict[str, dict[str, Any]]:
    """Row → size in bytes, perplexity, and [value, low, high] of KL and top-1, and of the same on chats."""
    rows = {}
    for package in found.packages:
        name = Path(package.path).name
        rows[name] = facts = {
            "bytes": sizes.get(name, package.bytes),
            "perplexity": package.perplexity.value,
        }
        for comparison in package.comparisons:
            for key, interval in (("kl", comparison.kl), ("top1", comparison.agreement)):
                facts[key] = [interval.value, interval.low, interval.high]
        for key, interval in chat.get(name, {}).items():
            facts[key] = [interval.value, interval.low, interval.high]
        opened = read_package(Path(package.path))
        gate = Divergence.of(opened)
        if (
            gate is not None and opened.manifest.packed_weights is None
        ):  # otherwise it is from the file's integers
            facts["kl gate"] = [gate.kl.value, gate.kl.low, gate.kl.high]
    return rows


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    columns = [("kl", "KL, nats", 5, 1), ("top1", "top-1, %", 1, 100)]
    if any("kl chat" in facts for facts in rows.values()):
        columns = [
            ("kl", "KL text, nats", 4, 1),
            ("kl chat", "KL chat, nats", 4, 1),
            ("kl gate", "KL compile", 4, 1),
        ]
        columns += [("top1", "top-1 text, %", 1, 100), ("top1 chat", "top-1 chat, %", 1, 100)]
    lines = []
    for name in sorted(rows, key=ORDER.index):
        facts = rows[name]
        cells = [name, f"{facts['bytes'] / 1e3:,.0f}", f"{facts['perplexity']:.3f}"]
        for key, _, digits, factor in columns:
            value, low, high = (factor * number for number in facts.get(key, [0, 0, 0]))
            cells.append(
                f"{value:.{digits}f} ± {(high - low) / 2:.{digits}f}" if key in facts else ""
            )
        lines.append(cells)
    return markdown(
        ["bits", "size, kB", "perplexity", *(title for _, title, _, _ in columns)], lines
    )


def write(data: dict[str, Any], output: Path) -> None:
    """Write the page. output: its path without a suffix."""
    lines = [
        "# Quality of bits",
        "",
        "Made by `python benchmarks/quality.py`, whose docstring describes the method.",
    ]
    lines += [
        "KL and top-1 are relative to the float32 package, ± half of the 95 % interval;",
        "KL compile is what compile reported, on text that the float32 package writes.",
        "",
    ]
    # Real models come first.
    for model, facts in sorted(data["models"].items(), key=lambda entry: entry[0] not in TITLES):
        widths = " and ".join(map(str, facts["widths"]))
        texts = f"{facts['tokens']:,} tokens of {'a page of docs' if model in TITLES else 'held-out text'}"
        if "chat_tokens" in facts:
            texts += f" and {facts['chat_tokens']:,} of answers"
        lines += [f"## {TITLES.get(model, model)}", "", f"{texts}; matrices of {widths} columns;"]
        lines += [f"{facts['machine']}.", "", *table(facts["rows"]), ""]
        if any(width % 256 for width in facts["widths"]):
            lines += [
                "Q4_K has blocks of 256 columns: llama.cpp gives matrices that they do not divide more bits.",
                "",
            ]
        lines += [f"Without {name}: {reason}\n" for name, reason in facts["missing"].items()]
    output.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__, "quality", peers=True)
    parser.add_argument("--model", type=Path, default=FOLDER / DITHERED, help="checkpoint folder")
    parser.add_argument("--heldout", type=Path, nargs="+", help="UTF-8 files to evaluate on")
    parser.add_argument(
        "--calibration-text", type=Path, nargs="+", help="UTF-8 files for the rows that fit to text"
    )
    parser.add_argument("--bits", nargs="+", help="only these rows")
    parser.add_argument("--ctx-len", type=int, default=512)
    parser.add_argument(
        "--work", type=Path, help="folder that keeps the packages; existing packages are reused"
    )
    parser.add_argument("--plot", type=Path, help="also draw the figures: a .png or .svg file")
    options = parser.parse_args()
    held_out, calibration = texts(options)
    with tempfile.TemporaryDirectory() as scratch:
        work, sizes, missing, packages = options.work or Path(scratch), {}, {}, []
        work.mkdir(parents=True, exist_ok=True)
        model = qsample.AutoModelForCausalLM.from_pretrained(options.model)
        made = peers(options, options.model, work)
        for name in (*OWN, *WORSE, *(FITTED if calibration else ()), *made, FLOAT):
            if options.bits and name not in (*options.bits, FLOAT):
                continue
            path, own = work / name, name not in made
            weights, _, preset = name.partition(", ")[0].partition(" ")
            chosen: dict[str, Any] = {}
            if own and preset:
                chosen = {"weights": weights, "preset": preset, "max_divergence": MOST_DIVERGENCE}
            chosen |= {"calibration_text": calibration} if name.endswith(TO_TEXT) else {}
            chosen |= {"block_size": BLOCKED[name]} if name in BLOCKED else {}
            print(path.name, file=sys.stderr)
            try:
                source, to_compile = (None, model) if own else made[name]()
                if not path.exists():
                    if own and not isinstance(model, PackagedModel):
                        to_compile = model = model.export(work / "portable", overwrite=True)
                    to_compile.compile(path, ctx_len=options.ctx_len, **chosen)
            except (RuntimeError, QsampleError) as error:
                if name == FLOAT:
                    raise
                missing[name] = one_line(str(error).splitlines()[-1])
                continue
            packages.append(path)
            sizes |= {} if own else {name: size_of(source)}
        ids = [
            Tokenizer.from_file(str(options.model / "tokenizer.json")).encode(text).ids
            for text in held_out
        ]
        found = qsample.evaluate(packages[:-1], ids, against=packages[-1], batch_size=ROWS)
        is_chat = (options.model / "chat_template.jinja").exists()
        chats = chats_of(packages[-1]) if is_chat else []
        chat = on_answers(packages, chats, options.ctx_len) if chats else {}
        if options.plot:
            draw(found, options.plot)
    rows = figures(found, sizes, chat)
    results = Kept(options.output.with_suffix(".json"), {"models": {}}, same=())
    known = results.data["models"].setdefault(options.model.resolve().name, {"rows": {}})
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    known["widths"] = [config["hidden_size"], config["intermediate_size"]]
    known |= {
        "machine": f"{describe_machine()}, {processor_class()}",
        "tokens": found.tokens,
        "missing": missing,
    }
    if chats:
        known["chat_tokens"] = sum(len(one.answer) for one in chats)
    known["rows"] = (known["rows"] if options.bits else {}) | rows
    results.save()
    write(results.data, options.output)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
