"""Scores of given tokens: a graph that enters logits and ids, and leaves log-probabilities.

It is the end of decode graphs that score prompts. Its arithmetic is that of sampled tokens, so that
the same logits give the same log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    SLICE_END,
    Tensor,
    TensorRecord,
    branch,
    building,
    constant,
    op,
    size,
)


@dataclass(frozen=True)
class _Scores(TensorRecord):
    """The outputs by the contract's names; None for outputs that the package lacks."""

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor | None
    top_values: Tensor | None


def build_scores(interface: Interface) -> ir.Model:
    """Build the graph from `ALL_LOGITS` and `SCORED_IDS` to `Interface.prompt_outputs`. Without ids, it
    computes nothing."""
    spec = GraphSpec((ALL_LOGITS, SCORED_IDS), (), interface.prompt_outputs)
    graph, inputs = new_graph(interface, spec)
    with building(graph):
        count = size(inputs[SCORED_IDS.name], 0)
        found = branch(
            op("Squeeze", count) > 0,
            lambda: _scores(interface, inputs[ALL_LOGITS.name], inputs[SCORED_IDS.name], count),
            lambda: _no_scores(interface),
        )
        tensors = {PROMPT_LOGPROBS.name: found.logprobs, PROMPT_RANKS.name: found.ranks}
        if found.top_ids is not None and found.top_values is not None:
            tops = (found.top_ids, found.top_values)
            tensors |= {
                spec.name: tensor
                for spec, tensor in zip(PROMPT_TOP_LOGPROB_OUTPUTS, tops, strict=True)
            }
        set_outputs(graph, interface, spec.results, tensors)
    return finished(graph)


def _scores(interface: Interface, all_logits: Tensor, ids: Tensor, count: Tensor) -> _Scores:
    """The scores of `ids`, [U] int32, whose logits are the last U of `all_logits`."""
    logits = op("Slice", all_logits, -count, [SLICE_END], [0])
    column = ids.to(INT64).unsqueeze()
    split = blocks.split(logits, interface.vocab_size, block_size(interface.vocab_size))
    shares = normalizer(split)
    own = logits.gather(column)
    larger = (logits > own).to(FLOAT)
    # A sum of ones is exact in float32.
    ranks = larger.sum().to(INT32) + 1
    top_ids = None
    top_values = None
    if interface.features.top_logprobs:
        every_row = column.equals(column)
        top_ids, top_values = top_logprobs(
            split, shares, interface.features.top_logprobs, every_row, replayed=False
        )
    return _Scores(shares.log_softmax(own), ranks, top_ids, top_values)


def _no_scores(interface: Interface) -> _Scores:
    def empty(columns: int, dtype: str) -> Tensor:
        return constant(np.zeros((0, columns), dtype))

    most = interface.features.top_logprobs
    return _Scores(
        empty(1, "float32"),
        empty(1, "int32"),
        empty(most, "int32") if most else None,
        empty(most, "float32") if most else None,
    )
