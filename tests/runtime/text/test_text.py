"""Tokens to text, piece by piece, across multi-byte characters; streamers; chat templates."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from qsample.runtime import CausalLM, SamplingParams, TextStreamer, load
from qsample.runtime.text.chat import ChatTemplate
from qsample.runtime.text.stop_strings import StopStrings, check_stop_strings
from qsample.runtime.text.tokenizer import GeneratedText, IncrementalDecoder, Tokenizer
from tests.helpers.fake_package import BOS, EOS, byte_tokenizer, fake_package

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


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    inner = byte_tokenizer()
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    assert len(Tokenizer(inner).encode("0123456789")) == 11


# Streamers.


class Recorder:
    def __init__(self) -> None:
        self.values: list[Any] = []
        self.ended = 0

    def put(self, value: Any) -> None:
        self.values.append(value)

    def end(self) -> None:
        self.ended += 1


def test_the_protocol_is_hugging_faces(model: CausalLM) -> None:
    recorder = Recorder()
    output = model.generate([5, 6, 7], streamer=recorder, seed=1, max_new_tokens=6)
    assert recorder.values[0].tolist() == [[5, 6, 7]]
    assert [value.tolist() for value in recorder.values[1:]] == [[token] for token in output.new_token_ids[0]]
    assert recorder.ended == 1


def test_transformers_own_streamer_works(model: CausalLM) -> None:
    transformers = pytest.importorskip("transformers")
    written: list[str] = []

    class Streamer(transformers.TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            written.append(text)

    streamer = Streamer(model.tokenizer, skip_prompt=True)
    output = model.generate("hello", streamer=streamer, seed=3, max_new_tokens=30)
    assert model.tokenizer is not None
    assert "".join(written) == model.tokenizer.decode(output.new_token_ids[0])


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_text_streamer(skip_prompt: bool, model: CausalLM) -> None:
    file = io.StringIO()
    streamer = TextStreamer(model.tokenizer, file, skip_prompt=skip_prompt)
    for _ in range(2):  # it can be used again
        output = model.generate("hello", streamer=streamer, seed=3, max_new_tokens=30)
        assert output.texts is not None
        assert file.getvalue() == ("" if skip_prompt else "hello") + output.texts[0] + "\n"
        file.seek(0)
        file.truncate()


def test_text_streamer_takes_standard_output_of_the_moment(model: CausalLM, capsys: pytest.CaptureFixture[str]) -> None:
    model.generate("hello", streamer=TextStreamer(model.tokenizer), seed=3, max_new_tokens=3)
    assert capsys.readouterr().out.startswith("hello")


def test_streaming_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        TextStreamer(None)


# Chat.

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <b>"}]


def test_chat_is_templated_without_doubling_special_tokens(model: CausalLM) -> None:
    assert model.tokenizer is not None
    rendered = "[system]be brief\n[user]hi <b>\n[assistant]"
    expected = [BOS, *model.tokenizer.encode(rendered, add_special_tokens=False)]
    output = model.generate(CHAT, seed=1, max_new_tokens=2)
    assert output.sequences[0, : output.prompt_lengths[0]].tolist() == expected
    batch = model.generate([CHAT, CHAT[1:]], seed=1, max_new_tokens=2)
    assert batch.prompt_lengths[0] == len(expected)
    assert batch.new_token_ids[0] == output.new_token_ids[0]


def test_templates_render_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- set ns = namespace(n=0) %}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "    {%- set ns.n = ns.n + 1 %}\n"
        "    {{- bos_token + m.role + ': ' + m.content | trim }}\n"
        "    {%- generation %}{{ m | tojson }}{% endgeneration %}\n"
        "    {% if loop.last %}\n"
        "last {{ ns.n }}\n"
        "    {% endif %}\n"
        "{%- endfor %}\n"
        "{{ messages | tojson(indent=2) }}{{ {'a': '<é>'} | tojson }}\n"
        "{% if add_generation_prompt %}go{% endif %}\n"
    )
    messages = [*CHAT, {"role": "tool", "content": "x"}, {"role": "user", "content": " 日本 "}]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="<s>")
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(template, {"bos_token": "<s>"}).render(messages) == expected


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<s>"}}, {}, "A<s>"),
        ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}, {}, "D"),
        ({"chat_template": "A"}, {"chat_template.jinja": "J"}, "J"),
    ],
)
def test_where_the_template_comes_from(
    config: dict[str, Any], files: dict[str, str], expected: str, tmp_path: Path
) -> None:
    package = fake_package(tmp_path / "package", tokenizer_config=config, files=files)
    template = ChatTemplate.of(package)
    assert template is not None
    assert template.render(CHAT) == expected


def test_no_template(tmp_path: Path) -> None:
    model = load(fake_package(tmp_path / "package", tokenizer_config={}).path)
    with pytest.raises(ValueError, match=r"has no chat template \(chat_template.jinja, or"):
        model.generate(CHAT)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "refuses these messages: roles must alternate"),
        ("{% if %}", CHAT, "is not valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "refuses these messages"),
        ("{{ messages.append(1) }}", CHAT, "refuses these messages"),
        ("x", [{"content": "hi"}], 'a chat message is .*; give {"role"'),
        ("x", ["hi"], "a chat message is 'hi'"),
    ],
)
def test_wrong_templates_and_messages(template: str, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(template).render(messages)


def test_without_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"need jinja2: `pip install 'qsample\[chat\]'`"):
        ChatTemplate("x").render(CHAT)


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
    assert output.texts == [model.tokenizer.decode(row) for row in output.new_token_ids]
    assert output.prompt_lengths == [2, 2]


# Stop strings.


def through(stops: StopStrings, parts: list[str]) -> tuple[str, str | None]:
    return "".join([*(stops.put(part) for part in parts), stops.end()]), stops.found


def test_a_stop_string_is_found_however_the_text_is_cut() -> None:
    generator = random.Random(2)
    for _ in range(500):
        text = "".join(generator.choice("ab\n漢") for _ in range(generator.randrange(0, 14)))
        strings = ["".join(generator.choice("ab\n漢") for _ in range(generator.randrange(1, 5))) for _ in range(3)]
        # The oracle: the shortest text that ends in a stop string, and of several of them the longest.
        ends = [(text[:end], stop) for end in range(len(text) + 1) for stop in strings if text[:end].endswith(stop)]
        wanted: tuple[str, str | None] = (text, None)
        if ends:
            stop = max((stop for whole, stop in ends if len(whole) == len(ends[0][0])), key=len)
            wanted = (ends[0][0].removesuffix(stop), stop)
        for _ in range(5):
            cuts = sorted(generator.choices(range(len(text) + 1), k=3))
            parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert through(StopStrings(strings), parts) == wanted
        assert through(StopStrings(strings), list(text)) == wanted


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    stops = StopStrings(["\n\nQ:", "END"])
    parts = ["a", "\n", "b", "\n\n", "Q", "E", "N", "\n", "\nQ", ":c"]
    assert [stops.put(part) for part in parts] == ["a", "", "\nb", "", "", "\n\nQ", "", "EN", "", ""]
    assert (stops.found, stops.end()) == ("\n\nQ:", "")
    ended = StopStrings(["END"])
    assert (ended.put("xEN"), ended.end()) == ("x", "EN")


@pytest.mark.parametrize("wrong", ["", ["a", ""], 5, [b"a"], {"a": 1}])
def test_wrong_stop_strings(wrong: Any) -> None:
    with pytest.raises(ValueError, match="stop_strings is"):
        check_stop_strings(wrong)


def test_stop_strings_as_they_are_given() -> None:
    assert check_stop_strings(None) == ()
    assert check_stop_strings("ab") == ("ab",)
    assert check_stop_strings(["a", "b", "a"]) == ("a", "b")


def test_generated_text_stops_inside_multi_byte_characters_and_tokens(tokenizer: Tokenizer) -> None:
    """Every byte is a token here, so the stop string and the characters around it come in pieces."""
    text = GeneratedText(tokenizer, tokenizer.encode("x"), ["。\n"])
    ids = tokenizer.encode("漢字。é。\nmore", add_special_tokens=False)
    parts = []
    for token in ids:
        parts.append(text.put(token))
        if text.stop_string:
            break
    assert "".join([*parts, text.end()]) == "漢字。é"
    assert len(parts) == len("漢字。é。\n".encode())
    assert text.stop_string == "。\n"


def ascii_piece(text: str) -> str:
    """A character in the middle of a random text that is certain as soon as it comes."""
    return next(character for character in text[4:] if "!" <= character <= "~")


def test_generate_with_stop_strings(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model()
    params = SamplingParams(temperature=0.9, max_new_tokens=40, eos_token_id=())
    free = model.generate(["hello", "other"], params, seed=3)
    assert free.texts is not None
    stop = ascii_piece(free.texts[0])
    count = next(n for n in range(41) if stop in Tokenizer(byte_tokenizer()).decode(free.new_token_ids[0][:n]))
    for flush_every in (1, 4, 16):
        for double_buffering in (True, False):
            output = model.generate(
                ["hello", "other"],
                params,
                seed=3,
                stop_strings=[stop, "zzzz"],
                flush_every=flush_every,
                double_buffering=double_buffering,
            )
            assert output.texts == [free.texts[0].split(stop)[0], free.texts[1].split(stop)[0]]
            assert output.new_token_ids[0] == free.new_token_ids[0][:count]
            assert output.finish_reasons[0] == "stop"


def test_where_stop_strings_come_from(fake_model: Callable[..., CausalLM]) -> None:
    own = {"do_sample": True, "top_k": 0, "stop_strings": ["E"], "max_new_tokens": 60}
    model = fake_model(generation_config=own)
    free = model.generate("hello", seed=3, stop_strings=[])
    assert free.texts is not None
    assert "E" in free.texts[0]
    assert model.generate("hello", seed=3).texts == [free.texts[0].split("E")[0]]
    with pytest.raises(ValueError, match="the package has no tokenizer; give eos_token_id"):
        fake_model(tokenizer=False).generate([5], stop_strings="a")


def test_a_text_streamer_cuts_at_a_stop_string(model: CausalLM) -> None:
    params = SamplingParams(temperature=0.9, max_new_tokens=40, eos_token_id=())
    free = model.generate("hello", params, seed=3)
    assert free.texts is not None
    stop = ascii_piece(free.texts[0])
    for skip_prompt in (False, True):
        file = io.StringIO()
        streamer = TextStreamer(model.tokenizer, file, skip_prompt=skip_prompt, stop_strings=stop)
        output = model.generate("hello", params, seed=3, streamer=streamer, stop_strings=stop)
        assert output.texts is not None
        assert file.getvalue() == ("" if skip_prompt else "hello") + output.texts[0] + "\n"
