"""Checkpoints as people have them: kinds of tokenizers, several stop tokens, names of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qsample.exporters.export import _save_model_files, _token_ids, weight_hash
from qsample.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer
from qsample.transforms.cache import DecodeContext
from qsample.transforms.pipeline import apply, default_transforms
from tests.helpers.tiny_models import byte_tokenizer, random_model

WORDS = ["in", "the", "begin", "##ning"]


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), *(("\u2581" + word, -1.0) for word in ("in", "the", "begin")), ("ning", -1.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {token: place for place, token in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "ids"), [(unigram, [1, 2, 3, 4]), (word_piece, [1, 2, 3, 4])], ids=["unigram", "word_piece"]
)
def test_tokenizers_reach_the_runtime(make: Callable[[], Tokenizer], ids: list[int], tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    _save_model_files(random_model("llama"), tokenizer, tmp_path)
    assert RuntimeTokenizer(Tokenizer.from_file(str(tmp_path / "tokenizer.json"))).encode("in the beginning") == ids


def test_every_stop_token_of_the_generation_config_is_kept() -> None:
    model = random_model("llama")
    model.generation_config.eos_token_id = [2, 7, 9]
    assert tuple(_token_ids(model, byte_tokenizer()).eos) == (2, 7, 9)


@pytest.mark.parametrize("model_type", ["llama", "opt", "bert"])
def test_the_weight_hash_does_not_see_the_transforms(model_type: str) -> None:
    model = random_model(model_type, is_decoder=True) if model_type == "bert" else random_model(model_type)
    before = weight_hash(model)
    model, modified = apply(model, default_transforms(DecodeContext()))
    assert modified
    assert weight_hash(model) == before
