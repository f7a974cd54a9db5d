"""The words of other programs for commands and options, from the add-ons that know them (`qsample.spellings`)."""

from __future__ import annotations

from collections.abc import Collection

from qsample.extensions import SPELLINGS, load_extensions


def names_here(word: str, known: Collection[str]) -> list[str]:
    """The names here of a command or option of another program.

    Args:
        word: the unknown command or option that the user typed.
        known: the options of the running command; no other option is suggested.

    Returns:
        Several names if programs differ in what they mean by the word; none if no add-on knows it.
    """
    names = [
        ours
        for words_of in load_extensions(SPELLINGS).values()
        for ours, words in words_of.items()
        if word in words
    ]
    return [name for name in names if not name.startswith("-") or name in known]
