"""The tokens of a checkpoint's own tokenizer.json, whatever class of transformers opens it; the tokenizers library is
the oracle."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from qsample.checkpoints.checkpoint import Checkpoint
from qsample.errors import QsampleError

TEXTS = [
    "In 1999 and 2024, 123 of 456.",
    "don't THINK of cafés, cafe\u0301s",
    "x  = [1, 22]\n\n  y",
] * 9
PROMPTS = [*TEXTS[:3], "2024", " 5 of 6", "1234567", "<s>In 1999<tool> of\n\n", "", "É"]
WORDS = r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"


def trained(own: Tokenizer, trainer: Any, **options: Any) -> Tokenizer:
    special = ["<s>", "</s>", "<unk>"]
    own.train_from_iterator(
        TEXTS, trainer(vocab_size=400, special_tokens=special, show_progress=False, **options)
    )
    own.add_tokens([AddedToken("<tool>", normalized=False)])
    return own


def of_bytes(normalizer: Any = None) -> Tokenizer:
    """Words of a rule of its own, as of Llama 3, and merges of whole words first."""
    own = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.pre_tokenizer = pre_tokenizers.Sequence([split, alphabet])
    own.decoder = decoders.ByteLevel()
    if normalizer is not None:
        own.normalizer = normalizer
    return trained(own, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def of_sentences() -> Tokenizer:
    """As of Llama 2: a blank before each piece of text between special tokens."""
    own = Tokenizer(models.BPE(unk_token="<unk>"))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return trained(own, trainers.BpeTrainer)


def with_visible_blanks() -> Tokenizer:
    """Decoded in another way than by the class, too."""
    own = of_sentences()
    own.decoder = decoders.Sequence([decoders.Replace("▁", "_"), decoders.Fuse()])
    return own


def of_words() -> Tokenizer:
    own = Tokenizer(models.WordPiece(unk_token="<unk>"))
    own.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    own.decoder = decoders.WordPiece()
    return trained(own, trainers.WordPieceTrainer)


def checkpoint(
    folder: Path, own: Tokenizer, model_type: str = "llama", **stated: Any
) -> Checkpoint:
    """A checkpoint without weights. stated: the contents of its tokenizer_config.json."""
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[model_type]
    config(vocab_size=512).save_pretrained(folder)
    own.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special | stated))
    return Checkpoint(str(folder))


def tokens(backend: Any) -> list[list[int]]:
    """Of each prompt; of a tokenizer of transformers or of the tokenizers library."""
    backend = getattr(backend, "backend_tokenizer", backend)
    return [backend.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("own", "model_type", "kind", "word"),
    [
        (of_bytes, "qwen2", "PreTrainedTokenizerFast", "2024"),
        (of_bytes, "llama", "Qwen2Tokenizer", "2024"),
        (of_bytes, "llama", "GPT2Tokenizer", "a  b   c"),
        (of_bytes, "llama", "CohereTokenizerFast", "2024"),
        (lambda: of_bytes(normalizers.NFD()), "llama", "GPTNeoXTokenizer", "café"),
        (of_sentences, "llama", "LlamaTokenizer", " 1,234.56"),
        (with_visible_blanks, "llama", "LlamaTokenizer", " 1,234.56"),
    ],
)
def test_a_class_with_words_of_its_own_gets_those_of_the_file(
    own: Callable[[], Tokenizer], model_type: str, kind: str, word: str, tmp_path: Path
) -> None:
    opened = checkpoint(tmp_path, own(), model_type, tokenizer_class=kind)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokens(theirs) != tokens(file)
    with pytest.warns(
        UserWarning,
        match=rf"{type(theirs).__name__} of .* than the tokenizer\.json of .*; the package has those of the file",
    ) as said:
        tokenizer = opened.tokenizer
    assert len(said) == 1
    named = re.search(r"other tokens for (.+?)(?: and (\d+) others)?; ", str(said[0].message))
    assert named is not None
    words = ast.literal_eval(f"[{named[1]}]")
    assert word in words
    assert len(words) == 6 or (len(words) < 6 and named[2] is None)
    assert named[2] is None or int(named[2]) > 0
    assert tokenizer is not None
    assert tokens(tokenizer) == tokens(file)
    assert tokenizer.added_tokens_decoder == theirs.added_tokens_decoder
    assert tokenizer.bos_token == "<s>"
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert tokens(saved) == tokens(file)
    for ids in tokens(file):
        assert saved.decode(ids) == file.decode(ids)


def test_a_file_that_says_the_same_changes_nothing(tmp_path: Path) -> None:
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trained(own, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    for kind in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
        opened = checkpoint(tmp_path, own, tokenizer_class=kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tokens(opened.tokenizer) == tokens(own)


def test_a_class_that_reads_the_file_as_it_is_is_left_alone(tmp_path: Path) -> None:
    """Whatever the configuration states: the class has passed over it."""
    own = of_words()
    opened = checkpoint(
        tmp_path, own, tokenizer_class="PreTrainedTokenizerFast", strip_accents=True
    )
    assert (
        tokens(opened.tokenizer) == tokens(own) == tokens(AutoTokenizer.from_pretrained(tmp_path))
    )


def test_options_that_the_configuration_states_are_kept(tmp_path: Path) -> None:
    """As in transformers 4, which read the rest from the file."""
    own = of_words()
    kind = {"tokenizer_class": "BertTokenizer"}
    opened = checkpoint(tmp_path, own, **kind, do_lower_case=True, strip_accents=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tokens(opened.tokenizer) == tokens(theirs) != tokens(own)
    chinese = "你好世界"
    opened = checkpoint(tmp_path, own, **kind, tokenize_chinese_chars=False)
    with pytest.warns(UserWarning, match="'In 1999'"):
        tokenizer = opened.tokenizer
    assert tokenizer is not None
    assert tokenizer.tokenize(chinese) == ["<unk>"]
    assert own.encode(chinese).tokens == ["<unk>"] * len(chinese)
    silent = checkpoint(tmp_path, own, **kind)
    with pytest.warns(UserWarning, match="BertTokenizer of .*'In 1999', "):
        tokenizer = silent.tokenizer
    assert tokens(tokenizer) == tokens(own)

    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trained(own, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    opened = checkpoint(tmp_path, own, tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert tokens(opened.tokenizer) == tokens(own)


def test_a_correction_that_the_configuration_asks_for_is_kept(tmp_path: Path) -> None:
    opened = checkpoint(
        tmp_path, of_bytes(), tokenizer_class="GPT2Tokenizer", fix_mistral_regex=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(opened.tokenizer) == tokens(AutoTokenizer.from_pretrained(tmp_path))


def test_a_tokenizer_without_the_file_is_the_classes_own(tmp_path: Path) -> None:
    own = of_bytes()
    checkpoint(tmp_path, own, tokenizer_class="Qwen2Tokenizer")
    own.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "tokenizer.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = Checkpoint(str(tmp_path)).tokenizer
    assert tokens(tokenizer) == tokens(AutoTokenizer.from_pretrained(tmp_path)) != tokens(own)


def test_a_tokenizer_in_another_folder(tmp_path: Path) -> None:
    own = of_bytes()
    checkpoint(tmp_path / "other", own, tokenizer_class="Qwen2Tokenizer")
    checkpoint(tmp_path / "model", of_sentences(), tokenizer_class="PreTrainedTokenizerFast")
    opened = Checkpoint(str(tmp_path / "model"), tokenizer=str(tmp_path / "other"))
    with pytest.warns(
        UserWarning, match=r"than the tokenizer\.json of .*other, with other tokens for "
    ):
        assert tokens(opened.tokenizer) == tokens(own)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer_config.json", r"cannot read .*tokenizer_config\.json"),
        ("tokenizer.json", r"tokenizer\.json cannot be read: "),
    ],
)
def test_a_file_that_is_damaged_is_named(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = checkpoint(tmp_path, of_bytes(), tokenizer_class="Qwen2Tokenizer")
    made = AutoTokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: made)
    (tmp_path / name).write_text("{")
    with pytest.raises(QsampleError, match=message):
        _ = opened.tokenizer
