"""Step 2 of the contract in plain NumPy: the logits after masks, bans, biases and penalties."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.helpers.reference_grammar import forbidden

Array = np.ndarray
Row = Mapping[str, Array]
_LONGEST_MATCH = 64  # tokens of DRY's longest match


def adjust(logits: Array, row: Row, history: Array, total: int, capacity: int = 2**31 - 1) -> Array:
    """Step 2, in float32, an operation at a time: ties are judged on the float32 logits.

    Args:
        logits: [V] float32.
        row: the row's inputs; optional ones may be absent.
        history: [total] the row's tokens so far, those of this call included.
        total: how many they are.
        capacity: T.
    """
    l = np.array(logits, np.float32)
    if "grammar_state" in row:
        with np.errstate(invalid="ignore"):
            l[forbidden(row, len(l), capacity, total)] += -np.inf
    if "allowed_tokens" in row:
        words = np.ascontiguousarray(row["allowed_tokens"]).astype("<i4")
        l[np.unpackbits(words.view(np.uint8), bitorder="little")[: len(l)] == 0] += -np.inf
    with np.errstate(over="ignore", invalid="ignore"):
        if "logit_bias_ids" in row:
            real = row["logit_bias_ids"] >= 0
            np.add.at(l, row["logit_bias_ids"][real], np.float32(row["logit_bias"][real]))
        if total < row["min_length"]:
            l[[i for i in row["stop_ids"] if i >= 0]] += -np.inf
        if "bad_words_ids" in row:
            l[bad_words(row, history)] += -np.inf
        if "no_repeat_ngram_size" in row:
            l[repeated_ngrams(int(row["no_repeat_ngram_size"]), history)] += -np.inf
        penalized, counts = history, np.asarray(row["output_counts"], np.float32)
        if (last_n := int(row.get("penalty_last_n", -1))) >= 0:
            penalized = history[max(0, len(history) - last_n) :]
            counts = np.bincount(penalized, minlength=len(l)).astype(np.float32)
        ids = np.unique(penalized)
        r, frequency, presence = (
            np.float32(row[f"{name}_penalty"]) for name in ("repetition", "frequency", "presence")
        )
        l[ids] = np.where(l[ids] < 0, l[ids] * r, l[ids] / r)
        l = l - (frequency * counts + presence * np.float32(counts > 0))
        if "dry_multiplier" in row:
            for token, penalty in dry_penalties(row, history).items():
                l[token] -= np.float32(penalty)
    return l


def bad_words(row: Row, history: Array) -> list[int]:
    """The last token of each forbidden sequence whose other tokens the row ends with."""
    banned, past = [], history.tolist()
    for padded in np.asarray(row["bad_words_ids"]).tolist():
        *before, last = [token for token in padded if token >= 0] or [-1]
        if last >= 0 and past[len(past) - len(before) :] == before:
            banned.append(last)
    return banned


def repeated_ngrams(n: int, history: Array) -> list[int]:
    """The tokens that would complete an n-gram that the row holds already."""
    past = history.tolist()
    if n == 0 or len(past) < n:
        return []
    end = past[len(past) - n + 1 :]
    return [past[i + n - 1] for i in range(len(past) - n + 1) if past[i : i + n - 1] == end]


def dry_penalties(row: Row, history: Array) -> dict[int, float]:
    """The DRY penalty of the logit of each token that would go on with a repetition."""
    multiplier, base = float(row["dry_multiplier"]), float(row["dry_base"])
    allowed, last_n = int(row["dry_allowed_length"]), int(row["dry_penalty_last_n"])
    past = history.tolist() if last_n < 0 else history.tolist()[max(0, len(history) - last_n) :]
    if multiplier == 0 or base < 1 or not past:
        return {}
    breakers = {id_ for id_ in np.asarray(row["dry_sequence_breakers"]).tolist() if id_ >= 0}
    end, limit = len(past) - 1, 0
    while limit < min(_LONGEST_MATCH, len(past)) and past[end - limit] not in breakers:
        limit += 1
    longest: dict[int, int] = {}
    for i in range(end):
        match = 0
        while match < min(limit, i + 1) and past[i - match] == past[end - match]:
            match += 1
        if (
            match >= allowed and past[i + 1] not in breakers
        ):  # llama.cpp never penalizes a breaker itself
            longest[past[i + 1]] = max(match, longest.get(past[i + 1], 0))
    with np.errstate(over="ignore"):
        growth = {
            token: float(np.float32(np.power(base, match - allowed)))
            for token, match in longest.items()
        }
    return {token: min(multiplier * power, 1e30) for token, power in growth.items()}
