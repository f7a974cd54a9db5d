"""Arguments of other programs pass through every dialect in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from qsample.contract.interface import Features
from qsample.models import dialects
from qsample.models.dialects import (
    Dialect,
    GenerateArguments,
    read_compile,
    read_from_pretrained,
    read_generate,
)

FEATURES = Features(logprobs=True)


class _Marking(Dialect):
    """A dialect that adds its mark to a text or a keyword."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def read_from_pretrained(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**keywords, "opened": keywords.get("opened", "") + self.mark}

    def read_compile(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**keywords, "compiled": keywords.get("compiled", "") + self.mark}

    def read_generate(self, arguments: GenerateArguments, features: Features) -> GenerateArguments:
        assert features is FEATURES
        return GenerateArguments(arguments.inputs + self.mark, arguments.params, arguments.keywords)


def use(monkeypatch: pytest.MonkeyPatch, *found: Dialect) -> None:
    def load(group: str) -> dict[str, Dialect]:
        assert group == "qsample.dialects"
        return {str(index): dialect for index, dialect in enumerate(found)}

    monkeypatch.setattr(dialects, "load_extensions", load)


def test_each_dialect_reads_what_the_one_before_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, _Marking("a"), _Marking("b"))
    assert read_from_pretrained({"x": 1}) == {"x": 1, "opened": "ab"}
    assert read_compile({"x": 1}) == {"x": 1, "compiled": "ab"}
    read = read_generate(GenerateArguments("", "params", {"x": 1}), FEATURES)
    assert read == GenerateArguments("ab", "params", {"x": 1})


@pytest.mark.parametrize("found", [[], [Dialect()]], ids=["none", "one that knows nothing"])
def test_arguments_that_no_dialect_knows_stay(
    found: list[Dialect], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, *found)
    keywords = {"dtype": "float16"}
    arguments = GenerateArguments([1], None, {"seed": 0})
    assert read_from_pretrained(keywords) == keywords
    assert read_compile(keywords) == keywords
    assert read_generate(arguments, FEATURES) == arguments
