"""The words of other programs lead to commands and options that are there."""

from __future__ import annotations

import re

import pytest

from qsample import cli
from qsample.addons.migrate.spellings import ELSEWHERE
from qsample.cli.spellings import names_here

COMMANDS = cli.commands()
OPTIONS = {
    name for command in COMMANDS.values() for parameter in command.params for name in parameter.opts
}


WORDS = [(word, ours) for ours, words in ELSEWHERE.items() for word in words]


@pytest.mark.parametrize(("word", "ours"), WORDS)
def test_words(word: str, ours: str) -> None:
    assert word not in COMMANDS
    assert ours in names_here(word, OPTIONS)
    assert ours in OPTIONS or {*re.findall("qsample ([a-z]+)", ours)} <= {*COMMANDS}
    assert ours in OPTIONS or {*re.findall(" (--?[a-z-]+)", ours)} <= OPTIONS


def test_an_option_that_the_command_lacks_is_not_named() -> None:
    assert names_here("--max-tokens", {"--slots"}) == []
    assert names_here("--nonsense", OPTIONS) == []
    assert "-n" not in OPTIONS
    assert names_here("-n", OPTIONS) == ["--max-new-tokens", "--num-return-sequences"]
    assert names_here("-n", OPTIONS - {"--num-return-sequences"}) == ["--max-new-tokens"]
