"""Progress of long work: the callback that receives it, parts of a whole, and stages with their shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from itertools import accumulate
from typing import Any

Progress = Callable[[str, float], None]  # the name of a stage, and the fraction of the whole that is done, in [0, 1]


class Stage(StrEnum):
    """The stages of long work, in the words that a progress bar shows."""

    STARTING = "starting"
    WAITING = "waiting for another process that makes the same package"
    MAKING_AGAIN = "the package in the cache is damaged and is made again"
    OPENING = "opening the checkpoint"
    CHECKING = "checking the model"
    TRACING = "tracing the decode graph"
    WRITING_WEIGHTS = "writing the weights"
    COMPARING_WITH_MODEL = "comparing with the Hugging Face model"

    FINDING = "finding the decoder"
    READING = "reading the decoder"
    RUNNING = "running the decoder as it is"
    REWRITING = "rewriting"
    COMPARING_WITH_DECODER = "comparing with the decoder as it is"
    COMPARING_WITH_CHECKPOINT = "comparing with the checkpoint"

    OPTIMISING = "optimising the graph"
    MEASURING_CACHE = "measuring keys and values"
    FITTING = "fitting weights to the text"
    WRITING_GRAPH = "writing the graph"
    TESTING = "self-test"
    DIVERGENCE = "measuring the divergence"
    PUBLISHING = "publishing"

    LOADING = "loading"
    READING_TEXT = "reading the text"
    READING_PROMPT = "reading the prompt"
    TIMING = "timing"
    DONE = "done"  # the last report of the whole


def unreported(stage: str, fraction: float) -> None:
    """The callback of a caller who gave none."""


@contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """`progress`; for callers without one, a bar on a terminal or in a notebook, as transformers shows when it loads.

    It needs tqdm, which comes with transformers. HF_HUB_DISABLE_PROGRESS_BARS hides it, too.
    """
    try:
        from tqdm.auto import tqdm as bar_class
    except ModuleNotFoundError:
        bar_class = None
    notebook = "ipykernel" in sys.modules
    in_sight = notebook or (sys.stderr is not None and sys.stderr.isatty())
    if progress is not None or bar_class is None or not in_sight or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        yield progress or unreported
        return
    bar: Any
    with bar_class(total=1.0, leave=False, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}") as bar:

        def report(stage: str, fraction: float) -> None:
            bar.set_description_str(str(stage), refresh=False)
            bar.n = fraction
            bar.refresh()

        report(Stage.STARTING, 0.0)
        yield report


def part(progress: Progress | None, start: float, end: float) -> Progress:
    """A callback for work that is a part of a longer one: its fractions 0 to 1 become `start` to `end` of the whole.

    The part's own "done" is not passed on unless the whole ends with it.
    """

    def report(stage: str, fraction: float) -> None:
        if progress is not None and (stage != Stage.DONE or end == 1.0):
            progress(stage, start + (end - start) * fraction)

    return report


class Stages:
    """The stages of long work, in order, reported to a callback: the fraction done rises from 0 to 1 once.

    >>> stages = Stages(progress, {Stage.TESTING: 8, Stage.PUBLISHING: 2})
    >>> stages.begin(Stage.TESTING)
    >>> advance = stages.begin(Stage.PUBLISHING)
    >>> advance(0.5)  # reports ("publishing", 0.9)
    >>> stages.finish()
    """

    def __init__(self, progress: Progress | None, shares: Mapping[str, float]) -> None:
        """
        Args:
            progress: the caller's callback, if any.
            shares: the stages by name, with the time that each takes in proportion to the others.
        """
        self._report = progress or unreported
        ends = list(accumulate(shares.values(), initial=0.0))
        self._spans = {
            stage: (start / ends[-1], end / ends[-1]) for stage, start, end in zip(shares, ends, ends[1:], strict=False)
        }

    def begin(self, stage: str) -> Callable[[float], None]:
        """Report that `stage` begins, and return a function that reports the fraction of it that is done, in [0, 1]."""
        start, end = self._spans[stage]

        def advance(fraction: float) -> None:
            self._report(stage, start + (end - start) * fraction)

        advance(0.0)
        return advance

    def finish(self) -> None:
        """Report the end of the whole."""
        self._report(Stage.DONE, 1.0)
