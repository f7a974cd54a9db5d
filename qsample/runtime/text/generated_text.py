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

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None so far."""
        return self._stops.match

    def put(self, token: int) -> str:
        """The text that `token` makes certain."""
        return self._stops.put(self._decoder.put(token))

    def end(self) -> str:
        """What was held back."""
        return self._stops.put(self._decoder.end()) + self._stops.end()
