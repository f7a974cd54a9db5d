"""Measures how fast a loaded package prefills and decodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from qsample.ort.session import Sessions
from qsample.runtime.causal_lm import CausalLM
from qsample.runtime.decode.prefixes import Pieces
from qsample.runtime.decode.scheduler import joined_slots
from qsample.runtime.decode.slots import Slots
from qsample.runtime.parameters import for_package, parameter_row
from qsample.sampling_params import SamplingParams
from qsample.tensors import Array

_WARM_UP_STEPS: Final = 3


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch size. Times in milliseconds.

    rows: prompts in the batch. prompt_tokens: of each row. new_tokens: decode steps that were timed.
    first_token_ms: from the prompts to the first token of every row, median of the repetitions.
    prefill_tokens_per_second: prompt tokens of all rows over that time. decode_ms, decode_ms_p90: a decode step, median
    and 90th percentile of all steps. tokens_per_second: of all rows together, at the median step.
    """

    rows: int
    prompt_tokens: int
    new_tokens: int
    first_token_ms: float
    prefill_tokens_per_second: float
    decode_ms: float
    decode_ms_p90: float
    tokens_per_second: float


class LockStep:
    """Rows that start together and are read after every step: the plain loop, for measurements.

    >>> rows = LockStep(model.sessions, [parameters_0, parameters_1], seeds=[0, 1], capacity=256)
    >>> tokens = [rows.prefill([prompt_0, prompt_1]), rows.decode(), rows.decode()]
    """

    def __init__(
        self, sessions: Sessions, parameters: Sequence[Mapping[str, Array]], seeds: Sequence[int], capacity: int
    ) -> None:
        """parameters: of each row, see `parameter_row`. seeds: of each row. capacity: T, in tokens."""
        self._slots = Slots(sessions, len(seeds), capacity)
        self._joins_prompts = sessions.joins_prompts
        self._pieces = Pieces.of(sessions)
        self._parameters = parameters
        self._seeds = seeds
        for row, values in enumerate(parameters):  # which decide on what is captured
            for name, value in values.items():
                self._slots.set_parameter(row, name, value)
        if not self._slots.prepared:
            self._slots.prepare()

    def prefill(self, prompts: Sequence[Array]) -> Array:
        """Read each row's prompt, [n] int64, and sample its first token: [B] int64."""
        waiting = {row: len(prompt) for row, prompt in enumerate(prompts)}
        while waiting:
            first = min(waiting)
            rows = range(first, first + 1)
            if self._joins_prompts:
                rows = joined_slots(waiting, first, self._pieces.size)
            for row in rows:
                self._slots.begin(row, prompts[row], self._seeds[row], self._parameters[row])
                del waiting[row]
            if len(rows) > 1:
                self._slots.prefill(rows.start, *(prompts[row] for row in rows), emit=True)
            else:
                self._prefill_alone(first, prompts[first])
        return self._newest()

    def _prefill_alone(self, row: int, prompt: Array) -> None:
        for piece in self._pieces.cut(0, len(prompt)):
            self._slots.prefill(row, prompt[piece.start : piece.stop], emit=piece.stop == len(prompt))

    def decode(self) -> Array:
        """Sample each row's next token: [B] int64."""
        self._slots.decode()
        return self._newest()

    def set_parameter(self, name: str, values: Array) -> None:
        """Replace a parameter of every row, from the next call on."""
        for row, value in enumerate(values):
            self._slots.set_parameter(row, name, value)

    def _newest(self) -> Array:
        snapshot = self._slots.read()
        tokens: Array = np.take_along_axis(snapshot.tokens, snapshot.lengths[:, None], axis=1)[:, 0].astype(np.int64)
        return tokens


def measure(
    model: CausalLM,
    rows: int = 1,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    params: SamplingParams | None = None,
    repetitions: int = 3,
) -> Measurement:
    """Generate from random prompts and time every call.

    Args:
        rows, prompt_tokens, new_tokens, repetitions: at least 1.
        params: how to sample; None = greedily. Stop tokens are ignored, so that every row runs to its end.

    Raises ValueError where the prompt and the new tokens do not fit the model.
    """
    counts = {"rows": rows, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repetitions": repetitions}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    needed = prompt_tokens + new_tokens + _WARM_UP_STEPS + 1
    capacity = model.capacity(needed)
    if capacity < needed:
        raise ValueError(
            f"{prompt_tokens} prompt tokens, {new_tokens} new ones and {_WARM_UP_STEPS + 1} to warm up need {needed} "
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
    for repetition in range(repetitions + 1):  # the first one warms up
        loop = LockStep(model.sessions, parameters, list(range(rows)), capacity)
        first = _seconds(partial(loop.prefill, prompts))
        taken = [_seconds(loop.decode) for _ in range(_WARM_UP_STEPS + new_tokens)][_WARM_UP_STEPS:]
        if repetition:
            first_token.append(first)
            steps += taken
    first, step = float(np.median(first_token)), float(np.median(steps))
    return Measurement(
        rows=rows,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        first_token_ms=1e3 * first,
        prefill_tokens_per_second=rows * prompt_tokens / first,
        decode_ms=1e3 * step,
        decode_ms_p90=1e3 * float(np.percentile(steps, 90)),
        tokens_per_second=rows / step,
    )


def peak_memory_bytes() -> int:
    """The most memory that this process has held at once, mapped files included; 0 where that is unknown."""
    try:
        import resource
    except ImportError:  # Windows has none
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
