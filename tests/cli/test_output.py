"""What the commands print: sizes, and the bar that shows only on a terminal."""

from __future__ import annotations

import pytest

from qsample.cli.output import format_size, progress


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (2_000_000_000, "2.0 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


def test_no_bar_where_standard_error_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as report:
        report("tracing", 0.5)
    assert capsys.readouterr() == ("", "")
