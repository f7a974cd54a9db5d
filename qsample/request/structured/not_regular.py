"""The refusal of forms that have no tables, and the parts of expressions that all forms share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from qsample.errors import ArgumentError

MAX_EXPRESSION_CHARACTERS: Final = 1 << 20
# The nested schemas, or the nested rules and groups of GBNF.
MAX_NESTING: Final = 48
# regex-syntax accepts 250.
_MAX_GROUP_NESTING: Final = 200
# The times that a part may be repeated, if there is a limit.
MAX_REPETITIONS: Final = 1 << 12
# A class without characters: an expression with it matches nothing.
NEVER: Final = "[a&&b]"
_SPECIAL_CHARACTERS: Final = frozenset(r"\.+*?()|[]{}^$#&-~")
_GROUP_BOUNDARY: Final = re.compile(r"\\.|[()]", re.DOTALL)


class NotRegularError(ArgumentError):
    """A form has no tables: no expression keeps it exactly, or its tables are too large.

    Attributes:
        reason: the part of the form, and the thing that is not kept.
    """

    def __init__(self, reason: str) -> None:
        """
        Args:
            reason: the part of the form, and the thing that is not kept, such as
                "#/properties/a: uniqueItems".
        """
        super().__init__(f"that form has no tables: {reason:.300}")
        self.reason = reason


def checked_length(expression: str) -> str:
    """An expression that is not too long.

    Raises:
        NotRegularError: the expression has more than `MAX_EXPRESSION_CHARACTERS`.
    """
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise NotRegularError(
            f"its regular expression has more than {MAX_EXPRESSION_CHARACTERS} characters"
        )
    return expression


def checked_nesting(expression: str) -> str:
    """An expression whose groups are not nested too deep. Its classes have no brackets.

    Raises:
        NotRegularError: the groups are nested too deep.
    """
    nesting = 0
    for boundary in _GROUP_BOUNDARY.findall(expression):
        if boundary == "(":
            nesting += 1
        elif boundary == ")":
            nesting -= 1
        if nesting > _MAX_GROUP_NESTING:
            raise NotRegularError(f"its groups are nested more than {_MAX_GROUP_NESTING} deep")
    return expression


def escaped(text: str) -> str:
    """The expression that matches a text alone.

    Raises:
        NotRegularError: the text is not Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotRegularError("a text has half of a surrogate pair") from None
    characters = []
    for character in text:
        is_special = character in _SPECIAL_CHARACTERS
        characters.append(f"\\{character}" if is_special else character)
    return "".join(characters)


def alternatives(expressions: Sequence[str]) -> str:
    """A group of alternatives; `NEVER` for none."""
    distinct = list(dict.fromkeys(expressions))
    possible = [expression for expression in distinct if expression != NEVER]
    if not possible:
        return NEVER
    return checked_length(f"(?:{'|'.join(possible)})")


def repeated(expression: str, least: int, most: int | None) -> str:
    """An expression, repeated.

    Args:
        expression: the expression.
        least: the fewest times.
        most: the most times, at least `least`; None for any number.

    Raises:
        NotRegularError: a number is larger than `MAX_REPETITIONS`.
    """
    if max(least, most or 0) > MAX_REPETITIONS:
        raise NotRegularError(f"a part is repeated more than {MAX_REPETITIONS} times")
    if most == 0:
        return ""
    if most is None:
        suffix = {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    elif (least, most) == (0, 1):
        suffix = "?"
    else:
        suffix = f"{{{least},{most}}}"
    return checked_length(f"(?:{expression}){suffix}")
