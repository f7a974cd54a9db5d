"""The keywords of `from_pretrained`, sorted by their use."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import Features
from qsample.models.keywords import OpenOptions, hub_options, read_keywords
from qsample.models.sources import SourceRequest


def read(images: bool | None = False, **keywords: Any) -> OpenOptions:
    return read_keywords("me/m", keywords, images=images)  # type: ignore[arg-type]


def test_without_keywords_everything_has_its_default() -> None:
    assert read() == OpenOptions(
        source=SourceRequest(name="me/m"),
        features=Features(),
        chosen=frozenset(),
        provider=None,
        device_map=None,
        trusted_keys=None,
    )
    defaults = read().source
    assert (defaults.tokenizer, defaults.text_only, defaults.dtype) == ("auto", False, None)


def test_every_keyword_reaches_its_place() -> None:
    options = read(
        images=None,
        file="a.onnx",
        gguf_file="b.gguf",
        dtype="float16",
        tokenizer="me/t",
        adapter="me/a",
        text_only=True,
        revision="v2",
        cache_dir="downloads",
        token="secret",
        local_files_only=True,
        trust_remote_code=True,
        provider="cuda",
        device_map="auto",
        trusted_keys=("key.pem",),
    )
    assert options.source == SourceRequest(
        name="me/m",
        file="a.onnx",
        gguf_file="b.gguf",
        dtype="float16",
        tokenizer="me/t",
        adapter="me/a",
        images=None,
        text_only=True,
        hub=HubOptions(
            revision="v2",
            cache_dir="downloads",
            token="secret",
            local_files_only=True,
            trust_remote_code=True,
        ),
    )
    assert (options.provider, options.device_map) == ("cuda", "auto")
    assert options.trusted_keys == ("key.pem",)


def test_the_older_name_of_dtype_and_a_tokenizer_of_none() -> None:
    source = read(torch_dtype="float16", tokenizer=None).source
    assert (source.dtype, source.tokenizer) == ("float16", None)


@pytest.mark.parametrize(
    ("keywords", "features"),
    [
        ({"include_sampler": False}, Features(sampler=False)),
        ({"return_pdfs": True}, Features(probs=True)),
        ({"logit_bias": True, "top_logprobs": 3}, Features(logit_bias=True, top_logprobs=3)),
        ({"filters": ["xtc"]}, Features(filters=("xtc",))),
        ({"for_serving": True}, Features().for_serving()),
        ({"for_serving": False}, Features()),
        ({"for_serving": True, "filters": ["xtc"]}, Features(filters=("xtc",)).for_serving()),
        ({"max_loras": 2, "max_lora_rank": 4}, Features(max_loras=2, max_lora_rank=4)),
    ],
)
def test_features(keywords: dict[str, Any], features: Features) -> None:
    assert read(**keywords).features == features


def test_a_choice_that_the_caller_made_is_told_from_a_default() -> None:
    for name, value in (("filter_order", "llama.cpp"), ("logprobs_mode", "processed_logprobs")):
        options = read(**{name: value})
        assert options.chosen == {name}
        assert options.features == Features(**{name: value})
        unset = read(**{name: None})
        assert (unset.chosen, unset.features) == (frozenset(), Features())


def test_keywords_that_are_refused() -> None:
    with pytest.raises(TypeError, match="'revison'; did you mean 'revision'"):
        read(revison="v2")
    with pytest.raises(ValueError, match="local_files_only is of type int"):
        read(local_files_only=1)
    with pytest.raises(ValueError, match="top_logprobs"):
        read(top_logprobs=-1)


def test_options_of_the_hub_are_picked_among_others() -> None:
    keywords: Any = {"revision": "v2", "file": "a.onnx", "overwrite": True}
    assert hub_options(keywords) == HubOptions(revision="v2")
