"""Texts that decode graphs write and read, call by call, so that the checks of compile can compare graphs on them.

Only one graph is open at a time: the weights of two may not fit into the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import onnx_ir as ir

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import LOGITS, SEQUENCE
from qsample.graph.join import cut_at_logits, return_all_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph


class Call(NamedTuple):
    """A call of a graph. ids: [rows, S]. lengths: [rows], the real tokens. tokens: [rows], chosen after these. logits:
    [rows, V], from which they were chosen; empty if the graph does not return them. images: the inputs of images by
    name, with the same features in all calls."""

    ids: Array
    lengths: Array
    tokens: Array
    logits: Array
    images: Mapping[str, Array] = MappingProxyType({})


Text = Sequence[Call]
Step = Callable[[Array, Array], dict[str, Array]]
_NO_LOGITS: Final = np.empty(0)


def chosen(results: Mapping[str, Array]) -> Array:
    """[rows]: the tokens of a call's results, or the argmax if the graph returns logits."""
    tokens: Array = (
        results["next_ids"][:, 0] if "next_ids" in results else results[LOGITS.name].argmax(-1)
    )
    return tokens


def write(
    step: Step,
    ids: Array,
    lengths: Array,
    calls: int,
    choose: Callable[[Mapping[str, Array]], Array] = chosen,
) -> Iterator[Call]:
    """The `calls` calls of a text that a graph writes after a prompt `ids`, `lengths`, as in `Call`. step: takes ids
    and lengths, moves the graph's states on, and returns its outputs. choose: the tokens [rows] of a call's outputs."""
    for _ in range(calls):
        results = step(ids, lengths)
        tokens = choose(results)
        yield Call(ids, lengths, tokens, results.get(LOGITS.name, _NO_LOGITS))
        ids = tokens[:, None]
        lengths = np.ones(len(tokens), np.int64)


def read(
    model: ir.Model, texts: Sequence[Text], folder: Path, interface: Interface, capacity: int
) -> list[list[Array]]:
    """The logits [rows, V] of `model` after each call of each text, read from empty states. All texts are read in one
    call, in one pass over the weights; call by call only if the model has just the logits of a row's last token.
    `model` is a decode graph cut at its logits, and is changed; `folder` has its weights and starting state."""
    at_once = return_all_logits(model)
    runner = GraphRunner(model, folder, interface, capacity, weights_mapped=True)
    if not at_once:
        return [list(_logits_by_call(runner, text)) for text in texts]
    lengths = np.array(
        [length for text in texts for length in np.sum([call.lengths for call in text], axis=0)]
    )
    ids = _joined([[call.ids for call in text] for text in texts], texts, 0)
    images = dict(texts[0][0].images)
    for spec in interface.image_inputs:
        if spec.name in images and SEQUENCE in spec.axes:
            images[spec.name] = _joined(
                [[call.images[spec.name] for call in text] for text in texts], texts, spec.off
            )
    logits = runner.step(ids, lengths, runner.start(len(ids)), images)[LOGITS.name].reshape(
        *ids.shape, -1
    )
    found = []
    first = 0
    for text in texts:
        own = np.arange(first, first + len(text[0].ids))
        # The last token of each call has this place in its row.
        ends = np.cumsum([call.lengths for call in text], axis=0) - 1
        found.append([logits[own, end] for end in ends.astype(int)])
        first += len(own)
    return found


def _joined(values: Sequence[Sequence[Array]], texts: Sequence[Text], off: float | None) -> Array:
    """The values of the real tokens of all calls, one after the other, then `off`: [rows of all texts, S, ..].

    `values` has an array [rows, S, ..] for each call of each text.
    """
    rows = [
        np.concatenate(
            [value[row, : call.lengths[row]] for value, call in zip(own, text, strict=True)]
        )
        for own, text in zip(values, texts, strict=True)
        for row in range(len(text[0].ids))
    ]
    joined = np.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), off, rows[0].dtype)
    for whole, row in zip(joined, rows, strict=True):
        whole[: len(row)] = row
    return joined


def _logits_by_call(runner: GraphRunner, text: Text) -> Iterator[Array]:
    state = runner.start(len(text[0].ids))
    for call in text:
        yield runner.step(call.ids, call.lengths, state, call.images)[LOGITS.name]


def logits_of(folder: Path, interface: Interface) -> ir.Model:
    """The decode graph in `folder` up to its logits."""
    return cut_at_logits(load_graph(folder / "decoder.onnx"), interface)
