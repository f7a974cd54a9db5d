"""Tokenizers of GGUF files against the tokens that llama.cpp itself made
(`scripts/gguf_fixtures.py`)."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from qsample.addons.formats.gguf.file import GgufFile
from qsample.addons.formats.gguf.tokenizer import stop_ids, tokenizer_of
from qsample.errors import QsampleError, UnsupportedModelError
from tests.helpers import gguf_vocabularies as vocabularies

RECORDED = json.loads(vocabularies.FIXTURE.read_text())
# llama.cpp's expressions of o200k's kind know only the case of ASCII letters, and no marks.
_SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
_FORMS = (
    r"[^\r\n\p{L}\p{N}]?((?=\p{L})[^a-z])*((?=\p{L})[^A-Z])+%s"
    r"|[^\r\n\p{L}\p{N}]?((?=\p{L})[^a-z])+((?=\p{L})[^A-Z])*%s"
)
_REST = r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
OFTEN = ("llama-bpe", "qwen2", "tekken", "sentencepiece", "sentencepiece, no prefix", "gemma4")
APPROXIMATED = {
    "tekken": _FORMS % ("", "") + _REST % "",
    "gpt-4o": _FORMS % (_SHORT, _SHORT) + _REST % "{1,3}",
}


def file_of(metadata: dict[str, Any]) -> GgufFile:
    return GgufFile(Path("model.gguf"), metadata, {})


@cache
def all_texts() -> list[str]:
    return [text for group in vocabularies.texts().values() for text in group]


def different(tokenizer: PreTrainedTokenizerFast, case: str) -> dict[str, list[str]]:
    """The texts whose tokens are not llama.cpp's, with the tokens."""
    ids = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(all_texts())]
    found, recorded = vocabularies.digests(ids), RECORDED["cases"][case]
    differ = [
        i
        for i in range(len(ids))
        if found["texts"][2 * i : 2 * i + 2] != recorded["texts"][2 * i : 2 * i + 2]
    ]
    assert differ or found["all"] == recorded["all"]
    return {all_texts()[i]: tokenizer.convert_ids_to_tokens(ids[i]) for i in differ}


@pytest.mark.parametrize(
    "case",
    [
        case if case in OFTEN else pytest.param(case, marks=pytest.mark.ci)
        for case in vocabularies.CASES
    ],
)
def test_a_text_gets_llama_cpp_s_tokens(case: str) -> None:
    metadata = vocabularies.metadata(case, RECORDED)
    tokenizer = tokenizer_of(file_of(metadata))
    assert len(tokenizer) == len(metadata["tokenizer.ggml.tokens"])
    differ = different(tokenizer, case)
    if case == "deepseek-llm":  # llama.cpp takes an ideographic space for any other
        differ = {
            text: tokens for text, tokens in differ.items() if not re.search(r"\s\u3000", text)
        }
    if "no types" in case:  # the special tokens that are named by id are found in a prompt as well
        differ = {text: ids for text, ids in differ.items() if not re.search("<(unk|/?s)>", text)}
    if case in APPROXIMATED:
        assert differ
        assert not any(text.isascii() for text in differ)
        words = pre_tokenizers.Split(Regex(APPROXIMATED[case]), "isolated")
        levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, levels])
        differ = different(tokenizer, case)
    assert not differ


@pytest.mark.parametrize("pre", APPROXIMATED)
def test_expressions_that_llama_cpp_approximates_are_the_models(pre: str) -> None:
    words = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    own = tokenizer_of(
        file_of(vocabularies.stop_metadata({}, {"bos": 1}) | {"tokenizer.ggml.pre": pre})
    )
    ours = own.backend_tokenizer.pre_tokenizer
    for text in all_texts():
        assert [part for _, part in ours.pre_tokenize_str(text)] == [
            part for _, part in words.pre_tokenize_str(text)
        ]


def test_names_of_an_expression_mean_the_same() -> None:
    """The script compared their tokens in llama.cpp."""

    def shape(pre: str) -> Any:
        metadata = vocabularies.stop_metadata({}, {"bos": 1}) | {"tokenizer.ggml.pre": pre}
        if pre == "default":
            del metadata["tokenizer.ggml.pre"]
        tokenizer = json.loads(tokenizer_of(file_of(metadata)).backend_tokenizer.to_str())
        return (
            tokenizer["pre_tokenizer"],
            tokenizer["model"]["ignore_merges"],
            tokenizer["post_processor"],
        )

    shapes = {pre: shape(pre) for pre in vocabularies.PRE}
    for pre, others in vocabularies.PRE.items():
        assert all(shape(other) == shapes[pre] for other in others.split())
    assert len({json.dumps(found) for found in shapes.values()}) == len(shapes)


@pytest.mark.parametrize("number", [0xFFFFFFFF, -1, None])
@pytest.mark.parametrize("key", ["bos", "eos", "unknown", "padding", "seperator", "mask"])
@pytest.mark.parametrize("case", ["llama-bpe", "sentencepiece"])
def test_an_id_that_no_token_has_counts_as_missing(case: str, key: str, number: int | None) -> None:
    """None stands for the number of tokens."""
    metadata = vocabularies.metadata(case, RECORDED)
    name = f"tokenizer.ggml.{key}_token_id"
    wanted = dict(metadata)
    wanted.pop(name, None)
    if (case, key) == ("llama-bpe", "bos"):
        wanted["tokenizer.ggml.add_bos_token"] = False
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata[name] = count if number is None else number
    theirs, ours = tokenizer_of(file_of(wanted)), tokenizer_of(file_of(metadata))
    assert len(ours) == count
    assert ours.special_tokens_map == theirs.special_tokens_map
    text = "In the beginning</s> 3.14"
    assert ours.encode(text) == theirs.encode(text)
    assert stop_ids(file_of(metadata)) == stop_ids(file_of(wanted))


def test_default_ids_must_be_tokens_too() -> None:
    """A vocabulary of sentencepiece has BOS 1 and EOS 2, unless it is too small for them."""
    metadata = vocabularies.metadata("sentencepiece", RECORDED)
    for key in ("unknown", "bos", "eos"):
        del metadata[f"tokenizer.ggml.{key}_token_id"]
    for key in ("tokens", "scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:2]
    metadata["tokenizer.ggml.add_eos_token"] = False
    tokenizer = tokenizer_of(file_of(metadata))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, None)
    assert stop_ids(file_of(metadata)) == []


def test_a_list_of_ids_that_end_a_text() -> None:
    """ollama writes such a list. The text of </s>, 2, ends a text by itself."""
    metadata = vocabularies.stop_metadata({"<a>": 3, "<b>": 3}, {"eos": 4})
    metadata["tokenizer.ggml.eos_token_ids"] = [
        4,
        3,
        0xFFFFFFFF,
        len(metadata["tokenizer.ggml.tokens"]),
    ]
    assert stop_ids(file_of(metadata)) == [4, 3, 2]
    del metadata["tokenizer.ggml.eos_token_id"]
    assert stop_ids(file_of(metadata)) == [4, 3, 2]
    metadata["tokenizer.ggml.eos_token_ids"] = []
    assert stop_ids(file_of(metadata)) == [2]
    metadata["tokenizer.ggml.eos_token_ids"] = ["</s>"]
    with pytest.raises(QsampleError, match="eos_token_ids is"):
        stop_ids(file_of(metadata))


def test_a_file_without_scores() -> None:
    """The ids have the order of the scores."""
    metadata = vocabularies.metadata("sentencepiece", RECORDED)
    del metadata["tokenizer.ggml.scores"]
    assert not different(tokenizer_of(file_of(metadata)), "sentencepiece")


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_further_values_than_tokens_are_ignored(key: str) -> None:
    metadata = vocabularies.metadata("sentencepiece", RECORDED)
    metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], 1, 1]
    assert not different(tokenizer_of(file_of(metadata)), "sentencepiece")


@pytest.mark.parametrize("number", range(len(vocabularies.STOPS)))
def test_stop_tokens_of_files_without_types_of_tokens(number: int) -> None:
    """The texts of tokens tell."""
    metadata = vocabularies.stop_metadata(*vocabularies.STOPS[number])
    del metadata["tokenizer.ggml.token_type"]
    assert sorted(stop_ids(file_of(metadata))) == RECORDED["stops_without_types"][number]


@pytest.mark.parametrize("case", ["qwen2", "sentencepiece, Phi-3", "gemma4"])
def test_tokens_become_the_text_again(case: str) -> None:
    tokenizer = tokenizer_of(file_of(vocabularies.metadata(case, RECORDED)))
    special = vocabularies.SPECIAL.keys() | vocabularies.MORE.keys()
    texts = [text for text in all_texts() if not any(token in text for token in special)]
    read = tokenizer.backend_tokenizer.decode_batch([tokenizer.encode(text) for text in texts])
    assert read == [text if case == "qwen2" else text.replace("▁", " ") for text in texts]


@pytest.mark.parametrize("number", range(len(vocabularies.STOPS)))
def test_stop_tokens_are_llama_cpp_s(number: int) -> None:
    file = file_of(vocabularies.stop_metadata(*vocabularies.STOPS[number]))
    assert sorted(stop_ids(file)) == RECORDED["stops"][number]


def test_text_of_an_ordinary_token_stops_nothing() -> None:
    """llama.cpp would stop at it, and find it whole in a prompt: Qwen's </s> is HTML."""
    metadata = vocabularies.stop_metadata(
        {"</p>": 1, "<|im_end|>": 1, "<|eot_id|>": 3}, {"eos": 2, "eot": 4}
    )
    metadata["tokenizer.ggml.token_type"][2] = 1
    assert stop_ids(file_of(metadata)) == [2, 4, 5]
    assert stop_ids(file_of({"general.architecture": "llama"})) == []
    sentencepiece = vocabularies.metadata("sentencepiece", RECORDED)
    for name in ("unknown", "bos", "eos"):
        del sentencepiece[f"tokenizer.ggml.{name}_token_id"]
    tokenizer = tokenizer_of(file_of(sentencepiece))
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert stop_ids(file_of(sentencepiece))[0] == 2


def test_chat_templates(tmp_path: Path) -> None:
    metadata = vocabularies.metadata("llama-bpe", RECORDED)
    template = (
        "{{ bos_token }}{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    )
    metadata["tokenizer.chat_template"] = template
    tokenizer = tokenizer_of(file_of(metadata))
    assert tokenizer.chat_template == template
    messages = [{"role": "user", "content": "heaven"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s>heaven<|im_end|>"
    assert tokenizer.apply_chat_template(messages)["input_ids"][0] == 1
    assert tokenizer.encode("heaven")[:1] == [1]
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    tokenizer = tokenizer_of(file_of(metadata))
    assert tokenizer.chat_template == {"default": template, "tool_use": "tools"}
    tokenizer.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    assert again.encode("a <tool>b") == tokenizer.encode("a <tool>b")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.model", "t5"),
        ("tokenizer.ggml.model", None),
        ("tokenizer.ggml.pre", "llama-bep"),
        ("tokenizer.ggml.pre", 3),
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.tokens", []),
        ("tokenizer.ggml.tokens", "abc"),
        ("tokenizer.ggml.tokens", ["a", "b", "a"]),
        ("tokenizer.ggml.tokens", ["a", 1]),
        ("tokenizer.ggml.tokens", ["a" * 2000]),
        ("tokenizer.ggml.token_type", [1, 1]),
        ("tokenizer.ggml.token_type", [1.5] * 2000),
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.merges", ["th yy"]),
        ("tokenizer.ggml.merges", ["the"]),
        ("tokenizer.ggml.merges", [" "]),
        ("tokenizer.ggml.merges", ["h i"]),
        ("tokenizer.ggml.eos_token_id", 2.5),
        ("tokenizer.ggml.eos_token_id", [2]),
        ("tokenizer.ggml.padding_token_id", "two"),
        ("tokenizer.ggml.bos_token_id", None),
        ("tokenizer.ggml.add_bos_token", 1),
        ("tokenizer.chat_template", 7),
        ("tokenizer.chat_template", "x" * (1 << 21)),
        ("tokenizer.chat_template.../../evil", "x"),
        ("tokenizer.chat_template.", "x"),
        ("scores", [0.0]),
        ("scores", [float("nan")] * 5000),
    ],
)
def test_metadata_that_do_not_fit(key: str, value: Any) -> None:
    metadata = vocabularies.metadata("sentencepiece" if key == "scores" else "llama-bpe", RECORDED)
    key = "tokenizer.ggml.scores" if key == "scores" else key
    if value is None:
        del metadata[key]
    else:
        metadata[key] = value
    named = (
        "add_bos_token" if (key, value) == ("tokenizer.ggml.bos_token_id", None) else re.escape(key)
    )
    with pytest.raises(QsampleError, match=rf"model\.gguf: .*{named}") as caught:
        tokenizer_of(file_of(metadata))
    assert "tokenizer=" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert isinstance(caught.value, UnsupportedModelError) == (
        value in ("t5", "llama-bep") or key.endswith("model")
    )
