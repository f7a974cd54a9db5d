"""Streamers: Hugging Face's protocol, and text on a file."""

from __future__ import annotations

import io
from typing import Any

import pytest

from qsample.runtime import CausalLM, SamplingParams, TextStreamer
from tests.helpers.fake_package import ascii_piece


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
    assert [value.tolist() for value in recorder.values[1:]] == [[token] for token in output.token_ids[0]]
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


def test_text_streamer_takes_standard_output_of_the_moment(model: CausalLM, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_streamer_does_constant_work_a_token(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no token ever completes a character, and text is held back for a stop string."""
    assert model.tokenizer is not None
    decoded: list[int] = []
    plain = model.tokenizer.decode
    monkeypatch.setattr(
        model.tokenizer, "decode", lambda ids, **options: (decoded.append(len(ids)), plain(ids, **options))[1]
    )
    file = io.StringIO()
    streamer = TextStreamer(model.tokenizer, file, stop_strings="\ufffd" * 5000)
    for token in [5, *[3 + 0xA0] * 2000]:
        streamer.put([token])
    assert file.getvalue() == plain([5])
    streamer.end()
    assert file.getvalue() == plain([5]) + "\ufffd" * 2000 + "\n"
    assert sum(decoded) < 60 * 2000
