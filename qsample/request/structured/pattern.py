"""The patterns of JSON schemas, in Python's syntax, become expressions of the content of strings.

Patterns mean almost the same in Python and in JavaScript, and a text must match in both. Where the
two differ, or may differ between versions of Unicode, a class has a lower bound, the characters
that are in it for sure, and an upper bound; expressions take the lower one, and a negated class has
the complements of the two.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, Final, NamedTuple

from qsample.request.structured.json_text import CHARACTER
from qsample.request.structured.not_regular import (
    MAX_NESTING,
    NEVER,
    NotRegularError,
    alternatives,
    checked_length,
    repeated,
)

# Python 3.11 moved the parser of `re` here; it has no public name.
_parser: Any = re._parser  # type: ignore[attr-defined]
_codes: Any = re._constants  # type: ignore[attr-defined]

_LAST_CODE_POINT: Final = 0x10FFFF
_MAX_PATTERN_CHARACTERS: Final = 1 << 14
_ESCAPES: Final = {
    '"': '\\\\"',
    "\\": r"\\\\",
    "\b": r"\\b",
    "\f": r"\\f",
    "\n": r"\\n",
    "\r": r"\\r",
    "\t": r"\\t",
}

# Code points as sorted intervals, both ends included, with a gap between neighbours.
_Intervals = tuple[tuple[int, int], ...]


class _CodePoints(NamedTuple):
    """The code points of a class.

    Attributes:
        lower: the code points that are in it for sure.
        upper: the code points that may be in it.
    """

    lower: _Intervals
    upper: _Intervals


def _joined(intervals: list[tuple[int, int]]) -> _Intervals:
    """The union of intervals in any order."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def _complement(intervals: _Intervals) -> _Intervals:
    gaps = []
    begin = 0
    for first, last in intervals:
        if begin < first:
            gaps.append((begin, first - 1))
        begin = last + 1
    if begin <= _LAST_CODE_POINT:
        gaps.append((begin, _LAST_CODE_POINT))
    return tuple(gaps)


def _exactly(first: int, last: int) -> _CodePoints:
    return _CodePoints(((first, last),), ((first, last),))


def _negated(points: _CodePoints) -> _CodePoints:
    return _CodePoints(_complement(points.upper), _complement(points.lower))


def _points_of(characters: str) -> list[tuple[int, int]]:
    return [(ord(character), ord(character)) for character in characters]


_BEYOND_ASCII: Final = (0x80, _LAST_CODE_POINT)
_DIGITS: Final = [(0x30, 0x39)]
_WORD: Final = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES: Final = _points_of(" \t\n\r\f\v")
# Blanks of Python or of JavaScript.
_OTHER_SPACES: Final = [
    (0x1C, 0x1F),
    (0x2000, 0x200A),
    *_points_of("\x85\xa0\u1680\u180e\u2028\u2029\u202f\u205f\u3000\ufeff"),
]
_CATEGORIES: Final = {
    "CATEGORY_DIGIT": _CodePoints(_joined(_DIGITS), _joined([*_DIGITS, _BEYOND_ASCII])),
    "CATEGORY_WORD": _CodePoints(_joined(_WORD), _joined([*_WORD, _BEYOND_ASCII])),
    "CATEGORY_SPACE": _CodePoints(_joined(_SPACES), _joined(_SPACES + _OTHER_SPACES)),
}
_NEGATED_CATEGORIES: Final = {
    name.replace("CATEGORY_", "CATEGORY_NOT_"): _negated(points)
    for name, points in _CATEGORIES.items()
}
# A dot matches all but line feeds; JavaScript also excludes other ends of lines.
_NO_LINE_END: Final = _negated(
    _CodePoints(((0x0A, 0x0A),), _joined(_points_of("\n\r\u2028\u2029")))
)
# The code points that JSON escapes, and the halves of surrogate pairs.
_NOT_RAW: Final = _joined([(0, 0x1F), *_points_of('"\\'), (0xD800, 0xDFFF)])


def expression_of_pattern(pattern: str) -> str:
    """The expression of the content of a JSON string in which a pattern is found.

    Args:
        pattern: the pattern. A text need not match it from its start or to its end, except at ^ and $.

    Raises:
        NotRegularError: the pattern has parts that are not kept, or Python cannot read it.
    """
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise NotRegularError(f"pattern of more than {_MAX_PATTERN_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            # Python warns of sets that a later version may read otherwise.
            warnings.simplefilter("error")
            tree = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise NotRegularError(f"pattern ({error!s:.60})") from None
    if tree.state.flags & ~re.UNICODE:
        raise NotRegularError("pattern with flags")
    return _found(list(tree), is_first=True, is_last=True, depth=0)


def _found(items: list[Any], is_first: bool, is_last: bool, depth: int) -> str:
    """The expression of a sequence, and of any text around it.

    Args:
        items: the items of the sequence.
        is_first: whether any text may come before it.
        is_last: whether any text may come after it.
        depth: the number of groups around it.
    """
    if depth > MAX_NESTING:
        raise NotRegularError("pattern nested too deep")
    items = list(items)
    before = ""
    after = ""
    if is_first and items and items[0] == (_codes.AT, _codes.AT_BEGINNING):
        items.pop(0)
        is_first = False
    if is_last and items and items[-1] == (_codes.AT, _codes.AT_END):
        items.pop()
        is_last = False
    # An alternative at an end may have an anchor there.
    is_first_inside = is_first and bool(items) and items[0][0] in _GROUPS
    is_last_inside = is_last and bool(items) and items[-1][0] in _GROUPS
    if is_first and not is_first_inside:
        before = f"{CHARACTER}*"
    if is_last and not is_last_inside:
        after = f"{CHARACTER}*"
    parts = [before]
    for place, item in enumerate(items):
        starts = is_first_inside and place == 0
        ends = is_last_inside and place == len(items) - 1
        parts.append(_item(item, starts, ends, depth))
    parts.append(after)
    return NEVER if NEVER in parts else checked_length("".join(parts))


def _item(item: Any, is_first: bool, is_last: bool, depth: int) -> str:
    """The expression of an item of a sequence; see `_found`."""
    code, value = item
    if code is _codes.LITERAL:
        return _literal(value)
    if code is _codes.BRANCH:
        branches = [_found(list(branch), is_first, is_last, depth + 1) for branch in value[1]]
        return alternatives(branches)
    if code is _codes.SUBPATTERN:
        _, added_flags, removed_flags, content = value
        if added_flags or removed_flags:
            raise NotRegularError("pattern with flags")
        return alternatives([_found(list(content), is_first, is_last, depth + 1)])
    if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT):
        least, most, content = value
        repeated_item = _found(list(content), is_first=False, is_last=False, depth=depth + 1)
        if repeated_item == NEVER:
            return NEVER if least else ""
        return repeated(repeated_item, least, None if most is _codes.MAXREPEAT else int(most))
    return _class_expression(_code_points(code, value))


_GROUPS: Final = (_codes.BRANCH, _codes.SUBPATTERN)


def _literal(code_point: int) -> str:
    """The expression of a character in a JSON string."""
    escape = _ESCAPES.get(chr(code_point))
    return _class_expression(_exactly(code_point, code_point)) if escape is None else escape


def _code_points(code: Any, value: Any) -> _CodePoints:
    """The characters of an item that matches one character."""
    if code is _codes.ANY:
        return _NO_LINE_END
    if code is _codes.NOT_LITERAL:
        return _negated(_exactly(value, value))
    if code is not _codes.IN:
        raise NotRegularError(f"pattern with {str(code).lower()}")
    is_negated = value[0][0] is _codes.NEGATE
    lower: list[tuple[int, int]] = []
    upper: list[tuple[int, int]] = []
    for kind, content in value[is_negated:]:
        if kind is _codes.LITERAL:
            points = _exactly(content, content)
        elif kind is _codes.RANGE:
            points = _exactly(*content)
        else:
            points = (_CATEGORIES | _NEGATED_CATEGORIES)[str(content)]
        lower += points.lower
        upper += points.upper
    united = _CodePoints(_joined(lower), _joined(upper))
    return _negated(united) if is_negated else united


def _class_expression(points: _CodePoints) -> str:
    """The class of the characters that are in a class for sure, and that JSON need not escape."""
    # The intersection is the complement of the union of the complements.
    excluded = _joined([*_complement(points.lower), *_NOT_RAW])
    ranges = []
    for first, last in _complement(excluded):
        begin = _class_character(first)
        ranges.append(begin if first == last else f"{begin}-{_class_character(last)}")
    return f"[{''.join(ranges)}]" if ranges else NEVER


def _class_character(code_point: int) -> str:
    character = chr(code_point)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code_point:x}}}"
