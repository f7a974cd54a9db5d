"""Two decode graphs of one model enter, the second with quantized weights; the distance of their distributions leaves.

The text is sampled at temperature 1 from random first tokens: it needs no corpus. The quantized graph writes it, in
cheap steps, and the first graph reads all of it in one call, in one pass over its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from qsample.compiler.trial import Call, Text, logits_of, read, write
from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import LOGITS
from qsample.graph.packed import in_nibbles
from qsample.graph.runner import GraphRunner
from qsample.ort.providers import CPU

ROWS: Final = 8
STEPS: Final = 32
_PART: Final = 512  # tokens of the vocabulary
_WRITING: Final = 0.6  # of the time, where a single call reads


@dataclass(frozen=True, slots=True)
class Divergence:
    """Means over `tokens` tokens of the text.

    kl: Kullback-Leibler divergence of the quantized from the float distribution, nats a token. kept_kl: the same over
    the parts that the float model could have written, too. agreement: share of tokens with the same argmax in both.
    perplexity, quantized_perplexity: exp of each model's mean negative log-likelihood of tokens drawn from the float
    one.
    """

    tokens: int
    kl: float
    kept_kl: float
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
    runner: Callable[[int], Any] | None = None,
) -> Divergence:
    """Compare the logits of two folders' `decoder.onnx` and `initial_state.onnx`, equal but for the quantization.
    capacity: tokens of state a row, at least 2. providers: for the quantized graph. progress: called with the fraction
    done, in [0, 1]. rows: of a call, 1, 2, 4 or 8, if the quantized graph has it fixed. runner: runs
    the quantized graph over a number of rows, in place of a `GraphRunner`."""
    rng = np.random.default_rng(0)
    rows, calls = rows or ROWS, min(STEPS, capacity - 1)
    prompts = [rng.integers(0, interface.vocab_size, (rows, 1)) for _ in range(ROWS // rows)]
    # Only the quantized graph needs its kernels' own layout: without it, each call would unpack the weights.
    if runner is not None:
        writer = runner(rows)
    else:
        model = logits_of(quantized, interface)
        if providers == (CPU,):
            in_nibbles(model)  # a package for browsers would take minutes
        writer = GraphRunner(model, quantized, interface, capacity, providers)
    texts: list[list[Call]] = []
    for prompt in prompts:
        texts.append([])
        step = partial(writer.step, state=writer.start(rows))
        for call in write(step, prompt, np.ones(rows, np.int64), calls, sampled(rng)):
            texts[-1].append(call)
            if progress is not None:
                progress(_WRITING * sum(map(len, texts)) / (len(prompts) * calls))
    del writer, step  # before the next graph opens its session
    # The float graph has neither caches in fewer bits nor caches of a window.
    plain = tuple(replace(shape, capacity=None) for shape in interface.key_values)
    whole = replace(interface, key_values=plain, kv_cache_dtype=None)
    return _score(texts, read(logits_of(reference, whole), texts, reference, whole, capacity))


def _score(texts: Sequence[Text], reference: Sequence[Sequence[Array]]) -> Divergence:
    """The divergence over `texts` of the quantized graph; reference: the other's logits, [rows, V] after each call.

    Such a text may hide errors: if it repeats a token over and over, the float graph soon expects that, too. `kept_kl`
    weights each place by the probability that the float graph would have kept all tokens before it, a token with min(1,
    p / q) (speculative decoding, https://arxiv.org/abs/2211.17192): the kept text is the float graph's.
    """
    kl, entropy, weights, same = list[Array](), list[Array](), list[Array](), list[Array]()
    for text, own in zip(texts, reference, strict=True):
        kept = np.ones(len(text[0].ids))
        for call, x in zip(text, own, strict=True):
            y = call.logits
            of_x, of_y = softmax(x), softmax(y)
            with np.errstate(invalid="ignore"):  # 0 * -inf, which `where` leaves out
                likely = of_x.p > 0
                expected = np.where(likely, of_x.p * x, 0).sum(-1, dtype=np.float64)
                difference = np.where(likely, of_x.p * (x - y), 0).sum(-1, dtype=np.float64)
            # Rounding may end below 0.
            kl.append(np.maximum(difference - (of_x.normalizer - of_y.normalizer)[:, 0], 0))
            entropy.append(of_x.normalizer[:, 0] - expected)
            weights.append(kept)
            same.append(x.argmax(-1) == y.argmax(-1))
            ratio = np.take_along_axis(x - y, call.tokens[:, None], -1) - (of_x.normalizer - of_y.normalizer)
            kept = kept * np.exp(np.minimum(ratio[:, 0], 0))
    mean_kl, mean_entropy = float(np.mean(kl)), float(np.mean(entropy))
    return Divergence(
        tokens=np.size(kl),
        kl=mean_kl,
        kept_kl=float(np.average(kl, weights=weights)),
        agreement=float(np.mean(same)),
        perplexity=float(np.exp(mean_entropy)),
        quantized_perplexity=float(np.exp(mean_entropy + mean_kl)),
    )


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


def sampled(rng: np.random.Generator) -> Callable[[Mapping[str, Array]], Array]:
    """Chooses tokens of a call's logits at temperature 1, by inverse CDF: for `trial.write`."""

    def choose(results: Mapping[str, Array]) -> Array:
        logits = results[LOGITS.name]
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        rows, vocab_size = weights.shape
        # A part of the vocabulary first, then a token of it: running sums of all tokens take ten times as long.
        parts = np.pad(weights, ((0, 0), (0, -vocab_size % _PART))).reshape(rows, -1, _PART)
        ends = parts.sum(-1, dtype=np.float64).cumsum(-1)
        drawn = rng.random((rows, 1)) * ends[:, -1:]
        part = np.minimum((ends <= drawn).sum(-1), ends.shape[-1] - 1)
        before = np.where(part > 0, ends[np.arange(rows), part - 1], 0)[:, None]
        within = before + parts[np.arange(rows), part].cumsum(-1, dtype=np.float64)
        tokens: Array = np.minimum(part * _PART + (within <= drawn).sum(-1), vocab_size - 1)
        return tokens

    return choose
