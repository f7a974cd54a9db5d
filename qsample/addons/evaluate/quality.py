"""Perplexity, KL divergence and top-1 agreement of packages on a text, with confidence intervals.

All packages read the same tokens in step, so that each package has only a row of distributions in memory; a few numbers
of each token are kept. Like the runtime, this needs onnxruntime, numpy and tokenizers only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.addons.evaluate.windows import Window, cut_windows
from qsample.checks import as_path, check_count, is_number
from qsample.contract.arrays import Array
from qsample.contract.tensors import INPUT_IDS, LENGTHS, LOGITS
from qsample.errors import QsampleError, shown
from qsample.ort.options import NO_SPINNING, SessionOptions
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import Package, read_package
from qsample.package.statistics import Estimate, estimate_means
from qsample.progress import Progress, Stage, unreported
from qsample.request.text.documents import documents_of

DEFAULT_MAX_LENGTH: Final = 1024
DEFAULT_BATCH_SIZE: Final = 8
# The prompt before the timed steps has this many tokens, and there are as many steps.
_TIMED_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far a package is from the package in the folder `reference`, on the same tokens.

    Attributes:
        reference: the folder of the reference.
        kl: the Kullback-Leibler divergence of the package's distribution from the reference's, sum of p_reference *
            ln(p_reference / p_package), in nats a token.
        agreement: the share of tokens, in [0, 1], with the same likeliest next token (top-1).
        perplexity_ratio: the package's perplexity over the reference's; its interval is of pairs, and so narrower than
            the intervals of the two perplexities.
    """

    reference: str
    kl: Estimate
    agreement: Estimate
    perplexity_ratio: Estimate


@dataclass(frozen=True, slots=True)
class PackageQuality:
    """A package: the folder `path`, and how good it is.

    Attributes:
        path: the folder.
        label: the format of its weights, in words.
        bytes: the size of all its files.
        perplexity: exp of the mean negative log-likelihood of a token.
        comparisons: the comparison with each reference.
        step_ms: the median time of a decode step of a row, in milliseconds; None if it was not measured.
    """

    path: str
    label: str
    bytes: int
    perplexity: Estimate
    comparisons: tuple[Comparison, ...] = ()
    step_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Packages on a text.

    Attributes:
        tokens, documents: the numbers of scored tokens and of documents.
        max_length: the tokens of a window.
        stride: the tokens from the beginning of a window to the next; see `windows.cut_windows`.
        confidence: the confidence of every interval, in (0, 1).
        packages: the packages in the order given, then the references, each of them once.
    """

    tokens: int
    documents: int
    max_length: int
    stride: int
    confidence: float
    packages: tuple[PackageQuality, ...]


def evaluate(  # noqa: PLR0913  # keywords of the public API
    packages: Any,
    text: Any,
    *,
    against: Any = (),
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    confidence: float = 0.95,
    seed: int = 0,
    step_time: bool = False,
    intra_op_num_threads: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Score `text` by packages, and say how far they are from references. Every package is loaded at the same time.

    Args:
        packages: a folder, a `Package`, a result of `export` or `compile`, or a list of these.
        text: a document, or a list of documents. Each is a text, tokenized as a prompt is, or token ids, [n] integers.
        against: references, as `packages`: each package is compared with each of them.
        max_length: the tokens of a window, at least 2; by default the capacity of all packages, at most 1,024.
        stride: the tokens from a window to the next, 1 to max_length, by default half of it. A smaller stride gives
            tokens more context and takes longer; see `windows.cut_windows`.
        batch_size: the windows that are read at once, at least 1; fewer if a package was compiled for fewer rows.
        confidence: the confidence of the intervals, in (0, 1); `package.statistics` has the method.
        seed: the seed of their resamples, an integer.
        step_time: whether decode steps of a single row are timed, too, after prompts of up to 64 tokens.
        intra_op_num_threads: the threads of an operator, by default ONNX Runtime's choice.
        progress: a function that is called with a stage's name and the fraction done, in [0, 1].

    Raises ValueError for a wrong argument and for a text without a token to score; QsampleError if the packages'
    vocabularies or tokenizers differ, a package has no tokenizer for a text, or a model gives logits that are not
    numbers; PackageError for a folder that is not a package.

    >>> evaluate("tiny-int4", Path("book.txt").read_text("utf-8"), against="tiny-cpu").packages[0].comparisons[0].kl
    """
    report = progress or unreported
    chosen = opened(packages, "package")
    references = opened(against, "reference")
    if not chosen:
        raise ValueError("no package was given; give at least one")
    models = list(
        (chosen | {path: one for path, one in references.items() if path not in chosen}).values()
    )
    places = {path: place for place, path in enumerate(dict.fromkeys((*chosen, *references)))}
    pairs = [(places[one], places[other]) for one in chosen for other in references if one != other]
    if references and not pairs:
        raise ValueError(
            f"against is {next(iter(references))}, the package itself; give another one to compare it with"
        )
    check_count("batch_size", batch_size)
    if not is_number(confidence) or not 0 < confidence < 1:
        raise ValueError(
            f"confidence is {shown(confidence)}; give a number between 0 and 1, such as 0.95"
        )
    check_vocabularies(models)
    documents = documents_of(text, models)
    max_length, stride = _window_size(models, max_length, stride)
    windows = cut_windows(documents, max_length, stride)
    if not windows:
        raise ValueError(
            "text has no token to score: a document needs at least 2 tokens; give a longer text"
        )
    rows = min(
        [
            batch_size,
            len(windows),
            *(most for one in models if (most := compiled_for(one)[1]) is not None),
        ]
    )
    # Sessions that wait would take the processors from the session that runs.
    options = SessionOptions(intra_op_num_threads, config=NO_SPINNING)
    scores = _Scores(models, pairs, sum(window.scored for window in windows))
    steppers = []
    for index, one in enumerate(models):
        report(f"{Stage.LOADING} {one.path.name}", 0.05 * index / len(models))
        sessions = open_sessions(one, options=options, logits=True)
        ctx_len, _ = compiled_for(one)
        capacity = max_length if ctx_len is None else ctx_len
        steppers.append(Stepper(sessions, rows, capacity, logits=True))
    for done, (place, token, logits) in enumerate(read_windows(steppers, windows, rows), 1):
        scores.add(place, token, logits)
        report(Stage.READING_TEXT, 0.05 + (0.75 if step_time else 0.95) * done / scores.tokens)
    del steppers
    times = [_step_time(one, intra_op_num_threads, report) if step_time else None for one in models]
    report(Stage.DONE, 1.0)
    return Evaluation(
        tokens=scores.tokens,
        documents=len(documents),
        max_length=max_length,
        stride=stride,
        confidence=confidence,
        packages=scores.qualities(confidence, seed, times),
    )


class _Scores:
    """A few numbers of every scored token, [models or pairs, tokens]."""

    def __init__(
        self, models: Sequence[Package], pairs: Sequence[tuple[int, int]], tokens: int
    ) -> None:
        """`pairs`: a package and the reference that it is compared with, by their places in `models`."""
        self.models = models
        self.pairs = list(dict.fromkeys(pairs))
        self.tokens = tokens
        self.losses = np.zeros((len(models), tokens))
        self.kl = np.zeros((len(self.pairs), tokens))
        self.same = np.zeros((len(self.pairs), tokens), bool)

    def add(self, place: int, token: int, logits: Sequence[Array]) -> None:
        """Keep the numbers of the scored token at `place`: `token` came after the `logits`, [V] of each model."""
        log_p = [
            log_probabilities(row, one.path, place)
            for row, one in zip(logits, self.models, strict=True)
        ]
        self.losses[:, place] = [-row[token] for row in log_p]
        for index, (model, reference) in enumerate(self.pairs):
            p = np.exp(log_p[reference])
            with np.errstate(invalid="ignore"):  # two masked tokens: -inf less -inf, times 0
                self.kl[index, place] = np.where(
                    p > 0, p * (log_p[reference] - log_p[model]), 0
                ).sum()
            self.same[index, place] = log_p[reference].argmax() == log_p[model].argmax()

    def qualities(
        self, confidence: float, seed: int, times: Sequence[float | None]
    ) -> tuple[PackageQuality, ...]:
        columns = {f"loss {index}": row for index, row in enumerate(self.losses)}
        for index, (model, reference) in enumerate(self.pairs):
            columns[f"kl {index}"], columns[f"same {index}"] = self.kl[index], self.same[index]
            columns[f"ratio {index}"] = self.losses[model] - self.losses[reference]
        means = estimate_means(columns, confidence=confidence, seed=seed)
        return tuple(
            PackageQuality(
                path=str(one.path),
                label=_label(one),
                bytes=sum(entry.bytes for entry in one.manifest.files.values()),
                perplexity=means[f"loss {index}"].map(_exp),
                comparisons=tuple(
                    Comparison(
                        str(self.models[reference].path),
                        means[f"kl {pair}"],
                        means[f"same {pair}"],
                        means[f"ratio {pair}"].map(_exp),
                    )
                    for pair, (model, reference) in enumerate(self.pairs)
                    if model == index
                ),
                step_ms=times[index],
            )
            for index, one in enumerate(self.models)
        )


def opened(given: Any, what: str) -> dict[Path, Package]:
    """The packages that a caller named, by their folders without links."""
    entries = list(given) if isinstance(given, list | tuple) else [given]
    packages: dict[Path, Package] = {}
    for entry in entries:
        package = getattr(entry, "package", entry)
        if isinstance(package, str | os.PathLike):
            package = read_package(as_path(what, package))
        if not isinstance(package, Package):
            raise ValueError(
                f"{shown(entry)} is not a {what}; give a package's folder, or the result of compile"
            )
        packages.setdefault(Path(os.path.realpath(package.path)), package)
    return packages


def check_vocabularies(models: Sequence[Package]) -> None:
    """Raise QsampleError unless all vocabularies have the same size."""
    sizes = {one.interface.vocab_size: one for one in models}
    if len(sizes) > 1:
        (size, one), (other_size, other), *_ = sizes.items()
        raise QsampleError(
            f"{other.path} has a vocabulary of {other_size} tokens and {one.path} one of {size}; distributions over "
            "different tokens cannot be compared"
        )


def window_length(models: Sequence[Package], max_length: int | None, default: int) -> int:
    """The checked max_length; None is `default`, or the most that all packages hold if that is less."""
    limits = [(limit, one.path) for one in models if (limit := _longest_context(one)) is not None]
    most, tightest = min(limits, default=(None, None))
    check_count("max_length", max_length, least=2)
    if max_length is None:
        return default if most is None else min(default, most)
    if most is not None and max_length > most:
        raise ValueError(
            f"max_length is {max_length} and {tightest} holds {most} tokens; give at most that"
        )
    return max_length


def _window_size(
    models: Sequence[Package], max_length: int | None, stride: int | None
) -> tuple[int, int]:
    """The checked max_length and stride."""
    max_length = window_length(models, max_length, DEFAULT_MAX_LENGTH)
    if stride is None:
        stride = max_length // 2
    check_count("stride", stride)
    if stride > max_length:
        raise ValueError(
            f"stride is {stride} and max_length {max_length}; windows may not leave tokens out between them"
        )
    return max_length, stride


def compiled_for(package: Package) -> tuple[int | None, int | None]:
    """T, and the most rows; None for any number, as in a portable package."""
    compilation = package.manifest.compilation
    return (None, None) if compilation is None else (compilation.ctx_len, compilation.batch_size)


def _longest_context(package: Package) -> int | None:
    """The most tokens of a row; None for any number."""
    ctx_len, _ = compiled_for(package)
    return package.manifest.max_position_embeddings if ctx_len is None else ctx_len


def _label(package: Package) -> str:
    """How the weights are held, in words."""
    compilation = package.manifest.compilation
    figures: Mapping[str, Any] = (compilation.quantization if compilation else None) or {}
    parts = (
        figures.get("dtype") or package.interface.dtype,
        figures.get("method"),
        f"blocks of {figures['block_size']}" if "block_size" in figures else None,
        "packed by the checkpoint" if package.manifest.packed_weights else None,
        f"{figures['kv_cache_dtype']} cache" if "kv_cache_dtype" in figures else None,
    )
    return ", ".join(str(part) for part in parts if part not in (None, ""))


def _step_time(package: Package, threads: int | None, report: Progress) -> float:
    from qsample.runtime import load
    from qsample.runtime.bench import measure

    report(f"{Stage.TIMING} {package.path.name}", 0.8)
    longest = _longest_context(package)
    if longest is None:
        longest = 2 * _TIMED_TOKENS
    # Eight places are left for the steps that warm up.
    tokens = max(1, min(_TIMED_TOKENS, (longest - 8) // 2))
    model = load(package.path, intra_op_num_threads=threads, verify=False)
    return measure(model, prompt_tokens=tokens, new_tokens=tokens).decode_ms


def read_windows(
    steppers: Sequence[Stepper], windows: Sequence[Window], rows: int, *, prefill: bool = True
) -> Iterator[tuple[int, int, list[Array]]]:
    """Read windows, `rows` at a time. Yields, for each scored token, its place, the token, and the logits, [V] of each
    stepper, that it came after. prefill: read the tokens before the scored ones in pieces, not one by one."""
    for start in range(0, len(windows), rows):
        batch = windows[start : start + rows]
        begin = [window.first - 1 if prefill else 0 for window in batch]
        for row, window in enumerate(batch):
            for stepper in steppers:
                stepper.fill(row, window.ids[: begin[row]])
        for step in range(
            max(len(window.ids) - 1 - first for window, first in zip(batch, begin, strict=True))
        ):
            running = [
                row for row, window in enumerate(batch) if begin[row] + step + 1 < len(window.ids)
            ]
            ids, lengths = (
                np.zeros(rows, np.int64),
                np.zeros(rows, np.int32),
            )  # the rest begin again, and again
            for row in running:
                lengths[row] = begin[row] + step
                ids[row] = batch[row].ids[lengths[row]]
            logits = [_logits(stepper, ids, lengths) for stepper in steppers]
            if not prefill:
                for (
                    stepper
                ) in steppers:  # a captured graph's recurrent states are not updated in place
                    stepper.advance()
            for row in running:
                following = int(lengths[row]) + 1
                if following >= batch[row].first:
                    place = batch[row].offset + following - batch[row].first
                    yield place, int(batch[row].ids[following]), [one[row] for one in logits]


def _logits(stepper: Stepper, ids: Array, lengths: Array) -> Array:
    """[rows, V] float32 after one more token of each row. `ids`: [rows] int64. `lengths`: [rows] int32, the tokens
    before it; a recurrent layer wants them to grow by the tokens read, or to start again from 0."""
    stepper.write(INPUT_IDS.name, ids[:, None])
    stepper.write(LENGTHS.name, lengths)
    stepper.run()
    return stepper.read(LOGITS.name)


def log_probabilities(logits: Array, origin: Any, place: int) -> Array:
    """[V] float64, of logits [V]. Raises QsampleError, with the scored token's `place`, if `origin` gave no numbers."""
    with np.errstate(invalid="ignore"):
        shifted: Array = logits.astype(np.float64)
        shifted -= shifted.max()
        shifted -= np.log(np.exp(shifted).sum())
    if not np.isfinite(shifted.max()):
        raise QsampleError(
            f"{origin} gives logits that are not numbers, at scored token {place}; export or compile it again"
        )
    return shifted


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):  # infinity
        return float(np.exp(value))
