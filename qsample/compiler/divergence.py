"""Two decode graphs of one model enter, the second with quantized weights; the distance of their distributions leaves.

The float graph writes a text, begun as the model's users begin theirs, and the quantized graph reads it, token by
token: what users would measure on text of the model's kind, without a corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from qsample.compiler.own_text import OwnText, opening_of, write_text
from qsample.compiler.trial import Step, logits_of
from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import LOGITS
from qsample.graph.packed import in_nibbles
from qsample.graph.runner import GraphRunner
from qsample.ort.providers import CPU
from qsample.package.divergence import Divergence
from qsample.package.package import Package
from qsample.package.statistics import estimate_means

ROWS: Final = 32
# Each token of a row costs a pass over the float weights.
TOKENS_PER_ROW: Final = 16
# Caches and weights are fitted to texts of other seeds.
_SEED: Final = 0
# Writing the text takes this share of the time, reading it the rest.
_SHARE_OF_WRITING: Final = 0.8


def measure_divergence(
    source: Package,
    quantized: Path,
    interface: Interface,
    capacity: int,
    providers: tuple[str, ...] = (CPU,),
    progress: Callable[[float], None] | None = None,
    *,
    rows: int | None = None,
    runner: Callable[[int], Any] | None = None,
) -> Divergence:
    """Compare the logits of a portable package with those of a graph that was made from it.

    Args:
        source: the portable package, the float model.
        quantized: the folder of the other graph's `decoder.onnx` and `initial_state.onnx`.
        interface: the interface of the quantized graph.
        capacity: tokens of state a row, at least 2.
        providers: the execution providers of the quantized graph.
        progress: called with the fraction done, in [0, 1].
        rows: the rows of a call, 1, 2, 4, 8, 16 or 32, if the quantized graph has them fixed.
        runner: makes what runs the quantized graph over a number of rows, a token a call, in place of a `GraphRunner`.
    """
    report = progress or (lambda fraction: None)
    at_once = ROWS if rows is None else rows
    text = _written(source, capacity, lambda fraction: report(_SHARE_OF_WRITING * fraction))
    if runner is None:
        model = logits_of(quantized, interface)
        # Only the quantized graph needs its kernels' own layout: without it, each call would unpack the weights.
        if providers == (CPU,):
            in_nibbles(model)  # a package for browsers would take minutes
        reader = GraphRunner(model, quantized, interface, capacity, providers)
    else:
        reader = runner(at_once)
    places: list[_Place] = []
    for first in range(0, ROWS, at_once):
        part = slice(first, first + at_once)
        step = partial(reader.step, state=reader.start(at_once))
        places += _read(step, text, part, at_once=runner is None)
        report(_SHARE_OF_WRITING + (1 - _SHARE_OF_WRITING) * part.stop / ROWS)
    return _divergence(text, places)


def _written(source: Package, capacity: int, progress: Callable[[float], None]) -> OwnText:
    interface = source.interface
    opening = opening_of(source, capacity)
    runner = GraphRunner(
        logits_of(source.path, interface), source.path, interface, capacity, weights_mapped=True
    )
    return write_text(
        partial(runner.step, state=runner.start(ROWS)),
        opening,
        interface.vocab_size,
        rows=ROWS,
        tokens=min(TOKENS_PER_ROW, capacity - max(len(opening.ids), 1)),
        seed=_SEED,
        keep_logits=True,
        progress=progress,
    )


class _Place(NamedTuple):
    """A scored token of a row: its figures."""

    row: int
    kl: float
    same: bool
    ratio: float


def _read(step: Step, text: OwnText, part: slice, *, at_once: bool) -> Iterator[_Place]:
    """The figures of the rows `part` of a text that a graph reads. at_once: it reads the opening in one call."""
    prompt = text.prompt[part]
    ones = np.ones(len(prompt), np.int64)
    calls = [prompt] if at_once else list(np.split(prompt, prompt.shape[1], axis=1))
    for ids in calls:
        results = step(ids, ones * ids.shape[1])
    for logits, tokens, scored in zip(text.logits, text.ids, text.scored, strict=True):
        figures = _figures(logits[part], results[LOGITS.name], tokens[part])
        for row in np.flatnonzero(scored[part]):
            yield _Place(part.start + int(row), *(column[row] for column in figures))
        if tokens is not text.ids[-1]:
            results = step(tokens[part], ones)


def _figures(x: Array, y: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Of each row: the divergence of the logits `y` [rows, V] from the logits `x`, whether both have the same argmax,
    and how much less likely `y` makes the tokens [rows, 1], in nats."""
    of_x = softmax(x)
    of_y = softmax(y)
    normalizers = (of_x.normalizer - of_y.normalizer)[:, 0]
    with np.errstate(invalid="ignore"):  # -inf less -inf, and 0 * -inf, which `where` leaves out
        away = x - y
        difference = np.where(of_x.p > 0, of_x.p * away, 0).sum(-1, dtype=np.float64)
    kl = np.maximum(difference - normalizers, 0)  # rounding may end below 0
    ratio = np.take_along_axis(away, tokens, -1)[:, 0] - normalizers
    return kl, x.argmax(-1) == y.argmax(-1), ratio


def _divergence(text: OwnText, places: list[_Place]) -> Divergence:
    """The means over all places, row by row: neighbours are correlated, which the intervals take into account."""
    ordered = sorted(places, key=lambda place: place.row)
    columns = {
        name: np.array([getattr(place, name) for place in ordered])
        for name in ("kl", "same", "ratio")
    }
    means = estimate_means(columns)
    ratio = means["ratio"].map(lambda value: float(np.exp(value)))
    return Divergence(text.opening.text, len(ordered), means["kl"], means["same"], ratio)


class Distribution(NamedTuple):
    """p: [rows, V] float32 probabilities. normalizer: [rows, 1] float64; a logit less it is the log-probability."""

    p: Array
    normalizer: Array


def softmax(logits: Array) -> Distribution:
    """The distribution of [rows, V] float32 logits, in float32, ten times as fast in NumPy; its sums are float64."""
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - largest)
    total = weights.sum(-1, keepdims=True, dtype=np.float64)
    weights /= total.astype(np.float32)
    return Distribution(weights, largest + np.log(total))
