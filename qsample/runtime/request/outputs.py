"""What comes of a request, for its readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from qsample.runtime.sequence import PrefixStats
from qsample.tensors import Array


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the delta before.

    token_ids: sampled tokens, a stop token included. text: what they make certain; None without a tokenizer. There may
    be tokens without text, where a character or a stop string is not complete, and at the end text without tokens.
    seconds: since the request was added. outputs: the optional outputs that the package has, by name, one entry a
    token.
    """

    token_ids: list[int]
    text: str | None
    seconds: float
    outputs: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. cached_tokens: of the prompt, those that a slot held already from an earlier request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds since the request was added: until it got a slot, until its first token, until its end. None where it did
    not come so far."""

    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request at its end.

    token_ids: sampled, a stop token included, up to the one that completes a stop string. text: cut off before the stop
    string; None without a tokenizer. finish_reason: "stop" (a stop token or a stop string), "length", "time" (its
    max_time), "invalid" (the model gave NaN or infinite logits) or "cancelled". stop_string: the one that ended it.
    seed: reproduces the tokens. outputs: the optional outputs that the package has, by name, one entry a token.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    stop_string: str | None
    seed: int
    usage: Usage
    timing: RequestTiming
    outputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The requests of an engine at one moment. running: in slots. waiting: added, without a slot. prefixes: what of all
    prompts so far was not read again."""

    slots: int
    max_waiting: int
    running: int
    waiting: int
    prefixes: PrefixStats


def stacked(outputs: list[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several tokens by name, a row each."""
    return {name: np.stack([output[name] for output in outputs]) for name in outputs[0]} if outputs else {}
