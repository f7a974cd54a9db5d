"""The text of one row, cut off before its first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from qsample.runtime.text.incremental_decoder import IncrementalDecoder
from qsample.runtime.text.stop_strings import StopStrings
from qsample.runtime.text.tokenizer import Tokenizer


class GeneratedText:
    """The text of one row as its tokens come, cut off before its first stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> None:
        """prompt: as for `IncrementalDecoder`."""
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._stops = StopStrings(stop_strings)
        self._pieces: list[str] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None so far."""
        return self._stops.match

    @property
    def whole(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    def put(self, token: int) -> str:
        """The text that `token` makes certain."""
        self._pieces.append(self._stops.put(self._decoder.put(token)))
        return self._pieces[-1]

    def end(self) -> str:
        """The text that was held back, as no more tokens come."""
        self._pieces.append(self._stops.put(self._decoder.end()) + self._stops.end())
        return self._pieces[-1]
