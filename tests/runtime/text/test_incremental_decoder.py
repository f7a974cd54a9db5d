"""Text of tokens that come one by one: whole characters, and the same text as all at once."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from qsample.runtime.text.incremental_decoder import IncrementalDecoder
from qsample.runtime.text.tokenizer import Tokenizer
from tests.helpers.fake_package import BOS, EOS, byte_tokenizer

TEXTS = [
    "In the beginning",
    "naïve café — “quotes” …",
    "日本語のテキスト、漢字。",
    "🙂👩‍👩‍👧‍👦 flags 🇫🇷 ok",
    " leading and trailing ",
    "line\nbreaks\r\n\ttabs",
    "",
]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def sentencepiece_like() -> Tokenizer:
    """Spells a space as ▁ and falls back to bytes, as Llama's tokenizer does."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "▁the", "▁be", "gin", "ning", "▁In", "é", ".", "a", "b"):
        vocab[piece] = len(vocab)
    inner = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return Tokenizer(inner)


def pieces(decoder: IncrementalDecoder, ids: list[int]) -> list[str]:
    return [*(decoder.put(token) for token in ids), decoder.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_join_to_the_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(IncrementalDecoder(tokenizer), ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    # A byte-level token is one byte, so every character comes with its last byte and not later.
    ends = [len(text[: i + 1].encode()) - 1 for i in range(len(text))]
    assert [i for i, part in enumerate(parts[:-1]) if part] == ends


def test_a_text_cut_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🙂", add_special_tokens=False)[:-1]
    assert pieces(IncrementalDecoder(tokenizer), ids) == ["a", "b", "", "", "", "\ufffd"]


def test_bytes_that_are_no_text(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("é")[-1]
    ids = [*tokenizer.encode("a"), continuation, continuation, *tokenizer.encode("b")]
    parts = pieces(IncrementalDecoder(tokenizer), ids)
    assert "".join(parts) == tokenizer.decode(ids) == "a\ufffd\ufffdb"


def test_any_bytes_join_to_what_the_whole_decodes_to(tokenizer: Tokenizer) -> None:
    generator = random.Random(3)
    for _ in range(300):
        # Mostly letters, so that text and what is no text meet.
        length = generator.randrange(1, 30)
        ids = [generator.randrange(3, 260) if generator.random() < 0.3 else 68 for _ in range(length)]
        assert "".join(pieces(IncrementalDecoder(tokenizer), ids)) == tokenizer.decode(ids)


def test_byte_fallback_joins_to_what_the_whole_decodes_to() -> None:
    tokenizer, generator = sentencepiece_like(), random.Random(3)
    characters = [[3 + byte for byte in text.encode()] for text in ("é", "漢", "🙂")]
    for _ in range(300):
        units = [*([piece] for piece in range(259, 269)), *characters, [2]]
        ids = [token for _ in range(generator.randrange(1, 20)) for token in generator.choice(units)]
        assert "".join(pieces(IncrementalDecoder(tokenizer), ids)) == tokenizer.decode(ids)


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece_like()
    index = {tokenizer.decode([i], skip_special_tokens=False): i for i in range(259, 269)}
    prompt, new = [1, index["In"]], [index["the"], index["be"], index["gin"], index["ning"]]
    assert "".join(pieces(IncrementalDecoder(tokenizer, prompt), new)) == " the beginning"
    assert tokenizer.decode(prompt) + " the beginning" == tokenizer.decode(prompt + new)
    assert "".join(pieces(IncrementalDecoder(tokenizer), new)) == "the beginning"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character(cut: int, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x🙂y", add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer, ids[: 1 + cut])
    assert "".join(pieces(decoder, ids[1 + cut :])) == "🙂y"


def test_a_prompt_that_holds_a_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x\ufffd", add_special_tokens=False)
    assert "".join(pieces(IncrementalDecoder(tokenizer, ids), tokenizer.encode("y", add_special_tokens=False))) == "y"


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), EOS]
    assert ids[0] == BOS
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hi</s>"
    assert "".join(pieces(IncrementalDecoder(tokenizer), ids)) == "hi"
    assert "".join(pieces(IncrementalDecoder(tokenizer, skip_special_tokens=False), ids)) == "<s>hi</s>"


def test_the_decoder_does_constant_work_a_token(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: (seen.append(len(ids)), real(ids, **options))[1])
    decoder = IncrementalDecoder(tokenizer, [70] * 1000)
    for _ in range(1000):
        decoder.put(71)
    assert max(seen) < 12
