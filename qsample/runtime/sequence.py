"""A request, from its prompt to its text; and statistics of the beginnings that prompts share."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Final

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import DRAFT_IDS, RUNNING, STATUS_NAMES, STOPPED
from qsample.images.prompt import ImagePrompt
from qsample.runtime.adapters import Adapter
from qsample.text.generated_text import GeneratedText

_NGRAMS: Final = range(
    8, 1, -1
)  # tokens that have to be the same before guesses go on elsewhere; the most first


class Prediction:
    """Follows the tokens of a row through its expected tokens. While both are the same, the expected tokens that come
    next are guessed. Where they part, nothing is guessed, until the newest tokens of the row stand among the expected
    tokens: from there on, or anywhere if they do not."""

    def __init__(self, tokens: Array) -> None:
        """tokens: [n] int64."""
        self._tokens = tokens
        self._place: int | None = 0  # of the next token among those expected; None if unknown
        self._last = 0  # the last place that was known
        self._seen = 0  # tokens of the row

    def draft(self, sampled: list[int], most: int) -> Array:
        """Guesses of the tokens after `sampled`, at most `most`: [1 to most] int32, a single -1 for none. sampled: the
        row's new tokens so far; each call gets the tokens of the call before, and more."""
        for count in range(self._seen + 1, len(sampled) + 1):
            place = self._place
            if (
                place is not None
                and place < len(self._tokens)
                and self._tokens[place] == sampled[count - 1]
            ):
                self._place = self._last = place + 1
            else:
                self._place = self._find(sampled[:count])
        self._seen = len(sampled)
        guesses = self._tokens[:0] if self._place is None else self._tokens[self._place :][:most]
        return (
            guesses.astype(DRAFT_IDS.dtype)
            if len(guesses)
            else np.array([DRAFT_IDS.off], DRAFT_IDS.dtype)
        )

    def _find(self, sampled: list[int]) -> int | None:
        """The place after the longest end of `sampled`, of a length in _NGRAMS, that is among the expected tokens, or
        None. Of several places, the first after the last that was known."""
        for length in _NGRAMS:
            if length > min(len(sampled), len(self._tokens)):
                continue
            windows = np.lib.stride_tricks.sliding_window_view(self._tokens, length)
            places = np.flatnonzero((windows == sampled[-length:]).all(axis=1)) + length
            if len(places):
                later = places[places >= self._last]
                self._last = int(later[0] if len(later) else places[0])
                return self._last
        return None


@dataclass(frozen=True, slots=True)
class DraftStats:
    """How the guessed tokens of a row fared, in vLLM's words.

    Attributes:
        num_steps, num_drafts: decode steps that gave the row tokens, and how many of these had guesses to check.
        num_draft_tokens, num_accepted_tokens: guesses, and how many of these were the tokens which were drawn there.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: DraftStats) -> DraftStats:
        return DraftStats(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, earlier: DraftStats) -> DraftStats:
        return DraftStats(
            *(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True))
        )

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a decode step: 1 without guesses, and without steps."""
        return 1 + self.num_accepted_tokens / max(self.num_steps, 1)


NO_DRAFTS: Final = DraftStats()


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, how to continue it, and its progress.

    Attributes:
        prompt, padded: [n] int64, n >= 1; the same with its padding, if it came with any.
        parameters: the row of every name of `Interface.parameters` but `seed` and `draft_ids`.
        guided: whether a function has to see each token before the next is sampled.
        prediction: guesses its tokens before each step; without it, the graph alone guesses.
        text: decodes its tokens; None without a tokenizer.
        priority: the lowest number gets a slot first.
        max_time: seconds that an engine gives it.
        adapter: that its tokens are read and sampled with.
        wanted: the optional outputs that it returns, by name; None: all that the package has.
        images: of the prompt. image_features: [F, C], of its placeholders; there before it waits for a slot, until the
            prompt is read.
        slot: None outside of the slots. The scheduler changes it and the next five.
        adapter_place: the graph's number of its adapter; 0 = none.
        marked: the prompt, marked with its adapter.
        reused, consumed: prompt tokens that need not be read again; prompt tokens in the cache. The decode loop makes
            both 0 if a stored prefix is gone.
        issued: sampled tokens if the row still runs; the least, if it guesses tokens. The decode loop raises it.
        admitted_at: when it got its slot, on `time.perf_counter`. The decode loop changes it and the next four.
        sampled, outputs: the tokens that were read, and each token's optional outputs by name, without a batch axis; if
            any are wanted, they may be read later than the tokens, and `take` waits for them.
        drafts: how its guesses fared, as far as they were read.
        status: the contract's, as the loop read it; or STOPPED at a stop string, by `take`.
        max_length: the most tokens that it may have in the end, prompt included.
        reason: why it ended, if not because of the graph or a stop string.
    """

    prompt: Array
    parameters: Mapping[str, Array]
    seed: int
    guided: bool = False
    text: GeneratedText | None = None
    padded: Array | None = None
    priority: int = 0
    max_time: float | None = None
    prediction: Prediction | None = None
    adapter: Adapter | None = None
    wanted: tuple[str, ...] | None = None
    images: ImagePrompt | None = None
    image_features: Array | None = None

    slot: int | None = None
    adapter_place: int = 0
    marked: Array = field(init=False)
    reused: int = 0
    consumed: int = 0
    issued: int = 0
    admitted_at: float | None = None
    sampled: list[int] = field(default_factory=list)
    outputs: list[Mapping[str, Array]] = field(default_factory=list)
    drafts: DraftStats = NO_DRAFTS
    status: int = RUNNING
    max_length: int = field(init=False)
    reason: str | None = None
    _taken: int = 0  # tokens of `sampled` that were handed on

    def __post_init__(self) -> None:
        self.max_length = int(self.parameters["max_length"])
        self.marked = self.identities

    @property
    def identities(self) -> Array:
        """[n] int64: the prompt's tokens for comparisons, see `ImagePrompt.identities`."""
        return self.prompt if self.images is None else self.images.identities

    @property
    def followed(self) -> bool:
        """Whether the tokens of each step have to be read before the next."""
        return self.guided or self.prediction is not None

    @property
    def given(self) -> Array:
        """The prompt as its caller gave it, padding included."""
        return self.prompt if self.padded is None else self.padded

    @property
    def limit(self) -> int:
        """The most tokens that it samples."""
        return self.max_length - len(self.prompt)

    @property
    def may_run(self) -> bool:
        """Whether it has its first token and did not certainly end since."""
        return 0 < self.issued < self.limit

    @property
    def started(self) -> bool:
        """Whether it has its first token, or ended without one."""
        return bool(self.sampled) or self.status != RUNNING

    @property
    def token_ids(self) -> list[int]:
        """The tokens that were taken; a stop token, or the token that completes a stop string, is the last."""
        return self.sampled[: self._taken]

    @property
    def untaken(self) -> bool:
        """Whether tokens were read, with their outputs, that `take` has not handed on."""
        return self._ready > self._taken

    @property
    def _ready(self) -> int:
        """Tokens that were read with their outputs."""
        return min(len(self.sampled), len(self.outputs)) if self.wanted else len(self.sampled)

    @property
    def ended(self) -> bool:
        """Whether all of it was taken and nothing more can come."""
        stopped = self.text is not None and self.text.stop_string is not None
        return self.reason is not None or stopped or (self.status != RUNNING and not self.untaken)

    @property
    def finish_reason(self) -> str:
        return self.reason or STATUS_NAMES[self.status]

    def take(self, most: int | None = None) -> tuple[list[int], str]:
        """The tokens, at most `most`, that were read since the last call, and the text that they make certain. The
        graph knows nothing of stop strings: a complete stop string ends the sequence, and the tokens after it are left
        out. Without a tokenizer, the text is ""."""
        tokens, pieces = self.sampled[self._taken : self._ready][:most], []
        if self.text is not None:
            for count, token in enumerate(tokens, start=1):
                pieces.append(self.text.put(token))
                if self.text.stop_string is not None:
                    self.status, tokens = STOPPED, tokens[:count]
                    break
        self._taken += len(tokens)
        return tokens, "".join(pieces)


def sequences_array(sequences: abc.Sequence[Sequence], pad: int) -> Array:
    """[B, P + N] int64: the prompts against column P from the left, the new tokens from the right."""
    prompts = [sequence.given for sequence in sequences]
    width = max(map(len, prompts))
    longest = max(len(sequence.token_ids) for sequence in sequences)
    block = np.full((len(sequences), width + longest), pad, dtype=np.int64)
    for row, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        block[row, width - len(prompt) : width] = prompt
        block[row, width : width + len(sequence.token_ids)] = sequence.token_ids
    return block


@dataclass(slots=True)
class PrefixStats:
    """Beginnings of prompts that were not read again, over all prompts that were read.

    Attributes:
        hits, cached_tokens: prompts of which a slot or a stored prefix held a beginning, and its tokens.
        saved_states, saved_bytes: copies of recurrent states that are kept now, and their memory.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    hits: int = 0
    cached_tokens: int = 0
    saved_states: int = 0
    saved_bytes: int = 0
