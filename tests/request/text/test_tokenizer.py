"""Texts and token ids, and packages without a tokenizer."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from qsample.errors import PackageError
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, load
from tests.helpers.fake_package import byte_tokenizer, fake_package


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    inner = byte_tokenizer()
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    assert len(Tokenizer(inner).encode("0123456789")) == 11


def test_text_without_a_tokenizer(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(tokenizer=False)
    assert model.tokenizer is None
    assert model.generate([5, 6], max_new_tokens=2).texts is None


def test_texts_of_a_batch(model: CausalLM) -> None:
    output = model.generate(["a", "b"], seed=1, max_new_tokens=5)
    assert model.tokenizer is not None
    whole = [model.tokenizer.decode(row) for row in output.token_ids]
    assert output.texts == [
        text.removesuffix("\ufffd") for text in whole
    ]  # the last character lacks bytes
    assert output.prompt_lengths == [2, 2]


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra {i}>" for i in range(100)])
    package = fake_package(tmp_path / "package", files={"tokenizer.json": tokenizer.to_str()})
    model = load(package.path)
    read = model.tokenizer
    assert read is not None
    assert read.num_ids == 360
    assert read.encode("a<extra 70>") == [1, 68, 330]
    for text in ("a<extra 71>b", "a" * 30_000 + "<extra 71>"):
        wanted = (
            r"a text has '<extra 71>', token 331 of the tokenizer, and the model has 331 tokens"
        )
        for encode in (read.encode, lambda text: model.generate(text, max_new_tokens=1)):
            with pytest.raises(ValueError, match=wanted):
                encode(text)
    ids = read.tokenize("a<extra 71><extra 99>")
    assert ids == [1, 68, 331, 359]
    assert read.decode(ids) == "a<extra 71><extra 99>"
    assert model.generate("a", max_new_tokens=3, eos_token_id=()).token_ids[0]


def test_another_tokenizer_may_have_more_tokens(fake_model: Callable[..., CausalLM]) -> None:
    given = byte_tokenizer()
    given.add_tokens([f"<extra {i}>" for i in range(100)])
    model = fake_model(tokenizer=False)
    assert model.generate("a<extra 70>", tokenizer=given, max_new_tokens=2).texts
    with pytest.raises(ValueError, match="a text has '<extra 71>', token 331"):
        model.generate("a<extra 71>", tokenizer=given)


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", files={"tokenizer.json": "{}"})
    with pytest.raises(PackageError, match=r"cannot read .*tokenizer.json"):
        load(package.path)


def test_half_a_character_is_refused_as_a_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    with pytest.raises(
        ValueError, match=r"a text has a lone surrogate at character 2 \('\\udc00'\)"
    ):
        tokenizer.encode("ab\udc00")


def test_tokens_that_are_skipped_are_those_that_decode_leaves_out() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    for skip in (True, False):
        for token in (0, 2, 3, 68, 259, 260, 10_000):
            left_out = tokenizer.decode([68, token, 68], skip_special_tokens=skip) == "aa"
            assert tokenizer.is_skipped(token, skip_special_tokens=skip) == left_out, token


def changed(**parts: object) -> Tokenizer:
    """The bytes' tokenizer with other parts of its tokenizer.json."""
    description = json.loads(byte_tokenizer().to_str())
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps({**description, **parts})))


SPLIT = {"type": "Split", "pattern": {"Regex": "x+"}, "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ADDED = {"id": 0, "content": "<unk>", "single_word": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    "normalizer", [None, {"type": "NFC"}, {"type": "NFKC"}], ids=["none", "NFC", "NFKC"]
)
def test_characters_that_a_token_takes_the_place_of(normalizer: object) -> None:
    tokenizer = changed(normalizer=normalizer)
    most = tokenizer.characters_per_token()
    assert most is not None
    texts = [chr(code) * 50 for code in range(0x20, 0x3000, 7)]
    texts += [
        unicodedata.normalize("NFD", chr(code)) * 50 for code in (0x1F82, 0xAC01, 0x1E69, 0x0390)
    ]
    for text in texts:
        assert len(text) <= most * len(tokenizer.encode(text, add_special_tokens=False)), ascii(
            text[:8]
        )


def test_characters_of_tokens_with_byte_fallback() -> None:
    """Llama's kind: a character without a token is its bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "<unk>": 256,
        "\u2581": 257,
        "an": 258,
    }
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [],
        "byte_fallback": True,
        "unk_token": "<unk>",
    }
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    parts: dict[str, object] = {"pre_tokenizer": None, "normalizer": blanks, "added_tokens": []}
    assert changed(model=model, post_processor=None, **parts).characters_per_token() == len(
        "<0x00>"
    )
    del vocabulary["<0x80>"]
    assert changed(model=model, post_processor=None, **parts).characters_per_token() is None


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{**SPLIT, "behavior": "Removed"}, BYTES],
            }
        },
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "WhitespaceSplit"}, BYTES],
            }
        },
        {"pre_tokenizer": None},
        {"added_tokens": [{**ADDED, "lstrip": True, "rstrip": False}]},
    ],
    ids=["Strip", "Regex", "shorter", "Removed", "WhitespaceSplit", "no bytes", "lstrip"],
)
def test_tokenizers_that_leave_characters_out_take_any_number(parts: dict[str, object]) -> None:
    assert changed(**parts).characters_per_token() is None
