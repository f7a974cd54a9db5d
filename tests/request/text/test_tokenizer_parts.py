"""A tokenizer beside its texts: templates and their forms, bytes that complete a character, tokenizers of callers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from qsample.errors import PackageError
from qsample.request.text import tokenizer as tokenizer_module
from qsample.request.text.chat import ChatOptions, ChatTemplates
from qsample.request.text.tokenizer import Tokenizer, choose_tokenizer, warn_of_missing_rows
from tests.helpers.small_packages import byte_tokenizer

A = 68  # the token of "a"
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
WITH_TOOLS = "T{{ tools | tojson }}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
HI = [{"role": "user", "content": "hi"}]
LONGER = [*HI, {"role": "assistant", "content": "a"}]


def tokenizer_of(templates: Any = PLAIN, vocab_size: int | None = None) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), ChatTemplates(templates, {"bos_token": "<s>"}), vocab_size)


@pytest.mark.parametrize("length", [20_000, 20_001])
def test_long_texts_are_read_and_written_as_short_ones(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As batches, and only those: in a fork, the library prints a warning for a batch."""
    tokenizer, used = tokenizer_of(), list[str]()
    plain = tokenizer._tokenizer

    class Watched:
        def __getattr__(self, name: str) -> Any:
            used.append(name)
            return getattr(plain, name)

    monkeypatch.setattr(tokenizer, "_tokenizer", Watched())
    ids, text = [A, *[A + 1] * (length - 1)], "a" + "b" * (length - 1)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(iter(ids)) == text
    assert tokenizer.decode([1, *ids[1:]]) == text[1:]
    assert tokenizer.decode([1, *ids[1:]], skip_special_tokens=False) == "<s>" + text[1:]
    names = ("encode_batch_fast", "decode_batch") if length > 20_000 else ("encode", "decode")
    assert used == [*[names[0]] * 2, *[names[1]] * 3]


def test_every_token_and_its_id() -> None:
    plain = byte_tokenizer()
    plain.add_tokens(["more"])
    tokenizer = Tokenizer(plain, vocab_size=A + 1)
    assert (tokenizer.get_vocab()["a"], tokenizer.get_vocab()["more"]) == (A, 260)
    assert tokenizer.num_ids == 261
    assert json.loads(tokenizer.to_json())["model"]["vocab"]["a"] == A
    assert tokenizer.encode("a") == [1, A]
    with pytest.raises(ValueError, match=f"token {A + 1} of the tokenizer.* 0 to {A}, so it"):
        tokenizer.encode("aba")
    assert Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())).num_ids == 0


@pytest.mark.parametrize("fallback", [False, True])
def test_some_completion_ends_every_incomplete_character(fallback: bool) -> None:
    """In a byte-level vocabulary, and in one with byte fallback."""
    tokenizer = tokenizer_of()
    if fallback:
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
        parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        inner.decoder = tokenizers.decoders.Sequence(parts)
        tokenizer = Tokenizer(inner)
    for character in "é߿ࠀ퟿￿𐀀\U0010ffff日😊":
        ids = tokenizer.encode(character, add_special_tokens=False)
        for cut in range(1, len(ids)):
            found = [tokenizer.decode([*ids[:cut], *more]) for more in tokenizer.completions]
            assert any(len(text) == 1 and text != "\ufffd" for text in found), (character, cut)
    words = tokenizers.models.WordLevel({"a": 0, "°": 1}, unk_token="a")
    assert Tokenizer(tokenizers.Tokenizer(words)).completions == ()


def test_the_template_of_a_tokenizer() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.chat_template is None
    several = {"default": PLAIN, "tool_use": WITH_TOOLS}
    tokenizer = tokenizer_of()
    for given in (PLAIN, several):
        tokenizer.chat_template = given
        assert tokenizer.chat_template == given
        assert tokenizer.get_chat_template() == PLAIN
    assert tokenizer.get_chat_template(tools=[TOOL]) == tokenizer.get_chat_template("tool_use")
    assert tokenizer.get_chat_template("tool_use") == WITH_TOOLS
    assert tokenizer.render_chat(HI) == "<s>hi;>", "its special tokens stay"
    assert tokenizer.encode_chat(HI)[:2] == [1, A + 7], "once"
    told: list[str] = []
    options = ChatOptions(tools=[TOOL], chat_template=PLAIN)
    assert tokenizer.render_chat(HI, options, told.append) == "<s>hi;>"
    assert told == ["tools"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<s>hi;"),
        ({"add_generation_prompt": True}, "<s>hi;>"),
        ({"continue_final_message": True}, "<s>hi"),
        ({"chat_template": "x{{ y }}", "y": 5}, "x5"),
        ({"chat_template": "{{ documents[0].text }}", "documents": [{"text": "d"}]}, "d"),
        ({"chat_template": "{{ tools[0].function.name }}", "tools": [TOOL]}, "f"),
    ],
)
def test_forms_of_conversations(options: dict[str, Any], text: str) -> None:
    tokenizer = tokenizer_of()
    ids = tokenizer.encode(text, add_special_tokens=False)  # the template writes those

    def apply(chats: Any, **more: Any) -> Any:
        return tokenizer.apply_chat_template(chats, **options, **more)

    assert apply(HI, tokenize=False) == text
    assert apply([HI, tuple(HI)], tokenize=False) == [text] * 2
    assert apply(HI, return_dict=False) == ids
    assert apply(HI) == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    rows = apply([HI, LONGER])
    assert rows["input_ids"][0] == ids
    assert rows["attention_mask"] == [[1] * len(row) for row in rows["input_ids"]]
    assert apply([HI, LONGER], return_dict=False) == rows["input_ids"]
    for chats, count in ((HI, 1), ([HI, HI], 2)):
        arrays = apply(chats, return_tensors="np")
        assert arrays["input_ids"].tolist() == [ids] * count
        assert arrays["attention_mask"].tolist() == [[1] * len(ids)] * count
        assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}
        assert apply(chats, return_tensors="np", return_dict=False).tolist() == [ids] * count


def test_the_most_characters_of_a_token() -> None:
    """The longest token of the vocabulary or of those that were added; four times that if characters are composed."""
    plain = json.loads(byte_tokenizer().to_str())
    added = {"id": 260, "content": "<added>", "single_word": False, "normalized": False, "special": False,
             "lstrip": False}  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": "x"}, "invert": False, "behavior": "Isolated"}
    sequence = {"type": "Sequence", "pretokenizers": [split, plain["pre_tokenizer"]]}
    replaced = {"type": "Replace", "pattern": {"String": "ab"}, "content": "cd"}
    composed = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    words = {"type": "WordLevel", "vocab": plain["model"]["vocab"], "unk_token": "<unk>"}
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({"added_tokens": [{**added, "rstrip": False}]}, 7),
        ({"added_tokens": [{**added, "rstrip": True}]}, None),
        ({"added_tokens": []}, len("<pad>")),
        *(({"normalizer": {"type": name}}, 5) for name in ("NFD", "NFKD", "Lowercase")),
        *(({"normalizer": part}, 20) for part in ({"type": "NFC"}, {"type": "NFKC"}, composed)),
        ({"normalizer": replaced}, 5),
        ({"pre_tokenizer": sequence}, 5),
        ({"model": words}, None),
    ]
    for parts, expected in cases:
        inner = tokenizers.Tokenizer.from_str(json.dumps({**plain, **parts}))
        assert Tokenizer(inner).characters_per_token() == expected, parts


def test_the_tokenizer_of_a_call() -> None:
    own, other = tokenizer_of(), tokenizer_of()
    inner: Any = byte_tokenizer()
    given: Any
    inner.enable_truncation(3)
    names = {"bos_token": "<pad>"}
    theirs = SimpleNamespace(backend_tokenizer=inner, chat_template=PLAIN, special_tokens_map=names)
    slow = SimpleNamespace(decode=lambda ids: "")
    for given in (None, other, inner, theirs, slow):
        assert choose_tokenizer(own, given, 100) is own
    assert choose_tokenizer(None, None, 100) is None
    assert choose_tokenizer(None, other, 100) is other
    for given, template in ((inner, None), (theirs, PLAIN)):
        chosen: Any = choose_tokenizer(None, given, A + 1)
        assert chosen.encode("aaaa") == [1, *[A] * 4], "as a whole"
        assert inner.truncation["max_length"] == 3, "the caller's stays as it is"
        with pytest.raises(ValueError, match="and the model has 69 tokens"):
            chosen.encode("b")
        assert chosen.chat_template == template
    assert chosen.render_chat(HI).startswith("<pad>hi;")
    for own_or_none, given in ((None, slow), (own, 5), (None, "gpt2")):
        with pytest.raises(ValueError, match=f"tokenizer is a {type(given).__name__}; give a fast"):
            choose_tokenizer(own_or_none, given, 100)


def test_tokens_beyond_a_model_are_told(recwarn: pytest.WarningsRecorder) -> None:
    vocabulary = {"c": 7, "a": 3, "b": 5, "d": 4}
    warn_of_missing_rows(vocabulary, 8)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"lacks 2 of .* from 'b' \(id 5\) on: its ids are 0 to 4"):
        warn_of_missing_rows(vocabulary, 5)


def test_faults_of_a_file_are_told_from_those_of_an_argument() -> None:
    class PanicException(BaseException):
        pass

    error: BaseException
    for error in (Exception("no  such\n type"), PanicException("no such type")):
        with pytest.raises(PackageError, match="it: no such type; export") as raised:
            tokenizer_module._raise_failure("it", error)
        assert raised.value.__cause__ is error
    for error in (OverflowError(), TypeError(), KeyboardInterrupt(), SystemExit()):
        tokenizer_module._raise_failure("it", error)
    with pytest.raises(OverflowError):
        tokenizer_of().decode([-1])
