"""Arguments under the names of other programs → qsample's arguments; add-ons register the programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qsample.contract.interface import Features
from qsample.extensions import DIALECTS, load_extensions


@dataclass(frozen=True, slots=True)
class GenerateArguments:
    """The arguments of `generate`.

    Attributes:
        inputs: the prompts; None if a keyword has them.
        params: the sampling parameters; None if keywords have them.
        keywords: the other arguments by name.
    """

    inputs: Any
    params: Any
    keywords: Mapping[str, Any]


class Dialect:
    """The arguments of another program. An add-on registers an instance in the group `qsample.dialects`.

    Each method returns the arguments that it was given, with qsample's names in place of the program's. It raises
    ValueError for an argument of the program that has no meaning here.
    """

    def read_from_pretrained(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keywords of `from_pretrained`."""
        return keywords

    def read_compile(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keywords of `compile`."""
        return keywords

    def read_generate(self, arguments: GenerateArguments, features: Features) -> GenerateArguments:
        """The arguments of `generate`, for a graph with `features`."""
        return arguments


def read_from_pretrained(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords of `from_pretrained` in qsample's names."""
    for dialect in _dialects():
        keywords = dialect.read_from_pretrained(keywords)
    return keywords


def read_compile(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords of `compile` in qsample's names."""
    for dialect in _dialects():
        keywords = dialect.read_compile(keywords)
    return keywords


def read_generate(arguments: GenerateArguments, features: Features) -> GenerateArguments:
    """The arguments of `generate` in qsample's names, for a graph with `features`."""
    for dialect in _dialects():
        arguments = dialect.read_generate(arguments, features)
    return arguments


def _dialects() -> list[Dialect]:
    return list(load_extensions(DIALECTS).values())
