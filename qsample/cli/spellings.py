"""The names that qsample has for commands and options of other programs.

Add-ons know the words of other programs (`qsample.spellings`).
"""

from __future__ import annotations

from collections.abc import Collection

from qsample.extensions import SPELLINGS, load_extensions


def names_here(word: str, known: Collection[str]) -> list[str]:
    """The names that qsample has for a command or option of another program.

    Args:
        word: the unknown command or option that the user typed.
        known: the options of the running command. Other options are not suggested.

    Returns:
        The names: several if the meaning of the word differs among programs, and none if no add-on
        knows it.
    """
    names: list[str] = []
    for words_by_name in load_extensions(SPELLINGS).values():
        for name, words in words_by_name.items():
            is_command = not name.startswith("-")
            if word in words and (is_command or name in known):
                names.append(name)
    return names
