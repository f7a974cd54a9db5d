"""Text of tokens that come one by one: whole characters, cut off before a stop string; streamers."""

from __future__ import annotations

import codecs
import io
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from qsample.request.text.generated_text import (
    GeneratedText,
    IncrementalDecoder,
    check_streamer,
)
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, SamplingParams, TextStreamer
from tests.helpers.fake_package import BOS, EOS, ascii_piece, byte_tokenizer

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
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    return Tokenizer(inner)


def whole(tokenizer: Tokenizer, data: bytes, ids: list[int]) -> str:
    """The text of bytes, and of `ids` that hold them, up to a character that they only begin."""
    reader = codecs.getincrementaldecoder("utf-8")("replace")
    text = reader.decode(data)
    begun, _ = reader.getstate()
    assert tokenizer.decode(ids) == text + "\ufffd" * bool(begun)
    return text


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


# The first bytes of characters differ in what may follow: E0, ED, F0 and F4 take a part of the other bytes alone.
@pytest.mark.parametrize(
    "character", ["é", "\u0800", "漢", "\ud7ff", "\U00010000", "🙂", "\U0010ffff"]
)
@pytest.mark.parametrize("before", ["", "a", "é", "a\ufffd"])
def test_a_text_cut_inside_a_character_ends_before_it(
    before: str, character: str, tokenizer: Tokenizer
) -> None:
    characters = {byte: spelling for spelling, byte in bytes_to_characters().items()}
    for spelled, spelling in (
        (tokenizer, characters.get),
        (sentencepiece_like(), "<0x{:02X}>".format),
    ):
        vocabulary = spelled.get_vocab()
        for count in range(1, len(character.encode())):
            data = before.encode() + character.encode()[:count]
            ids = [vocabulary[spelling(byte)] for byte in data]
            assert "".join(pieces(IncrementalDecoder(spelled), ids)) == before
            text = GeneratedText(spelled)
            for token in ids:
                text.put(token)
            text.end()
            assert text.whole == before


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_replacement_character_that_was_written_stays(count: int, tokenizer: Tokenizer) -> None:
    for text in ("\ufffd" * count, "a" + "\ufffd" * count, "\ufffd" * count + "b"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pieces(IncrementalDecoder(tokenizer), ids)) == text


def test_a_vocabulary_without_bytes_has_no_incomplete_characters() -> None:
    words = Tokenizer(
        RustTokenizer(models.WordLevel({"a": 0, "\ufffd": 1, "Ģ": 2, "°": 3}, unk_token="a"))
    )
    assert words.completions == ()
    assert "".join(pieces(IncrementalDecoder(words), [0, 1])) == "a \ufffd"


def test_bytes_that_are_not_valid_text(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("é")[-1]
    ids = [*tokenizer.encode("a"), continuation, continuation, *tokenizer.encode("b")]
    parts = pieces(IncrementalDecoder(tokenizer), ids)
    assert "".join(parts) == tokenizer.decode(ids) == "a\ufffd\ufffdb"


def test_the_pieces_of_any_bytes_join_to_the_decoded_whole(tokenizer: Tokenizer) -> None:
    generator, spelled = random.Random(3), bytes_to_characters()
    held = {
        token: spelled[piece] for piece, token in tokenizer.get_vocab().items() if piece in spelled
    }
    for _ in range(300):
        # Mostly letters, so that text and what is no text meet.
        length = generator.randrange(1, 30)
        ids = [
            generator.randrange(4, 260) if generator.random() < 0.3 else 68 for _ in range(length)
        ]
        expected = whole(tokenizer, bytes(held[token] for token in ids), ids)
        assert "".join(pieces(IncrementalDecoder(tokenizer), ids)) == expected


def test_the_pieces_of_byte_fallback_join_to_the_decoded_whole() -> None:
    tokenizer, generator = sentencepiece_like(), random.Random(3)
    characters = [[3 + byte for byte in text.encode()] for text in ("é", "漢", "🙂")]
    for _ in range(300):
        units = [*([piece] for piece in range(259, 269)), *characters, [2]]
        ids = [
            token for _ in range(generator.randrange(1, 20)) for token in generator.choice(units)
        ]
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
    assert (
        "".join(
            pieces(
                IncrementalDecoder(tokenizer, ids), tokenizer.encode("y", add_special_tokens=False)
            )
        )
        == "y"
    )


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hi"), EOS]
    assert ids[0] == BOS
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hi</s>"
    assert "".join(pieces(IncrementalDecoder(tokenizer), ids)) == "hi"
    assert (
        "".join(pieces(IncrementalDecoder(tokenizer, skip_special_tokens=False), ids))
        == "<s>hi</s>"
    )


def many_bytes_a_token() -> tuple[Tokenizer, dict[bytes, int]]:
    """Byte-level, with tokens that begin and end anywhere in a character; and what each token holds."""
    generator, plain = random.Random(5), byte_tokenizer()
    spelled = {byte: text for text, byte in bytes_to_characters().items()}
    alphabet = [*"ab é漢🙂".encode(), 0x80, 0xC3, 0xF0]
    held = {bytes(generator.choices(alphabet, k=generator.randrange(1, 5))) for _ in range(300)} | {
        b"\xa9\xc3"
    }
    vocab = plain.get_vocab() | {
        "".join(spelled[byte] for byte in token): 260 + n for n, token in enumerate(sorted(held))
    }
    inner = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner), {
        token: vocab["".join(spelled[byte] for byte in token)] for token in sorted(held)
    }


def bytes_to_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: those that print are themselves, the others follow from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


def test_pieces_that_end_inside_a_character_join_to_the_decoded_whole() -> None:
    tokenizer, tokens = many_bytes_a_token()
    generator = random.Random(4)
    for _ in range(100):
        chosen = generator.choices([*tokens], k=generator.randrange(1, 120))
        ids = [tokens[token] for token in chosen]
        parts = pieces(IncrementalDecoder(tokenizer), ids)
        assert "".join(parts) == whole(tokenizer, b"".join(chosen), ids)
        characters = [
            len(b"".join(chosen[:n]).decode(errors="ignore")) for n in range(len(chosen) + 1)
        ]
        given = [len("".join(parts[:n])) for n in range(len(chosen) + 1)]
        # A character comes with its last byte, whatever follows in the same token.
        assert all(have >= count for have, count in zip(given, characters, strict=True))


E = "é".encode()
CONTINUATION = byte_tokenizer().token_to_id("¡")  # the byte A1, with which no character begins
SEQUENCES: dict[str, tuple[Callable[[], tuple[Tokenizer, Any]], Callable[[Any], list[int]]]] = {
    "text": (lambda: (Tokenizer(byte_tokenizer()), None), lambda _: [71]),
    "no beginning of a character": (
        lambda: (Tokenizer(byte_tokenizer()), None),
        lambda _: [CONTINUATION],
    ),
    "no end of one": (many_bytes_a_token, lambda tokens: [tokens[b"\xa9\xc3"]]),
    "special tokens": (lambda: (Tokenizer(byte_tokenizer()), None), lambda _: [EOS]),
    "ids without a token": (lambda: (Tokenizer(byte_tokenizer()), None), lambda _: [300]),
    "byte fallback, invalid": (lambda: (sentencepiece_like(), None), lambda _: [3 + 0x80]),
    "byte fallback, valid": (
        lambda: (sentencepiece_like(), None),
        lambda _: [3 + byte for byte in E],
    ),
    "byte fallback, never complete": (lambda: (sentencepiece_like(), None), lambda _: [3 + 0xF0]),
    "byte fallback, invalid at its beginning": (
        lambda: (sentencepiece_like(), None),
        lambda _: [3 + 0x80, *(3 + byte for byte in E * 400)],
    ),
    "byte fallback, both": (
        lambda: (sentencepiece_like(), None),
        lambda _: [3 + 0x80, *(3 + byte for byte in E * 9)],
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_decoder_does_constant_work_a_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, repeat = SEQUENCES[name]
    tokenizer, tokens = make()
    unit = repeat(tokens)
    ids = (unit * 1000)[:1000]
    seen: list[int] = []
    real = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **options: (seen.append(len(ids)), real(ids, **options))[1]
    )
    for prompt in ([], [70] * 1000, unit * 9):
        seen.clear()
        decoder = IncrementalDecoder(tokenizer, prompt)
        text = "".join(pieces(decoder, ids))
        assert sum(seen) < 60 * len(ids)
        if not name.startswith("byte fallback, ") and not prompt:
            assert text == real(ids).removesuffix("\ufffd" * (name == "no end of one"))


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


def test_the_sources_of_stop_strings(fake_model: Callable[..., CausalLM]) -> None:
    own = {"do_sample": True, "top_k": 0, "stop_strings": ["E"], "max_new_tokens": 60}
    model = fake_model(generation_config=own)
    free = model.generate("hello", seed=3, stop_strings=[])
    assert free.texts is not None
    assert "E" in free.texts[0]
    assert model.generate("hello", seed=3).texts == [free.texts[0].split("E")[0]]


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
    assert [value.tolist() for value in recorder.values[1:]] == [
        [token] for token in output.token_ids[0]
    ]
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
    assert "".join(written) == model.tokenizer.decode(output.token_ids[0])


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


def test_text_streamer_takes_standard_output_of_the_moment(
    model: CausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    model.generate("hello", streamer=TextStreamer(model.tokenizer), seed=3, max_new_tokens=3)
    assert capsys.readouterr().out.startswith("hello")


def test_streaming_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        TextStreamer(None)


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


@pytest.mark.parametrize("first", [[5], [70, 71, 72], [70, 71]])
@pytest.mark.parametrize("skip_prompt", [True, False])
def test_a_text_streamer_is_as_new_after_its_end(
    skip_prompt: bool, first: list[int], model: CausalLM
) -> None:
    """Also after a stop string, and after the beginning of one that was not completed."""

    def text(streamer: TextStreamer, file: io.StringIO, tokens: list[int]) -> str:
        start = len(file.getvalue())
        streamer.put(np.array([[80, 81]]))
        for token in tokens:
            streamer.put(np.array([token]))
        streamer.end()
        return file.getvalue()[start:]

    def made() -> tuple[TextStreamer, io.StringIO]:
        file = io.StringIO()
        return TextStreamer(
            model.tokenizer, file, skip_prompt=skip_prompt, stop_strings=["cde", "zz"]
        ), file

    used = made()
    assert model.tokenizer is not None
    assert model.tokenizer.decode([70, 71, 72]) == "cde"
    text(*used, first)
    for second in ([69, 70, 71], [71, 72, 73], [73]):
        assert text(*used, second) == text(*made(), second) != "\n"


def test_a_streamer_ends_after_an_error(model: CausalLM) -> None:
    """Whoever waits for its texts, as for those of transformers' TextIteratorStreamer, waits no longer."""
    heard: list[str] = []

    class Recorder:
        def put(self, value: Any) -> None:
            heard.append("put")

        def end(self) -> None:
            heard.append("end")

    def fail(ids: Any, scores: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(
            "hello", seed=3, max_new_tokens=9, streamer=Recorder(), stopping_criteria=fail
        )
    assert heard.count("end") == 1
    assert heard[-1] == "end"
    heard.clear()
    with pytest.raises(ValueError, match="temperature is -1"):
        model.generate("hello", temperature=-1, streamer=Recorder())
    assert heard == [], "nothing began"


def test_a_streamer_does_constant_work_a_token(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no token ever completes a character, and text is held back for a stop string."""
    assert model.tokenizer is not None
    decoded: list[int] = []
    plain = model.tokenizer.decode
    monkeypatch.setattr(
        model.tokenizer,
        "decode",
        lambda ids, **options: (decoded.append(len(ids)), plain(ids, **options))[1],
    )
    file = io.StringIO()
    streamer = TextStreamer(model.tokenizer, file, stop_strings="\ufffd" * 5000)
    for token in [5, *[CONTINUATION] * 2000]:
        streamer.put([token])
    assert file.getvalue() == plain([5])
    streamer.end()
    assert file.getvalue() == plain([5]) + "\ufffd" * 2000 + "\n"
    assert sum(decoded) < 60 * 2000


SPECIAL_STOPS: list[tuple[list[str], str, str | None]] = [
    (["<s>"], "ab", "<s>"),
    (["s"], "ab", "s"),
    (["b<s>c"], "a", "b<s>c"),
    (["<s>cd"], "ab", "<s>cd"),
    (["ab<s>"], "", "ab<s>"),
    (["b<s>x"], "abcd", None),
    (["<s>x", "b<s>c!"], "abcd", None),
    (["d"], "abc", "d"),
]


@pytest.mark.parametrize(("stops", "text", "found"), SPECIAL_STOPS)
def test_stop_strings_may_have_special_tokens(
    stops: list[str], text: str, found: str | None
) -> None:
    """As in transformers. The special tokens themselves are not in the text."""
    tokenizer = Tokenizer(byte_tokenizer())
    ids = [*tokenizer.encode("ab", add_special_tokens=False), BOS]
    ids += tokenizer.encode("cd", add_special_tokens=False)
    assert tokenizer.decode([BOS], skip_special_tokens=False) == "<s>"
    generated = GeneratedText(tokenizer, (), stops)
    pieces = []
    for token in ids:
        pieces.append(generated.put(token))
        if generated.stop_string is not None:
            break
    assert "".join(pieces) + generated.end() == text
    assert (generated.whole, generated.stop_string) == (text, found)
    with_specials = GeneratedText(tokenizer, (), stops, skip_special_tokens=False)
    for token in ids:
        with_specials.put(token)
    assert with_specials.stop_string == found


def test_what_a_streamer_needs() -> None:
    check_streamer(Recorder(), 1)
    for rows in (0, 2):
        with pytest.raises(ValueError, match=f"follows a single prompt, and {rows} were given"):
            check_streamer(Recorder(), rows)
    for lacks in (
        {"put": print},
        {"end": print},
        {"put": print, "end": 5},
        {"put": 5, "end": print},
    ):
        with pytest.raises(ValueError, match=r"give an object with put\(value\) and end\(\)"):
            check_streamer(SimpleNamespace(**lacks), 1)
