"""Guided decoding: a caller's function says before every token which tokens may be sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import ALLOWED_TOKENS
from qsample.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """The results of a step, copied to the host.

    Args:
        tokens: [B] int64.
        emitted: [B] bool; false if the row had ended before, or its logits were invalid.
        status: [B] int32, after the step.
        outputs: the optional outputs of the package, by name.
    """

    tokens: Array
    emitted: Array
    status: Array
    outputs: Mapping[str, Array]


class AllowedTokensFn(Protocol):
    """Guided decoding: writes the mask of every next token into an array, which keeps its values between calls."""

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Called before each token while some row runs; the masks of rows that have ended are ignored.

        Args:
            step: the last results, None before the first token.
            mask: [B, W] int32, bit i of word w for token 32 w + i, all set at first.
        """


class Guide:
    """Calls a function for its sequences, and gives each sequence the mask that the function writes."""

    def __init__(self, function: AllowedTokensFn, sequences: list[Sequence], mask: Array, pad_token_id: int) -> None:
        """mask: [B, W] int32, all bits set; row i is of sequence i. pad_token_id: stands for the token of a row that
        has none."""
        self._function = function
        self.sequences = sequences
        self._mask = mask
        self._pad = pad_token_id
        self._shown = [0] * len(sequences)  # tokens of each that the function has seen

    def start(self) -> None:
        """Write the masks of the first tokens."""
        self._call(None)

    def update(self, set_parameter: Callable[[Sequence, str, Array], None]) -> None:
        """Write the masks of the next tokens, if any sequence has a token that the function has not seen.

        set_parameter: replaces a parameter of a sequence.
        """
        counts = [len(sequence.sampled) for sequence in self.sequences]
        if counts == self._shown:
            return
        emitted = np.greater(counts, self._shown)
        self._shown = counts
        self._call(self._step(emitted))
        for sequence, mask in zip(self.sequences, self._mask, strict=True):
            set_parameter(sequence, ALLOWED_TOKENS.name, mask)

    def _call(self, step: Step | None) -> None:
        self._function(step, self._mask.view())  # a view, so that the function cannot change its shape and dtype

    def _step(self, emitted: Array) -> Step:
        """The newest token of every sequence: the loop reads guided sequences after each token."""
        rows = len(self.sequences)
        tokens = np.full(rows, self._pad, dtype=np.int64)
        status = np.array([sequence.status for sequence in self.sequences], dtype=np.int32)
        outputs: dict[str, Array] = {}
        for row in np.flatnonzero(emitted):
            sequence = self.sequences[row]
            tokens[row] = sequence.sampled[-1]
            for name, value in (sequence.outputs[-1] if sequence.outputs else {}).items():
                outputs.setdefault(name, np.zeros((rows, *value.shape), value.dtype))[row] = value
        return Step(tokens, emitted, status, outputs)
