"""A decode graph and the logits of the model that it was made from enter; the measured difference leaves, or a
ParityError.

The gate runs before a package is published. Teacher-forced, it compares every logit of a ragged batch of prompts and of
the decode steps after them, of one prompt fed in chunks, and (with a sampler) greedy tokens with the argmax. It knows
arrays and graphs only: where the reference comes from is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract import LOGITS, Interface
from qsample.errors import ParityError
from qsample.exporters.graph import gqa
from qsample.exporters.graph.runner import GraphRunner
from qsample.tensors import Array

DECODE_STEPS: Final = 8
# Largest difference per unit of the largest logit. Rounding alone stays a factor of several below (float32: 1e-5).
TOLERANCES: Final = {"float32": 1e-4, "float16": 3e-2}


@dataclass(frozen=True, slots=True)
class Reference:
    """What the original model computes: prompts, the tokens fed after them, and the logits after each.

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


def check(
    decoder: Path, initial_state: Path, interface: Interface, expected: Reference, *, plain_attention_layers: int = 0
) -> Parity:
    """Compare the decode graph at `decoder` with `expected`. Its logits are read even where it does not return them.

    plain_attention_layers: how many layers attend through plain operators.

    Raises ParityError with the figures where a logit differs by more than the tolerance, where a greedy token is not
    the argmax, or where there is not exactly one GroupQueryAttention per other attention layer.
    """
    model = _returning_logits(ir.load(decoder))
    attentions = len(gqa.attentions(model.graph))
    layers = len(interface.key_values) - plain_attention_layers
    if attentions != layers:
        raise ParityError(
            f"the graph has {attentions} GroupQueryAttention nodes for {layers} attention layers; "
            "the model's attention was not exported as it is"
        )
    capacity = max(map(len, expected.prompts)) + DECODE_STEPS + 2
    runner = GraphRunner(model, initial_state, interface, capacity, folder=decoder.parent, weights_mapped=True)
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


def _returning_logits(model: ir.Model) -> ir.Model:
    """`model` with its logits among the outputs, in place."""
    graph = model.graph
    if all(output.name != LOGITS.name for output in graph.outputs):
        graph.outputs.append(next(value for node in graph for value in node.outputs if value.name == LOGITS.name))
    return model


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
    logits = results[LOGITS.name]
    if "next_ids" in results and not np.array_equal(results["next_ids"][:, 0], logits.argmax(-1)):
        raise ParityError("the sampler at temperature 0 did not return the token with the largest logit")
    return logits
