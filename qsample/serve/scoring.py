"""The log-probabilities of a prompt's tokens.

A graph returns the log-probability of the tokens that it samples, as the model has it, before any mask. So a prompt is
sampled as well: a request begins with its first token, and each mask allows the prompt's own next token alone. That
takes a step for each token, in a slot like any other, and works on every device. It leaves all other requests as they
are, the answer to the same prompt included, which is a request of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import LOGPROBS, TOP_LOGPROB_OUTPUTS
from qsample.request.sampling_params import SamplingParams
from qsample.runtime import Step

_WORD_BITS: Final = 32


def scoring_params(tokens: int) -> SamplingParams:
    """Of the request that scores a prompt with so many tokens, at least 2: a stop token in it ends nothing."""
    return SamplingParams(temperature=0.0, max_new_tokens=tokens - 1, eos_token_id=())


class ForcedTokens:
    """The `allowed_tokens` of a request that has to sample given tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = iter(tokens)

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Allow the next token alone; mask: [1, W] int32."""
        token = next(self._left)
        mask[:] = 0
        mask[0, token // _WORD_BITS] = np.uint32(1 << token % _WORD_BITS).astype(np.int32)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What the model says of a prompt.

    Attributes:
        token_ids: n tokens of the prompt.
        outputs: the optional outputs of the package by name, an entry for each token but the first, [n - 1, ...]; none
            for a prompt of a single token.
    """

    token_ids: Sequence[int]
    outputs: Mapping[str, Array]

    def entries(self, top: int) -> list[dict[int, tuple[float, int | None]] | None]:
        """For each token the log-probability and rank of the `top` likeliest tokens in its place, and of itself, by
        token id. None for the first token, which follows nothing. The rank of a token is None if it is not among the
        alternatives that the package returns."""
        ids, values = (self.outputs.get(spec.name) for spec in TOP_LOGPROB_OUTPUTS)
        found: list[dict[int, tuple[float, int | None]] | None] = [None]
        for place, token in enumerate(self.token_ids[1:]):
            ranked: dict[int, tuple[float, int | None]] = {}
            if ids is not None and values is not None:
                pairs = zip(ids[place].tolist(), values[place].tolist(), strict=True)
                ranked = {other: (value, rank) for rank, (other, value) in enumerate(pairs, start=1)}
            own = ranked.get(token, (float(self.outputs[LOGPROBS.name][place, 0]), None))
            found.append({**dict(list(ranked.items())[:top]), token: own})
        return found
