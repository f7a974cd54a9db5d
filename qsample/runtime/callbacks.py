"""Functions of the caller: masks of the next tokens, logits processors and stopping criteria.

transformers calls a processor once per token for the whole batch. Here, each row has a copy of the
processor, which is called as for a batch of a single row, so the tokens of a row do not depend on
the other rows. Stopping criteria see the whole batch after every token, as in transformers.
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
from qsample.contract.tensors import ALLOWED_TOKENS, RAW_LOGPROBS
from qsample.runtime.sequence import Sequence, sequences_array


@dataclass(frozen=True, slots=True)
class Step:
    """The results of a step, copied to the host.

    Args:
        tokens: the sampled tokens, [B] int64.
        emitted: whether each row has a token, [B] bool; false if the row had ended before, or if
            its logits were invalid.
        status: the status of each row after the step, [B] int32.
        outputs: the optional outputs that the call returns, by name. They are read from the device
            when they are first used. That has to be within the call that gets this step, unless all
            rows have ended.
    """

    tokens: Array
    emitted: Array
    status: Array
    outputs: Mapping[str, Array]


class AllowedTokensFn(Protocol):
    """A function for guided decoding: it writes the masks of the next tokens into an array. The
    array keeps its values between calls."""

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Write the masks. This is called before each token while any row runs; the masks of rows
        that have ended are ignored.

        Args:
            step: the results of the last step; None before the first token.
            mask: the masks, [B, W] int32, with bit i of word w for token 32 w + i; all bits are set
                at first.
        """


class Guide:
    """Calls a function for its sequences, and gives each sequence the mask that the function
    writes."""

    def __init__(
        self, function: AllowedTokensFn, sequences: list[Sequence], mask: Array, pad_token_id: int
    ) -> None:
        """Make a guide.

        Args:
            function: the caller's function.
            sequences: the sequences that it guides.
            mask: [B, W] int32, all bits set, a row for each sequence.
            pad_token_id: the token that a `Step` has for a row without a token.
        """
        self._function = function
        self.sequences = sequences
        self._mask = mask
        self._pad = pad_token_id
        # The number of tokens of each sequence that the function has seen.
        self._seen_tokens = [0] * len(sequences)

    def start(self) -> None:
        """Write the masks of the first tokens."""
        self._call(None)

    def update(
        self,
        set_parameter: Callable[[Sequence, str, Array], None],
        read_outputs: Callable[[], None] = lambda: None,
    ) -> None:
        """Call the function if a sequence has a new token.

        Args:
            set_parameter: takes the mask of each sequence's next token.
            read_outputs: reads the outputs of the newest tokens, which the function may use.
        """
        counts = [len(sequence.progress.sampled) for sequence in self.sequences]
        if counts == self._seen_tokens:
            return
        emitted = np.greater(counts, self._seen_tokens)
        self._seen_tokens = counts
        new_tokens = {
            int(row): (self.sequences[row], counts[row] - 1) for row in np.flatnonzero(emitted)
        }
        outputs = StepOutputs(new_tokens, len(counts), read_outputs)
        try:
            self._call(self._step(emitted, outputs))
        finally:
            outputs.close()
        for sequence, mask in zip(self.sequences, self._mask, strict=True):
            set_parameter(sequence, ALLOWED_TOKENS.name, mask)

    def _call(self, step: Step | None) -> None:
        # The function cannot change the shape and dtype of the mask through a view.
        self._function(step, self._mask.view())

    def _step(self, emitted: Array, outputs: StepOutputs) -> Step:
        """The newest token of every sequence. The loop reads guided sequences after each token."""
        rows = len(self.sequences)
        tokens = np.full(rows, self._pad, dtype=np.int64)
        status = np.array([sequence.status for sequence in self.sequences], dtype=np.int32)
        for row in np.flatnonzero(emitted):
            tokens[row] = self.sequences[row].progress.sampled[-1]
        return Step(tokens, emitted, status, outputs)


class StepOutputs(Mapping[str, Array]):
    """The optional outputs of a step by name, [B, ...]; 0 for rows without a token."""

    def __init__(
        self, tokens: Mapping[int, tuple[Sequence, int]], rows: int, read: Callable[[], None]
    ) -> None:
        """tokens: row → its sequence and the index of its new token. rows: B. read: reads the
        outputs that were not read yet."""
        self._tokens = tokens
        self._rows = rows
        self._read: Callable[[], None] | None = read

    def close(self) -> None:
        """Stop reading from the device, which may be in use. Outputs that were read remain."""
        self._read = None

    @functools.cached_property
    def _values(self) -> dict[str, Array]:
        given = {row: token for row, token in self._tokens.items() if token[0].request.output_names}
        if self._read is not None:
            self._read()
        elif any(len(sequence.progress.outputs) <= index for sequence, index in given.values()):
            raise RuntimeError(
                "the outputs of a step were not read; look at them within the call that gets the step"
            )
        values: dict[str, Array] = {}
        for row, (sequence, index) in given.items():
            for name, value in sequence.progress.outputs[index].items():
                if name not in values:
                    values[name] = np.zeros((self._rows, *value.shape), value.dtype)
                values[name][row] = value
        return values

    def __getitem__(self, name: str) -> Array:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


_STOP_REASON: Final = "stop"
_TIME_REASON: Final = "time"
# Parameter → its value that is off. transformers changes the logits in these ways before a caller's
# processors see them; the graph does so afterwards.
_EARLIER_PARAMETERS: Final[Mapping[str, float]] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_length": 0,
    "logit_bias": 0,
    "allowed_tokens": -1,
}
LOGITS_PROCESSOR_ADVICE: Final = (
    "export with logit_bias=True for a bias for each token, or with allowed_tokens=True for a function that says which "
    "tokens may come next"
)


@dataclass(frozen=True, slots=True)
class _Callback:
    """A function of arrays. in_torch: whether it takes and returns torch tensors."""

    function: Any
    in_torch: bool

    def __call__(self, *arrays: Array | None) -> Array:
        """The result of the function for copies of `arrays`, as an array; None stays None."""
        result = self.function(*(self._argument(array) for array in arrays))
        if hasattr(result, "detach"):
            result = result.detach().cpu()
        return np.asarray(result)

    def _argument(self, array: Array | None) -> Any:
        """A copy of an array, as the function takes it."""
        if array is None:
            return None
        copied = array.copy()
        # A caller with an object of transformers has imported torch.
        return sys.modules["torch"].from_numpy(copied) if self.in_torch else copied


def _callbacks(name: str, given: Any, expected: str) -> list[_Callback]:
    """The callables of an argument: a single callable or several. Objects of transformers get torch
    tensors, other objects NumPy arrays.

    Args:
        name: the name of the argument.
        given: its value.
        expected: the accepted values in words, for the error.

    Raises ValueError for anything but callables.
    """
    if given is None:
        return []
    functions = list(given) if isinstance(given, Iterable) else [given]
    for function in functions:
        if not callable(function):
            raise ValueError(
                f"{name} has a {type(function).__name__}; give {expected}, or a list of them"
            )
    return [
        _Callback(function, _is_of_transformers(given) or _is_of_transformers(function))
        for function in functions
    ]


def _is_of_transformers(value: Any) -> bool:
    """Whether a class of `value` comes from transformers."""
    return any(kind.__module__.split(".")[0] == "transformers" for kind in type(value).__mro__)


class LogitsProcessors:
    """Calls the processors for the rows whose next token is sampled; these rows are read after each
    token."""

    def __init__(self, given: Any, sequences: abc.Sequence[Sequence], interface: Interface) -> None:
        """Make the copies of the processors.

        Args:
            given: a callable, or a list of callables. It takes [1, n] token ids, the prompt with
                its padding and the sampled tokens, and [1, V] float32 logits; it returns logits of
                that shape.
            sequences: the rows.
            interface: the interface of the package.

        Raises ValueError for anything else, and if the package does not support processors.
        """
        if interface.features.sampler:
            raise ValueError(
                "logits_processor is given, and the logits stay in this package's graph; export with "
                f"include_sampler=False, which returns them, or {LOGITS_PROCESSOR_ADVICE}"
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
        """The logits of `slots`, [len(slots), V] float32, after the processors."""
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
    has_logprobs = features.logprobs or features.top_logprobs > 0
    if has_logprobs and features.logprobs_mode == RAW_LOGPROBS:
        raise ValueError(
            "logits_processor changes the logits that the package's logprobs are of; export without them, or with "
            "logprobs_mode='processed_logprobs'"
        )
    for name, off in _EARLIER_PARAMETERS.items():
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
    """Ends rows at a caller's criteria, or when time is up: token by token, for the whole batch at
    once. Tokens that were sampled after a criterion was met are left out."""

    def __init__(
        self, criteria: Any, max_time: float | None, sequences: abc.Sequence[Sequence], pad: int
    ) -> None:
        """Start the time.

        Args:
            criteria: a callable, or a list of callables. It takes [B, n] token ids, prompts and
                padding included, and None; it returns a bool, or a bool for each row.
            max_time: the seconds until the rows end; None for no limit.
            sequences: the rows.
            pad: the token id after a row that has ended.

        Raises ValueError for wrong criteria.
        """
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
        """Look at the tokens that were sampled since the last call, a token of every row at a time.

        Args:
            leave: takes a sequence out of the loop.
            deliver: delivers the next token of a sequence.
        """
        while True:
            self._live = [sequence for sequence in self._live if not sequence.ended]
            # A row that has no new token has yet to sample the token that the other rows have.
            if not self._live or not all(sequence.untaken for sequence in self._live):
                return
            for sequence in self._live:
                deliver(sequence)
            met = self._met()
            is_late = self._deadline is not None and time.perf_counter() > self._deadline
            for sequence in self._live:
                if met[id(sequence)]:
                    sequence.end(_STOP_REASON)
                elif is_late and not sequence.ended:
                    sequence.end(_TIME_REASON)
                if sequence.ended:
                    leave(sequence)

    def _met(self) -> dict[int, bool]:
        """The id of each sequence → whether a criterion is met."""
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
