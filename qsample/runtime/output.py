"""What the decode loop delivers enters; a `GenerateOutput` leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsample.contract import BATCH, LOGPROBS, NEXT_IDS, RUNNING, STATUS_NAMES, STOPPED, Interface
from qsample.runtime.decode.loop import Progress
from qsample.runtime.text.generated_text import GeneratedText
from qsample.tensors import Array

_FILL = {"logprobs": np.nan, "top_logprobs": np.nan, "top_logprob_ids": -1, "probs": 0}


@dataclass(frozen=True, slots=True)
class Step:
    """What one step sampled, copied to the host.

    tokens: [B] int64. emitted: [B] bool, false where the row had ended before, or its logits were invalid. status: [B]
    int32 after the step. outputs: the optional outputs that the package has, by name.
    """

    tokens: Array
    emitted: Array
    status: Array
    outputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Timing:
    """prefill_seconds: until the first token of every row. decode_seconds: from there to the end. steps: decode steps
    of the whole batch, each one run of the graph; double buffering may run one window more than the rows needed."""

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


class Collector:
    """Gathers what the rows of one generation sampled, and their text where a tokenizer makes one."""

    def __init__(self, interface: Interface, texts: Sequence[GeneratedText | None]) -> None:
        """texts: one a row; None where a row has none."""
        self._interface = interface
        self._texts = texts
        self._pieces: list[list[str]] = [[] for _ in texts]
        self._outputs: list[list[Mapping[str, Array]]] = [[] for _ in texts]
        self.new_token_ids: list[list[int]] = [[] for _ in texts]
        self.statuses = [RUNNING] * len(texts)

    @property
    def finish_reasons(self) -> list[str]:
        return [STATUS_NAMES[status] for status in self.statuses]

    @property
    def started(self) -> bool:
        """Whether every row has its first token, or ended without one."""
        return all(ids or status != RUNNING for ids, status in zip(self.new_token_ids, self.statuses, strict=True))

    def add(self, row: int, progress: Progress) -> list[int]:
        """Take a row's tokens, up to the one that completes a stop string, and return those that were taken."""
        text, taken = self._texts[row], []
        self.statuses[row] = progress.status
        for token in progress.tokens:
            taken.append(token)
            if text is not None:
                self._pieces[row].append(text.put(token))
                if text.stop_string is not None:
                    self.statuses[row] = STOPPED
                    break
        self.new_token_ids[row] += taken
        if taken:
            self._outputs[row].append(progress.outputs)
        return taken

    def texts(self) -> list[str] | None:
        """The text of every row, at its end; None without a tokenizer."""
        whole = [
            "".join([*pieces, text.end()])
            for pieces, text in zip(self._pieces, self._texts, strict=True)
            if text is not None
        ]
        return whole if len(whole) == len(self._texts) else None

    def optional_outputs(self) -> dict[str, Array]:
        """The optional outputs by name, [B, N, ...]."""
        longest = max(map(len, self.new_token_ids))
        gathered = {}
        for spec in self._interface.sampler_outputs:
            if spec is NEXT_IDS:
                continue
            shape = spec.shape({**self._interface.sizes, BATCH: longest})
            values = np.full((len(self._outputs), *shape), _FILL[spec.name], dtype=spec.dtype)
            for row, outputs in enumerate(self._outputs):
                for place, output in enumerate(outputs):
                    values[row, place] = output[spec.name]
            # `logprobs` has a column for the one token; the others have one for each alternative or token.
            gathered[spec.name] = values[:, :, 0] if spec is LOGPROBS else values
        return gathered


def pad_sequences(prompts: Sequence[Array], new_token_ids: Sequence[Sequence[int]], pad: int) -> Array:
    """[B, longest] int64: each prompt and its new tokens, padded on the right."""
    rows = [[*prompt.tolist(), *new] for prompt, new in zip(prompts, new_token_ids, strict=True)]
    sequences = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int64)
    for index, row in enumerate(rows):
        sequences[index, : len(row)] = row
    return sequences
