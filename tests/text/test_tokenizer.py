"""Texts and token ids, and packages without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qsample.errors import PackageError
from qsample.runtime import CausalLM, load
from qsample.text.tokenizer import Tokenizer
from tests.helpers.fake_package import byte_tokenizer, fake_package


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    inner = byte_tokenizer()
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    assert len(Tokenizer(inner).encode("0123456789")) == 11


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <b>"}]


def test_text_without_a_tokenizer(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(tokenizer=False)
    assert model.tokenizer is None
    assert model.generate([5, 6], max_new_tokens=2).texts is None
    for inputs in ("hello", CHAT):
        with pytest.raises(ValueError, match="has no tokenizer, so it takes no text; give token ids"):
            model.generate(inputs)


def test_texts_of_a_batch(model: CausalLM) -> None:
    output = model.generate(["a", "b"], seed=1, max_new_tokens=5)
    assert model.tokenizer is not None
    assert output.texts == [model.tokenizer.decode(row) for row in output.token_ids]
    assert output.prompt_lengths == [2, 2]


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra {i}>" for i in range(100)])
    package = fake_package(tmp_path / "package", files={"tokenizer.json": tokenizer.to_str()})
    with pytest.raises(PackageError, match="has 360 tokens and the model 320"):
        load(package.path)


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", files={"tokenizer.json": "{}"})
    with pytest.raises(PackageError, match=r"cannot read .*tokenizer.json"):
        load(package.path)


def test_half_a_character_is_no_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    with pytest.raises(ValueError, match=r"a text has a lone surrogate at character 2 \('\\udc00'\)"):
        tokenizer.encode("ab\udc00")


def test_tokens_that_are_skipped_are_those_that_decode_leaves_out() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    for skip in (True, False):
        for token in (0, 2, 3, 68, 259, 260, 10_000):
            left_out = tokenizer.decode([68, token, 68], skip_special_tokens=skip) == "aa"
            assert tokenizer.is_skipped(token, skip_special_tokens=skip) == left_out, token
