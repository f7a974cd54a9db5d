"""The captured graph's sampler on the GPU, beside the portable one on the CPU, over the same logits.

Which of equal logits comes first, and what a NaN does to a maximum, is up to a kernel, and shows in no model's tokens
until it meets such logits, as those of bfloat16 weights are. So here are some of every kind.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from gpu_process import Reports
from gpu_systems import MIXES
from mixes import FLAT

from qsample.compiler.passes.opset import lower_opset
from qsample.contract import CANDIDATES, SEARCHED_ROWS
from qsample.interface import Interface
from qsample.ort.options import session_options
from qsample.ort.providers import execution_providers, open_session
from qsample.runtime import SamplingParams
from qsample.sampler import build_sampler

VOCAB = 151936
CAPACITY, HISTORY = 64, 40
OPSET = 18  # of CUDA's decode graphs
# A row each. A draw may fall on the boundary of two tokens, whose place follows from the order in which weights are
# added, so a few of them may differ.
ROWS: dict[str, dict[str, float]] = {
    **MIXES,
    **FLAT,
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.25},
    "top-k 1": {"top_k": 1},
    "top-k 1000": {"temperature": 2.0, "top_k": 1000},
    "min-p 0.02": {"temperature": 1.5, "min_p": 0.02},
}
EXACT = {"greedy", "greedy, penalties"}
MOST_DRAWS_APART = 0.1


def check_sampler(provider: str, reports: Reports, vocab: int = VOCAB) -> None:
    """Report, kind of logits by kind, how many rows have the token and status that they have on the CPU."""
    interface = Interface(vocab, ())
    captured = build_sampler(replace(interface, captured=True), 0)
    lower_opset(captured, OPSET)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "captured.onnx", Path(folder) / "portable.onnx"
        ir.save(captured, paths[0])
        ir.save(build_sampler(interface, 0), paths[1])
        device, portable = _session(paths[0], provider), _session(paths[1], "cpu")
    rng = np.random.default_rng(0)
    inputs = _inputs(interface, rng)
    filters = [SamplingParams(**row) for row in ROWS.values()]
    listed = [i for i, row in enumerate(filters) if row.temperature > 0 and _goes_beyond(row)]  # docs/contract.md
    searched = {SEARCHED_ROWS.name: np.array(listed)}
    for kind, logits in made_logits(rng, vocab).items():
        with reports.section(f"the sampler, {kind} logits"):
            got = _choose(device, {"logits": logits, **inputs, **searched})
            wanted = _choose(portable, {"logits": logits, **inputs})
            apart = {
                name: f"{name}: {have.tolist()} for {want.tolist()}"
                for name, have, want in zip(ROWS, got, wanted, strict=True)
                if not np.array_equal(have, want)
            }
            line = f"{kind} logits: {len(ROWS) - len(apart)} of {len(ROWS)} rows have the CPU's token and status"
            if EXACT.intersection(apart) or len(apart) > MOST_DRAWS_APART * len(ROWS):
                reports.problem(f"the sampler, {line}; {', '.join(apart.values())}")
            else:
                reports.check("sampler", line)


def _goes_beyond(row: SamplingParams) -> bool:
    return row.top_k > CANDIDATES or (row.top_k == 0 and row.top_p < 1)


def _choose(session: Any, inputs: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[B, 2]: tokens and statuses."""
    tokens, status = session.run(["next_ids", "status_RetainedState"], inputs)
    return np.stack([tokens[:, 0], status], axis=1)


def made_logits(rng: np.random.Generator, vocab: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Kind → [B, V] float32; the values repeat more and more, and then some are none."""
    shape = len(ROWS), vocab
    distinct = rng.normal(scale=3, size=shape).astype(np.float32)
    kinds = {
        "distinct": distinct,
        "bfloat16": (distinct.view(np.uint32) & 0xFFFF0000).view(np.float32),
        "whole": np.round(distinct),
        "equal": np.ones(shape, np.float32),
        "masked": np.where(rng.random(shape) < 0.999, -np.inf, np.round(distinct)).astype(np.float32),
        "one of": np.where(np.arange(vocab) == vocab - 1, distinct, np.float32(-np.inf)),
    }
    for kind, value in (("NaN among", np.nan), ("infinite", np.inf)):
        kinds[kind] = distinct.copy()
        kinds[kind][:, vocab // 3] = value
    kinds["no"] = np.full(shape, -np.inf, np.float32)
    return kinds


def _inputs(interface: Interface, rng: np.random.Generator) -> dict[str, Any]:
    """A decode step of rows that have read HISTORY tokens."""
    sizes = interface.sizes | {"B": len(ROWS), "S": 1, "T": CAPACITY, "E": 2}
    values: dict[str, Any] = {
        "emit": True,
        "input_lengths": 1,
        "lengths": HISTORY,
        "max_length": CAPACITY,
        "input_ids": rng.integers(0, interface.vocab_size, (len(ROWS), 1)),
        "noise": rng.integers(0, 2**24, (len(ROWS), CAPACITY)) / 2**24,
        "tokens": rng.integers(0, interface.vocab_size, (len(ROWS), CAPACITY)),
    }
    inputs = {}
    for spec in (*interface.sampler.inputs[1:], *interface.sampler.states):
        value = values.get(spec.name, spec.off if spec.off is not None else 0)
        inputs[spec.name] = np.array(np.broadcast_to(np.asarray(value), spec.shape(sizes))).astype(spec.dtype)
    for index, row in enumerate(ROWS.values()):
        for name, value in row.items():
            inputs[name][index] = value
    return inputs


def _session(path: Path, provider: str) -> Any:
    options = {"use_tf32": "0"} if provider == "cuda" else {}
    return open_session(path, session_options(), execution_providers(provider), options)
