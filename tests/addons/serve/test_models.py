"""What a package is served with, and what is refused at the start."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import tokenizers
from tokenizers.decoders import ByteFallback, ByteLevel, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from qsample.addons.serve.chats import ChatCompletionRequest
from qsample.addons.serve.forms import ANY_TEXT, AnswerForm
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.models import ServedModel, ServedModels, TokenTexts
from qsample.addons.serve.requests import CompletionRequest
from qsample.addons.serve.settings import ServeSettings
from qsample.contract.interface import Features
from qsample.request.grammar import Form
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import SamplingParams
from tests.helpers.fake_package import fake_package

FORMS = Features(grammars=True, allowed_tokens=True)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {
        "chat_template.jinja": "own {{ messages[0].content }}",
        "additional_chat_templates/short.jinja": "short {{ messages[0].content }}",
    }
    return fake_package(tmp_path_factory.mktemp("served") / "package", files=files).path


@contextmanager
def served(package: Path, **settings: Any) -> Iterator[ServedModel]:
    models = ServedModels(ServeSettings(models={"tiny": str(package)}, slots=1, **settings))
    try:
        yield models.find("tiny")
    finally:
        models.close()


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (None, "own hello"),
        ("short", "short hello"),
        ("given {{ messages[0].content }}", "given hello"),
    ],
)
def test_a_chat_template_by_name_or_as_text(
    package: Path, template: str | None, prompt: str
) -> None:
    with served(package, chat_template=template) as model:
        ids = model.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        assert model.tokenizer.decode(ids) == prompt


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (
            {"chat_template": "shrot"},
            {},
            "chat_template is .shrot., which is neither Jinja nor a template",
        ),
        ({"chat_template": "{% if %}"}, {}, "the chat template is not valid Jinja"),
        ({"ctx_len": 1}, {}, "ctx_len is 1"),
    ],
)
def test_a_mistake_is_told_at_the_start_and_leaves_no_engine(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    package = fake_package(tmp_path / "package", generation_config=config or None)
    with pytest.raises(ValueError, match=message):
        ServedModels(ServeSettings(models={"tiny": str(package.path)}, **options))
    assert not [thread for thread in threading.enumerate() if thread.name == "qsample-engine"]


def test_settings_of_the_model_that_cannot_run_do_not_end_the_start(tmp_path: Path) -> None:
    config = {"do_sample": True, "temperature": 0, "top_k": -1, "top_p": 0}
    package = fake_package(tmp_path / "package", generation_config=config).path
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with served(package, generation_config="auto") as model:
            assert model.defaults == {"temperature": 0, "top_k": 0}
            request = CompletionRequest(model="tiny", prompt="x")
            assert model.sampling_params(request).temperature == 0
    assert sum('asks for "top_p": 0, which is outside' in str(one.message) for one in said) == 1


def test_settings_of_the_model_are_kept_or_named(tmp_path: Path) -> None:
    config = {"suppress_tokens": [5], "sequence_bias": [[[6], 1.5]], "begin_suppress_tokens": [7]}
    able = fake_package(tmp_path / "able", generation_config=config, logit_bias=True).path
    plain = fake_package(tmp_path / "plain", generation_config=config).path
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # OpenAI's defaults have nothing to do with the model's
        with served(plain) as model:
            assert model.defaults == {"temperature": 1.0}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with served(plain, generation_config="auto") as model:
            assert model.defaults == {"temperature": 1.0}
        with served(able, generation_config="auto") as model:
            request = CompletionRequest(model="tiny", prompt="x", logit_bias={"6": 2.0, "8": -1.0})
            params = model.sampling_params(request)
    undone = '"begin_suppress_tokens", which qsample does not do'
    lacking = '"suppress_tokens", "sequence_bias", which the package was made without'
    for one, are_named in zip(said, ({lacking, undone}, {undone}), strict=True):
        assert {text for text in (lacking, undone) if text in str(one.message)} == are_named
    assert params.biases == {
        "logit_bias": {6: 2.0, 8: -1.0},
        "sequence_bias": {6: 1.5},
        "suppress_tokens": {5: -math.inf},
    }


@pytest.mark.parametrize(
    ("features", "tokenizer", "message"),
    [
        (
            Features(),
            object(),
            "exported without grammars, which an answer .* needs; export it with --for",
        ),
        (FORMS, None, "has no tokenizer, which an answer that follows a schema needs"),
    ],
)
def test_what_a_form_needs(features: Features, tokenizer: object, message: str) -> None:
    loaded = SimpleNamespace(tokenizer=tokenizer)
    interface = SimpleNamespace(features=features)
    model: Any = SimpleNamespace(model=loaded, interface=interface)
    ServedModel.check_form(model, None)
    with pytest.raises(ApiError, match=message) as raised:
        ServedModel.check_form(model, Form("regex", "a"))
    assert raised.value.status == 400


def test_the_text_and_bytes_of_each_token() -> None:
    """Parts of characters have bytes; a blank at the start stays, whatever a decoder does at the start of a text."""
    by_bytes = tokenizers.Tokenizer(BPE({"a": 0, "Ġb": 1, "Ã": 2, "©": 3}, []))
    by_bytes.decoder = ByteLevel()
    by_bytes.add_special_tokens(["<s>"])
    texts = TokenTexts(SimpleNamespace(tokenizer=Tokenizer(by_bytes)))  # type: ignore[arg-type]
    wanted = [("a", b"a"), (" b", b" b"), ("\ufffd", b"\xc3"), ("\ufffd", b"\xa9"), ("<s>", b"<s>")]
    assert [texts.of(token) for token in range(5)] == wanted
    assert [texts.width(token) for token in range(5)] == [1, 2, 1, 0, 0], "é has a place, once"
    assert [texts.label(token) for token in range(5)] == [
        *("a", " b", r"bytes:\xc3", r"bytes:\xa9", "<s>")
    ]

    by_pieces = tokenizers.Tokenizer(
        BPE({"<unk>": 0, "▁a": 1, "<0xC3>": 2}, [], unk_token="<unk>", byte_fallback=True)
    )
    by_pieces.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    texts = TokenTexts(SimpleNamespace(tokenizer=Tokenizer(by_pieces)))  # type: ignore[arg-type]
    assert [texts.of(token) for token in (1, 2)] == [(" a", b" a"), ("\ufffd", b"\xc3")]


@pytest.mark.parametrize("reasoning_parser", [None, "deepseek_r1"])
def test_thoughts_are_split_off_if_asked_for(package: Path, reasoning_parser: str | None) -> None:
    with served(package, reasoning_parser=reasoning_parser) as model:
        assert (model.reasoning_reader([5], ANY_TEXT) is None) == (reasoning_parser is None)
        assert model.reasoning_reader([5], AnswerForm(may_have_thoughts=False)) is None


@pytest.mark.parametrize(
    ("special", "parser", "tools", "shows"),
    [
        ((), "qwen3", True, False),
        (("<tool_call>",), None, True, True),
        (("<tool_call>",), None, False, False),
        (("</think>",), "qwen3", False, True),
        (("</think>",), None, True, False),
        (("<s>",), "qwen3", True, False),
    ],
)
def test_marks_that_are_special_tokens_are_shown(
    tmp_path: Path, special: tuple[str, ...], parser: str | None, tools: bool, shows: bool
) -> None:
    package = fake_package(tmp_path / "package", files={"chat_template.jinja": "<tool_call>"})
    path = package.path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.add_special_tokens([*special])
    tool = {"type": "function", "function": {"name": "f"}}
    body = ChatCompletionRequest.of(
        {"messages": [{"role": "user", "content": "x"}], "tools": [tool] if tools else None}
    )
    with served(package.path, reasoning_parser=parser) as model:
        model.model.tokenizer = Tokenizer(tokenizer)
        assert model.reads_special_tokens(body) == shows


def test_answers_without_a_limit_have_the_default_of_their_api(package: Path) -> None:
    """OpenAI's completions have 16 tokens, and its chats as many as fit."""
    with served(package, generation_config="openai") as model:
        completion = model.sampling_params(CompletionRequest(prompt="x"))
        assert (completion.max_new_tokens, completion.max_length) == (16, None)
        chat = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}])
        params = model.sampling_params(chat)
        assert (params.max_new_tokens, params.max_length) == (None, model.max_model_len)
        limited = model.sampling_params(CompletionRequest(prompt="x", max_tokens=3))
        assert (limited.max_new_tokens, limited.max_length) == (3, None)
        limited = model.sampling_params(chat.model_copy(update={"max_tokens": 3}))
        assert (limited.max_new_tokens, limited.max_length) == (3, None)


def test_an_adapter_that_was_unloaded_meanwhile() -> None:
    added = MagicMock(return_value=["request"])
    model: Any = SimpleNamespace(
        base="tiny",
        adapter=None,
        engine=SimpleNamespace(add=added),
        model=SimpleNamespace(adapters=["a"]),
    )
    params = SamplingParams(max_new_tokens=3)
    for adapter, priority in ((None, 0), ("a", 2)):
        model.adapter = adapter
        request: Any = ServedModel.add(model, [5], params, priority=priority, seed=7)
        assert request == "request"
        (made,), options = added.call_args
        assert (made.inputs, made.seed, made.params) == ([[5]], 7, replace(params, adapter=adapter))
        assert options == {"timeout": 0, "priority": priority}
    model.adapter = "b"
    with pytest.raises(
        ApiError, match="the model 'b' does not exist here; there is 'tiny'"
    ) as raised:
        ServedModel.add(model, [5], params)
    assert (raised.value.status, raised.value.param, raised.value.code) == (
        404,
        "model",
        "model_not_found",
    )
