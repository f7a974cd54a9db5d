"""Text that a model writes itself, begun as its users begin it: compile measures on one, and fits weights to another.

A model with a chat template writes both sides of a conversation, from the empty turn of the user on (Magpie, Xu et al.,
2024, https://arxiv.org/abs/2406.08464). Any other model writes documents after its first token, and a model without
such a token goes on after random ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsample.compiler.trial import Step, write
from qsample.contract.arrays import Array
from qsample.contract.tensors import LOGITS
from qsample.errors import CompileError
from qsample.package.divergence import CHATS, DOCUMENTS, RANDOM_STARTS
from qsample.package.package import Package
from qsample.request.text.chat import ChatOptions
from qsample.request.text.tokenizer import Tokenizer

_PART_TOKENS: Final = 512
_MARKS: Final = (
    "qsample-user-1",
    "qsample-assistant",
    "qsample-user-2",
)  # contents that no template has
# Temperatures of the texts. People let a model chat below 1; documents are as likely as those that it was trained on.
_CHAT_TEMPERATURE: Final = 0.7
_DOCUMENT_TEMPERATURE: Final = 1.0
# An opening may take this share of the context.
_MAX_OPENING_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Opening:
    """How the rows of a text begin and go on.

    Attributes:
        text: the kind of the text, one of `divergence.TEXTS`.
        ids: the token ids in front of each row; empty if each row begins with a random token.
        stops: the ids that end a turn.
        temperature: the temperature at which the model chooses tokens, above 0.
        turns: the ids that take the place of the stop that ends a turn, one entry after the other: the end of the turn
            and the beginning of the next. Empty if a row goes on after a stop as after any token.
    """

    text: str
    ids: tuple[int, ...]
    stops: tuple[int, ...]
    temperature: float
    turns: tuple[tuple[int, ...], ...]


def opening_of(package: Package, capacity: int) -> Opening:
    """The opening for rows of `capacity` tokens, of a package that need not have a tokenizer."""
    chat = _chat_opening(package)
    if chat is not None and len(chat.ids) <= _MAX_OPENING_SHARE * capacity:
        return chat
    ids = package.manifest.token_ids
    if ids.bos is None:
        return random_starts(package)
    turns = ((ids.eos[0], ids.bos),) if ids.eos else ()
    return Opening(DOCUMENTS, (ids.bos,), ids.eos, _DOCUMENT_TEMPERATURE, turns)


def random_starts(package: Package) -> Opening:
    """The opening of rows that begin with any token of the vocabulary, and go on after a stop token."""
    return Opening(RANDOM_STARTS, (), package.manifest.token_ids.eos, _DOCUMENT_TEMPERATURE, ())


def _chat_opening(package: Package) -> Opening | None:
    """None without a chat template, a stop token or jinja2, and for a template that changes what a message says."""
    stops = package.manifest.token_ids.eos
    tokenizer = Tokenizer.of(package)
    if tokenizer is None or tokenizer.chat_template is None or not stops:
        return None
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    try:
        whole = tokenizer.render_chat(messages)
        first = tokenizer.render_chat(messages[:1])
        unasked = tokenizer.render_chat(messages[:1], ChatOptions(add_generation_prompt=False))
    except (ValueError, ImportError):
        return None
    if (
        any(whole.count(mark) != 1 for mark in _MARKS)
        or _MARKS[0] not in first
        or not first.startswith(unasked)
    ):
        return None
    before, _, after_user = first.partition(_MARKS[0])
    _, _, rest = whole.partition(_MARKS[1])
    after_answer, _, _ = rest.partition(_MARKS[2])
    parts = [
        tuple(tokenizer.encode(part, add_special_tokens=False))
        for part in (before, after_user, after_answer)
    ]
    if not all(parts):
        return None
    return Opening(CHATS, parts[0], stops, _CHAT_TEMPERATURE, (parts[1], parts[2]))


@dataclass(slots=True)
class OwnText:
    """A text in work, and its tokens.

    Attributes:
        opening: how its rows begin.
        prompt: [rows, n] int64, the tokens of the opening.
        ids: [rows, 1] int64 for each token of a row after these.
        scored: [rows] bool for each token: whether the model chose it; the host chooses those between two turns.
        logits: [rows, V] float32 for each token, from which it was chosen, if they are kept.
    """

    opening: Opening
    prompt: Array
    ids: list[Array]
    scored: list[Array]
    logits: list[Array]

    @property
    def rows(self) -> Array:
        """[rows, S] int64: all tokens of each row, the opening's first."""
        return np.concatenate([self.prompt, *self.ids], axis=1)


def write_text(
    step: Step,
    opening: Opening,
    vocab_size: int,
    *,
    rows: int,
    tokens: int,
    seed: int,
    keep_logits: bool = False,
    progress: Callable[[float], None] = lambda fraction: None,
) -> OwnText:
    """Let a graph write `rows` rows of `tokens` tokens each, with the same result each time.

    Args:
        step: a function that takes ids and lengths, moves the graph's states on, and returns its outputs.
        vocab_size: the number of tokens from which a random first token is drawn.
        seed: the seed of all random numbers.
        progress: a function that is called with the fraction done, in (0, 1].

    Raises CompileError if the graph gives logits of which no token can be chosen: NaN, +inf, or none that is finite.
    """
    rng = np.random.default_rng(seed)
    first = np.tile(np.array(opening.ids, np.int64), (rows, 1))
    if not opening.ids:
        first = rng.integers(0, vocab_size, (rows, 1))
    text = OwnText(opening, first, [], [], [])
    waiting: list[list[int]] = [[] for _ in range(rows)]
    ended = [0] * rows  # turns

    def choose(results: Mapping[str, Array]) -> Array:
        if not np.isfinite(results[LOGITS.name].max(-1)).all():
            raise CompileError(
                "the float model gives logits that are not numbers, so no text can be written to measure or fit "
                "quantized weights and caches; export the model again"
            )
        chosen = sampled(results[LOGITS.name] / np.float32(opening.temperature), rng)
        scored = np.array([not queue for queue in waiting])
        for row, queue in enumerate(waiting):
            if not queue and opening.turns and chosen[row] in opening.stops:
                queue.extend(opening.turns[ended[row] % len(opening.turns)])
                ended[row] += 1
            if queue:
                chosen[row] = queue.pop(0)
        text.ids.append(chosen[:, None])
        text.scored.append(scored)
        if keep_logits:
            text.logits.append(results[LOGITS.name])
        return chosen

    lengths = np.full(rows, first.shape[1], np.int64)
    for number, _ in enumerate(write(step, first, lengths, tokens, choose)):
        progress((number + 1) / tokens)
    return text


def sampled(logits: Array, rng: np.random.Generator) -> Array:
    """[rows] int64: a token of each row of `logits`, [rows, V] float32, at temperature 1, by inverse CDF."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    rows, vocab_size = weights.shape
    # A part of the vocabulary first, then a token of it: running sums of all tokens take ten times as long.
    parts = np.pad(weights, ((0, 0), (0, -vocab_size % _PART_TOKENS))).reshape(
        rows, -1, _PART_TOKENS
    )
    ends = parts.sum(-1, dtype=np.float64).cumsum(-1)
    drawn = rng.random((rows, 1)) * ends[:, -1:]
    part = np.minimum((ends <= drawn).sum(-1), ends.shape[-1] - 1)
    before = np.where(part > 0, ends[np.arange(rows), part - 1], 0)[:, None]
    within = before + parts[np.arange(rows), part].cumsum(-1, dtype=np.float64)
    tokens: Array = np.minimum(part * _PART_TOKENS + (within <= drawn).sum(-1), vocab_size - 1)
    return tokens
