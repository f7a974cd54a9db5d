"""The words of other programs lead to commands and options that are there."""

from __future__ import annotations

import re

import pytest

from qsample import cli
from qsample.cli.spellings import HERE, name_here

COMMANDS = cli.commands()
OPTIONS = {name for command in COMMANDS.values() for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize(("word", "ours"), HERE.items())
def test_words(word: str, ours: str) -> None:
    assert word not in COMMANDS
    assert name_here(word, OPTIONS) == ours
    assert ours in OPTIONS or {*re.findall("qsample ([a-z]+)", ours)} <= {*COMMANDS}
    assert ours in OPTIONS or {*re.findall(" (--?[a-z-]+)", ours)} <= OPTIONS


def test_an_option_that_the_command_lacks_is_not_named() -> None:
    assert name_here("--max-tokens", {"--slots"}) is None
    assert name_here("--nonsense", OPTIONS) is None
