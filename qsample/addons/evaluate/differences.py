"""How far a package's log-probabilities are from a reference's on the same tokens, in each form that its graph has.

The texts are fixed, so that a difference changes nothing that follows, and the tokens are the reference's likeliest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qsample.addons.evaluate.quality import (
    check_vocabularies,
    compiled_for,
    log_probabilities,
    opened,
    read_windows,
    window_length,
)
from qsample.addons.evaluate.windows import Window
from qsample.checks import check_count
from qsample.contract.arrays import Array
from qsample.errors import QsampleError
from qsample.ort.options import NO_SPINNING, SessionOptions
from qsample.ort.session import Sessions, open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import Package
from qsample.progress import Progress, Stage, unreported
from qsample.request.sampling_params import SamplingParams
from qsample.text.documents import documents_of

SEQUENTIAL = "sequential"
BATCHED = "batched"
CAPTURED = "captured"
_HEAD: Final = 20
_MAX_LENGTH: Final = 64
_STRIDE: Final = 11  # from a prompt's length to the next, so that the rows of a batch are ragged

# Rows of token ids → the logits of each row, [n, V] float32.
Logits = Callable[[list[list[int]]], Sequence[Array]]


@dataclass(frozen=True, slots=True)
class Differences:
    """From the reference, over all positions.

    Attributes:
        mean, p99, largest: of the absolute differences of log-probabilities, in nats.
        agreement: share of positions, in [0, 1], with the same argmax.
        quantiles: the differences at 0, 1, ... 100 percent, in order.
    """

    mean: float
    p99: float
    largest: float
    agreement: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """The package in the folder `package` beside `reference`.

    Attributes:
        positions, head: scored tokens, and the compared log-probabilities of each.
        forms: sequential is a row at a time, token by token; batched are several rows, whose prompts are read in
            pieces; captured are the same rows, token by token, in a graph for replay. None if the package lacks it.
        tokens, sha256: of generated rows: the digest of a line for each, its ids in decimal with spaces between them.
        alone_sha256: of the same rows, each generated alone.
    """

    package: str
    reference: str
    positions: int
    head: int
    forms: Mapping[str, Differences | None]
    tokens: int
    sha256: str
    alone_sha256: str


def verify(  # noqa: PLR0913  # keywords of the public API
    package: Any,
    against: Any,
    *,
    text: Any = None,
    positions: int = 256,
    max_length: int | None = None,
    batch_size: int = 8,
    name: str = "the reference",
    intra_op_num_threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare a package with a reference. Packages are in memory one at a time.

    Args:
        package: a folder, a `Package`, or a result of `export` or `compile`.
        against: the same, or a function from rows of token ids to the logits of each row, [n, V].
        text: as in `evaluate`, cut into prompts and scored tokens; by default random ids, the same for any model.
        positions: tokens to score, at least 1.
        max_length: tokens of a row, at least 2, of which half are scored; by default 64, or the most that both hold.
        batch_size: rows of a batch, at least 1; fewer if a package was compiled for fewer.
        name: of that function, in messages.
        intra_op_num_threads, progress: as in `evaluate`.

    Raises as `evaluate` does, and ValueError for a text that is too short.
    """
    report = progress or unreported
    eager: Logits | None = (
        against if callable(against) and not hasattr(against, "package") else None
    )
    models = [
        *opened(package, "package").values(),
        *(opened(against, "reference").values() if eager is None else ()),
    ]
    if len(models) != 1 + (eager is None):
        raise ValueError("give a single package, and a single reference to compare it with")
    check_vocabularies(models)
    check_count("positions", positions)
    check_count("batch_size", batch_size)
    max_length = window_length(models, max_length, _MAX_LENGTH)
    windows = _windows(models, text, positions, max_length)
    rows = min(batch_size, len(windows), compiled_for(models[0])[1] or batch_size)

    def read(package: Package, sessions: Sessions, form: str) -> Iterator[tuple[int, Array]]:
        """The place and the logits [V] of each scored token."""
        capacity, most = compiled_for(package)
        count = 1 if form == SEQUENTIAL else min(rows, most or rows)
        stepper = Stepper(
            sessions, count, capacity or max_length, captured=form == CAPTURED, logits=True
        )
        for place, _, (logits,) in read_windows([stepper], windows, count, prefill=form == BATCHED):
            yield place, logits

    one = models[0]
    options = SessionOptions(intra_op_num_threads, config=NO_SPINNING)
    report(Stage.COMPARING, 0.0)
    if eager is not None:
        wanted = _eager(eager, windows, rows)
    else:
        name = str(models[1].path)
        wanted = read(models[1], open_sessions(models[1], options=options, logits=True), BATCHED)
    head = _head(name, wanted, positions, one.interface.vocab_size)
    report(f"{Stage.LOADING} {one.path.name}", 0.4)
    texts = _generated(one, windows[:rows], max_length // 2, intra_op_num_threads)
    report(Stage.READING_TEXT, 0.6)
    sessions = open_sessions(one, options=options, logits=True)
    forms = {
        form: _differences(head, str(one.path), read(one, sessions, form)) if there else None
        for form, there in {
            SEQUENTIAL: True,
            BATCHED: rows > 1,
            CAPTURED: one.interface.captured,
        }.items()
    }
    report(Stage.DONE, 1.0)
    tokens, (sha256, alone) = sum(map(len, texts[0])), map(_sha256, texts)
    return Verification(
        str(one.path), name, positions, head[0].shape[1], forms, tokens, sha256, alone
    )


def _windows(models: Sequence[Package], text: Any, positions: int, max_length: int) -> list[Window]:
    scored = max_length // 2
    first = [1 + _STRIDE * row % (max_length - scored) for row in range(-(-positions // scored))]
    sizes = [prompt + min(scored, positions - scored * row) for row, prompt in enumerate(first)]
    if text is None:
        pad = models[0].manifest.token_ids.pad  # which models that number positions themselves skip
        allowed = np.setdiff1d(np.arange(models[0].interface.vocab_size), [pad])
        ids: Array = np.random.default_rng(0).choice(allowed, sum(sizes))
    else:
        ids = np.concatenate(documents_of(text, models))
    if len(ids) < sum(sizes):
        raise ValueError(
            f"text has {len(ids)} tokens, and {positions} positions need {sum(sizes)}; give a longer text, or fewer "
            "positions"
        )
    pieces = np.split(ids[: sum(sizes)], np.cumsum(sizes)[:-1])
    return [
        Window(piece, prompt, scored * row)
        for row, (piece, prompt) in enumerate(zip(pieces, first, strict=True))
    ]


def _eager(eager: Logits, windows: Sequence[Window], rows: int) -> Iterator[tuple[int, Array]]:
    for start in range(0, len(windows), rows):
        batch = windows[start : start + rows]
        for window, logits in zip(
            batch, eager([window.ids.tolist() for window in batch]), strict=True
        ):
            yield from enumerate(logits[window.first - 1 : -1], window.offset)


def _head(
    name: str, read: Iterable[tuple[int, Array]], positions: int, vocab_size: int
) -> tuple[Array, Array]:
    """The likeliest tokens at each position, [positions, K], likeliest first, and their log-probabilities."""
    ids = np.zeros((positions, min(_HEAD, vocab_size)), np.int64)
    wanted = np.zeros(ids.shape)
    for place, logits in read:
        if len(logits) != vocab_size:
            raise QsampleError(
                f"{name} has a vocabulary of {len(logits)} tokens and the package one of {vocab_size}; distributions "
                "over different tokens cannot be compared"
            )
        log_p = log_probabilities(logits, name, place)
        ids[place] = np.argsort(-log_p, kind="stable")[: ids.shape[1]]
        wanted[place] = log_p[ids[place]]
    return ids, wanted


def _differences(
    head: tuple[Array, Array], name: str, read: Iterable[tuple[int, Array]]
) -> Differences:
    ids, wanted = head
    found = np.zeros(ids.shape)
    same = np.zeros(len(ids), bool)
    for place, logits in read:
        log_p = log_probabilities(logits, name, place)
        got = log_p[ids[place]]
        with np.errstate(invalid="ignore"):  # -inf less -inf, of tokens that both forbid
            found[place] = np.where(got == wanted[place], 0, np.abs(got - wanted[place]))
        same[place] = log_p.argmax() == ids[place, 0]
    quantiles = np.quantile(found, np.linspace(0, 1, 101), method="higher").tolist()
    return Differences(
        float(found.mean()), quantiles[99], quantiles[100], float(same.mean()), tuple(quantiles)
    )


def _generated(
    package: Package, windows: Sequence[Window], tokens: int, threads: int | None
) -> tuple[list[list[int]], list[list[int]]]:
    """What the package writes after the prompts, greedily and at random in turn: together, and each alone."""
    from qsample.runtime import load

    model = load(package.path, intra_op_num_threads=threads, verify=False)
    rows = [
        (
            window.ids[: window.first].tolist(),
            SamplingParams(temperature=row % 2, seed=row, max_new_tokens=tokens, eos_token_id=()),
        )
        for row, window in enumerate(windows)
    ]
    alone = [model.generate(*row).token_ids[0] for row in rows]
    return model.generate(*map(list, zip(*rows, strict=True))).token_ids, alone


def _sha256(rows: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(
        "".join(" ".join(map(str, row)) + "\n" for row in rows).encode()
    ).hexdigest()
