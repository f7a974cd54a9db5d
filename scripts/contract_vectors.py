"""Writes docs/vectors: results of a sampler of this contract, for samplers and hosts in any language.

    python scripts/contract_vectors.py

The tokens come from the tests' float64 reference. Logits are drawn until each parameter makes a difference and no
decision is close, so that a sampler with another float32 rounding returns the same tokens. docs/vectors/README.md
describes the files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from qsample import AutoModelForCausalLM  # noqa: E402
from qsample.compiler.compile import compile_package  # noqa: E402
from qsample.compiler.options import CompileOptions  # noqa: E402
from qsample.contract.tensors import (  # noqa: E402
    CONTRACT_VERSION,
    GRAMMARS_VERSION,
    HUGGING_FACE,
    IMAGES_VERSION,
    STEPS_VERSION,
)
from scripts.vector_drafts import (  # noqa: E402
    ADJUST,
    FILTERS,
    GRAMMAR_TABLES,
    GRAMMARS,
    IMAGES,
    PIECES,
    PROMPTS,
    RECENT,
    SETTINGS,
    WAITING,
    WIDE,
    Draft,
)
from tests.helpers.plain_host import PlainHost  # noqa: E402
from tests.helpers.reference import philox4x32, philox_uniform, reference_step  # noqa: E402
from tests.helpers.vectors import FOLDER, Array, Arrays, Case, after, inputs_of, interface_of, start  # noqa: E402

MARGIN: Final = (
    2.0**-16
)  # of u from each boundary; of a filter's closest call, as a share of its threshold
MODEL_MARGIN: Final = 2.0**-13  # the same for logits of a model, which depend on the machine
MODEL_GAP: Final = 2.0**-6  # between a model's two largest logits
INT8_GAP: Final = (
    2.0**-4
)  # the same over an int8 cache, whose numbers may round to their neighbours
SEEDS: Final = (
    0,
    1,
    -1,
    2**32 - 1,
    2**32,
    2**53 - 1,
    2**53 + 1,
    1234567890123456789,
    2**63 - 1,
    -(2**63),
)
POSITIONS: Final = (*range(9), 4095, 131071)
CHECKPOINT: Final = "qsample/assets/tiny_lm"
CAPACITY, NEW_TOKENS = 48, 20


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for number, (name, drafts) in enumerate(
        {"adjust": ADJUST, "filters": FILTERS, "wide": WIDE, "recent": RECENT}.items()
    ):
        write(
            name,
            {"cases": [drawn(draft, order, number) for draft in drafts for order in draft.orders]},
        )
    drafts = [drawn(draft, HUGGING_FACE, len(GRAMMARS)) for draft in GRAMMARS]
    for case in drafts:
        del case["tables"]
    write(
        "grammars",
        {"contract_version": GRAMMARS_VERSION, "tables": GRAMMAR_TABLES, "cases": drafts},
    )
    write("noise", noise())
    write("package", package())
    write("waiting", waiting())
    write("images", images())


def drawn(draft: Draft, order: str, number: int) -> Case:
    """`draft` with logits for which no decision is close."""
    for attempt in range(2000):
        rng = np.random.default_rng([number, len(draft.name), attempt])
        case, clear = walk(draft, order, rng)
        if clear:
            return case
    raise RuntimeError(f"{draft.name!r}: no logits were found")


def walk(draft: Draft, order: str, rng: np.random.Generator) -> tuple[Case, bool]:
    """The case with the logits of `rng`, and whether it is usable."""
    pieces = draft.prompt if isinstance(draft.prompt[0], list) else [draft.prompt]
    face = interface_of(draft.vocab, order, grammars=draft.grammar_state is not None)
    parameters = {"temperature": 0.0, **draft.parameters}
    case: Case = {
        "name": draft.name,
        "filter_order": order,
        "vocab_size": draft.vocab,
        "capacity": draft.capacity,
    }
    case |= {"seed": str(draft.seed), "parameters": to_json(parameters), "steps": []}
    if draft.grammar_state is not None:
        case |= {"grammar_state": draft.grammar_state, "tables": GRAMMAR_TABLES}
    state = start(face, [case])
    matters = {name: name in draft.idle for name in draft.parameters if name not in SETTINGS}
    margins, ids = [], [0]
    for step in range(len(pieces) - 1 + draft.steps):
        logits = (
            np.round(rng.normal(draft.mean, draft.spread, draft.vocab) * draft.digits)
            / draft.digits
            + 0.0
        )
        for token, logit in draft.special.items():
            logits[token] = logit
        emit = step >= len(pieces) - 1
        call = {"input_ids": pieces[step] if step < len(pieces) else ids, "emit": emit}
        inputs = inputs_of(face, [case], [call], state)
        out = reference(logits, inputs, order)
        for name in matters:
            others = {key: value for key, value in case["parameters"].items() if key != name}
            if name == "logit_bias_ids":
                del others["logit_bias"]
            other = reference(
                logits, inputs_of(face, [{**case, "parameters": others}], [call], state), order
            )
            matters[name] |= any(
                not np.array_equal(out[key], other[key])
                for key in ("probs", "status_RetainedState")
            )
        margins += [out["margin"][0], out["edge"][0], gap(out["adjusted_logits"][0])]
        case["steps"].append(
            call | {"logits": to_json(logits.tolist())} | results(logits, inputs, out)
        )
        state = after(state, out)
        ids = out["next_ids"][0].tolist()
    case["tokens"] = state["tokens"][0].tolist()
    case["output_counts"] = {str(i): int(n) for i, n in enumerate(state["output_counts"][0]) if n}
    return case, min(margins) >= MARGIN and all(matters.values())


def reference(logits: Array, inputs: Arrays, order: str) -> Arrays:
    with np.errstate(invalid="ignore", over="ignore"):
        return reference_step(
            logits[None].astype(np.float32), inputs, pad_token_id=0, filter_order=order
        )


def gap(adjusted: Array) -> float:
    """The least difference of unequal logits: float32 has to see the same ties."""
    values = np.unique(adjusted[np.isfinite(adjusted)].astype(np.float64))
    return float(np.diff(values).min()) if len(values) > 1 else np.inf


def results(logits: Array, inputs: Arrays, out: Arrays) -> dict[str, Any]:
    """The recorded results of a step: its token, the states, and intermediate values for debugging."""
    probs, emitted = out["probs"][0], bool(out["probs"].any())
    shown: dict[str, Any] = {"next_id": int(out["next_ids"][0, 0]) if emitted else None}
    states = ["lengths", "status", *(["grammar_state"] if "grammar_state" in inputs else [])]
    shown |= {name: int(out[f"{name}_RetainedState"][0]) for name in states}
    if emitted:
        adjusted = out["adjusted_logits"][0]
        changed = np.flatnonzero(adjusted != logits.astype(np.float32))
        shown |= (
            {"adjusted": {str(i): to_json(float(f"{adjusted[i]:.9g}")) for i in changed}}
            if changed.size
            else {}
        )
    if emitted and inputs["temperature"][0] > 0:
        position = min(
            int(inputs["lengths"][0] + inputs["input_lengths"][0]), inputs["noise"].shape[1] - 1
        )
        shown |= {
            "kept": np.flatnonzero(probs).tolist(),
            "u": int(inputs["noise"][0, position] * 2**24),
        }
        if inputs["xtc_probability"][0] > 0:
            shown["xtc_u"] = int(inputs["xtc_noise"][0, position] * 2**24)
    for state, on in (
        ("mirostat_mu", inputs["mirostat_tau"] > 0),
        ("adaptive_error", inputs["adaptive_target"] >= 0),
    ):
        if emitted and on[0]:
            shown[state] = float(f"{out[f'{state}_RetainedState'][0]:.7g}")
    return shown


def noise() -> dict[str, Any]:
    """Philox's published answers, and the random numbers of seeds."""
    answers = []
    for counter, key in (
        ((0,) * 4, (0,) * 2),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)),
    ):
        words = {"counter": counter, "key": key, "words": philox4x32(counter, key)}
        answers.append({name: [f"{word:08x}" for word in value] for name, value in words.items()})
    rows = [
        {"seed": str(seed)}
        | {
            name: [int(philox_uniform(seed, t, stream) * 2**24) for t in POSITIONS]
            for name, stream in (("noise", 0), ("xtc_noise", 1))
        }
        for seed in SEEDS
    ]
    return {"philox4x32_10": answers, "positions": list(POSITIONS), "rows": rows}


def package() -> dict[str, Any]:
    """Texts of the bundled model, drawn from the logits of its package without a sampler."""
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(ROOT / CHECKPOINT, include_sampler=False)
        host = PlainHost(model.export(Path(folder) / "tiny").package.path)
        rows = [written(host, text, parameters) for text, parameters in PROMPTS]
    return {"export": f"qsample export {CHECKPOINT} tiny", "capacity": CAPACITY, "rows": rows}


def waiting() -> dict[str, Any]:
    """Texts of the bundled model over an int8 cache, each written alone; and calls in which all are written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        portable = AutoModelForCausalLM.from_pretrained(
            ROOT / CHECKPOINT, include_sampler=False
        ).export(path / "tiny")
        compile_package(
            portable.package, path / "cpu", CompileOptions(ctx_len=CAPACITY, kv_cache_dtype="int8")
        )
        host = PlainHost(path / "cpu")
        rows = [written(host, text, parameters, INT8_GAP) for text, parameters in WAITING]
    steps = 2 * max(len(row["tokens"]) for row in rows)
    calls = [*PIECES, *([1, n % 2, (n + 1) % 2, n % 2] for n in range(steps))]
    compilation = f"qsample compile tiny tiny-cpu --ctx-len {CAPACITY} --kv-cache-dtype int8 --num-speculative-tokens 4"
    commands = {"export": f"qsample export {CHECKPOINT} tiny", "compile": compilation}
    return {
        "contract_version": STEPS_VERSION,
        **commands,
        "capacity": CAPACITY,
        "calls": calls,
        "rows": rows,
    }


def images() -> dict[str, Any]:
    """Offsets of prompts with images: transformers' positions of a Qwen2.5-VL, less the tokens' places."""
    import torch

    from tests.helpers.tiny_vlms import ids_of, random_vlm

    model, placeholder = random_vlm("qwen2_5_vl").model, ids_of("qwen2_5_vl")["<|image_pad|>"]
    merged = model.config.vision_config.spatial_merge_size
    cases = []
    for pieces in IMAGES:
        sizes = [piece for piece in pieces if isinstance(piece, tuple)]
        ids = [id for n, piece in enumerate(pieces) for id in _ids(piece, placeholder, n)]
        prompt = torch.tensor([[*ids, 5]])  # and a token after it
        grids = torch.tensor([[1, rows * merged, columns * merged] for rows, columns in sizes])
        kinds = (prompt == placeholder).int()
        positions, _ = model.get_rope_index(prompt, kinds, image_grid_thw=grids if sizes else None)
        offsets = positions[:, 0].T.numpy() - np.arange(prompt.shape[1])[:, None]
        cases.append({"input_ids": ids, "sizes": sizes, "position_offsets": offsets.tolist()})
    return {"contract_version": IMAGES_VERSION, "placeholder": placeholder, "cases": cases}


def _ids(piece: Any, placeholder: int, place: int) -> list[int]:
    """An image's placeholders, or as many tokens of text."""
    return (
        [placeholder] * (piece[0] * piece[1])
        if isinstance(piece, tuple)
        else [10 * place + i for i in range(piece)]
    )


def written(
    host: PlainHost, text: str, parameters: dict[str, Any], least_gap: float = MODEL_GAP
) -> dict[str, Any]:
    """A row with the first seed for which no decision is close."""
    ids = Tokenizer.from_file(str(ROOT / CHECKPOINT / "tokenizer.json")).encode(text).ids
    stops = {"stop_ids": host.manifest["token_ids"]["eos"], "max_length": len(ids) + NEW_TOKENS}
    case: Case = {
        "prompt": text,
        "prompt_ids": ids,
        "parameters": {"temperature": 0.0, **stops, **parameters},
    }
    first = 2**53 + 1 if parameters.get("top_p") else 1
    for seed in range(first, first + 1000):
        case["seed"] = str(seed)
        tokens, status, clear = continuation(host, case, least_gap)
        if clear:
            return case | {"tokens": tokens, "status": status}
    raise RuntimeError(f"{text!r}: no seed was found")


def continuation(host: PlainHost, case: Case, least_gap: float) -> tuple[list[int], int, bool]:
    """The new tokens, the final status, and whether no decision was close."""
    face = interface_of(host.manifest["interface"]["vocab_size"], HUGGING_FACE)
    state, tokens = host.start([int(case["seed"])], CAPACITY), []
    state = start(face, [case | {"capacity": CAPACITY}]) | state
    ids = case["prompt_ids"]
    while not state["status"][0]:
        outputs = host.call(state, [ids])
        inputs = inputs_of(face, [case], [{"input_ids": ids, "emit": True}], state)
        out = reference_step(outputs["logits"], inputs, pad_token_id=0)
        second, first = np.sort(out["adjusted_logits"][0])[-2:]
        greedy = case["parameters"]["temperature"] == 0
        if min(out["margin"][0], out["edge"][0]) < MODEL_MARGIN or (
            greedy and first - second < least_gap
        ):
            return tokens, 0, False
        state = after(host.after(state, outputs), out)
        ids = out["next_ids"][0].tolist()
        tokens += ids
    return tokens, int(state["status"][0]), True


def to_json(value: Any) -> Any:
    """`value` for JSON: "-inf", "inf" and "nan" as strings, and integral numbers without a point."""
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def write(name: str, content: dict[str, Any]) -> None:
    """Write a file; each element of a list of objects begins a line."""
    (FOLDER / f"{name}.json").write_text(
        layout({"contract_version": CONTRACT_VERSION, **content}) + "\n", "utf-8"
    )


def layout(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(name)}: {layout(item)}" for name, item in value.items())
            + "}"
        )
    if isinstance(value, list) and isinstance(value[0] if value else None, dict):
        return "[\n" + ",\n".join(layout(item) for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)


if __name__ == "__main__":
    main()
