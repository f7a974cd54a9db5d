"""Tokenizers of three kinds, each with llguidance's reading of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, normalizers

from qsample.request.grammar import GrammarTokenizer
from qsample.request.structured.vocabulary import TokenVocabulary

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "qsample" / "assets" / "tiny_lm" / "tokenizer.json"
REAL = ROOT / "build" / "smollm2" / "checkpoint" / "tokenizer.json"
STOP = 2
NUM_PADDED = 5


class Kind(NamedTuple):
    """A tokenizer, as qsample and as llguidance read it."""

    text: str
    reading: GrammarTokenizer
    vocabulary: TokenVocabulary
    tokenizer: LLTokenizer


def kind_of(text: str) -> Kind:
    size = Tokenizer.from_str(text).get_vocab_size() + NUM_PADDED
    reading = GrammarTokenizer.of({"tokenizer": text, "vocab_size": size})
    library = LLTokenizer(text, n_vocab=size, eos_token=[STOP])
    return Kind(text, reading, TokenVocabulary.of(reading), library)


def sentencepiece_like() -> str:
    """A tokenizer with byte fallback, in which ▁ is a space."""
    pieces = ["▁", *'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-\\éü', "ab", "no", "▁ab", "▁no"]
    pieces += ["▁a", '":', ',▁"', "ye", "yes", '{"', '"}', "an", "na", "ana", "20", "▁20", "▁▁"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    ids = {piece: number for number, piece in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(ids, [("a", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<think>", "</think>"])
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def byte_level() -> Kind:
    return kind_of(TINY.read_text("utf-8"))


@pytest.fixture(scope="session")
def sentencepiece() -> Kind:
    return kind_of(sentencepiece_like())


@pytest.fixture(scope="session")
def real() -> Kind:
    if not REAL.exists():
        pytest.skip("there is no real model; `python scripts/real_model.py` fetches it")
    return kind_of(REAL.read_text("utf-8"))
