"""A grammar in llama.cpp's GBNF becomes an expression.

The rules may not be recursive, except that a rule may call itself at the very end of an
alternative: then it is a repetition. The notation is described in
https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn, TypeAlias

from qsample.errors import ArgumentError
from qsample.request.structured.not_regular import (
    MAX_EXPRESSION_CHARACTERS,
    MAX_NESTING,
    NEVER,
    NotRegularError,
    alternatives,
    checked_length,
    checked_nesting,
    escaped,
    repeated,
)

_ROOT: Final = "root"
_BLANKS: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_DEFINITION: Final = "::="
_LIMITS: Final = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}", re.ASCII)
_ESCAPE: Final = re.compile(
    r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\"\[\]]))'
)
_LETTER_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}
_LAST_CODE_POINT: Final = 0x10FFFF
_FIRST_SURROGATE: Final = 0xD800
_LAST_SURROGATE: Final = 0xDFFF
_ANY_CHARACTER: Final = "(?s:.)"


class _Text(NamedTuple):
    """An expression of a literal, a class or a dot."""

    expression: str


class _Call(NamedTuple):
    """The name of a rule, and the line of its use."""

    name: str
    line: int


class _Repetition(NamedTuple):
    """An element that comes `least` to `most` times; None for any number."""

    element: _Element
    least: int
    most: int | None


class _Sequence(NamedTuple):
    """Elements in their order."""

    elements: list[_Element]


class _Choice(NamedTuple):
    """Alternatives."""

    sequences: list[_Sequence]


_Element: TypeAlias = _Text | _Call | _Repetition | _Choice


class _Tail(NamedTuple):
    """The alternatives of a rule.

    Attributes:
        repeated: the expressions after which the rule comes again.
        last: the expressions after which nothing comes.
    """

    repeated: list[str]
    last: list[str]


def expression_of_gbnf(text: str) -> str:
    """The expression of a grammar.

    Args:
        text: the grammar, whose rule `root` is the whole answer.

    Returns:
        An expression of Rust's regex crate.

    Raises:
        NotRegularError: the grammar is recursive, or it is too large.
        ArgumentError: the grammar is not GBNF; the message names the line.
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        raise NotRegularError(f"a grammar of more than {MAX_EXPRESSION_CHARACTERS} characters")
    rules = _Parser(text).rules()
    if _ROOT not in rules:
        raise ArgumentError("the grammar is not valid GBNF: it has no rule `root`; add it")
    return checked_nesting(_Translation(rules).rule(_Call(_ROOT, 1), 0))


@dataclass
class _Parser:
    """Reads the rules of a grammar.

    Attributes:
        text: the grammar.
        place: the place of the next character.
        nesting: the number of groups around it.
    """

    text: str
    place: int = 0
    nesting: int = 0

    def rules(self) -> dict[str, _Choice]:
        """All rules by their names."""
        rules = {}
        self._skip_lines()
        while self.place < len(self.text):
            name = self._match(_NAME)
            if name is None:
                self._fail("a rule has no name")
            self._skip_blanks()
            if not self._take(_DEFINITION):
                self._fail("`::=` is missing after the name of a rule")
            self._skip_lines()
            # llama.cpp takes the last of several rules of a name.
            rules[name[0]] = self._choice()
            if self.place < len(self.text) and self.text[self.place] not in "\r\n":
                self._fail(f"{self.text[self.place]!r} is out of place")
            self._skip_lines()
        return rules

    def _choice(self) -> _Choice:
        sequences = [self._sequence()]
        while self._take("|"):
            self._skip_lines()
            sequences.append(self._sequence())
        return _Choice(sequences)

    def _sequence(self) -> _Sequence:
        elements: list[_Element] = []
        while True:
            element = self._element()
            if element is None:
                return _Sequence(elements)
            self._skip()
            elements.append(self._with_repetitions(element))

    def _element(self) -> _Element | None:
        """The next element; None at the end of a sequence."""
        character = self.text[self.place : self.place + 1]
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if self._take("."):
            return _Text(_ANY_CHARACTER)
        if character == "(":
            return self._group()
        if character in ("<", "!"):
            raise NotRegularError(f"line {self._line()}: a token of the model")
        name = self._match(_NAME)
        return None if name is None else _Call(name[0], self._line())

    def _group(self) -> _Choice:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise NotRegularError(
                f"line {self._line()}: groups nested more than {MAX_NESTING} deep"
            )
        self.place += 1
        self._skip_lines()
        choice = self._choice()
        if not self._take(")"):
            self._fail("a group does not end")
        self.nesting -= 1
        return choice

    def _with_repetitions(self, element: _Element) -> _Element:
        """An element with the repetitions after it."""
        depth = 0
        while True:
            limits = self._match(_LIMITS)
            if limits is not None:
                least = int(limits[1])
                most = least if limits[2] is None else None
                if limits[3] is not None:
                    most = int(limits[3])
            elif self._take("*"):
                least, most = (0, None)
            elif self._take("+"):
                least, most = (1, None)
            elif self._take("?"):
                least, most = (0, 1)
            else:
                return element
            if most is not None and most < least:
                self._fail("the limits of a repetition are in the wrong order")
            depth += 1
            if depth > MAX_NESTING:
                raise NotRegularError(f"line {self._line()}: too many repetitions of an element")
            element = _Repetition(element, least, most)
            self._skip()

    def _literal(self) -> _Text:
        begin = self.place
        self.place += 1
        characters = []
        while not self._take('"'):
            characters.append(chr(self._character(begin)))
        return _Text(escaped("".join(characters)))

    def _class(self) -> _Text:
        begin = self.place
        self.place += 1
        is_negated = self._take("^")
        ranges = []
        while not self._take("]"):
            first = self._character(begin)
            last = first
            if self.text[self.place : self.place + 1] == "-":
                if self.text[self.place : self.place + 2] != "-]":
                    self.place += 1
                    last = self._character(begin)
            if last < first:
                self._fail("a range of characters is in the wrong order")
            ranges.append(rf"\x{{{first:x}}}-\x{{{last:x}}}")
        if not ranges:
            self._fail("a class has no characters")
        return _Text(f"[{'^' if is_negated else ''}{''.join(ranges)}]")

    def _character(self, begin: int) -> int:
        """The code point of the next character of the literal or class that begins at `begin`."""
        if self.place >= len(self.text):
            self.place = begin
            self._fail("a text or a class does not end")
        if self.text[self.place] != "\\":
            code_point = ord(self.text[self.place])
            self.place += 1
        else:
            escape = self._match(_ESCAPE)
            if escape is None:
                self._fail("an escape is not known")
            digits = escape[1] or escape[2] or escape[3]
            letter = escape[4]
            code_point = int(digits, 16) if digits else ord(_LETTER_ESCAPES.get(letter, letter))
        if code_point > _LAST_CODE_POINT or _FIRST_SURROGATE <= code_point <= _LAST_SURROGATE:
            self._fail("an escape is not a character")
        return code_point

    def _skip(self) -> None:
        """Skip blanks, and inside groups also ends of lines."""
        if self.nesting > 0:
            self._skip_lines()
        else:
            self._skip_blanks()

    def _skip_blanks(self) -> None:
        self._match(_BLANKS)

    def _skip_lines(self) -> None:
        self._match(_BLANK_LINES)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take a match of a pattern at this place."""
        match = pattern.match(self.text, self.place)
        if match is not None:
            self.place = match.end()
        return match

    def _take(self, text: str) -> bool:
        """Take a text at this place, if it is there."""
        is_there = self.text.startswith(text, self.place)
        if is_there:
            self.place += len(text)
        return is_there

    def _line(self) -> int:
        return self.text.count("\n", 0, self.place) + 1

    def _fail(self, problem: str) -> NoReturn:
        raise ArgumentError(f"the grammar is not valid GBNF: line {self._line()}: {problem}")


@dataclass
class _Translation:
    """Translates rules to expressions.

    Attributes:
        rules: the rules by their names.
        expressions: the expressions of the rules so far.
        open_rules: the rules that are being translated.
    """

    rules: Mapping[str, _Choice]
    expressions: dict[str, str] = field(default_factory=dict)
    open_rules: set[str] = field(default_factory=set)

    def rule(self, call: _Call, depth: int) -> str:
        """The expression of a rule.

        Args:
            call: its use.
            depth: the number of rules and groups around it.
        """
        name = call.name
        if name in self.expressions:
            return self.expressions[name]
        if name not in self.rules:
            raise ArgumentError(
                f"the grammar is not valid GBNF: line {call.line}: there is no rule {name:.80}"
            )
        if name in self.open_rules:
            raise NotRegularError(
                f"line {call.line}: the rule {name:.80} calls itself, and not at the end"
            )
        self.open_rules.add(name)
        tail = self._tail(self.rules[name], name, depth)
        self.open_rules.discard(name)
        # A repetition without characters changes nothing.
        parts = alternatives([part for part in tail.repeated if part])
        expression = alternatives(tail.last)
        if parts != NEVER and expression != NEVER:
            expression = f"{repeated(parts, 0, None)}{expression}"
        self.expressions[name] = checked_length(expression)
        return self.expressions[name]

    def _tail(self, choice: _Choice, name: str, depth: int) -> _Tail:
        """The alternatives of a rule that ends with a choice.

        Args:
            choice: the choice.
            name: the name of the rule.
            depth: the number of rules and groups around it.
        """
        tail = _Tail([], [])
        for sequence in choice.sequences:
            before = ""
            elements = sequence.elements
            if elements and self._calls(elements[-1], name):
                before = self._sequence(elements[:-1], depth)
                end = self._tail_of_element(elements[-1], name, depth + 1)
            else:
                end = _Tail([], [self._sequence(elements, depth)])
            for place, parts in enumerate(end):
                tail[place].extend(_joined(before, part) for part in parts)
        return tail

    def _tail_of_element(self, element: _Element, name: str, depth: int) -> _Tail:
        """The alternatives of a rule that ends with an element that calls it."""
        if isinstance(element, _Call):
            return _Tail([""], [])
        if isinstance(element, _Choice):
            self._check_depth(depth)
            return self._tail(element, name, depth)
        if isinstance(element, _Repetition) and element.most == 1:
            tail = self._tail_of_element(element.element, name, depth + 1)
            if element.least == 0:
                tail.last.append("")
            return tail
        raise NotRegularError(f"the rule {name:.80} calls itself inside a repetition")

    def _calls(self, element: _Element, name: str) -> bool:
        """Whether an element itself calls a rule, not by way of another rule."""
        if isinstance(element, _Call):
            return element.name == name
        if isinstance(element, _Repetition):
            return self._calls(element.element, name)
        if isinstance(element, _Choice):
            elements = [part for sequence in element.sequences for part in sequence.elements]
            return any(self._calls(part, name) for part in elements)
        return False

    def _expression(self, element: _Element, depth: int) -> str:
        self._check_depth(depth)
        if isinstance(element, _Text):
            return element.expression
        if isinstance(element, _Call):
            return self.rule(element, depth + 1)
        if isinstance(element, _Choice):
            parts = [self._sequence(part.elements, depth + 1) for part in element.sequences]
            return alternatives(parts)
        repeated_part = self._expression(element.element, depth + 1)
        if repeated_part == NEVER:
            return NEVER if element.least != 0 else ""
        return repeated(repeated_part, element.least, element.most)

    def _sequence(self, elements: list[_Element], depth: int) -> str:
        expression = ""
        for element in elements:
            expression = _joined(expression, self._expression(element, depth + 1))
        return expression

    @staticmethod
    def _check_depth(depth: int) -> None:
        if depth > 2 * MAX_NESTING:
            raise NotRegularError("its rules and groups are nested too deep")


def _joined(before: str, after: str) -> str:
    """An expression after another."""
    if NEVER in (before, after):
        return NEVER
    return checked_length(before + after)
