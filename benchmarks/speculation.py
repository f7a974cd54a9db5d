"""Steps of several tokens on the CPU: prompt lookup while files are edited, texts quoted, and questions answered.

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/speculation.py --peers-python peers/bin/python      # about an hour on two cores
    python benchmarks/speculation.py --kind rewriting --rows 1 --texts 8 --warm

The texts are those of `speculation_texts.py`: 40 real edits of files, written again as a whole and from the middle on,
summaries with quotes, and prose. All systems have the same random weights in 4 bits, so each is made to write the given
answer, greedily; see `systems/qsample.py`. The systems are

- qsample: a package that draws a token a step, with an int8 cache;
- qsample, no guesses: a package that checks guesses, of requests that make none;
- qsample, lookup: the same with prompt_lookup_num_tokens;
- llama.cpp, and llama.cpp, lookup: one row, with the prompt lookup of its Python package and the defaults of that.

onnxruntime-genai is left out: its draws cannot be replaced, so its guesses would all be wrong. Systems that draw a
token a step write the first SAMPLED tokens of each answer, the others whole answers; later steps take longer, so that
this is to the disadvantage of lookup (--whole: whole answers of all systems). Milliseconds are those of a token and
row, over all texts of a kind, and a ratio is that of qsample over the system's. Before each step the worker reads
as many bytes as the last cache has, outside of the measured time, so that the weights come from memory; --warm leaves
that out. Four rows are texts next to each other, cut to the shortest answer. A run continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from checkpoints import SHAPES, make_checkpoint, make_gguf, make_package
from report import Kept, Rows, describe_machine, make_parser, markdown, print_table, rotated
from rich.console import Console
from speculation_texts import Text, make_texts
from turns import Worker, available

KINDS: Final = ("rewriting", "second half", "quotes", "chat")
PLAIN, OFF, LOOKUP = "qsample", "qsample, no guesses", "qsample, lookup"
LLAMA, LLAMA_LOOKUP = "llama.cpp", "llama.cpp, lookup"
SYSTEMS: Final = (PLAIN, OFF, LOOKUP, LLAMA, LLAMA_LOOKUP)
SHARED: Final = {LOOKUP: OFF, LLAMA_LOOKUP: LLAMA}  # systems that share a process
SAMPLED: Final = 64  # tokens of an answer
CTX_LEN: Final = 4096
LLAMA_GUESSES: Final = 10  # the default of llama-cpp-python
HEADER: Final = (
    "text",
    "rows",
    "system",
    "calls",
    "ms a token",
    "over qsample",
    "worst text",
    "tokens a step",
)


def last_cache_bytes() -> int:
    """The size of the largest cache of the first core; 0 if Linux does not report it."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KM])", path.read_text().strip()):
            sizes.append(int(match[1]) << {"K": 10, "M": 20}[match[2]])
    return max(sizes)


def start(options: argparse.Namespace, evict: int, console: Console) -> dict[str, Worker]:
    """A worker for each system."""
    folder = options.work / options.shape
    with console.status("models"):
        checkpoint = make_checkpoint(options.shape, options.checkpoint or folder / "checkpoint")

        def package(name: str, *more: str) -> Path:
            more = ("--kv-cache-dtype", "int8", *more)
            return make_package(
                checkpoint, folder / f"speculation-{name}", "int4", *more, ctx_len=CTX_LEN
            )

        guesses = str(options.guesses)
        models = {
            PLAIN: package("plain"),
            OFF: package(guesses, "--num-speculative-tokens", guesses),
        }
        if available([LLAMA], options.peers_python, console):
            models[LLAMA] = make_gguf(checkpoint, folder / "q4_0.gguf", options.peers_python)
    workers = {}
    for name, model in models.items():
        python = options.peers_python if name == LLAMA else sys.executable
        workers[name] = Worker(
            name.split(",")[0], model, python, options.threads, "write", evict_bytes=evict
        )
    return workers | {name: workers[other] for name, other in SHARED.items() if other in workers}


def ask(
    worker: Worker, system: str, texts: list[Text], options: argparse.Namespace
) -> dict[str, Any]:
    """The measurement of a system over adjacent rows."""
    guesses = {LOOKUP: options.guesses, LLAMA_LOOKUP: LLAMA_GUESSES}.get(system, 0)
    most = min(len(text.answer) for text in texts)
    most = most if guesses or options.whole else min(most, SAMPLED)
    rows = [{"prompt": text.prompt, "answer": text.answer[:most]} for text in texts]
    answer = worker.ask("write", texts=rows, guesses=guesses)
    steps = answer.pop("seconds")
    return {**answer, "steps": len(steps), "seconds": sum(steps)}


def table_rows(measurements: dict[str, dict[str, Any]]) -> Rows:
    """A line per kind of text, number of rows and system."""
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for key, entry in measurements.items():
        kind, rows, _, system = json.loads(key)
        found.setdefault((kind, rows, system), []).append(entry)

    def milliseconds(entries: list[dict[str, Any]]) -> float:
        return 1e3 * sum(one["seconds"] for one in entries) / sum(one["tokens"] for one in entries)

    table = []
    for (kind, rows, system), entries in found.items():
        base = found.get((kind, rows, PLAIN), [])
        ratios = [
            milliseconds([one]) / milliseconds([other])
            for one, other in zip(base, entries, strict=False)
        ]
        names = ("draft_tokens", "accepted_tokens", "tokens", "steps")
        drafted, accepted, tokens, steps = (sum(one[name] for one in entries) for name in names)
        over = (
            [f"{milliseconds(base) / milliseconds(entries):.2f}", f"{min(ratios):.2f}"]
            if base
            else ["", ""]
        )
        shares = [f"{tokens / rows / steps:.2f}", f"{accepted / drafted:.2f}" if drafted else ""]
        table.append(
            [
                kind,
                str(rows),
                system,
                str(len(entries)),
                f"{milliseconds(entries):.1f}",
                *over,
                *shares,
            ]
        )
    return [*HEADER, "guesses right"], table


def main() -> None:
    parser = make_parser(
        __doc__, "speculation", work="build/decode", peers=True, again=True, threads=2
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--checkpoint", type=Path, help="an existing checkpoint of that shape")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--texts", type=int, help="of each kind (default: all)")
    parser.add_argument(
        "--guesses",
        type=int,
        default=15,
        help="num_speculative_tokens and prompt_lookup_num_tokens",
    )
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--whole", action="store_true", help="all systems write whole answers, over equal histories"
    )
    parser.add_argument(
        "--warm", action="store_true", help="leave the weights in the caches between two steps"
    )
    options, console = parser.parse_args(), Console()
    cache = last_cache_bytes()
    evict = 0 if options.warm else cache
    machine = f"{describe_machine(options.threads)}, last cache {cache >> 20} MiB"
    setting = {
        "shape": options.shape,
        "guesses": options.guesses,
        "cold": bool(evict),
        "whole": options.whole,
    }
    data: dict[str, Any] = {"machine": machine, **setting, "measurements": {}}
    kept = Kept(options.output.with_suffix(".json"), data, ("machine", *setting))
    if options.again:
        kept.data["measurements"] = {}
    measurements: dict[str, dict[str, Any]] = kept.data["measurements"]
    workers = start(options, evict, console)
    with console.status("texts"):
        texts = make_texts(options.work, SHAPES[options.shape]["vocab_size"])
    turn = 0
    for kind in options.kind:
        chosen = [text for text in texts if text.kind == kind][: options.texts]
        for rows in options.rows:
            # Whole groups only.
            for index, first in enumerate(range(0, len(chosen) - rows + 1, rows)):
                group = chosen[first : first + rows]
                for system in rotated([name for name in options.system if name in workers], turn):
                    key = json.dumps([kind, rows, index, system])
                    if (rows > 1 and system in (LLAMA, LLAMA_LOOKUP)) or key in measurements:
                        continue
                    with console.status(f"{kind}, {rows} rows, {group[0].name}: {system}"):
                        measurements[key] = ask(workers[system], system, group, options)
                    kept.save()
                turn += 1
    header, lines = table_rows(measurements)
    print_table(header, lines)
    head = f"# Steps of several tokens\n\n{machine}; {'cold' if evict else 'warm'} weights, {options.shape}.\n"
    options.output.with_suffix(".md").write_text("\n".join([head, *markdown(header, lines)]) + "\n")
    for worker in {id(worker): worker for worker in workers.values()}.values():
        worker.close()


if __name__ == "__main__":
    main()
