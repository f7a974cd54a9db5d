"""Scores of given tokens: a graph from logits and token ids to log-probabilities and ranks.

It is the end of decode graphs that score prompts. Its arithmetic is that of sampled tokens, so that
the same logits give the same log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample.contract.interface import GraphSpec, Interface
from qsample.contract.tensors import (
    ALL_LOGITS,
    PROMPT_LOGPROBS,
    PROMPT_RANKS,
    PROMPT_TOP_LOGPROB_OUTPUTS,
    SCORED_IDS,
)
from qsample.sampler import blocks
from qsample.sampler.blocks import block_size
from qsample.sampler.build import finished, new_graph, set_outputs
from qsample.sampler.commit import normalizer, top_logprobs
from qsample.sampler.tensor import (
    FLOAT,
    INT32,
    INT64,
    Tensor,
    TensorRecord,
    building,
    constant,
    loop,
    minimum,
    op,
    size,
)

# The intermediate results for this many tokens take as much memory as their logits, several times.
_TOKENS_AT_ONCE: Final = 64
_MAX_REPETITIONS: Final = 2**31 - 1


@dataclass(frozen=True)
class _Scores(TensorRecord):
    """The scores of n tokens.

    Attributes:
        logprobs: [n, 1] float32, the log-probabilities of the tokens.
        ranks: [n, 1] int32, 1 + the number of tokens with a larger logit.
        top_ids: [n, M] int32, the likeliest tokens in their place; None if M is 0.
        top_values: [n, M] float32, the log-probabilities of these; None if M is 0.
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor | None
    top_values: Tensor | None

    @classmethod
    def none(cls, num_alternatives: int) -> _Scores:
        """The scores of no tokens. num_alternatives: M."""
        return cls(
            _empty(1, "float32"),
            _empty(1, "int32"),
            _empty(num_alternatives, "int32") if num_alternatives > 0 else None,
            _empty(num_alternatives, "float32") if num_alternatives > 0 else None,
        )

    def followed_by(self, more: _Scores) -> _Scores:
        """These scores, and those of more tokens."""
        pairs = zip(self.tensors(), more.tensors(), strict=True)
        return self.filled(iter([_below(first, second) for first, second in pairs]))


def build_scores(interface: Interface) -> ir.Model:
    """Build the graph from `ALL_LOGITS` and `SCORED_IDS` to `Interface.prompt_outputs`. The logits of
    the U scored tokens are the last U rows. Without scored tokens, it computes nothing."""
    spec = GraphSpec((ALL_LOGITS, SCORED_IDS), (), interface.prompt_outputs)
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        all_logits = inputs[ALL_LOGITS.name]
        ids = inputs[SCORED_IDS.name]
        count = op("Squeeze", size(ids, 0))
        first_row = op("Squeeze", size(all_logits, 0)) - count

        def step(number: Tensor, before: _Scores) -> tuple[Tensor, _Scores]:
            begin = number * _TOKENS_AT_ONCE
            end = minimum(begin + _TOKENS_AT_ONCE, count)
            logits = _rows(all_logits, first_row + begin, first_row + end)
            more = _scores(interface, logits, _rows(ids, begin, end))
            return end < count, before.followed_by(more)

        start = _Scores.none(interface.features.top_logprobs)
        found = loop(_MAX_REPETITIONS, count > 0, start, step)
        tensors = dict(zip(_output_names(interface), found.tensors(), strict=True))
        set_outputs(graph, interface, spec.results, tensors)
    return finished(graph)


def _output_names(interface: Interface) -> list[str]:
    """The names of the outputs, in the order of the fields of `_Scores`."""
    names = [PROMPT_LOGPROBS.name, PROMPT_RANKS.name]
    if interface.features.top_logprobs > 0:
        names += [spec.name for spec in PROMPT_TOP_LOGPROB_OUTPUTS]
    return names


def _scores(interface: Interface, logits: Tensor, ids: Tensor) -> _Scores:
    """The scores of `ids`, [n] int32, by their logits, [n, V]."""
    column = ids.to(INT64).unsqueeze()
    split = blocks.split(logits, interface.vocab_size, block_size(interface.vocab_size))
    shares = normalizer(split)
    own = logits.gather(column)
    # A sum of ones is exact in float32.
    ranks = (logits > own).to(FLOAT).sum().to(INT32) + 1
    top_ids = None
    top_values = None
    if interface.features.top_logprobs > 0:
        every_row = column.equals(column)
        top = blocks.top_candidates(split, interface.features.top_logprobs)
        top_ids, top_values = top_logprobs(*top, shares, every_row)
    return _Scores(shares.log_softmax(own), ranks, top_ids, top_values)


def _rows(tensor: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """The rows from `begin` to `end`, int64 scalars."""
    return op("Slice", tensor, begin.reshape(1), end.reshape(1), [0])


def _below(first: Tensor, second: Tensor) -> Tensor:
    """The rows of two tensors, one below the other."""
    return op("Concat", first, second, axis=0)


def _empty(columns: int, dtype: str) -> Tensor:
    """A tensor that has no rows, and gets some in a loop: its shape leaves their number open."""
    empty = op("Identity", constant(np.zeros((0, columns), dtype)))
    empty.value.shape = ir.Shape([None, columns])
    return empty
