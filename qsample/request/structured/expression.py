"""A form becomes an expression of Rust's regex crate, if one keeps it exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from qsample.errors import ArgumentError, shown
from qsample.request.grammar import Form, invalid_grammar, parsed_schema
from qsample.request.schemas.normal_form import InvalidSchemaError
from qsample.request.structured.gbnf import expression_of_gbnf
from qsample.request.structured.not_regular import (
    NEVER,
    NotRegularError,
    alternatives,
    checked_length,
    checked_nesting,
    escaped,
)
from qsample.request.structured.schema import expression_of_schema

_ESCAPE: Final = re.compile(r"\\.", re.DOTALL)
# An escape, or a class.
_CLASS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_BOUNDARY_ESCAPES: Final = (r"\A", r"\z", r"\b", r"\B", r"\<", r"\>")


def expression_of(form: Form) -> str:
    """The expression of a form. The whole answer matches it.

    Args:
        form: the form.

    Raises:
        NotRegularError: no expression keeps the form exactly, or it is too large.
        ArgumentError: the form is invalid.
    """
    kind, value = form
    match kind:
        case "json_schema":
            return expression_of_schema(parsed_schema(value))
        case "regex":
            return _checked_regex(value)
        case "choice":
            return _expression_of_choice(value)
        case "grammar":
            if "::=" not in value:
                raise NotRegularError("a grammar in Lark's notation")
            return expression_of_gbnf(value)
        case "call" | "calls":
            return _expression_of_calls(value, several=kind == "calls")


def _checked_regex(expression: str) -> str:
    """An expression that llguidance can read, so that its brackets match, without anchors."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(checked_length(expression)))
    if problem:
        raise invalid_grammar(problem)
    inner = _without_anchors(expression)
    # A class may contain other classes; the rest of such a class looks like an anchor at worst.
    has_anchor = any(character in "^$" for character in _CLASS.sub("", inner))
    has_boundary = any(escape in _BOUNDARY_ESCAPES for escape in _ESCAPE.findall(inner))
    if has_anchor or has_boundary:
        raise NotRegularError("a regular expression with anchors or boundaries")
    return inner


def _without_anchors(expression: str) -> str:
    """An expression without an anchor at its start or end, because the whole answer matches it."""
    expression = expression.removeprefix("^")
    without_end = expression.removesuffix("$")
    num_backslashes = len(without_end) - len(without_end.rstrip("\\"))
    return expression if num_backslashes % 2 != 0 else without_end


def _expression_of_choice(texts: Any) -> str:
    if not isinstance(texts, list) or not texts:
        raise ArgumentError(f"the choices are {shown(texts, 40)}; give a list of texts")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ArgumentError("a choice is empty; give texts of at least a character")
    return alternatives([escaped(text) for text in texts])


def _expression_of_calls(functions: Mapping[str, Any], several: bool) -> str:
    """A list of calls.

    Args:
        functions: the schemas of the functions' arguments, by the names of the functions.
        several: whether there may be more than one call.
    """
    calls = []
    for name, schema in functions.items():
        try:
            arguments = expression_of_schema(schema)
        except NotRegularError as error:
            raise NotRegularError(f"{name:.80}: {error.reason}") from None
        except InvalidSchemaError as error:
            raise error.of_function(name) from None
        if arguments != NEVER:
            start = escaped(f'{{"name": "{name}", "parameters": ')
            calls.append(rf"{start}{arguments}\}}")
    call = alternatives(calls)
    if call == NEVER:
        return NEVER
    more_calls = f"(?:, {call})*" if several else ""
    return checked_nesting(checked_length(rf"\[{call}{more_calls}\]"))
