"""What the commands print: sizes."""

from __future__ import annotations

import pytest

from qsample.cli.output import format_size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (2_000_000_000, "2.0 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text
