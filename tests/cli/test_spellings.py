"""Names here for the words of other programs, from all add-ons."""

from __future__ import annotations

import pytest

from qsample.cli import spellings
from qsample.cli.spellings import names_here

FIRST = {"--seed": ["--random-seed", "-s"], "generate": ["run", "-s"]}
SECOND = {"--slots": ["-s", "--parallel"], "--seed": ["--rng"]}


@pytest.fixture(autouse=True)
def two_addons(monkeypatch: pytest.MonkeyPatch) -> None:
    addons = {"qsample.spellings": {"one": FIRST, "two": SECOND}}
    monkeypatch.setattr(spellings, "load_extensions", addons.__getitem__)


@pytest.mark.parametrize(
    ("word", "known", "names"),
    [
        ("--random-seed", {"--seed"}, ["--seed"]),
        ("--rng", {"--seed", "--slots"}, ["--seed"]),
        ("-s", {"--seed", "--slots"}, ["--seed", "generate", "--slots"]),
        ("--parallel", {"--seed"}, []),  # the running command has no --slots
        ("run", set(), ["generate"]),  # a command is known everywhere
        ("--nonsense", {"--seed", "--slots"}, []),
        ("--seed", {"--seed"}, []),
    ],
)
def test_names(word: str, known: set[str], names: list[str]) -> None:
    assert names_here(word, known) == names
