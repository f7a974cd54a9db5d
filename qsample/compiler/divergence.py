"""Two decode graphs of one model enter, the second with quantized weights; the distance of their distributions leaves.

The text is sampled at temperature 1 from random first tokens: a text for any model, without a corpus. The quantized
graph writes it, in cheap steps, and the first graph reads all of it in a single call, which passes over its weights
once.

One after the other: together their weights may not fit into the memory, and each step would read those of the first
from the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import LOGITS
from qsample.graph.join import cut_at_logits, return_all_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.ort.providers import CPU

ROWS: Final = 8
STEPS: Final = 32
_WRITING: Final = 0.6  # of the time, where a single call reads


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over `tokens` tokens of the text.

    kl: Kullback-Leibler divergence of the quantized from the float distribution, nats a token. kept_kl: the same over
    those parts that the float model could have written, too. agreement: share of tokens for which both have the same
    argmax. perplexity, quantized_perplexity: exp of the mean negative log-likelihood that tokens drawn from the float
    distribution have in each.
    """

    tokens: int
    kl: float
    kept_kl: float
    agreement: float
    perplexity: float
    quantized_perplexity: float


class Text(NamedTuple):
    """What a graph wrote. ids: [rows, steps + 1], the first of a row not its own. logits: [rows, steps, V], after each
    but the last."""

    ids: Array
    logits: Array


def measure_divergence(
    reference: Path,
    quantized: Path,
    interface: Interface,
    capacity: int,
    providers: tuple[str, ...] = (CPU,),
    progress: Callable[[float], None] | None = None,
    *,
    rows: int | None = None,
) -> Divergence:
    """Compare the logits of two folders with `decoder.onnx` and `initial_state.onnx` each; they differ in their
    quantization alone.

    capacity: tokens of state a row, at least 2. providers: those of the quantized graph. progress: called with the
    fraction done, in [0, 1]. rows: of a call, if the quantized graph has it fixed: 1, 2, 4 or 8; None = it is free.
    """
    rng = np.random.default_rng(0)
    rows, steps = rows or ROWS, min(STEPS, capacity - 1)
    first = [rng.integers(0, interface.vocab_size, (rows, 1)) for _ in range(ROWS // rows)]
    advance = _Steps(progress, round(len(first) * steps / _WRITING))
    # Only the quantized graph needs its kernels' own layout: without it, each call would unpack the weights.
    written = _write(logits_runner(quantized, interface, capacity, providers), first, steps, rng, advance)
    return _score(written, written.logits, _read_at_once(reference, interface, capacity, written.ids))


class _Steps:
    """Reports the fraction that is done of `total` calls, each time that it is called."""

    def __init__(self, progress: Callable[[float], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done / self._total)


def _write(
    runner: GraphRunner, first: list[Array], steps: int, rng: np.random.Generator, advance: Callable[[], None]
) -> Text:
    """`steps` tokens after each of the ids `first`, [rows, 1] each, sampled at temperature 1."""
    ids = np.repeat(np.concatenate(first), steps + 1, axis=1)
    logits = np.empty((len(ids), steps, runner.vocab_size), np.float32)
    rows = len(first[0])
    for start in range(0, len(ids), rows):
        batch, state = slice(start, start + rows), runner.start(rows)
        for step in range(steps):
            logits[batch, step] = runner.step(ids[batch, step, None], np.ones(rows), state)[LOGITS.name]
            ids[batch, step + 1, None] = sample(softmax(logits[batch, step]), rng)
            advance()
    return Text(ids, logits)


def _read(runner: GraphRunner, ids: Array, rows: int, advance: Callable[[], None]) -> Array:
    """[n, steps, V] after each of `ids` [n, steps + 1] but the last, `rows` rows at a time, token by token."""
    steps = ids.shape[1] - 1
    logits = np.empty((len(ids), steps, runner.vocab_size), np.float32)
    for start in range(0, len(ids), rows):
        batch, state = slice(start, start + rows), runner.start(rows)
        for step in range(steps):
            logits[batch, step] = runner.step(ids[batch, step, None], np.ones(rows), state)[LOGITS.name]
            advance()
    return logits


def _read_at_once(folder: Path, interface: Interface, capacity: int, ids: Array) -> Array:
    """As `_read`, in a single call, if the graph in `folder` has the logits of all positions."""
    model = cut_at_logits(load_graph(folder / "decoder.onnx"), interface)
    has_all = return_all_logits(model)
    runner = GraphRunner(model, folder / "initial_state.onnx", interface, capacity, folder=folder, weights_mapped=True)
    rows, steps = len(ids), ids.shape[1] - 1
    if not has_all:
        return _read(runner, ids, rows, lambda: None)
    results = runner.step(ids[:, :-1], np.full(rows, steps), runner.start(rows))
    logits: Array = results[LOGITS.name].reshape(rows, steps, -1)
    return logits


def _score(text: Text, quantized: Array, reference: Array) -> Divergence:
    """quantized, reference: the logits of both graphs along `text`, [rows, steps, V]; the writer's are those of `text`.

    A text that the quantized graph wrote may hide its errors: if it repeats a token over and over, the float graph
    soon expects that, too. In `kept_kl` each place is weighted by the probability that the float graph would have kept
    all tokens before it, by the rule of speculative decoding (https://arxiv.org/abs/2211.17192): a token with
    min(1, p / q), which makes the kept text the float graph's own.
    """
    rows, steps, _ = quantized.shape
    kl, entropy, kept = np.empty((rows, steps)), np.empty((rows, steps)), np.ones((rows, steps))
    same = 0
    for step in range(steps):
        x, y = reference[:, step], quantized[:, step]
        of_x, of_y = softmax(x), softmax(y)
        with np.errstate(invalid="ignore"):  # 0 * -inf, which `where` leaves out
            likely = of_x.p > 0
            expected = np.where(likely, of_x.p * x, 0).sum(-1, dtype=np.float64)
            difference = np.where(likely, of_x.p * (x - y), 0).sum(-1, dtype=np.float64)
        # Rounding may end below 0.
        kl[:, step] = np.maximum(difference - (of_x.normalizer - of_y.normalizer)[:, 0], 0)
        entropy[:, step] = of_x.normalizer[:, 0] - expected
        same += int((x.argmax(-1) == y.argmax(-1)).sum())
        if step + 1 < steps and text.logits is quantized:
            chosen = text.ids[:, step + 1, None]
            ratio = np.take_along_axis(x - y, chosen, -1) - (of_x.normalizer - of_y.normalizer)
            kept[:, step + 1] = kept[:, step] * np.exp(np.minimum(ratio[:, 0], 0))
    return Divergence(
        tokens=rows * steps,
        kl=float(kl.mean()),
        kept_kl=float(np.average(kl, weights=kept)),
        agreement=same / (rows * steps),
        perplexity=float(np.exp(entropy.mean())),
        quantized_perplexity=float(np.exp(entropy.mean() + kl.mean())),
    )


def logits_runner(
    folder: Path,
    interface: Interface,
    capacity: int,
    providers: tuple[str, ...] = (CPU,),
    *,
    weights_mapped: bool = False,
) -> GraphRunner:
    """A runner of the folder's decode graph up to its logits. weights_mapped: see GraphRunner."""
    model = cut_at_logits(load_graph(folder / "decoder.onnx"), interface)
    initial_state = folder / "initial_state.onnx"
    return GraphRunner(
        model, initial_state, interface, capacity, providers, folder=folder, weights_mapped=weights_mapped
    )


class Distribution(NamedTuple):
    """Of `softmax`. p: [rows, V] float32 probabilities. normalizer: [rows, 1] float64; a logit less it is the
    logarithm of the probability."""

    p: Array
    normalizer: Array


def softmax(logits: Array) -> Distribution:
    """The distribution of [rows, V] float32 logits. Its numbers are float32, which NumPy computes ten times as fast as
    float64, and their sums float64."""
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - largest)
    total = weights.sum(-1, keepdims=True, dtype=np.float64)
    weights /= total.astype(np.float32)
    return Distribution(weights, largest + np.log(total))


def sample(distribution: Distribution, rng: np.random.Generator) -> Array:
    """[rows, 1]: a token of each row by inverse CDF."""
    cumulative = distribution.p.cumsum(-1, dtype=np.float64)
    chosen = (cumulative < rng.random((len(cumulative), 1)) * cumulative[:, -1:]).sum(-1, keepdims=True)
    tokens: Array = np.minimum(chosen, cumulative.shape[-1] - 1)
    return tokens
