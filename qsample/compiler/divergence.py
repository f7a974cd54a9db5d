"""Two decode graphs of one model enter, the second with quantized weights; the distance of their distributions leaves.

The text is the first graph's own, sampled at temperature 1 from random first tokens: a text that the model itself
finds natural, for any model and without a corpus. Both graphs read the same tokens, the first all of them before the
second begins: together their weights may not fit into the memory, and each step would read those of the first from the
disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from qsample.contract import LOGITS
from qsample.graph.join import cut_at_logits
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.interface import Interface
from qsample.ort.providers import CPU
from qsample.tensors import Array

ROWS: Final = 8
STEPS: Final = 32


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over `tokens` tokens of the float graph's own text.

    kl: Kullback-Leibler divergence of the quantized from the float distribution, nats a token. agreement: share of
    tokens for which both have the same argmax. perplexity, quantized_perplexity: exp of the mean negative
    log-likelihood.
    """

    tokens: int
    kl: float
    agreement: float
    perplexity: float
    quantized_perplexity: float


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
    rows = rows or ROWS
    batches, steps = ROWS // rows, min(STEPS, capacity - 1)
    done = 0

    def note_call() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done / (2 * batches * steps))

    runner = logits_runner(reference, interface, capacity, weights_mapped=True)
    rng = np.random.default_rng(0)
    texts = [
        _own_text(runner, rng.integers(0, interface.vocab_size, (rows, 1)), steps, rng, note_call)
        for _ in range(batches)
    ]
    del runner  # before the next opens its session
    # Only the quantized graph needs its kernels' own layout: without it, each call would unpack the weights.
    runner = logits_runner(quantized, interface, capacity, providers)
    kl = likelihood = quantized_likelihood = 0.0
    same = 0
    for ids, logits in texts:
        state = runner.start(rows)
        for step in range(steps):
            log_p = log_softmax(logits[step])
            log_q = log_softmax(runner.step(ids[step], np.ones(rows), state)[LOGITS.name])
            p = np.exp(log_p)
            kl += float(np.where(p > 0, p * (log_p - log_q), 0.0).sum())
            same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            likelihood += float(np.take_along_axis(log_p, ids[step + 1], -1).sum())
            quantized_likelihood += float(np.take_along_axis(log_q, ids[step + 1], -1).sum())
            note_call()
    tokens = batches * steps * rows
    return Divergence(
        tokens=tokens,
        kl=kl / tokens,
        agreement=same / tokens,
        perplexity=float(np.exp(-likelihood / tokens)),
        quantized_perplexity=float(np.exp(-quantized_likelihood / tokens)),
    )


def _own_text(
    runner: GraphRunner, first: Array, steps: int, rng: np.random.Generator, note_call: Callable[[], None]
) -> tuple[list[Array], list[Array]]:
    """`steps` + 1 times ids [rows, 1], sampled after the ids `first`, and `steps` times the logits [rows, V] after
    each."""
    state = runner.start(len(first))
    ids, logits = [first], []
    for _ in range(steps):
        logits.append(runner.step(ids[-1], np.ones(len(first)), state)[LOGITS.name])
        ids.append(sample(log_softmax(logits[-1]), rng))
        note_call()
    return ids, logits


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


def sample(log_p: Array, rng: np.random.Generator) -> Array:
    """[rows, 1]: a token of each row by inverse CDF. log_p: [rows, V] log-probabilities."""
    cumulative = np.exp(log_p).cumsum(-1)
    chosen = (cumulative < rng.random((len(log_p), 1)) * cumulative[:, -1:]).sum(-1, keepdims=True)
    tokens: Array = np.minimum(chosen, log_p.shape[-1] - 1)
    return tokens


def log_softmax(logits: Array) -> Array:
    """float64 log-probabilities of [rows, V] logits."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
