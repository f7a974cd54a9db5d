"""Writes the tables of docs/contract.md, command-line.md, migrating.md and speed.md, and js/src/contract.ts.

The times of steps in docs/speed.md come from docs/benchmarks/decode.json.

    python scripts/contract_tables.py           rewrites the tables in place
    python scripts/contract_tables.py --check   exits with 1 if a table is out of date

A table is between `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is a key of TABLES.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import contract_typescript

from qsample.addons.migrate.spellings import ELSEWHERE
from qsample.contract import tensors as contract
from qsample.contract.interface import (
    AdapterTarget,
    Features,
    ImageShape,
    Interface,
    KeyValueShape,
    adapter_ids,
)
from qsample.contract.tensors import TensorSpec

ROOT = Path(__file__).resolve().parent.parent
PAGES = tuple(
    ROOT / "docs" / f"{name}.md" for name in ("contract", "command-line", "migrating", "speed")
)
TYPESCRIPT = ROOT / "js" / "src" / "contract.ts"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def axes(spec: TensorSpec) -> str:
    """`[B, S]`, or `scalar`."""
    return f"[{', '.join(map(str, spec.axes))}]" if spec.axes else "scalar"


def off_value(spec: TensorSpec) -> str:
    """The off-value as text; empty for tensors that are not parameters."""
    return (
        "" if spec.off is None else str(spec.off) if spec.dtype == "float32" else str(int(spec.off))
    )


def tensors(specs: Iterable[TensorSpec]) -> str:
    """name, dtype, shape, meaning."""
    return markdown(
        ("name", "dtype", "shape", "meaning"),
        ([f"`{s.name}`", s.dtype, axes(s), s.meaning] for s in specs),
    )


def parameters(specs: Iterable[TensorSpec]) -> str:
    """Per-row sampling inputs with their off-values."""
    rows = ([f"`{s.name}`", s.dtype, axes(s), off_value(s), s.meaning] for s in specs)
    return markdown(("name", "dtype", "shape", "off", "meaning"), rows)


def states() -> str:
    """Each retained state with the output of its next value; the cache of layer `{i}` is a pair of rows."""
    rows = []
    sampler_states = (*contract.SAMPLER_STATES, contract.GRAMMAR_STATE)
    for spec in (*sampler_states, *contract.FILTER_STATES.values()):
        after = "— (read-only)" if spec.read_only else f"`{contract.retained_name(spec.name)}`"
        rows.append([f"`{spec.name}`", after, spec.dtype, axes(spec), spec.meaning])
    for spec in Interface(vocab_size=1, key_values=(KeyValueShape(1, 1),)).cache_states:
        name = spec.name.replace(".0.", ".{i}.")
        meaning = spec.meaning.replace("layer 0", "layer i")
        rows.append(
            [f"`{name}`", f"`{contract.retained_name(name)}`", "model", "[B, H, T, K]", meaning]
        )
    return markdown(("input", "output", "dtype", "shape", "meaning"), rows)


def optional_inputs() -> str:
    """The inputs that a feature adds."""
    return parameters((*contract.LOGIT_BIAS_INPUTS, contract.ALLOWED_TOKENS))


def extra_parameters() -> str:
    """The inputs of the extra filters; a filter's name precedes its first input."""
    rows = (
        [
            f"`{name}`" if place == 0 else "",
            f"`{s.name}`",
            s.dtype,
            axes(s),
            off_value(s),
            s.meaning,
        ]
        for name, specs in contract.EXTRA_PARAMETERS.items()
        for place, s in enumerate(specs)
    )
    return markdown(("filter", "name", "dtype", "shape", "off", "meaning"), rows)


def filters() -> str:
    """The values of `--filter`, and their parameters."""
    rows = (
        [f"`{name}`", f"`{spec.name}`", spec.meaning]
        for name, specs in contract.EXTRA_PARAMETERS.items()
        for spec in specs
    )
    return markdown(("--filter", "parameter", "meaning"), rows)


def outputs() -> str:
    """`next_ids` and the outputs of features."""
    everything = Features(logprobs=True, top_logprobs=1, probs=True)
    return tensors(Interface(vocab_size=1, key_values=(), features=everything).sampler_outputs)


def speculation() -> str:
    """The inputs and outputs of packages whose steps may give a row several tokens."""
    features = Features(logprobs=True, top_logprobs=1, num_speculative_tokens=1)
    outputs = Interface(vocab_size=1, key_values=(), features=features).sampler_outputs
    return parameters(contract.SPECULATION_INPUTS) + "\n" + tensors(outputs[1:])


def adapters() -> str:
    """The inputs of packages that take adapters, for a layer."""
    layer = AdapterTarget("{path}", 0, 0)
    matrices = (
        replace(spec, axes=("P.{kind}", size))
        for spec, size in zip(layer.tensors("model"), ("in", "out"), strict=True)
    )
    return tensors(
        (contract.ADAPTER, replace(adapter_ids("{kind}"), axes=("P.{kind}",)), *matrices)
    )


def images() -> str:
    """The inputs of packages that read images; then those of vision.onnx, which reads patches or tiles."""
    kinds = [
        Interface(1, (), image=ImageShape(0, axial=True, patch_values=values)) for values in (1, 0)
    ]

    def named(spec: TensorSpec) -> TensorSpec:
        if spec.name == contract.IMAGE_FEATURES:
            return replace(spec, dtype="model", axes=(spec.axes[0], "C"))
        return replace(
            spec, axes=tuple("patch_values" if axis == 1 else axis for axis in spec.axes)
        )

    vision = [named(spec) for kind in kinds for spec in (*kind.vision.inputs, *kind.vision.outputs)]
    return parameters(map(named, kinds[0].image_inputs)) + "\n" + tensors(dict.fromkeys(vision))


def spellings() -> str:
    """What other programs call the commands and options."""
    return markdown(
        ("elsewhere", "here"),
        (
            [", ".join(f"`{word}`" for word in words), f"`{ours}`"]
            for ours, words in ELSEWHERE.items()
        ),
    )


def steps() -> str:
    """The shape of Qwen3-0.6B with two threads: milliseconds of a decode step; a part for each class of processor."""
    presets = (
        "qsample",
        "qsample, balanced",
        "qsample, speed",
        "qsample, speed, --no-batch-invariant",
    )
    shown = (*presets, "genai", "llama.cpp")
    sections = json.loads((ROOT / "docs" / "benchmarks" / "decode.json").read_text("utf-8"))[
        "shapes"
    ]
    bits, found = dict[str, float](), dict[tuple[str, ...], dict[str, str]]()
    for title, facts in sections.items():
        shape, _, kind = title.partition(", ")
        if shape != "qwen3-0.6b" or kind.endswith(" 1 thread"):
            continue
        measured = {
            name: known.get("kl", {}).get("dithered") for name, known in facts["systems"].items()
        }
        bits |= {name: kl for name, kl in measured.items() if kl is not None}
        for cell in facts["cells"]:
            key = (kind.partition(", ")[0], f"{cell['prompt']:,}", str(cell["batch"]), cell["mix"])
            central = key[1] == "64" and cell["batch"] in (1, 4) and "top-k" not in cell["mix"]
            if central or key[1:] == ("1,024", "1", "greedy"):
                found.setdefault(key, {})[cell["system"]] = (
                    f"{statistics.median(cell['step_ms']):.1f}"
                )
            if key[1:] == ("64", "1", "greedy"):
                first = f"{statistics.median(cell['first_token_ms']):.0f}"
                found.setdefault((*key[:3], "greedy, first token"), {})[cell["system"]] = first
    systems = [name for name in shown if any(name in times for times in found.values())]
    rows = [[*key, *(times.get(name, "") for name in systems)] for key, times in found.items()]
    titles = [f"{name} (KL {bits[name]:.3f})" if name in bits else name for name in systems]
    return markdown(("processor", "prompt", "rows", "sampling", *titles), rows)


TABLES: dict[str, Callable[[], str]] = {
    "axes": lambda: markdown(
        ("axis", "size"), ([f"`{k}`", v] for k, v in contract.AXIS_MEANINGS.items())
    ),
    "tokens": lambda: tensors((contract.INPUT_IDS, contract.INPUT_LENGTHS, contract.EMIT)),
    "parameters": lambda: parameters(contract.PARAMETERS),
    "optional_inputs": optional_inputs,
    "extra_parameters": extra_parameters,
    "filters": filters,
    "replay_rows": lambda: tensors(contract.REPLAY_ROWS),
    "row_multiple": lambda: tensors((contract.ROW_MULTIPLE,)),
    "speculation": speculation,
    "adapters": adapters,
    "grammars": lambda: parameters(
        (contract.GRAMMAR_DEADLINE, *contract.GRAMMAR_TABLES, contract.GRAMMAR_DRAFTS)
    ),
    "images": images,
    "states": states,
    "outputs": outputs,
    "prompt_scores": lambda: (
        tensors((contract.SCORED_PLACES, contract.SCORED_IDS))
        + "\n"
        + tensors(
            (contract.PROMPT_LOGPROBS, contract.PROMPT_RANKS, *contract.PROMPT_TOP_LOGPROB_OUTPUTS)
        )
    ),
    "initial_state": lambda: tensors((contract.SEED, contract.CAPACITY_INPUT)),
    "spellings": spellings,
    "steps": steps,
    "status": lambda: markdown(
        ("value", "name"), ([str(k), v] for k, v in contract.STATUS_NAMES.items())
    ),
}


def render(page: str) -> str:
    """`page` with every table block rewritten."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[4], page)


def main(arguments: Sequence[str]) -> int:
    """Rewrite or check the files; returns the exit status."""
    now = {path: path.read_text("utf-8") if path.exists() else "" for path in (*PAGES, TYPESCRIPT)}
    wanted = {
        path: contract_typescript.module() if path == TYPESCRIPT else render(text)
        for path, text in now.items()
    }
    stale = [path for path in now if now[path] != wanted[path]]
    for path in stale:
        print(
            f"{'out of date' if '--check' in arguments else 'rewritten'}: {path.relative_to(ROOT)}"
        )
        if "--check" not in arguments:
            path.write_text(wanted[path], "utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
