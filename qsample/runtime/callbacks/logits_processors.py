"""Logits processors of a caller's, between the model's logits and a sampler that runs on the host.

transformers calls a processor once a token for the whole batch. Here it is called for each row on its own, as in a
batch of one, and each row has a copy of it: a row's tokens depend on the row alone, whatever is decoded beside it.
"""

from __future__ import annotations

import copy
from collections import abc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from qsample.interface import Interface
from qsample.runtime.callbacks.frameworks import Callback, as_callbacks, on_host
from qsample.runtime.sequence import Sequence
from qsample.tensors import Array

# What transformers does to the logits before a caller's processors see them, and the graph does after.
_BEFORE: Final[Mapping[str, float]] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_length": 0,
    "logit_bias": 0,
    "allowed_tokens": -1,
}
INSTEAD: Final = (
    "export with logit_bias=True for a bias a token, or with allowed_tokens=True for a function that says which tokens "
    "may come next"
)


def make_processors(
    given: Any, sequences: abc.Sequence[Sequence], interface: Interface, flush_every: int | None
) -> LogitsProcessors | None:
    """The processors of a call, None where there are none. Every row is then read after each token.

    Raises ValueError where the package or `flush_every` does not go with them.
    """
    if given is None:
        return None
    if interface.features.sampler:
        raise ValueError(
            "logits_processor is given, and the logits stay in this package's graph; export with "
            f"include_sampler=False, which returns them, or {INSTEAD}"
        )
    if flush_every is not None and flush_every > 1:
        raise ValueError(
            f"flush_every is {flush_every} and logits_processor is given, which takes a read after every token; give 1"
        )
    for sequence in sequences:
        sequence.guided = True
    return LogitsProcessors(given, sequences, interface)


class LogitsProcessors:
    """Calls the processors for the rows whose next token is sampled.

    Args:
        given: a callable of ([1, n] token ids, [1, V] float32 logits), the prompt with its padding and what was
            sampled, that returns logits of that shape; or a list of them. transformers' own get torch tensors, others
            arrays.
        sequences: the rows.
        interface: of the package.

    Raises ValueError where given is none of that, and where they could not see what they would in transformers.
    """

    def __init__(self, given: Any, sequences: abc.Sequence[Sequence], interface: Interface) -> None:
        processors = as_callbacks(
            "logits_processor", given, "a function of (input_ids, scores) that returns the scores to sample from"
        )
        _check(sequences, interface)
        own = [processors] if len(sequences) == 1 else [_copies(processors) for _ in sequences]
        self._rows = list(zip(sequences, own, strict=True))

    def __call__(self, slots: range, logits: Array) -> Array:
        """The logits of `slots`, [len(slots), V] float32, as the processors leave them."""
        logits = logits.copy()
        for sequence, processors in self._rows:
            if sequence.slot is None or sequence.slot not in slots:
                continue
            row = sequence.slot - slots.start
            ids = np.array([[*sequence.given.tolist(), *sequence.sampled]], dtype=np.int64)
            for processor in processors:
                result = on_host(processor(ids, logits[row : row + 1]))
                if result.dtype.kind != "f" or result.shape != (1, logits.shape[1]):
                    raise ValueError(
                        f"a logits processor returned {result.dtype} {result.shape}; it must return floats of the "
                        f"shape of its scores, (1, {logits.shape[1]})"
                    )
                logits[row] = result[0]
        return logits


def _copies(processors: list[Callback]) -> list[Callback]:
    try:
        return [replace(processor, function=copy.deepcopy(processor.function)) for processor in processors]
    except Exception as error:
        raise ValueError(
            f"logits_processor cannot be copied for every row ({error}); generate the prompts one by one"
        ) from error


def _check(sequences: abc.Sequence[Sequence], interface: Interface) -> None:
    features = interface.features
    if features.logprobs or features.top_logprobs:
        raise ValueError("logits_processor changes the logits that the package's logprobs are of; export without them")
    for name, off in _BEFORE.items():
        if any(np.any(np.asarray(one.parameters[name]) != off) for one in sequences if name in one.parameters):
            raise ValueError(
                f"logits_processor and {name} were given: transformers applies {name} first, and the graph after it; "
                "leave one out, or let a processor do both"
            )
