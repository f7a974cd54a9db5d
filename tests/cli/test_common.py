"""Texts of files and of standard input, as the commands take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.cli.common import TemplateOptions, plain_text, read_text


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("", ""),
        ("\ufeff", ""),
        ("a\r\n\r\nb\r\n", "a\n\nb\n"),
        ("\ufeffa\n", "a\n"),
        ("a\ufeff", "a\ufeff"),
        ("a\rb\r", "a\rb\r"),
    ],
)
def test_what_windows_puts_into_a_text_is_not_of_the_text(
    text: str, plain: str, tmp_path: Path
) -> None:
    assert plain_text(text) == plain
    if plain:
        (tmp_path / "text").write_bytes(text.encode())
        assert read_text(tmp_path / "text", "--system-file") == plain


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, {}),
        ({"thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"chat_template_kwargs": "{}"}, {}),
        ({"chat_template_kwargs": '{"a": 0}'}, {"chat_template_kwargs": {"a": 0}}),
        (
            {"chat_template_kwargs": '{"a": 0, "enable_thinking": true}', "thinking": False},
            {"chat_template_kwargs": {"a": 0, "enable_thinking": False}},
        ),
        ({"chat_template": "tool_use"}, {"chat_template": "tool_use"}),
    ],
)
def test_arguments_about_the_template(given: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert TemplateOptions(**given).arguments() == arguments
