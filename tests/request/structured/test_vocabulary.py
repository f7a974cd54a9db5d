"""The bytes of tokens: beside `tokenizers` on texts, and as a trie beside sets of prefixes."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest
from tokenizers import Tokenizer

from qsample.errors import ArgumentError
from qsample.request.grammar import GrammarTokenizer, TokenizerArguments
from qsample.request.structured.vocabulary import TokenVocabulary
from tests.request.structured.conftest import NUM_PADDED, TINY, Kind, sentencepiece_like

KINDS = ["byte_level", "sentencepiece", pytest.param("real", marks=pytest.mark.real)]


def texts_of(vocabulary: TokenVocabulary) -> dict[int, bytes]:
    texts: dict[int, bytes] = {}
    prefixes = [b""]
    for level in vocabulary.levels:
        parents = zip(level.parents, level.last_bytes, strict=True)
        prefixes = [prefixes[parent] + bytes([byte]) for parent, byte in parents]
        assert prefixes == sorted(set(prefixes))
        ends: dict[bytes, list[int]] = {}
        for token, node in zip(level.token_ids, level.token_nodes, strict=True):
            texts[int(token)] = prefixes[node]
            ends.setdefault(prefixes[node], []).append(int(token))
        for prefix, token in zip(prefixes, level.tokens, strict=True):
            assert token == min(ends.get(prefix, [-1]))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_have_the_bytes_of_their_texts(kind: str, request: pytest.FixtureRequest) -> None:
    made: Kind = request.getfixturevalue(kind)
    tokenizer = Tokenizer.from_str(made.text)
    texts = texts_of(made.vocabulary)
    for text in ["yes no", "naïve éü 日本 😊", '{"a": [1, 2]}\n\t', "  two  blanks"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(texts[token] for token in ids) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_a_text_and_no_bytes(kind: str, request: pytest.FixtureRequest) -> None:
    made: Kind = request.getfixturevalue(kind)
    texts = texts_of(made.vocabulary)
    added = json.loads(made.text)["added_tokens"]
    special = {token["content"]: [token["id"]] for token in added if token["special"]}
    assert special
    assert {text: list(ids) for text, ids in made.vocabulary.special_ids.items()} == special
    size = made.reading.vocab_size
    assert made.vocabulary.size == size
    for token in [*range(size - NUM_PADDED, size), *(ids[0] for ids in special.values())]:
        assert token not in texts


def test_added_tokens_that_are_not_special_are_text() -> None:
    definition = json.loads(TINY.read_text("utf-8"))
    size = Tokenizer.from_file(str(TINY)).get_vocab_size()
    entry = dict(definition["added_tokens"][0], special=False)
    definition["added_tokens"] += [
        dict(entry, id=size, content="<think>"),
        dict(entry, id=size + 1, content="é!"),
    ]
    vocabulary = vocabulary_of(json.dumps(definition), size + 3)
    texts = texts_of(vocabulary)
    assert (texts[size], texts[size + 1]) == (b"<think>", "é!".encode())
    assert "<think>" not in vocabulary.special_ids
    assert size + 2 not in texts


@pytest.mark.parametrize("padded", [-300, -1, 0, 1, 40])
def test_the_vocabulary_has_the_tokens_of_the_model(padded: int) -> None:
    """Whether the tokenizer has more tokens than the model, or fewer."""
    text = sentencepiece_like()
    size = Tokenizer.from_str(text).get_vocab_size() + padded
    whole = texts_of(vocabulary_of(text, 1000))
    made = vocabulary_of(text, size)
    assert made.size == size
    assert texts_of(made) == {token: value for token, value in whole.items() if token < size}
    assert all(token < size for ids in made.special_ids.values() for token in ids)


@pytest.mark.parametrize("has_special", [True, False])
def test_ids_without_a_token_between_others(has_special: bool) -> None:
    """No token can be added after them; a special token ends answers in its place."""
    definition = json.loads(sentencepiece_like())
    hole = definition["model"]["vocab"].pop("▁▁")
    if not has_special:
        definition["added_tokens"] = []
        del definition["model"]["vocab"]["no"]
    arguments = TokenizerArguments(tokenizer=json.dumps(definition), vocab_size=500)
    if not has_special:
        with pytest.raises(ArgumentError, match="its ids have gaps, and it has no special token"):
            GrammarTokenizer.of(arguments)
        return
    reading = GrammarTokenizer.of(arguments)
    assert reading.end == definition["added_tokens"][0]["id"]
    assert hole not in texts_of(TokenVocabulary.of(reading))


def vocabulary_of(text: str, size: int) -> TokenVocabulary:
    return TokenVocabulary.of(GrammarTokenizer.of({"tokenizer": text, "vocab_size": size}))


def test_a_trie_has_all_prefixes() -> None:
    rng = np.random.default_rng(0)
    tokens = [bytes(rng.integers(0, 4, rng.integers(0, 7), np.uint8)) for _ in range(500)]
    vocabulary = TokenVocabulary.of_tokens(tokens, {})
    expected = {number: text for number, text in enumerate(tokens) if text}
    assert texts_of(vocabulary) == expected
    prefixes = {text[:end] for text in tokens for end in range(1, len(text) + 1)}
    assert sum(len(level.parents) for level in vocabulary.levels) == len(prefixes)


def test_children_are_found() -> None:
    vocabulary = TokenVocabulary.of_tokens([b"ab", b"ac", b"b", b"\xff\x00"], {})
    first = vocabulary.levels[0].children(np.zeros(4, np.int64), np.array([97, 98, 99, 255]))
    assert first.tolist() == [0, 1, -1, 2]
    second = vocabulary.levels[1].children(np.array([0, 0, 1, 2]), np.array([98, 99, 98, 0]))
    assert second.tolist() == [0, 1, -1, 2]


def test_no_tokens_have_no_levels() -> None:
    assert not TokenVocabulary.of_tokens([b"", b""], {}).levels


@pytest.mark.ci
def test_a_large_trie_is_made_at_once() -> None:
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(1, 12, 152_000))
    text = rng.integers(97, 123, ends[-1], np.uint8).tobytes()
    tokens = [text[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    begin = time.process_time()
    TokenVocabulary.of_tokens(tokens, {})
    # Half a second is the aim; a busy machine may take three times as long.
    assert time.process_time() - begin < 1.5
