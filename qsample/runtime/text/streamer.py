"""Streamers: Hugging Face's protocol, and one that writes text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

import numpy as np

from qsample.errors import shown
from qsample.runtime.text.incremental_decoder import IncrementalDecoder
from qsample.runtime.text.stop_strings import StopStrings, check_stop_strings
from qsample.runtime.text.tokenizer import Tokenizer


class Streamer(Protocol):
    """Hugging Face's streamer protocol, so that theirs work too. Values are NumPy arrays in place of tensors."""

    def put(self, value: Any) -> None:
        """First the prompt, [1, n] int64; then every sampled token, [1] int64."""
        ...

    def end(self) -> None:
        """No token comes any more."""
        ...


def check_streamer(streamer: object, rows: int) -> None:
    """Raise ValueError where `streamer` lacks the protocol's methods, or `rows` are more than the one it follows."""
    if rows != 1:
        raise ValueError(f"a streamer follows one prompt, and {rows} were given; generate them one by one")
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise ValueError(f"streamer is {shown(streamer)}; give an object with put(value) and end()")


class TextStreamer:
    """Writes text to a file object as soon as it is certain; characters of several tokens come whole.

    >>> model.generate("In the beginning", streamer=TextStreamer(model.tokenizer))
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        file: TextIO | None = None,
        *,
        skip_prompt: bool = False,
        skip_special_tokens: bool = True,
        stop_strings: str | Sequence[str] | None = None,
    ) -> None:
        """file: None = standard output. skip_prompt: write only what was sampled. stop_strings: write what was sampled
        up to the first of them, as `generate(stop_strings=...)` cuts its texts."""
        if tokenizer is None:
            raise ValueError("a TextStreamer needs a tokenizer, and the package has none; stream token ids instead")
        self._tokenizer = tokenizer
        self._file = file
        self._skip_prompt = skip_prompt
        self._skip_special_tokens = skip_special_tokens
        self._stop_strings = check_stop_strings(stop_strings)
        self._stops = StopStrings(self._stop_strings)
        self._decoder: IncrementalDecoder | None = None

    def put(self, value: Any) -> None:
        tokens = [int(token) for token in np.asarray(value).reshape(-1)]
        if self._decoder is not None:
            self._write("".join(self._stops.put(self._decoder.put(token)) for token in tokens))
            return
        self._decoder = IncrementalDecoder(
            self._tokenizer,
            tokens if self._skip_prompt else (),
            skip_special_tokens=self._skip_special_tokens,
        )
        if not self._skip_prompt:
            self._write("".join(self._decoder.put(token) for token in tokens))

    def end(self) -> None:
        """Write what was held back, and a newline; the streamer can then be used again."""
        rest = self._stops.put(self._decoder.end()) + self._stops.end() if self._decoder is not None else ""
        self._decoder, self._stops = None, StopStrings(self._stop_strings)
        self._write(rest + "\n")

    def _write(self, text: str) -> None:
        if text:
            file = self._file or sys.stdout
            file.write(text)
            file.flush()
