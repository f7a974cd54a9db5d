"""Single tokens as text and bytes, for log-probabilities and /tokenize."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any, Final

from qsample.runtime import CausalLM

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNKNOWN: Final = "\ufffd"


class TokenTexts:
    """What each token of a vocabulary stands for, in the middle of a text."""

    def __init__(self, model: CausalLM) -> None:
        assert model.tokenizer is not None
        self._tokenizer = model.tokenizer
        described = json.loads(self._tokenizer.to_json())  # the file may be another one by now
        self._byte_level = '"ByteLevel"' in json.dumps(described.get("decoder"))
        pieces: dict[int, str] = {entry["id"]: entry["content"] for entry in described.get("added_tokens") or []}
        vocabulary: Any = (described.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            pieces = {number: piece for piece, number in vocabulary.items()} | pieces
        else:  # Unigram: a list of pieces and their scores
            pieces = {number: entry[0] for number, entry in enumerate(vocabulary)} | pieces
        self._added = {entry["id"] for entry in described.get("added_tokens") or []}
        self._pieces = pieces
        # Some decoders drop a blank at the start of a text; a token is shown as it is behind another one.
        self._anchor = next((token for token in pieces if token not in self._added and self._decode([token])), None)
        self.of = lru_cache(maxsize=2**16)(self._of)

    def _of(self, token: int) -> tuple[str, bytes]:
        """The text of a token, and the bytes, of which several tokens may make one character."""
        text = self._behind_another(token)
        piece = self._pieces.get(token, "")
        if _UNKNOWN in text and token not in self._added:
            data = _bytes_of(piece) if self._byte_level else b""
            if match := _BYTE_TOKEN.fullmatch(piece):
                data = bytes([int(match[1], 16)])
            return text, data or text.encode()
        return text, text.encode()

    def _behind_another(self, token: int) -> str:
        alone = self._decode([token])
        if self._anchor is None or _UNKNOWN in alone:
            return alone
        before, both = self._decode([self._anchor]), self._decode([self._anchor, token])
        return both.removeprefix(before) if both.startswith(before) else alone

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _bytes_of(piece: str) -> bytes:
    """The bytes that a piece of a byte-level vocabulary stands for; b"" where it is none."""
    table = _byte_table()
    return bytes(table[character] for character in piece) if all(character in table for character in piece) else b""


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """GPT-2's printable characters for bytes (Radford et al. 2019; openai/gpt-2, encoder.py): those that print stand
    for themselves, the others for the code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
