"""Steps of the decode loop enter; a `GenerateOutput` leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from qsample.contract import STATUS_NAMES
from qsample.runtime.decode_loop import Step
from qsample.runtime.state import Array

_FILL = {"logprobs": np.nan, "top_logprobs": np.nan, "top_logprob_ids": -1, "probs": 0}


@dataclass(frozen=True, slots=True)
class Timing:
    """prefill_seconds: until the first token of every row. decode_seconds: the steps after it, `steps` of them."""

    prefill_seconds: float
    decode_seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """What `generate` returns; row i belongs to prompt i.

    sequences: [B, longest] int64, prompt and new tokens, padded on the right with the pad id.
    new_token_ids: the sampled tokens, a stop token included. texts: their text, a continuation of the prompt; None
    where the package has no tokenizer. finish_reasons: "stop" (a stop token), "length", or "invalid" (the model gave
    NaN or infinite logits). seeds: each reproduces its row. prompt_lengths: in tokens.
    Packages with the feature; N = most new tokens of a row; NaN, -1 or 0 past a row's end. logprobs: [B, N] float32.
    top_logprob_ids: [B, N, M] int32. top_logprobs: [B, N, M] float32. probs: [B, N, V] float32.
    """

    sequences: Array
    new_token_ids: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    seeds: list[int]
    prompt_lengths: list[int]
    timing: Timing
    logprobs: Array | None = None
    top_logprob_ids: Array | None = None
    top_logprobs: Array | None = None
    probs: Array | None = None


@dataclass(slots=True)
class Collector:
    """Gathers the steps of one generation."""

    rows: int
    steps: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.steps.append(step)

    def new_token_ids(self) -> list[list[int]]:
        return [[int(step.tokens[row]) for step in self.steps if step.emitted[row]] for row in range(self.rows)]

    def finish_reasons(self) -> list[str]:
        return [STATUS_NAMES[int(status)] for status in self.steps[-1].status]

    def optional_outputs(self) -> dict[str, Array]:
        """The optional outputs by name, [B, N, ...]. A row emits from the first step on until it ends."""
        emitted = np.stack([step.emitted for step in self.steps], axis=1)
        longest = int(emitted.sum(axis=1).max())
        gathered = {}
        for name in self.steps[0].outputs:
            kept = self.steps[: max(longest, 1)]
            values = np.stack([step.outputs[name] for step in kept], axis=1)[:, :longest]
            values[~emitted[:, :longest]] = _FILL[name]
            # `logprobs` has a column for the one token; the others have one for each alternative or token.
            gathered[name] = values[:, :, 0] if name == "logprobs" else values
        return gathered


def pad_sequences(prompts: Sequence[Array], new_token_ids: Sequence[Sequence[int]], pad: int) -> Array:
    """[B, longest] int64: each prompt and its new tokens, padded on the right."""
    rows = [[*prompt.tolist(), *new] for prompt, new in zip(prompts, new_token_ids, strict=True)]
    sequences = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int64)
    for index, row in enumerate(rows):
        sequences[index, : len(row)] = row
    return sequences
