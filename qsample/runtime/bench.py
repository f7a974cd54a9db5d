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
from qsample.ort.session import Sessions
from qsample.request.sampling_params import SamplingParams
from qsample.runtime.adapters import Adapter
from qsample.runtime.causal_lm import CausalLM
from qsample.runtime.decode.loop import DecodeLoop
from qsample.runtime.decode.scheduler import Scheduler, SchedulerConfig
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import for_package, parameter_row
from qsample.runtime.sequence import NO_DRAFTS, DraftStats, Sequence

_WARM_UP_STEPS: Final = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch size: `rows` prompts of `prompt_tokens` tokens each, and `new_tokens` decode steps that were timed.

    Attributes:
        first_token_ms: milliseconds from the prompts to the first token of every row, median of the repetitions.
        prefill_tokens_per_second: prompt tokens of all rows over that time.
        decode_ms, decode_ms_p90: milliseconds of a decode step, median and 90th percentile of all steps.
        tokens_per_second: of all rows together, at the mean step if tokens are guessed, otherwise at the median step.
        tokens_per_step: tokens of a row and step; 1 without guesses.
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


class LockStep:
    """Rows that start together and are read after every step: the decode loop, for measurements.

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
        """Allocate the memory, and capture the steps of a package that is made for it.
        parameters, seeds: of each row; see `parameter_row`. No row may end before the last step. capacity: T, tokens of
        a row. adapters: of the rows, in turns."""
        turns = [adapters[row % len(adapters)] if adapters else None for row in range(len(parameters))]
        self._rows = list(zip(parameters, seeds, turns, strict=True))
        self._sequences: list[Sequence] = []
        self._slots = Slots(sessions, len(self._rows), capacity)
        for row, values in enumerate(parameters):  # they decide which graphs are captured
            self._slots.set_parameters(row, values)
        if not self._slots.prepared:
            self._slots.prepare()
        scheduler = Scheduler(len(self._rows), SchedulerConfig.of(sessions, interleave=False))
        self._loop = DecodeLoop(self._slots, scheduler, lambda sequence: None, double_buffering=False)

    def prefill(self, prompts: abc.Sequence[Array]) -> Array:
        """Read each row's prompt, [n] int64, and sample its first token: [B] int64."""
        for prompt, (values, seed, adapter) in zip(prompts, self._rows, strict=True):
            self._sequences.append(Sequence(prompt, values, seed, adapter=adapter, wanted=()))
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
        return sum((sequence.drafts for sequence in self._sequences), NO_DRAFTS)

    def _newest(self) -> Array:
        return np.array([sequence.sampled[-1] for sequence in self._sequences], dtype=np.int64)


def measure(
    model: CausalLM,
    rows: int = 1,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    params: SamplingParams | None = None,
    repetitions: int = 3,
    adapters: abc.Sequence[Adapter] = (),
) -> Measurement:
    """Generate from random prompts and time every call. Raises ValueError if the prompt and the new tokens do not fit.
    params: how to sample, by default greedily; stop tokens are ignored, so that every row runs to its end. adapters:
    LoRA adapters of the rows, in turns, at most the package's `max_loras`. The numbers are at least 1."""
    counts = {"rows": rows, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repetitions": repetitions}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    most = 1 + params.prompt_lookup_num_tokens if params is not None else 1  # tokens of a step
    needed = prompt_tokens + most * (new_tokens + _WARM_UP_STEPS) + 1
    capacity = model.capacity(needed)
    if capacity < needed:
        raise ValueError(
            f"{prompt_tokens} prompt tokens, {new_tokens} steps and {_WARM_UP_STEPS} to warm up need {needed} "
            f"places, and a row of this package has {capacity}; give fewer, or compile with a larger ctx_len"
        )
    interface = model.interface
    prompts = list(np.random.default_rng(0).integers(0, interface.vocab_size, (rows, prompt_tokens)))
    params = for_package(interface, params or SamplingParams(temperature=0), model.tokenizer)
    endless = replace(
        params, eos_token_id=(), min_length=0, min_new_tokens=None, max_length=capacity, max_new_tokens=None
    )
    parameters = [parameter_row(interface, endless, prompt_tokens, capacity)] * rows

    first_token: list[float] = []
    steps: list[float] = []
    drafts = NO_DRAFTS
    for repetition in range(repetitions + 1):  # the first warms up
        loop = LockStep(model.sessions, parameters, list(range(rows)), capacity, adapters)
        first = _seconds(partial(loop.prefill, prompts))
        for _ in range(_WARM_UP_STEPS):
            loop.decode()
        before = loop.drafts
        taken = [_seconds(loop.decode) for _ in range(new_tokens)]
        if repetition:
            first_token.append(first)
            steps += taken
            drafts += loop.drafts - before
    first, step = float(np.median(first_token)), float(np.median(steps))
    mean = float(np.mean(steps)) if drafts.num_drafts else step  # a step costs as much as it has guesses
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
    )


def peak_memory_bytes() -> int:
    """The most memory that this process has held at once, mapped files included; 0 if that is unknown."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _seconds(call: abc.Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
