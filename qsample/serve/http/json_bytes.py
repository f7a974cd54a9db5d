"""JSON as bytes of UTF-8, whatever is in the texts."""

from __future__ import annotations

import json
from typing import Any


def json_bytes(value: Any) -> bytes:
    """`value` as compact JSON. Half a character (a lone surrogate), which UTF-8 cannot hold, is written as its escape.

    Raises ValueError for NaN and infinities, which JSON lacks.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")
