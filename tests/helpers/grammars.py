"""Grammars that are hard to compile."""

from __future__ import annotations

from typing import Any

SLOW = "(ab)?" * 100_000  # as a regular expression: minutes, and gigabytes


def chained(count: int) -> dict[str, Any]:
    """A schema of definitions that refer to each other."""
    links = {
        f"d{number}": {"type": "array", "items": {"$ref": f"#/$defs/d{number + 1}"}}
        for number in range(count)
    }
    return {"$defs": {**links, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}
