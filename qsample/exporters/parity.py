"""An exported decode graph and the eager model's logits enter; the measured difference leaves, or a ParityError.

The gate runs before a package is published. Teacher-forced, it compares every logit of a ragged batch of prompts and of
the decode steps after them, of one prompt fed in chunks, and (with a sampler) greedy tokens with the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from transformers import PreTrainedModel

from qsample.contract import Interface
from qsample.errors import ParityError
from qsample.exporters.graph.runner import GraphRunner
from qsample.tensors import Array

DECODE_STEPS: Final = 8
PROMPT_LENGTHS: Final = (9, 4, 14)
# A window can only be seen to work on a prompt longer than it; beyond this the prompt would cost too much.
LONGEST_WINDOW: Final = 640
# Largest difference per unit of the largest logit. Rounding alone stays a factor of several below (float32: 1e-5).
TOLERANCES: Final = {"float32": 1e-4, "float16": 3e-2}


@dataclass(frozen=True, slots=True)
class Reference:
    """What the eager model computes: prompts, the tokens fed after them, and the logits after each.

    prompts: token ids, a row each. continuations: [rows, DECODE_STEPS]. logits: a row each, [DECODE_STEPS + 1, V].
    """

    prompts: list[list[int]]
    continuations: list[list[int]]
    logits: list[Array]


@dataclass(frozen=True, slots=True)
class Parity:
    """The figures of a passed gate. Errors are absolute differences of logits; `scale` is the largest |logit|."""

    max_error: float
    scale: float
    tolerance: float
    rows: int
    decode_steps: int
    longest_prompt: int
    attention_layers: int
    plain_attention_layers: int


def reference(model: PreTrainedModel) -> Reference:
    """Run `model` eagerly, without a cache, on random prompts of different lengths (seeded)."""
    config = model.config.get_text_config(decoder=True)
    generator = np.random.default_rng(0)
    # Models that number positions themselves skip padding, which a prompt does not contain.
    allowed = np.setdiff1d(np.arange(_vocab_size(model)), [_pad_token_id(model)])
    limit = (longest_context(config) or 2**20) - DECODE_STEPS - 1
    lengths = sorted({min(length, limit) for length in (*PROMPT_LENGTHS, _window(config))} - {0})
    rows = [generator.choice(allowed, n + DECODE_STEPS).tolist() for n in lengths]
    model.set_attn_implementation("eager")
    logits = []
    with torch.no_grad():
        for row, n in zip(rows, lengths, strict=True):
            output = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, n - 1 :]
            logits.append(output.to(torch.float32).numpy())
    prompts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    return Reference(prompts, [row[n:] for row, n in zip(rows, lengths, strict=True)], logits)


def longest_context(config: Any) -> int | None:
    """The positions that a text model knows; None = any number, which some configurations say with -1."""
    stated = int(getattr(config, "max_position_embeddings", None) or 0)
    return stated if stated > 0 else None


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings = model.get_input_embeddings()
    weight = embeddings.weight
    assert isinstance(weight, torch.Tensor)
    return int(weight.shape[0])


def _pad_token_id(model: PreTrainedModel) -> int:
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    return -1 if pad is None else int(pad)


def _window(config: Any) -> int:
    """A prompt length that runs past the smallest attention window; 0 if there is none to test."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    longest = min((int(window) for window in windows if window), default=LONGEST_WINDOW)
    return longest + 3 if longest < LONGEST_WINDOW else 0


def check(
    decoder: Path, initial_state: Path, interface: Interface, expected: Reference, *, plain_attention_layers: int = 0
) -> Parity:
    """Compare the graph at `decoder`, which must have `logits` among its outputs, with `expected`.

    plain_attention_layers: how many layers attend through plain operators.

    Raises ParityError with the figures where a logit differs by more than the tolerance, where a greedy token is not
    the argmax, or where there is not exactly one GroupQueryAttention per other attention layer.
    """
    nodes = onnx.load(decoder, load_external_data=False).graph.node
    attentions = sum(node.op_type == "GroupQueryAttention" for node in nodes)
    layers = len(interface.key_values) - plain_attention_layers
    if attentions != layers:
        raise ParityError(
            f"the graph has {attentions} GroupQueryAttention nodes for {layers} attention layers; "
            "the model's attention was not exported as it is"
        )
    capacity = max(map(len, expected.prompts)) + DECODE_STEPS + 2
    runner = GraphRunner(decoder, initial_state, interface, capacity, weights_mapped=True)
    wanted = np.stack(expected.logits, axis=1)
    batched = _prompts_then_steps(runner, expected)
    chunked = _in_chunks(runner, expected.prompts[-1])
    scale = float(np.abs(wanted).max())
    error = max(_error(batched, wanted), _error(chunked, wanted[0, -1]))
    tolerance = TOLERANCES[interface.dtype] * max(1.0, scale)
    if not error <= tolerance:  # NaN must not pass
        by_step = ", ".join(f"{_error(got, want):.2g}" for got, want in zip(batched, wanted, strict=True))
        raise ParityError(
            f"the exported graph's logits differ from the eager model's by {error:.3g}, more than {tolerance:.3g} "
            f"({TOLERANCES[interface.dtype]:g} of the largest logit, {scale:.3g}); by step (prefill first): {by_step}; "
            f"prompt in chunks: {_error(chunked, wanted[0, -1]):.2g}"
        )
    rows = len(expected.prompts)
    longest = max(map(len, expected.prompts))
    return Parity(error, scale, tolerance, rows, DECODE_STEPS, longest, attentions, plain_attention_layers)


def _error(got: Array, wanted: Array) -> float:
    return float(np.abs(got - wanted).max())


def _prompts_then_steps(runner: GraphRunner, expected: Reference) -> Array:
    """[DECODE_STEPS + 1, rows, V]: logits after the prompts, fed as one ragged batch, and after each token."""
    lengths = np.array([len(prompt) for prompt in expected.prompts])
    ids = np.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in expected.prompts])
    state = runner.start(len(ids))
    logits = [_logits(runner, ids, lengths, state)]
    for column in np.array(expected.continuations).T:
        logits.append(_logits(runner, column[:, None], np.ones(len(ids)), state))
    return np.stack(logits)


def _in_chunks(runner: GraphRunner, prompt: list[int]) -> Array:
    """[V]: logits after one prompt, fed in three pieces."""
    state = runner.start(1)
    for piece in np.array_split(np.array(prompt), 3):
        logits = _logits(runner, piece[None], np.array([len(piece)]), state)
    last: Array = logits[0]
    return last


def _logits(runner: GraphRunner, ids: Array, lengths: Array, state: dict[str, Array]) -> Array:
    results = runner.step(ids, lengths, state)
    logits = results["logits"]
    if "next_ids" in results and not np.array_equal(results["next_ids"][:, 0], logits.argmax(-1)):
        raise ParityError("the sampler at temperature 0 did not return the token with the largest logit")
    return logits
