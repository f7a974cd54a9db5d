"""Functions of a caller of the kinds that transformers takes: logits processors and stopping criteria.

transformers calls a processor once a token for the whole batch. Here it is called for each row alone, as in a batch of
a single row, and each row has a copy of it, so the tokens of a row do not depend on the other rows. Stopping criteria
see the whole batch after every token, as in transformers.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import ALLOWED_TOKENS
from qsample.runtime.sequence import Sequence, sequences_array


@dataclass(frozen=True, slots=True)
class Step:
    """The results of a step, copied to the host.

    Args:
        tokens: [B] int64.
        emitted: [B] bool; false if the row had ended before, or its logits were invalid.
        status: [B] int32, after the step.
        outputs: the optional outputs that the call returns, by name. They are read from the device when they are first
            looked at, which has to be within the call that gets this step, unless all of it has ended.
    """

    tokens: Array
    emitted: Array
    status: Array
    outputs: Mapping[str, Array]


class AllowedTokensFn(Protocol):
    """Guided decoding: writes the mask of every next token into an array; the array keeps its values between calls."""

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Called before each token while some row runs; the masks of rows that have ended are ignored.

        Args:
            step: the last results, None before the first token.
            mask: [B, W] int32, bit i of word w for token 32 w + i, all set at first.
        """


class Guide:
    """Calls a function for its sequences, and gives each sequence the mask that the function writes."""

    def __init__(
        self, function: AllowedTokensFn, sequences: list[Sequence], mask: Array, pad_token_id: int
    ) -> None:
        """mask: [B, W] int32, all bits set, a row for each sequence. pad_token_id: the token of a row without one."""
        self._function = function
        self.sequences = sequences
        self._mask = mask
        self._pad = pad_token_id
        self._shown = [0] * len(sequences)  # tokens of each that the function has seen

    def start(self) -> None:
        """Write the masks of the first tokens."""
        self._call(None)

    def update(
        self,
        set_parameter: Callable[[Sequence, str, Array], None],
        read_outputs: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand the next tokens' masks to `set_parameter`, if a token of some sequence is new to the function.
        read_outputs: reads the outputs of the newest tokens, which the function may look at."""
        counts = [len(sequence.progress.sampled) for sequence in self.sequences]
        if counts == self._shown:
            return
        emitted = np.greater(counts, self._shown)
        self._shown = counts
        rows = {int(row): (self.sequences[row], counts[row] - 1) for row in np.flatnonzero(emitted)}
        outputs = StepOutputs(rows, len(counts), read_outputs)
        try:
            self._call(self._step(emitted, outputs))
        finally:
            outputs.close()
        for sequence, mask in zip(self.sequences, self._mask, strict=True):
            set_parameter(sequence, ALLOWED_TOKENS.name, mask)

    def _call(self, step: Step | None) -> None:
        self._function(
            step, self._mask.view()
        )  # a view, so that the function cannot change its shape and dtype

    def _step(self, emitted: Array, outputs: StepOutputs) -> Step:
        """The newest token of every sequence: the loop reads guided sequences after each token."""
        rows = len(self.sequences)
        tokens = np.full(rows, self._pad, dtype=np.int64)
        status = np.array([sequence.status for sequence in self.sequences], dtype=np.int32)
        for row in np.flatnonzero(emitted):
            tokens[row] = self.sequences[row].progress.sampled[-1]
        return Step(tokens, emitted, status, outputs)


class StepOutputs(Mapping[str, Array]):
    """The optional outputs of a step by name, [B, ...], 0 for rows without a token."""

    def __init__(
        self, tokens: Mapping[int, tuple[Sequence, int]], rows: int, read: Callable[[], None]
    ) -> None:
        """tokens: of each row that got one, its sequence and the number of the token. read: reads what was not read."""
        self._tokens, self._rows = tokens, rows
        self._read: Callable[[], None] | None = read

    def close(self) -> None:
        """From now on, only outputs that were read anyway are there: nothing else may use the device."""
        self._read = None

    @functools.cached_property
    def _values(self) -> dict[str, Array]:
        given = {row: token for row, token in self._tokens.items() if token[0].request.output_names}
        if self._read is not None:
            self._read()
        elif any(len(sequence.progress.outputs) <= number for sequence, number in given.values()):
            raise RuntimeError(
                "the outputs of a step were not read; look at them within the call that gets the step"
            )
        found: dict[str, Array] = {}
        for row, (sequence, number) in given.items():
            for name, value in sequence.progress.outputs[number].items():
                found.setdefault(name, np.zeros((self._rows, *value.shape), value.dtype))[row] = (
                    value
                )
        return found

    def __getitem__(self, name: str) -> Array:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


_STOP: Final = "stop"
_TIME: Final = "time"
# transformers changes the logits in these ways before a caller's processors see them, and the graph afterwards.
_BEFORE: Final[Mapping[str, float]] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_length": 0,
    "logit_bias": 0,
    "allowed_tokens": -1,
}
INSTEAD: Final = (
    "export with logit_bias=True for a bias for each token, or with allowed_tokens=True for a function that says which "
    "tokens may come next"
)


@dataclass(frozen=True, slots=True)
class _Callback:
    """A function of arrays. in_torch: it takes and returns torch tensors."""

    function: Any
    in_torch: bool

    def __call__(self, *arrays: Array | None) -> Array:
        """The result of the function for copies of `arrays`, as an array; None stays None."""
        result = self.function(
            *(None if array is None else self._shown(array.copy()) for array in arrays)
        )
        return np.asarray(result.detach().cpu() if hasattr(result, "detach") else result)

    def _shown(self, array: Array) -> Any:
        # A caller with an object of transformers has imported torch.
        return sys.modules["torch"].from_numpy(array) if self.in_torch else array


def _callbacks(name: str, given: Any, expected: str) -> list[_Callback]:
    """The callables of an argument, one or several. Objects of transformers get torch tensors, other objects NumPy
    arrays. Raises ValueError for anything else than `expected`."""
    if given is None:
        return []
    several = list(given) if isinstance(given, Iterable) else [given]
    for function in several:
        if not callable(function):
            raise ValueError(
                f"{name} has a {type(function).__name__}; give {expected}, or a list of them"
            )
    return [
        _Callback(function, _of_transformers(given) or _of_transformers(function))
        for function in several
    ]


def _of_transformers(value: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "transformers" for kind in type(value).__mro__)


class LogitsProcessors:
    """Calls the processors for the rows whose next token is sampled; these rows are read after each token.
    given: a callable of ([1, n] token ids, [1, V] float32 logits), the prompt with its padding and the sampled tokens,
    that returns logits of that shape; or a list of them. Raises ValueError for anything else, and if the package does
    not go with processors."""

    def __init__(self, given: Any, sequences: abc.Sequence[Sequence], interface: Interface) -> None:
        if interface.features.sampler:
            raise ValueError(
                "logits_processor is given, and the logits stay in this package's graph; export with "
                f"include_sampler=False, which returns them, or {INSTEAD}"
            )
        processors = _callbacks(
            "logits_processor",
            given,
            "a function of (input_ids, scores) that returns the scores to sample from",
        )
        _check_order(sequences, interface)
        own = [processors] if len(sequences) == 1 else [_copies(processors) for _ in sequences]
        self._rows = list(zip(sequences, own, strict=True))

    def __call__(self, slots: range, logits: Array) -> Array:
        """The logits of `slots`, [len(slots), V] float32, as the processors leave them."""
        logits = logits.copy()
        for sequence, processors in self._rows:
            slot = sequence.placement.slot
            if slot is None or slot not in slots:
                continue
            row = slot - slots.start
            tokens = [*sequence.request.given_prompt.tolist(), *sequence.progress.sampled]
            ids = np.array([tokens], dtype=np.int64)
            for processor in processors:
                result = processor(ids, logits[row : row + 1])
                if result.dtype.kind != "f" or result.shape != (1, logits.shape[1]):
                    raise ValueError(
                        f"a logits processor returned {result.dtype} {result.shape}; it must return floats of the "
                        f"shape of its scores, (1, {logits.shape[1]})"
                    )
                logits[row] = result[0]
        return logits


def _copies(processors: list[_Callback]) -> list[_Callback]:
    try:
        return [
            replace(processor, function=copy.deepcopy(processor.function))
            for processor in processors
        ]
    except Exception as error:
        raise ValueError(
            f"logits_processor cannot be copied for every row ({error}); generate each prompt on its own"
        ) from error


def _check_order(sequences: abc.Sequence[Sequence], interface: Interface) -> None:
    """Raise ValueError if processors would not see the logits that they see in transformers."""
    features = interface.features
    if features.logprobs or features.top_logprobs:
        raise ValueError(
            "logits_processor changes the logits that the package's logprobs are of; export without them"
        )
    for name, off in _BEFORE.items():
        values = [
            sequence.request.parameters[name]
            for sequence in sequences
            if name in sequence.request.parameters
        ]
        if any(np.any(np.asarray(value) != off) for value in values):
            raise ValueError(
                f"logits_processor and {name} were given: transformers applies {name} first, and the graph after it; "
                "leave either out, or let a processor do both"
            )


class BatchEnd:
    """Ends rows at a caller's criteria, or when time is up: token by token, for the whole batch at once. Tokens that
    were sampled after a criterion was met are left out. Raises ValueError for wrong criteria.
    criteria: a callable of ([B, n] token ids, None), prompts and padding included, that returns a bool, or a bool for
    each row; or a list of them. max_time: seconds from now on. pad: token id after a row that has ended."""

    def __init__(
        self, criteria: Any, max_time: float | None, sequences: abc.Sequence[Sequence], pad: int
    ) -> None:
        self._criteria = _callbacks(
            "stopping_criteria",
            criteria,
            "a function of (input_ids, scores) that returns whether rows end",
        )
        self._deadline = None if max_time is None else time.perf_counter() + max_time
        self._sequences = sequences
        self._live = list(sequences)
        self._pad = pad

    def update(
        self, leave: Callable[[Sequence], None], deliver: Callable[[Sequence], None]
    ) -> None:
        """Look at the tokens that were sampled since the last call, a token of every row at a time: `deliver` takes the
        next token of a sequence, `leave` takes a sequence out of the loop."""
        while True:
            self._live = [sequence for sequence in self._live if not sequence.ended]
            if not self._live or not all(sequence.untaken for sequence in self._live):
                return  # a row has yet to sample the token that the other rows have
            for sequence in self._live:
                deliver(sequence)
            met = self._met()
            late = self._deadline is not None and time.perf_counter() > self._deadline
            for sequence in self._live:
                if met[id(sequence)]:
                    sequence.end(_STOP)
                elif late and not sequence.ended:
                    sequence.end(_TIME)
                if sequence.ended:
                    leave(sequence)

    def _met(self) -> dict[int, bool]:
        """Whether a criterion is met, by the id of each sequence."""
        rows = np.zeros(len(self._sequences), dtype=bool)
        ids = sequences_array(self._sequences, self._pad) if self._criteria else None
        for criterion in self._criteria:
            answer = criterion(ids, None)
            if answer.dtype != bool or answer.size not in (1, len(rows)):
                raise ValueError(
                    f"a stopping criterion returned {answer!r:.60}; it must return a bool, or a bool for each of the "
                    f"{len(rows)} rows"
                )
            rows |= answer.reshape(-1)
        return {
            id(sequence): bool(row) for sequence, row in zip(self._sequences, rows, strict=True)
        }
