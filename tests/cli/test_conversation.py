"""What `/set` makes of a value."""

from __future__ import annotations

from typing import Any

import pytest

from qsample.cli.chat.conversation import Conversation, TurnError


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("the end", "the end"),
        ('"\\n\\n"', "\n\n"),
        ('["a", "b"]', ["a", "b"]),
        ("5", "5"),
        ("{", "{"),
    ],
)
def test_stop_strings_are_set_and_dropped(text: str, kept: Any) -> None:
    talk = Conversation(None, None, {"seed": 1}, {})  # type: ignore[arg-type]
    talk.set_parameter("stop_strings", text)
    assert talk.options == {"seed": 1, "stop_strings": kept}
    talk.set_parameter("stop_strings", "null")
    assert talk.options == {"seed": 1}


@pytest.mark.parametrize("text", ["", '""', "[5]", '[""]'])
def test_wrong_stop_strings_change_nothing(text: str) -> None:
    talk = Conversation(None, None, {"stop_strings": "a"}, {})  # type: ignore[arg-type]
    with pytest.raises(TurnError, match="stop_strings is"):
        talk.set_parameter("stop_strings", text)
    assert talk.options == {"stop_strings": "a"}
