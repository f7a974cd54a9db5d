"""The refusal of forms that have no tables, and the bounds that expressions keep."""

from __future__ import annotations

from typing import Final

from qsample.errors import ArgumentError

MAX_EXPRESSION_CHARACTERS: Final = 1 << 20
# The nested groups that regex-syntax accepts are 250, and a level of a schema has at most four.
MAX_NESTING: Final = 48
# A class without characters: an expression with it matches nothing.
NEVER: Final = "[a&&b]"


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


def alternatives(expressions: list[str]) -> str:
    """A group of alternatives; `NEVER` for none."""
    distinct = list(dict.fromkeys(expressions))
    possible = [expression for expression in distinct if expression != NEVER]
    if not possible:
        return NEVER
    return checked_length(f"(?:{'|'.join(possible)})")
