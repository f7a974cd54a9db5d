"""DRY, no_repeat_ngram_size and bad_words_ids: by hand, and over random histories against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.sampler.repetition import Past
from tests.helpers.computed import computed
from tests.helpers.reference import adjust
from tests.helpers.sampler_cases import make_inputs, sampler

Array = np.ndarray
FEATURES = Features(filters=("dry", "no_repeat_ngram_size", "bad_words_ids"))
FACES = [Interface(26, (), features=FEATURES, captured=captured) for captured in (False, True)]


def changed(text: str, **values: Any) -> dict[str, float]:
    """Letter → the penalty of its logit after `text`, in both kinds of graph."""
    ids = [[ord(c) - ord("a") for c in text]]
    values = {"capacity": 128, "breakers": 2, **values}
    found = []
    for face in FACES:
        inputs = make_inputs(face, sequence=len(text), input_ids=ids, **values)
        taken = -sampler(face)(np.zeros((1, 26), np.float32), inputs)["adjusted_logits"][0]
        found.append({chr(ord("a") + i): float(taken[i]) for i in np.flatnonzero(taken)})
    assert found[0] == found[1]
    return found[0]


def letters(*words: str) -> list[list[list[int]]]:
    """`bad_words_ids` of one row; "." is padding."""
    return [[[ord(c) - ord("a") if c != "." else -1 for c in word] for word in words]]


@pytest.mark.parametrize(
    ("changes", "penalties"),
    [
        # llama.cpp's example: after a, b, c comes c; after c alone b; after b, c comes y.
        ({}, {"c": 4, "b": 1, "y": 2}),
        ({"dry_allowed_length": 2}, {"c": 2, "y": 1}),
        ({"dry_allowed_length": 4}, {}),
        ({"dry_multiplier": 0.5, "dry_base": 3}, {"c": 4.5, "b": 0.5, "y": 1.5}),
        ({"dry_penalty_last_n": 6}, {"y": 2}),  # b c y a b c
        ({"dry_penalty_last_n": 5}, {"y": 1}),  # c y a b c: the match is c alone
        ({"dry_penalty_last_n": 1}, {}),
        ({"dry_sequence_breakers": [[-1, 0]]}, {"c": 2, "b": 1, "y": 2}),
        ({"dry_sequence_breakers": [[1, -1]]}, {"c": 1, "y": 1}),  # b itself is never penalized
        ({"dry_sequence_breakers": [[-1, 2]]}, {}),
        ({"dry_penalty_last_n": 0}, {}),
        ({"dry_base": 1}, {"c": 1, "b": 1, "y": 1}),
        ({"dry_base": 0.9}, {}),
        ({"dry_multiplier": 0}, {}),
        ({"dry_multiplier": -1}, {}),
    ],
)
def test_dry(changes: dict[str, Any], penalties: dict[str, float]) -> None:
    parameters = {"dry_multiplier": 1, "dry_base": 2, "dry_allowed_length": 1, **changes}
    assert changed("abccbcyabc", **parameters) == penalties


@pytest.mark.parametrize(("count", "penalty"), [(1, 0), (2, 1), (40, 2.0**38), (64, 2.0**62), (100, 2.0**63)])
def test_the_longest_match_has_64_tokens(count: int, penalty: float) -> None:
    assert changed("a" * count, dry_multiplier=1, dry_base=2, dry_allowed_length=1) == (
        {"a": penalty} if penalty else {}
    )


def test_the_largest_penalty_is_no_mask() -> None:
    """So that a row whose every token is penalized is still valid."""
    assert changed("aaa" * 20, dry_multiplier=1, dry_base=100, dry_allowed_length=1) == {"a": float(np.float32(1e30))}


@pytest.mark.parametrize(
    ("text", "size", "banned"),
    [
        ("abcabd", 0, ""),
        ("abcabd", 1, "abcd"),
        ("abcabd", 2, ""),
        ("abcab", 2, "c"),
        ("abcabdab", 2, "cd"),
        ("abcabdab", 3, "cd"),
        ("abcabdab", 4, ""),
        ("bdabcabdab", 5, "c"),
        ("aaa", 2, "a"),
        ("aaa", 4, ""),
        ("a", 2, ""),
        ("a" * 64, 64, "a"),
        ("a" * 64, 65, ""),
        ("a" * 65, 65, "a"),
    ],
)
def test_no_repeat_ngram_size(text: str, size: int, banned: str) -> None:
    assert changed(text, no_repeat_ngram_size=size) == dict.fromkeys(banned, np.inf)


@pytest.mark.parametrize(
    ("text", "words", "banned"),
    [
        ("xab", ["abc"], "c"),
        ("xab", [".bc"], "c"),
        ("xab", ["..c"], "c"),  # a word of one token is never allowed
        ("xab", ["xbc"], ""),
        ("xab", [".ac"], ""),
        ("xab", ["..."], ""),
        ("xab", ["abc", ".bd", "abe", "..."], "cde"),
        ("b", ["abc", ".bd"], "d"),  # the row is too short for the first
        ("xab", ["c"], "c"),
        ("xab", ["xabc", "aabc"], "c"),
    ],
)
def test_bad_words(text: str, words: list[str], banned: str) -> None:
    ids = letters(*words)
    size = (len(words), len(words[0]))
    assert changed(text, bad_words=size, bad_words_ids=ids) == dict.fromkeys(banned, np.inf)


def test_the_tokens_of_a_row_are_its_own() -> None:
    """The row's earlier tokens and this call's inputs, and nothing after them."""
    tokens = np.zeros((1, 16), int)
    tokens[0, :8] = [3, 1, 2, 5, 5, 5, 5, 5]  # of the first three, the rest was another row's
    given = {"capacity": 16, "lengths": 3, "tokens": tokens, "no_repeat_ngram_size": 2, "input_lengths": 3}
    assert changed("bdczzz", **given) == {"b": np.inf}  # d b c b d c: after c came b


def test_matches() -> None:
    """m(i): how many tokens up to i are those up to the end, and no more than are wanted."""
    tokens = np.array([[1, 2, 3, 1, 2, 3, 9, 9], [7, 7, 7, 7, 7, 7, 7, 7], [4, 5, 4, 5, 4, 0, 0, 0]])
    lengths, longest = np.array([[6], [8], [5]]), np.array([[64], [3], [64]])
    (found,) = computed(
        lambda tokens, lengths, longest: Past(tokens, lengths).matches(longest), tokens, lengths, longest
    )
    assert found.tolist() == [[0, 0, 3, 0, 0, 0, 0, 0], [1, 2, 3, 3, 3, 3, 3, 0], [1, 0, 3, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("captured", [False, True])
def test_random_histories(captured: bool) -> None:
    """Few different tokens, so that they repeat; up to a full buffer."""
    rng, batch, vocab, capacity = np.random.default_rng(5), 200, 6, 90
    for sequence in (1, 4):
        lengths = rng.integers(0, capacity - sequence, batch)
        base = rng.integers(0, vocab, (batch, 12))
        tokens = np.where(
            rng.random((batch, capacity)) < 0.05,
            rng.integers(0, vocab, (batch, capacity)),
            np.tile(base, 8)[:, :capacity],
        )
        inputs = make_inputs(
            Interface(vocab, (), features=FEATURES, captured=captured),
            batch,
            sequence=sequence,
            capacity=capacity,
            breakers=2,
            bad_words=(3, 4),
            lengths=lengths,
            tokens=tokens,
            input_ids=rng.integers(0, vocab, (batch, sequence)),
            input_lengths=rng.integers(1, sequence + 1, batch),
            dry_multiplier=rng.choice([0, 0.5, 1], batch),
            dry_base=rng.choice([0.5, 1, 1.2, 1.5], batch),
            dry_allowed_length=rng.choice([1, 1, 2, 5], batch),
            dry_penalty_last_n=rng.choice([-1, -1, 0, 1, 2, 7, 30, 200], batch),
            dry_sequence_breakers=np.where(rng.random((batch, 2)) < 0.7, -1, rng.integers(0, vocab, (batch, 2))),
            no_repeat_ngram_size=rng.choice([0, 0, 1, 2, 3, 7], batch),
            bad_words_ids=np.where(
                np.arange(4) < rng.integers(0, 5, (batch, 3, 1)), -1, rng.integers(0, 3, (batch, 3, 4))
            ),
        )
        logits = rng.normal(size=(batch, vocab)).astype(np.float32)
        face = Interface(vocab, (), features=FEATURES, captured=captured)
        got = sampler(face)(logits, inputs)["adjusted_logits"]
        for row in range(batch):
            values = {name: array[row] for name, array in inputs.items() if name != "searched_rows"}
            past = [*values["tokens"][: lengths[row]], *values["input_ids"][: values["input_lengths"]]]
            expected = adjust(logits[row], values, np.array(past), len(past))
            np.testing.assert_allclose(got[row], expected, rtol=2e-5, err_msg=str((past, values)))
