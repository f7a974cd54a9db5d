"""Two decode graphs of one model enter, the second with quantized weights; how far its distributions are off leaves.

The text is the first graph's own, sampled at temperature 1 from random first tokens: what the model itself finds
natural, for any model and without a corpus. Both graphs read the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from qsample.contract import LOGITS, Interface
from qsample.exporters.graph.join import cut_at_logits
from qsample.exporters.graph.runner import GraphRunner
from qsample.exporters.graph.weights.stored import load_graph
from qsample.tensors import Array

ROWS: Final = 4
STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over `tokens` tokens of the float graph's own text.

    kl: Kullback-Leibler divergence of the quantized from the float distribution, nats a token. agreement: share of
    tokens where both have the same argmax. perplexity, quantized_perplexity: exp of the mean negative log-likelihood.
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
    providers: tuple[str, ...] = ("CPUExecutionProvider",),
    progress: Callable[[float], None] | None = None,
    *,
    rows: int | None = None,
) -> Divergence:
    """Compare the logits of two folders with `decoder.onnx` and `initial_state.onnx` each; only what is quantized may
    differ.

    capacity: tokens of state a row, at least 2. providers: what runs the quantized graph. progress: called with the
    fraction done, in [0, 1]. rows: of a call, where the quantized graph has it fixed: 1, 2 or 4;
    None = it is free.
    """
    # Only the quantized graph needs its kernels' own layout: without it, each call would unpack the weights.
    runners = [
        logits_runner(reference, interface, capacity, weights_mapped=True),
        logits_runner(quantized, interface, capacity, providers),
    ]
    rng = np.random.default_rng(0)
    rows = rows or ROWS
    steps = min(STEPS, capacity - 1)
    kl = likelihood = quantized_likelihood = 0.0
    same = done = 0
    for _ in range(ROWS // rows):
        states = [runner.start(rows) for runner in runners]
        ids = rng.integers(0, interface.vocab_size, (rows, 1))
        for _ in range(steps):
            log_p, log_q = (
                log_softmax(runner.step(ids, np.ones(rows), state)[LOGITS.name])
                for runner, state in zip(runners, states, strict=True)
            )
            p = np.exp(log_p)
            kl += float(np.where(p > 0, p * (log_p - log_q), 0.0).sum())
            same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
            ids = sample(log_p, rng)
            likelihood += float(np.take_along_axis(log_p, ids, -1).sum())
            quantized_likelihood += float(np.take_along_axis(log_q, ids, -1).sum())
            done += rows
            if progress is not None:
                progress(done / (steps * ROWS))
    return Divergence(
        tokens=done,
        kl=kl / done,
        agreement=same / done,
        perplexity=float(np.exp(-likelihood / done)),
        quantized_perplexity=float(np.exp(-quantized_likelihood / done)),
    )


def logits_runner(
    folder: Path,
    interface: Interface,
    capacity: int,
    providers: tuple[str, ...] = ("CPUExecutionProvider",),
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
