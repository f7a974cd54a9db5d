"""Exports a tiny random model of a type; the result is a `Row` of the table.

The parity gate of the export itself compares the graph's logits with the eager model's: a ragged batch of prompts,
decode steps over retained state, a prompt in chunks. Then the runtime samples from the package with fixed seeds, and
the float64 reference samples from the eager model's logits with the same noise.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from qsample.checkpoints.checkpoint import Origin
from qsample.checkpoints.source import check_kind
from qsample.contract.interface import Features
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.exporters.export import LoadedModel, export_model
from qsample.runtime import SamplingParams, load
from tests.architectures.configs import VOCAB_SIZE, tiny_model
from tests.architectures.packed import compile_packed
from tests.helpers import reference

MAX_ERROR = 2e-4  # of a logit; the largest is of order 10
NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 11, 9)  # the first is read alone, the others together
SEED = 5
PARAMS = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.2},
)
# A draw this close to a boundary between two tokens may fall on either side of it.
MARGIN = 1e-4


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a model type.

    `result` is "passed" or the stage that failed, `error` that of a logit, `operators` counts those on the cache,
    `int4` describes the packed and the float weights, and `images` how images enter.
    """

    model_type: str
    result: str
    reason: str = ""
    error: float | None = None
    scale: float | None = None
    tokens: int = 0
    operators: dict[str, int] = field(default_factory=dict)
    int4: str = ""
    images: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.result == "passed"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run(model_type: str, *, compiled: bool = True) -> Row:
    """Make, export and sample from a model of `model_type`, and compile it if `compiled`; errors become the result."""
    started = time.perf_counter()

    def row(result: str, reason: object = "", **figures: object) -> Row:
        text = " ".join(str(reason).split())
        return Row(
            model_type, result, text, seconds=round(time.perf_counter() - started, 1), **figures
        )  # type: ignore[arg-type]

    try:
        # What checkpoints of the type say: transformers makes some decoders without their encoder.
        check_kind(
            model_type, {"is_encoder_decoder": CONFIG_MAPPING[model_type].is_encoder_decoder}
        )
        model = tiny_model(model_type)
    except UnsupportedModelError as error:
        return row("refused", error)
    except Exception as error:
        return row("no tiny model", f"{type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "package"
        try:
            package = export_model(LoadedModel(model, None, Origin(model_type)), path, Features())
        except QsampleError as error:
            return row("refused", error)
        except Exception as error:
            return row("export failed", f"{type(error).__name__}: {error}")
        figures = package.manifest.parity
        assert figures is not None
        measured: dict[str, object] = {
            "error": figures["max_error"],
            "scale": figures["scale"],
            "operators": {
                name: figures[key]
                for name, key in (
                    ("GroupQueryAttention", "attention_layers"),
                    ("masked", "plain_attention_layers"),
                )
                if figures[key]
            }
            | _recurrent_operators(path),
        }
        if figures["max_error"] > MAX_ERROR:
            return row("inexact", f"a logit is off by {figures['max_error']:.2g}", **measured)
        try:
            tokens = check_sampling(tiny_model(model_type), path)
        except Exception as error:
            return row("sampling failed", f"{type(error).__name__}: {error}", **measured)
        measured["tokens"] = tokens
        if compiled:
            try:
                packed = compile_packed(package, Path(folder) / "int4")
            except Exception as error:
                return row("int4 failed", f"{type(error).__name__}: {error}", **measured)
            measured["int4"] = str(packed)
            if packed.unpacked:
                return row(
                    "int4 incomplete", f"{packed.unpacked} matrices are still float", **measured
                )
    return row("passed", **measured)


def _recurrent_operators(path: Path) -> dict[str, int]:
    counts = Counter(node.op_type for node in ir.load(path / "decoder.onnx").graph)
    return {
        name: counts[name]
        for name in ("LinearAttention", "CausalConvWithState", "Scan")
        if counts[name]
    }


def check_sampling(model: PreTrainedModel, path: Path) -> int:
    """Sample a ragged batch from the package at `path`, and compare every token with the reference's choice from
    `model`'s logits. Returns how many tokens were compared."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in PROMPT_LENGTHS]
    params = [
        SamplingParams(max_new_tokens=NEW_TOKENS, eos_token_id=(), **options) for options in PARAMS
    ]
    output = load(path).generate(prompts, params, seed=SEED)
    compared = 0
    for row, (prompt, new) in enumerate(zip(prompts, output.token_ids, strict=True)):
        assert len(new) == NEW_TOKENS, (
            f"row {row} ended after {len(new)} tokens: {output.finish_reasons[row]}"
        )
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([prompt + new]), use_cache=False)
                .logits[0]
                .float()
                .numpy()
            )
        compared += check_draws(row, prompt, new, logits[len(prompt) - 1 :], PARAMS[row])
    return compared


def check_draws(
    row: int, prompt: list[int], new: list[int], logits: np.ndarray, params: dict[str, float]
) -> int:
    """Compare the new tokens of a row with the reference's choices from their logits, [n, V]."""
    compared = 0
    uniforms = reference.philox_uniforms(SEED + row, len(prompt) + len(new))
    options = {
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "min_length": 0, "stop_ids": np.array([-1]),
        "output_counts": np.zeros(VOCAB_SIZE), "temperature": 1.0, **params,
    }  # fmt: skip
    for step, token in enumerate(new):
        total = len(prompt) + step
        history = np.array(prompt + new[:step])
        adjusted = reference.adjust(logits[step], options, history, total)
        probs = reference.distribution(adjusted, options)
        wanted, margin = reference.pick(probs, adjusted, options, float(uniforms[total]))
        if margin < MARGIN:
            continue
        assert token == wanted, (
            f"row {row}, token {step}: {token} instead of {wanted} (margin {margin:.2g})"
        )
        compared += 1
    return compared


def quiet() -> None:
    """Prepare a worker process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
