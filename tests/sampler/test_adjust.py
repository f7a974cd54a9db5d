"""allowed_tokens, logit_bias, the minimum length and penalties; DRY, no_repeat_ngram_size and bad_words_ids: each by
hand, and all of them against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS, INVALID_LOGITS
from qsample.sampler.adjust import Past
from tests.helpers.computed import computed
from tests.helpers.reference import adjust
from tests.helpers.sampler_cases import (
    ALL_FEATURES,
    check_steps,
    graph,
    interface,
    make_inputs,
    of_rows,
    sampler,
)

Array = np.ndarray
FEATURES = Features(logit_bias=True, allowed_tokens=True)
FACES = [Interface(4, (), features=FEATURES, captured=captured) for captured in (False, True)]


def check(logits: list[float], expected: list[float], **values: Any) -> None:
    """Assert the new logits of a row, in both kinds of graph, alone and next to a row with every parameter."""
    for face in FACES:
        inputs = make_inputs(face, **values)
        got = sampler(face)(np.float32([logits]), inputs)["adjusted_logits"]
        np.testing.assert_allclose(got, [expected], rtol=1e-6)
        both = {name: np.repeat(array, 2, 0) for name, array in inputs.items()}
        both["repetition_penalty"][1], both["presence_penalty"][1], both["min_length"][1] = (
            1.5,
            0.5,
            9,
        )
        got = sampler(face)(np.float32([logits] * 2), both)["adjusted_logits"]
        np.testing.assert_allclose(got[:1], [expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("ids", "bias", "expected"),
    [
        ([[2, -1, -1]], [[5, 9, 9]], [0, 0, 5, 0]),  # padding, whatever its bias, touches nothing
        ([[2, 2, 0]], [[1, 1, -3]], [-3, 0, 2, 0]),  # the biases of a repeated id add up
        ([[-1, -1, 0]], [[9, 9, 1]], [1, 0, 0, 0]),
        ([[1, 4, 1]], [[1, 9, 0]], [0, 1, 0, 0]),  # an id beyond the vocabulary is padding
        ([[3, -2, 0]], [[-np.inf, 9, -1]], [-1, 0, 0, -np.inf]),
    ],
)
def test_logit_bias(ids: list[list[int]], bias: list[list[float]], expected: list[float]) -> None:
    check([0, 0, 0, 0], expected, biases=3, logit_bias_ids=ids, logit_bias=bias)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70])
def test_allowed_tokens(vocab: int) -> None:
    """Every single bit, the sign bits and the last incomplete word included."""
    face = interface(vocab, Features(allowed_tokens=True))
    words = np.zeros((vocab, -(-vocab // 32)), np.uint32)
    words[np.arange(vocab), np.arange(vocab) // 32] = (
        np.uint32(1) << np.arange(vocab, dtype=np.uint32) % 32
    )
    inputs = make_inputs(face, vocab, allowed_tokens=words.view(np.int32))
    result = sampler(face)(np.ones((vocab, vocab), np.float32), inputs)
    assert result["next_ids"][:, 0].tolist() == [*range(vocab)]
    np.testing.assert_array_equal(result["adjusted_logits"], np.where(np.eye(vocab), 1, -np.inf))


def test_nothing_allowed_is_invalid() -> None:
    face = interface(40, Features(allowed_tokens=True))
    result = sampler(face)(
        np.zeros((1, 40), np.float32), make_inputs(face, allowed_tokens=[[0, -256]])
    )
    assert (
        result["status_RetainedState"][0] == INVALID_LOGITS
    )  # bits 8 to 31 of word 1 are tokens 40 and up


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_mask_does_not_hide_an_invalid_logit(value: float, captured: bool) -> None:
    filters = ("bad_words_ids", "no_repeat_ngram_size", "dry")
    features = Features(allowed_tokens=True, logit_bias=True, filters=filters)
    face = Interface(40, (), features=features, captured=captured)
    logits = np.zeros((1, 40), np.float32)
    logits[0, 7] = value
    for mask in (
        {"allowed_tokens": [[1, 0]]},
        {"logit_bias_ids": 7, "logit_bias": -np.inf},
        {"stop_ids": 7, "min_length": 9},
        {"bad_words_ids": [[[7]]]},
        {"no_repeat_ngram_size": 1, "input_ids": 7},
        {
            "dry_multiplier": 1e30,
            "dry_base": 9,
            "dry_allowed_length": 1,
            "input_ids": [[5, 7, 5]],
            "sequence": 3,
        },
    ):
        assert (
            sampler(face)(logits, make_inputs(face, **mask))["status_RetainedState"][0]
            == INVALID_LOGITS
        ), mask


def test_repetition_penalty_applies_once_per_distinct_id() -> None:
    """r = 2: token 0 (l = 4) is in the history three times, token 3 (l = -1) once: 4 / 2 = 2 and -1 * 2 = -2."""
    check([4, 2, 1, -1], [2, 2, 1, -2], sequence=4, input_ids=[[0, 0, 0, 3]], repetition_penalty=2)
    check(
        [4, 2, 1, -1],
        [2, 2, 1, -1],
        sequence=4,
        input_ids=[[0, 0, 0, 3]],
        input_lengths=2,
        repetition_penalty=2,
    )
    # The row's earlier tokens count, and nothing after them.
    tokens = [[1, 2] + [1] * 14]
    check(
        [4, 2, 1, -1], [2, 1, 0.5, -1], lengths=2, tokens=tokens, input_ids=0, repetition_penalty=2
    )
    check(
        [4, 2, 1, -1], [2, 2, 1, -1], tokens=tokens, input_ids=0, repetition_penalty=2
    )  # a new row: not read


def test_presence_and_frequency_count_sampled_tokens_only() -> None:
    """Token 1 was sampled twice, token 2 is in the prompt: l[1] -= 0.25 * 2 + 0.5."""
    state = {
        "lengths": 3,
        "tokens": [[2, 1, 1] + [2] * 13],
        "input_ids": 1,
        "output_counts": [[0, 2, 0, 0]],
    }
    check([1, 1, 1, 1], [1, 0, 1, 1], presence_penalty=0.5, frequency_penalty=0.25, **state)
    check([1, 1, 1, 1], [1, 0.5, 1, 1], frequency_penalty=0.25, **state)
    check([1, 1, 1, 1], [1, 1.5, 1, 1], presence_penalty=-0.5, **state)
    check(
        [1, 1, 1, 1],
        [1, -0.5, 0.5, 1],
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2,
        **state,
    )


@pytest.mark.parametrize("captured", [False, True])
def test_penalty_last_n(captured: bool) -> None:
    """r = 2, f = 1/4, g = 1/2, over 0 1 1 and the inputs 2 1. `output_counts` are for -1 alone."""
    face = Interface(4, (), features=Features(filters=("penalty_last_n",)), captured=captured)
    logits = [4, 2, 1, -1]
    cases = {
        -1: [2, 1 - 1, 0.5, -1],
        0: logits,
        1: [4, 1 - 0.75, 1, -1],
        2: [4, 1 - 0.75, 0.5 - 0.75, -1],
        3: [4, 1 - 1, 0.5 - 0.75, -1],
        4: [4, 1 - 1.25, 0.5 - 0.75, -1],
        5: [2 - 0.75, 1 - 1.25, 0.5 - 0.75, -1],
        2**31 - 1: [2 - 0.75, 1 - 1.25, 0.5 - 0.75, -1],
    }
    state = {"lengths": 3, "tokens": [[0, 1, 1] + [0] * 13], "output_counts": [[0, 2, 0, 0]]}
    penalties = {"repetition_penalty": 2, "frequency_penalty": 0.25, "presence_penalty": 0.5}
    inputs = make_inputs(
        face,
        8,
        sequence=3,
        input_ids=[[2, 1, 3]],
        input_lengths=2,
        penalty_last_n=[*cases],
        **state,
        **penalties,
    )
    got = sampler(face)(np.float32([logits] * 8), inputs)["adjusted_logits"]
    np.testing.assert_array_equal(got, np.float32([*cases.values()]))
    for row in range(8):
        alone = of_rows(inputs, np.array([row]))
        np.testing.assert_array_equal(
            sampler(face)(np.float32([logits]), alone)["adjusted_logits"], got[row : row + 1]
        )


@pytest.mark.parametrize(
    ("stop_ids", "min_length", "expected"),
    [
        # One token in the row, so lengths + n = 1: a stop is forbidden while that is below min_length.
        ([[1, -1, -1]], 2, [1, -np.inf, 0, 0]),
        ([[1, -1, -1]], 1, [1, 5, 0, 0]),
        ([[1, -1, -1]], 0, [1, 5, 0, 0]),
        ([[-1, 1, 3]], 9, [1, -np.inf, 0, -np.inf]),
        ([[0, 0, 2]], 9, [-np.inf, 5, -np.inf, 0]),  # the row's own token, too
        ([[-1, -1, -1]], 9, [1, 5, 0, 0]),
    ],
)
def test_min_length_forbids_stops(
    stop_ids: list[list[int]], min_length: int, expected: list[float]
) -> None:
    check([1, 5, 0, 0], expected, min_length=min_length, stop_ids=stop_ids, stops=3)
    penalized = [expected[0] / 2, *expected[1:]]
    check(
        [1, 5, 0, 0],
        penalized,
        min_length=min_length,
        stop_ids=stop_ids,
        stops=3,
        repetition_penalty=2,
    )


@pytest.mark.parametrize("captured", [False, True])
def test_bans_and_repetitions(captured: bool) -> None:
    """Each alone in its call, over the row's earlier tokens and this call's inputs: 0 1 2, and 0 1."""
    filters = ("bad_words_ids", "no_repeat_ngram_size", "dry")
    face = Interface(4, (), features=Features(filters=filters), captured=captured)
    state = {
        "lengths": 3,
        "tokens": [[0, 1, 2] + [0] * 13],
        "sequence": 2,
        "input_ids": [[0, 1]],
        "bad_words": (1, 2),
    }
    for values, expected in (
        ({"no_repeat_ngram_size": 1}, [-np.inf] * 3 + [0]),
        ({"no_repeat_ngram_size": 3}, [0, 0, -np.inf, 0]),
        ({"bad_words_ids": [[[1, 3]]]}, [0, 0, 0, -np.inf]),
        ({"bad_words_ids": [[[-1, 2]]]}, [0, 0, -np.inf, 0]),
        ({"dry_multiplier": 0.5, "dry_base": 3, "dry_allowed_length": 1}, [0, 0, -1.5, 0]),
        ({"dry_multiplier": 0.5, "repetition_penalty": 2}, [0, 0, -0.5, 0]),
        ({}, [0, 0, 0, 0]),
    ):
        got = sampler(face)(np.zeros((1, 4), np.float32), make_inputs(face, **state, **values))[
            "adjusted_logits"
        ]
        np.testing.assert_array_equal(got, [expected], err_msg=str(values))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("vocab", [3, 300])
def test_everything_at_once(vocab: int, captured: bool) -> None:
    """Against the reference, bans and repetitions included."""
    filters = () if vocab == 3 else tuple(EXTRA_PARAMETERS)
    features = Features(logit_bias=True, allowed_tokens=True, filters=filters)
    check_steps(Interface(vocab, (), features=features, captured=captured), 3, 40)


Array = np.ndarray
REPETITION = Features(filters=("dry", "no_repeat_ngram_size", "bad_words_ids"))
REPEATS = [Interface(26, (), features=REPETITION, captured=captured) for captured in (False, True)]


def changed(text: str, **values: Any) -> dict[str, float]:
    """Letter → the penalty of its logit after `text`, in both kinds of graph."""
    ids = [[ord(c) - ord("a") for c in text]]
    values = {"capacity": 128, "breakers": 2, **values}
    found = []
    for face in REPEATS:
        inputs = make_inputs(face, sequence=len(text), input_ids=ids, **values)
        taken = -sampler(face)(np.zeros((1, 26), np.float32), inputs)["adjusted_logits"][0]
        found.append({chr(ord("a") + i): float(taken[i]) for i in np.flatnonzero(taken)})
    assert found[0] == found[1]
    return found[0]


def letters(*words: str) -> list[list[list[int]]]:
    """`bad_words_ids` of one row; "." is padding."""
    return [[[ord(c) - ord("a") if c != "." else -1 for c in word] for word in words]]


EXAMPLE = "abccbcyabc"  # llama.cpp's: after a, b, c comes c; after c alone b; after b, c comes y
DRY: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    (EXAMPLE, {}, {"c": 4, "b": 1, "y": 2}),
    (EXAMPLE, {"dry_allowed_length": 2}, {"c": 2, "y": 1}),
    (EXAMPLE, {"dry_allowed_length": 4}, {}),
    (EXAMPLE, {"dry_multiplier": 0.5, "dry_base": 3}, {"c": 4.5, "b": 0.5, "y": 1.5}),
    (EXAMPLE, {"dry_penalty_last_n": 6}, {"y": 2}),  # b c y a b c
    (EXAMPLE, {"dry_penalty_last_n": 5}, {"y": 1}),  # c y a b c: the match is c alone
    (EXAMPLE, {"dry_penalty_last_n": 1}, {}),
    (EXAMPLE, {"dry_sequence_breakers": [-1, 0]}, {"c": 2, "b": 1, "y": 2}),
    (EXAMPLE, {"dry_sequence_breakers": [1, -1]}, {"c": 1, "y": 1}),  # b itself is never penalized
    (EXAMPLE, {"dry_sequence_breakers": [-1, 2]}, {}),
    (EXAMPLE, {"dry_penalty_last_n": 0}, {}),
    (EXAMPLE, {"dry_base": 1}, {"c": 1, "b": 1, "y": 1}),
    (EXAMPLE, {"dry_base": 0.9}, {}),
    (EXAMPLE, {"dry_multiplier": 0}, {}),
    # The longest match has 64 tokens.
    *(("a" * count, {}, {"a": 2.0 ** (min(count - 1, 64) - 1)}) for count in (2, 40, 64, 65, 100)),
    ("a", {}, {}),
]


@pytest.mark.parametrize(
    ("text", "changes", "penalties"), [*DRY, (EXAMPLE, {"dry_multiplier": -1}, {})]
)
def test_dry(text: str, changes: dict[str, Any], penalties: dict[str, float]) -> None:
    parameters = {"dry_multiplier": 1, "dry_base": 2, "dry_allowed_length": 1, **changes}
    assert changed(text, **parameters) == penalties


def test_the_largest_penalty_is_no_mask() -> None:
    """So that a row whose every token is penalized is still valid."""
    assert changed("aaa" * 20, dry_multiplier=1, dry_base=100, dry_allowed_length=1) == {
        "a": float(np.float32(1e30))
    }


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
    given = {
        "capacity": 16,
        "lengths": 3,
        "tokens": tokens,
        "no_repeat_ngram_size": 2,
        "input_lengths": 3,
    }
    assert changed("bdczzz", **given) == {"b": np.inf}  # d b c b d c: after c came b


def test_matches() -> None:
    """m(i): how many tokens up to i are those up to the end, and no more than are wanted."""
    tokens = np.array(
        [[1, 2, 3, 1, 2, 3, 9, 9], [7, 7, 7, 7, 7, 7, 7, 7], [4, 5, 4, 5, 4, 0, 0, 0]]
    )
    lengths, longest = np.array([[6], [8], [5]]), np.array([[64], [3], [64]])
    (found,) = computed(
        lambda tokens, lengths, longest: Past(tokens, lengths).matches(longest),
        tokens,
        lengths,
        longest,
    )
    assert found.tolist() == [
        [0, 0, 3, 0, 0, 0, 0, 0],
        [1, 2, 3, 3, 3, 3, 3, 0],
        [1, 0, 3, 0, 0, 0, 0, 0],
    ]


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
            Interface(vocab, (), features=REPETITION, captured=captured),
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
            dry_sequence_breakers=np.where(
                rng.random((batch, 2)) < 0.7, -1, rng.integers(0, vocab, (batch, 2))
            ),
            no_repeat_ngram_size=rng.choice([0, 0, 1, 2, 3, 7], batch),
            bad_words_ids=np.where(
                np.arange(4) < rng.integers(0, 5, (batch, 3, 1)),
                -1,
                rng.integers(0, 3, (batch, 3, 4)),
            ),
        )
        logits = rng.normal(size=(batch, vocab)).astype(np.float32)
        face = Interface(vocab, (), features=REPETITION, captured=captured)
        got = sampler(face)(logits, inputs)["adjusted_logits"]
        for row in range(batch):
            values = {name: array[0] for name, array in of_rows(inputs, np.array([row])).items()}
            past = [
                *values["tokens"][: lengths[row]],
                *values["input_ids"][: values["input_lengths"]],
            ]
            expected = adjust(logits[row], values, np.array(past), len(past))
            np.testing.assert_allclose(got[row], expected, rtol=2e-5, err_msg=str((past, values)))


def test_every_change_of_the_logits_keeps_the_name_of_the_batch() -> None:
    """ONNX Runtime changes a tensor in place only if it knows that the result has the same shape."""
    model = graph(interface(70, ALL_FEATURES))
    logits = next(value for value in model.graph.inputs if value.name == "logits")
    changed = {logits}
    changes = 0
    for node in model.graph:
        if node.op_type in ("Add", "ScatterElements") and node.inputs[0] in changed:
            assert node.outputs[0].shape == logits.shape, node
            changed.add(node.outputs[0])
            changes += 1
    assert changes >= 5  # two masks, the biases, the stop tokens, the penalties
