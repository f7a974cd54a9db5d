"""A request, from its prompt to its text; and statistics of the beginnings that prompts share."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import (
    DRAFT_IDS,
    GRAMMAR_DEADLINE,
    INVALID_LOGITS,
    LENGTH,
    RUNNING,
    STATUS_NAMES,
    STOPPED,
)
from qsample.images.prompt import ImagePrompt
from qsample.request.grammar import CompiledGrammar
from qsample.request.repetition import RepetitionDetector
from qsample.request.structured.tables import TokenGrammar
from qsample.request.text.generated_text import GeneratedText
from qsample.runtime.adapters import Adapter

# The finish reason of a row that repeats itself, vLLM's word.
REPETITION_REASON: Final = "repetition"
NO_TOKENS: Final[Array] = np.empty(0, dtype=np.int64)

# The n-gram sizes that have to match before guesses resume at another place, longest first. A shorter
# n-gram matches by chance too often.
_NGRAM_SIZES: Final = range(8, 1, -1)


class Prediction:
    """Guesses the next tokens of a row from tokens that its caller expects.

    While the row follows the expected tokens, the expected tokens that come next are guessed. Where
    the row leaves them, nothing is guessed until its newest tokens occur among the expected tokens:
    after the place at which it left them, or anywhere if they do not occur there.
    """

    def __init__(self, tokens: Array) -> None:
        """tokens: the expected tokens, [n] int64."""
        self._tokens = tokens
        # The index of the expected token that comes next; None while the row does not follow them.
        self._next: int | None = 0
        self._last_next = 0  # the newest value of `_next` that was not None
        self._tokens_seen = 0

    def draft(self, sampled: list[int], most: int) -> Array:
        """Guess the tokens after `sampled`.

        Args:
            sampled: the row's new tokens so far; each call gets the tokens of the call before, and
                more.
            most: the most guesses to return, at least 1.

        Returns:
            [1 to most] int32; a single -1 stands for no guesses.
        """
        for count in range(self._tokens_seen + 1, len(sampled) + 1):
            self._follow(sampled, count)
        self._tokens_seen = len(sampled)
        if self._next is None or self._next == len(self._tokens):
            return np.array([DRAFT_IDS.off], DRAFT_IDS.dtype)
        return self._tokens[self._next : self._next + most].astype(DRAFT_IDS.dtype)

    def _follow(self, sampled: list[int], count: int) -> None:
        """Find the expected token that comes after the first `count` sampled tokens."""
        index = self._next
        is_expected = (
            index is not None
            and index < len(self._tokens)
            and self._tokens[index] == sampled[count - 1]
        )
        if index is not None and is_expected:
            self._next = index + 1
        else:
            self._next = self._find(sampled[:count])
        if self._next is not None:
            self._last_next = self._next

    def _find(self, sampled: list[int]) -> int | None:
        """The index after the longest n-gram at the end of `sampled` that occurs among the expected
        tokens, or None. Of several occurrences, the first after `_last_next` counts, or the first
        of all if there is none."""
        for size in _NGRAM_SIZES:
            if size > min(len(sampled), len(self._tokens)):
                continue
            windows = np.lib.stride_tricks.sliding_window_view(self._tokens, size)
            ends = np.flatnonzero((windows == sampled[-size:]).all(axis=1)) + size
            if len(ends) > 0:
                later = ends[ends >= self._last_next]
                return int(later[0] if len(later) > 0 else ends[0])
        return None


@dataclass(frozen=True, slots=True)
class DraftStats:
    """The fate of the guessed tokens of a row, in vLLM's words.

    Attributes:
        num_steps: the number of decode steps that gave the row tokens.
        num_drafts: the number of these steps that had guesses to check.
        num_draft_tokens: the number of guesses.
        num_accepted_tokens: the number of guesses that were the tokens drawn there.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: DraftStats) -> DraftStats:
        return DraftStats(
            self.num_steps + other.num_steps,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    def __sub__(self, earlier: DraftStats) -> DraftStats:
        return DraftStats(
            self.num_steps - earlier.num_steps,
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
        )

    @property
    def tokens_per_step(self) -> float:
        """The number of tokens of a decode step: 1 without guesses, and without steps."""
        return 1 + self.num_accepted_tokens / max(self.num_steps, 1)


NO_DRAFTS: Final = DraftStats()


# A grammar for the graph, or for masks.
AnyGrammar = TokenGrammar | CompiledGrammar


class ScoredTokens(NamedTuple):
    """Tokens whose log-probabilities a request asks for.

    Attributes:
        places: [m] int64, the places in the prompt after which they are scored, ascending.
        ids: [m] int64, the tokens.
        num_unread: how many tokens of the caller's prompt are scored, and not read.
    """

    places: Array
    ids: Array
    num_unread: int = 0

    def in_piece(self, piece: range) -> ScoredTokens:
        """Those after the tokens of a piece of the prompt; their places count from its start."""
        first, end = np.searchsorted(self.places, [piece.start, piece.stop])
        return ScoredTokens(self.places[first:end] - piece.start, self.ids[first:end])


@dataclass(frozen=True, eq=False)
class SequenceRequest:
    """A prompt and how to continue it, as the caller asked. Nothing changes it.

    Attributes:
        prompt: the token ids of the prompt, [n] int64, n >= 1.
        parameters: a row of every name of `Interface.parameters` except `draft_ids`.
        seed: the seed of the row's random numbers.
        padded_prompt: the prompt with its padding; None if it came without any.
        guided: whether a function has to see each token before the next one is sampled.
        priority: the rank among waiting sequences; the lowest number gets a slot first.
        max_time: the seconds that an engine gives the sequence; None for no limit.
        expected_tokens: [m] int64, the tokens from which `Prediction` takes guesses before each
            step; None if only the graph guesses.
        adapter: the adapter with which the tokens are read and sampled; None for none.
        output_names: the names of the optional outputs to return.
        grammar: the grammar that the answer follows, for the graph or for masks; None for any text.
        scored: the tokens to score while the prompt is read; None to score none. A request that
            scores tokens samples a token that nobody gets.
    """

    prompt: Array
    parameters: Mapping[str, Array]
    seed: int
    padded_prompt: Array | None = None
    guided: bool = False
    priority: int = 0
    max_time: float | None = None
    expected_tokens: Array | None = None
    adapter: Adapter | None = None
    output_names: tuple[str, ...] = ()
    grammar: AnyGrammar | None = None
    scored: ScoredTokens | None = None

    @property
    def tables(self) -> TokenGrammar | None:
        """The grammar that the graph follows; None for masks, and for any text."""
        return self.grammar if isinstance(self.grammar, TokenGrammar) else None

    @cached_property
    def stop_ids(self) -> list[int]:
        """The tokens that end the sequence."""
        ids = self.parameters["stop_ids"]
        return [int(token) for token in ids[ids >= 0]]

    def status_at_end(self, status: int, sampled: abc.Sequence[int]) -> int:
        """The status of a row that the graph has ended.

        Without a stop token, the graph finds no token where an answer of a grammar is complete and
        nothing may follow, or ends the row at its limit: such an answer has stopped.

        Args:
            status: the status of the graph.
            sampled: all tokens of the answer.
        """
        if self.grammar is None or self.stop_ids or status not in (LENGTH, INVALID_LOGITS):
            return status
        if isinstance(self.grammar, TokenGrammar):
            room = self.max_new_tokens - len(sampled)
            budget = int(self.parameters[GRAMMAR_DEADLINE.name]) - len(self.prompt)
            is_over = self.grammar.is_over(sampled, room, budget)
        else:
            is_over = self.grammar.is_over(sampled)
        return STOPPED if is_over else status

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the caller's prompt."""
        unread = 0 if self.scored is None else self.scored.num_unread
        return len(self.prompt) + unread

    @property
    def reads_every_token(self) -> bool:
        """Whether no token of the prompt may come from a cache: tokens are scored after more than
        the last, which is always read."""
        return self.scored is not None and bool(self.scored.places[0] < len(self.prompt) - 1)

    @cached_property
    def max_length(self) -> int:
        """The most tokens that the sequence may have in the end, prompt included."""
        return int(self.parameters["max_length"])

    @cached_property
    def max_new_tokens(self) -> int:
        """The most tokens that the sequence samples."""
        return self.max_length - len(self.prompt)

    @property
    def min_new_tokens(self) -> int:
        """The number of sampled tokens before which nothing but a stop string ends the sequence."""
        return int(self.parameters["min_length"]) - len(self.prompt)

    @property
    def given_prompt(self) -> Array:
        """The prompt as its caller gave it, padding included."""
        return self.prompt if self.padded_prompt is None else self.padded_prompt

    @property
    def is_read_every_step(self) -> bool:
        """Whether the tokens of each step have to be read before the next step."""
        return self.guided or self.expected_tokens is not None

    @property
    def adapter_sha256(self) -> str:
        """The sha256 of the adapter; "" for none."""
        return "" if self.adapter is None else self.adapter.sha256


@dataclass(slots=True, eq=False)
class SequenceImages:
    """The images of a prompt. `ImageReader` adds their features before the sequence waits for a
    slot, and the decode loop drops the features once the device has them.

    Attributes:
        prompt: the images, and which tokens of the prompt stand for them.
        features: [F, C], the rows of all placeholders of the prompt; None before and after.
    """

    prompt: ImagePrompt
    features: Array | None = None


@dataclass(slots=True, eq=False)
class Placement:
    """The scheduler's record of a sequence. Only `Scheduler` changes it.

    Attributes:
        slot: the number of the slot; None outside of the slots.
        adapter_place: the graph's number of the adapter; 0 = none.
        marked_prompt: [n] int64, the identities of the prompt, marked with the adapter (`Marks`).
        tokens_reused: the number of prompt tokens that need not be read again.
        tokens_read: the number of prompt tokens in the cache after the jobs so far.
        tokens_issued: the number of tokens that the row has sampled after the jobs so far, if it
            still runs; the least number, if its tokens are guessed.
    """

    slot: int | None = None
    adapter_place: int = 0
    marked_prompt: Array = field(default_factory=lambda: NO_TOKENS)
    tokens_reused: int = 0
    tokens_read: int = 0
    tokens_issued: int = 0


@dataclass(slots=True, eq=False)
class Progress:
    """The results that were read of a sequence. Only `DecodeLoop` changes it.

    Attributes:
        admitted_at: the time at which it got its slot, on `time.perf_counter`; None before.
        sampled: the tokens that were read.
        outputs: the optional outputs of each token by name, without a batch axis. They may be read
            later than the tokens.
        scores: for each piece of the prompt that was read, the scores of its tokens by the names of
            `Interface.prompt_outputs`.
        drafts: how its guesses fared, as far as they were read.
        status: the contract's status, as it was last read.
        prediction: the guesses from the expected tokens; None without any.
    """

    admitted_at: float | None = None
    sampled: list[int] = field(default_factory=list)
    outputs: list[Mapping[str, Array]] = field(default_factory=list)
    scores: list[Mapping[str, Array]] = field(default_factory=list)
    drafts: DraftStats = NO_DRAFTS
    status: int = RUNNING
    prediction: Prediction | None = None


@dataclass(slots=True, eq=False)
class Delivery:
    """The part of a sequence that was handed on to its caller. Only `Sequence.take` and
    `Sequence.end` change it.

    Attributes:
        text: decodes the tokens that were taken, and finds stop strings; None without a tokenizer.
        repetitions: finds repetitions among the tokens that were taken; None if they end nothing.
        tokens_taken: the number of tokens that were taken.
        end_reason: why the sequence ended, if not because of the graph or a stop string.
    """

    text: GeneratedText | None = None
    repetitions: RepetitionDetector | None = None
    tokens_taken: int = 0
    end_reason: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """A prompt on its way to its text. Each part has a single writer.

    Attributes:
        request: the request of the caller; it never changes.
        delivery: the part that was handed on; `take` and `end` change it, on the caller's side.
        images: the images of the prompt; None without any.
        placement: the slot and the jobs of the device so far; the scheduler changes it.
        progress: the results that were read from the device; the decode loop changes it.
    """

    request: SequenceRequest
    delivery: Delivery = field(default_factory=Delivery)
    images: SequenceImages | None = None
    placement: Placement = field(default_factory=Placement)
    progress: Progress = field(default_factory=Progress)

    @property
    def identities(self) -> Array:
        """[n] int64: the prompt's tokens for comparisons, see `ImagePrompt.identities`."""
        return self.request.prompt if self.images is None else self.images.prompt.identities

    @property
    def may_run(self) -> bool:
        """Whether it has its first token and has not certainly ended since."""
        return 0 < self.placement.tokens_issued < self.request.max_new_tokens

    @property
    def started(self) -> bool:
        """Whether it has its first token, or ended without one."""
        return bool(self.progress.sampled) or self.progress.status != RUNNING

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None for no stop string, and without a tokenizer."""
        return None if self.delivery.text is None else self.delivery.text.stop_string

    @property
    def status(self) -> int:
        """The contract's status: STOPPED after a stop string, otherwise as it was last read."""
        return self.progress.status if self.stop_string is None else STOPPED

    @property
    def token_ids(self) -> list[int]:
        """The tokens that were taken; a stop token, or the token that completes a stop string, is
        the last."""
        return self.progress.sampled[: self.delivery.tokens_taken]

    @property
    def untaken(self) -> bool:
        """Whether tokens were read, with their outputs, that `take` has not handed on."""
        return self._complete_tokens > self.delivery.tokens_taken

    @property
    def _complete_tokens(self) -> int:
        """The number of tokens that were read with their outputs, and that the caller gets."""
        if self.request.scored is not None:
            return 0
        tokens = len(self.progress.sampled)
        return min(tokens, len(self.progress.outputs)) if self.request.output_names else tokens

    @property
    def ended(self) -> bool:
        """Whether all of it was taken and nothing more can come."""
        if self.delivery.end_reason is not None or self.stop_string is not None:
            return True
        return self.progress.status != RUNNING and not self.untaken

    @property
    def finish_reason(self) -> str:
        return (
            STATUS_NAMES[self.status]
            if self.delivery.end_reason is None
            else self.delivery.end_reason
        )

    def take(self, most: int | None = None) -> tuple[list[int], str]:
        """Hand on the tokens that were read since the last call.

        The graph knows nothing of stop strings and repetitions: a complete stop string or
        repetition ends the sequence, and the tokens after it are left out.

        Args:
            most: the most tokens to take; by default all.

        Returns:
            The tokens, and the text that they make certain; "" without a tokenizer.
        """
        start = self.delivery.tokens_taken
        tokens = self.progress.sampled[start : self._complete_tokens][:most]
        pieces: list[str] = []
        for token in tokens:
            self.delivery.tokens_taken += 1
            pieces.append(self._take_text(token))
            self._end_if_repeated(token)
            if self.stop_string is not None or self.delivery.end_reason is not None:
                break
        return tokens[: len(pieces)], "".join(pieces)

    @property
    def _graph_ended_here(self) -> bool:
        """Whether the graph ended the row with the token that was taken last."""
        return self.progress.status != RUNNING and self.delivery.tokens_taken == len(
            self.progress.sampled
        )

    def _take_text(self, token: int) -> str:
        """The text that the token taken last makes certain."""
        text = self.delivery.text
        if text is None:
            return ""
        is_stopped = self._graph_ended_here and self.progress.status == STOPPED
        # Without a stop token, an answer of a grammar stops with a token of its own.
        is_stop_token = is_stopped and token in self.request.stop_ids
        return text.put(token, is_stop_token=is_stop_token)

    def _end_if_repeated(self, token: int) -> None:
        """End the sequence if the token taken last completes a repetition, and nothing else has
        ended it there. As in vLLM, none counts before `min_new_tokens`."""
        repetitions = self.delivery.repetitions
        if repetitions is None or not repetitions.put(token):
            return
        is_early = self.delivery.tokens_taken < self.request.min_new_tokens
        if not (is_early or self._graph_ended_here or self.stop_string is not None):
            self.end(REPETITION_REASON)

    def end(self, reason: str) -> None:
        """End it. reason: the finish reason."""
        self.delivery.end_reason = reason


def sequences_array(sequences: abc.Sequence[Sequence], pad: int) -> Array:
    """The prompts and the tokens that were taken.

    Args:
        sequences: the B rows.
        pad: the token id beside shorter prompts and after shorter rows.

    Returns:
        [B, P + N] int64: each prompt ends in column P - 1, and the new tokens begin in column P.
    """
    prompts = [sequence.request.given_prompt for sequence in sequences]
    width = max(len(prompt) for prompt in prompts)
    longest = max(len(sequence.token_ids) for sequence in sequences)
    block = np.full((len(sequences), width + longest), pad, dtype=np.int64)
    for row, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        block[row, width - len(prompt) : width] = prompt
        block[row, width : width + len(sequence.token_ids)] = sequence.token_ids
    return block


@dataclass(slots=True)
class PrefixStats:
    """The beginnings of prompts that were not read again, over all prompts that were read.

    Attributes:
        prompts: the number of prompts.
        prompt_tokens: the number of their tokens.
        hits: the number of prompts of which a slot or a stored prefix held a beginning.
        cached_tokens: the number of tokens of these beginnings.
        saved_states: the number of copies of recurrent states that are kept now.
        saved_bytes: the memory of these copies, in bytes.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    hits: int = 0
    cached_tokens: int = 0
    saved_states: int = 0
    saved_bytes: int = 0
