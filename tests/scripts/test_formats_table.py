"""The table of docs/formats.md is up to date."""

from __future__ import annotations

from scripts import formats_table


def test_the_table_is_in_the_page() -> None:
    text = formats_table.PAGE.read_text("utf-8")
    assert f"<!-- formats -->\n{formats_table.table()}<!-- end of formats -->" in text, (
        "run scripts/formats_table.py"
    )
