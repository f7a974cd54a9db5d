"""The text of a row, cut off before a stop string."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qsample.runtime import CausalLM, SamplingParams
from qsample.runtime.text.generated_text import GeneratedText
from qsample.runtime.text.tokenizer import Tokenizer
from tests.helpers.fake_package import ascii_piece, byte_tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


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


def test_generate_with_stop_strings(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model()
    params = SamplingParams(temperature=0.9, max_new_tokens=40, eos_token_id=())
    free = model.generate(["hello", "other"], params, seed=3)
    assert free.texts is not None
    stop = ascii_piece(free.texts[0])
    count = next(n for n in range(41) if stop in Tokenizer(byte_tokenizer()).decode(free.token_ids[0][:n]))
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
            assert output.token_ids[0] == free.token_ids[0][:count]
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
