"""Measures how fast a loaded package prefills and decodes."""

from __future__ import annotations

import sys
import time
from collections import abc
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.images.prompt import ImagePrompt
from qsample.ort.session import Sessions
from qsample.request.sampling_params import SamplingParams
from qsample.runtime.adapters import Adapter
from qsample.runtime.causal_lm import CausalLM
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import for_package, parameter_row
from qsample.runtime.sequence import (
    NO_DRAFTS,
    DraftStats,
    Sequence,
    SequenceImages,
    SequenceRequest,
)

_WARM_UP_STEPS: Final = 3
_ImagesAndFeatures = tuple[ImagePrompt, Array]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of a batch size.

    Attributes:
        rows: the number of prompts.
        prompt_tokens: the tokens of each prompt.
        new_tokens: the number of decode steps that were timed.
        first_token_ms: the milliseconds from the prompts to the first token of every row, median of
            the repetitions.
        prefill_tokens_per_second: the prompt tokens of all rows, divided by that time.
        decode_ms, decode_ms_p90: the milliseconds of a decode step, median and 90th percentile of
            all steps.
        tokens_per_second: the tokens of all rows together, at the mean step if tokens are guessed,
            otherwise at the median step.
        tokens_per_step: the tokens of a row and step; 1 without guesses.
        image_tokens: the number of prompt tokens that stand for an image.
        vision_ms: the milliseconds to the features of an image, median; first_token_ms does not
            include them.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    first_token_ms: float
    prefill_tokens_per_second: float
    decode_ms: float
    decode_ms_p90: float
    tokens_per_second: float
    tokens_per_step: float = 1.0
    image_tokens: int = 0
    vision_ms: float = 0.0


class LockStep:
    """The decode loop for measurements: rows that start together and are read after every step.

    >>> rows = LockStep(model.sessions, [parameters_0, parameters_1], seeds=[0, 1], capacity=256)
    >>> tokens = [rows.prefill([prompt_0, prompt_1]), rows.decode(), rows.decode()]
    """

    def __init__(
        self,
        sessions: Sessions,
        parameters: abc.Sequence[abc.Mapping[str, Array]],
        seeds: abc.Sequence[int],
        capacity: int,
        adapters: abc.Sequence[Adapter] = (),
    ) -> None:
        """Allocate the memory, and capture the steps if the package is made for that.

        Args:
            sessions: the package's sessions.
            parameters, seeds: the parameters and the seed of each row; see `parameter_row`. No row
                may end before the last step.
            capacity: T, the tokens of a row.
            adapters: the adapters, which the rows use in turns.
        """
        adapters_of_rows: list[Adapter | None] = [None] * len(parameters)
        if adapters:
            adapters_of_rows = [adapters[row % len(adapters)] for row in range(len(parameters))]
        self._rows = list(zip(parameters, seeds, adapters_of_rows, strict=True))
        self._sequences: list[Sequence] = []
        self._slots = Slots(sessions, len(self._rows), capacity)
        for row, values in enumerate(parameters):  # The values decide which graphs are captured.
            self._slots.set_parameters(row, values)
        if not self._slots.prepared:
            self._slots.prepare()
        scheduler = Scheduler(len(self._rows), SchedulerConfig.of(sessions, interleave=False))
        self._loop = DecodeLoop(
            self._slots, scheduler, lambda sequence: None, double_buffering=False
        )

    def prefill(
        self, prompts: abc.Sequence[Array], images: abc.Sequence[_ImagesAndFeatures] = ()
    ) -> Array:
        """Read the prompts, and sample the first token of each row.

        Args:
            prompts: the prompt of each row, [n] int64.
            images: the images of each row, with their features.

        Returns:
            The tokens, [B] int64.
        """
        for row, (prompt, (values, seed, adapter)) in enumerate(
            zip(prompts, self._rows, strict=True)
        ):
            request = SequenceRequest(prompt, values, seed, adapter=adapter)
            own = SequenceImages(*images[row]) if images else None
            self._sequences.append(Sequence(request, images=own))
            self._loop.add(self._sequences[-1])
        while not all(sequence.started for sequence in self._sequences):
            self._loop.step()
        return self._newest()

    def decode(self) -> Array:
        """Sample each row's next token: [B] int64."""
        self._loop.step()
        return self._newest()

    @property
    def drafts(self) -> DraftStats:
        return sum((sequence.progress.drafts for sequence in self._sequences), NO_DRAFTS)

    def _newest(self) -> Array:
        return np.array(
            [sequence.progress.sampled[-1] for sequence in self._sequences], dtype=np.int64
        )


def _check_counts(**counts: int) -> None:
    """Raise ValueError unless all numbers are at least 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def measure(
    model: CausalLM,
    rows: int = 1,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    params: SamplingParams | None = None,
    repetitions: int = 3,
    adapters: abc.Sequence[Adapter] = (),
    image: tuple[int, int] | None = None,
) -> Measurement:
    """Generate from random prompts, and time every call.

    Args:
        model: the model.
        rows: the number of prompts, >= 1.
        prompt_tokens: the tokens of each prompt, >= 1.
        new_tokens: the number of decode steps to time, >= 1.
        params: the sampling parameters; by default greedy. Stop tokens are ignored, so that every
            row runs to its end.
        repetitions: the number of runs, >= 1, after a run that warms up.
        adapters: LoRA adapters, at most the package's `max_loras`, which the rows use in turns.
        image: the width and height of a random image before each prompt. Its tokens are in
            addition to `prompt_tokens`.

    Raises ValueError if the prompt and the new tokens do not fit.
    """
    _check_counts(
        rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repetitions=repetitions
    )
    random = np.random.default_rng(0)
    texts = list(random.integers(0, model.interface.vocab_size, (rows, prompt_tokens)))
    prompts = texts
    images: list[ImagePrompt] = []
    if image is not None:
        prompts, images = _with_images(model, texts, image, random)
        prompt_tokens = len(prompts[0])
    tokens_per_step = 1
    if params is not None:
        tokens_per_step += params.prompt_lookup_num_tokens
    needed = prompt_tokens + tokens_per_step * (new_tokens + _WARM_UP_STEPS) + 1
    capacity = model.capacity(needed)
    if capacity < needed:
        raise ValueError(
            f"{prompt_tokens} prompt tokens, {new_tokens} steps and {_WARM_UP_STEPS} to warm up need {needed} "
            f"places, and a row of this package has {capacity}; give fewer, or compile with a larger ctx_len"
        )
    interface = model.interface
    params = for_package(interface, params or SamplingParams(temperature=0), model.tokenizer)
    endless = replace(
        params,
        eos_token_id=(),
        min_length=0,
        min_new_tokens=None,
        max_length=capacity,
        max_new_tokens=None,
    )
    parameters = [parameter_row(interface, endless, prompt_tokens, capacity)] * rows

    vision: list[float] = []
    first_token: list[float] = []
    steps: list[float] = []
    drafts = NO_DRAFTS
    for repetition in range(repetitions + 1):  # The first repetition warms up.
        loop = LockStep(model.sessions, parameters, list(range(rows)), capacity, adapters)
        images_of_rows: list[_ImagesAndFeatures] = []
        vision_seconds = 0.0
        if image is not None:
            # Each repetition has other images, because the features of an image are cached.
            prompts, images = _with_images(model, texts, image, random)
            start = time.perf_counter()
            images_of_rows = [(own, model.images.features(own)) for own in images]
            vision_seconds = (time.perf_counter() - start) / rows
        first_seconds = _seconds(partial(loop.prefill, prompts, images_of_rows))
        for _ in range(_WARM_UP_STEPS):
            loop.decode()
        drafts_before = loop.drafts
        step_seconds = [_seconds(loop.decode) for _ in range(new_tokens)]
        if repetition == 0:
            continue
        if image is not None:
            vision.append(vision_seconds)
        first_token.append(first_seconds)
        steps += step_seconds
        drafts += loop.drafts - drafts_before
    first = float(np.median(first_token))
    step = float(np.median(steps))
    # The time of a step depends on the number of its guesses.
    mean = float(np.mean(steps)) if drafts.num_drafts > 0 else step
    return Measurement(
        rows=rows,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        first_token_ms=1e3 * first,
        prefill_tokens_per_second=rows * prompt_tokens / first,
        decode_ms=1e3 * step,
        decode_ms_p90=1e3 * float(np.percentile(steps, 90)),
        tokens_per_second=rows * drafts.tokens_per_step / mean,
        tokens_per_step=drafts.tokens_per_step,
        image_tokens=len(images[0].images[0].rows) if images else 0,
        vision_ms=1e3 * float(np.median(vision)) if vision else 0.0,
    )


def _with_images(
    model: CausalLM, texts: abc.Sequence[Array], size: tuple[int, int], random: np.random.Generator
) -> tuple[list[Array], list[ImagePrompt]]:
    """Prompts of a random image and a text each, [n] int64. Raises ValueError if the package reads
    text only."""
    width, height = size
    prompts = []
    images = []
    for text in texts:
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        processed = model.images.process([pixels])
        processor = model.images.processor
        tokenizer = model.tokenizer
        if processor is None or tokenizer is None:
            raise ValueError(
                "the package has no tokenizer, which writes the tokens of an image; leave the image out"
            )
        before = tokenizer.encode(processor.expand(processor.placeholder, processed))
        prompt = np.array([*before, *np.where(text == processor.token_id, 0, text)], dtype=np.int64)
        prompts.append(prompt)
        images.append(processor.prompt(prompt, processed))
    return prompts, images


def peak_memory_bytes() -> int:
    """The most bytes of memory that this process has held at once, mapped files included; 0 if that
    is unknown."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _seconds(call: abc.Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
