"""Grammars: the form that an answer has to follow, as llguidance reads it, and its compilation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from qsample.contract.arrays import Array
from qsample.serve.http import ApiError

# The prefix of a grammar in GBNF: its translation takes long, so the compiling thread does it.
_GBNF: Final = "\0GBNF:"
# Blanks as json.dumps writes them. A model that may write any number of them may never stop doing so.
_JSON: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Form(NamedTuple):
    """The form that an answer has to follow.

    kind: "json_schema" (value: a schema, true for any JSON, or a schema's text), "regex" (value: an expression of
    Rust's regex crate, for the whole answer), "choice" (value: a list of texts) or "grammar" (value: Lark's notation as
    llguidance reads it, or llama.cpp's GBNF).
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any


def grammar_of(form: Form) -> str:
    """The text of a form's grammar, for `Grammars.guide`. Needs llguidance.

    Raises ApiError if the form is invalid.
    """
    from llguidance import LLMatcher

    kind, value = form
    if kind == "regex":
        return _made(LLMatcher.grammar_from_regex, value)
    if kind == "grammar":
        return _GBNF + value if "::=" in value else _made(LLMatcher.grammar_from_lark, value)
    if kind == "choice":
        if "" in value:
            raise ApiError(400, "a choice is empty; give texts of at least a character")
        texts = (json.dumps(choice, ensure_ascii=False) for choice in value)
        return _made(LLMatcher.grammar_from_lark, "start: " + " | ".join(texts))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the schema is not valid JSON: {error}") from None
    if value is not True and not isinstance(value, dict):
        raise ApiError(400, f"the schema is {json.dumps(value):.60}; give an object, or true for any JSON")
    schema = {} if value is True else value
    return _made(lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON))


def _from_gbnf(grammar: str) -> str:
    from llguidance import LLMatcher, gbnf_to_lark

    try:
        lark = gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:
        raise ApiError(400, f"the grammar is not valid GBNF: {error!s:.200}") from None
    return _made(LLMatcher.grammar_from_lark, lark)


def _made(make: Callable[..., str], *value: str) -> str:
    try:
        return make(*value)
    except (ValueError, RecursionError) as error:
        raise refused(str(error)) from None


def refused(reason: str) -> ApiError:
    """The error of a grammar that is invalid or too large."""
    text = " ".join(reason.split())
    return ApiError(400, f"no answer can follow that form: {text:.300}", code="invalid_grammar")


def moved_schema(name: str, schema: Any, place: str) -> Any:
    """A JSON schema as a part of another schema: its references to its own parts follow it.

    Args:
        name: the function whose arguments it describes, for the error.
        schema: the schema, or a part of it.
        place: its place in the other schema, "#/items" for instance.

    Raises ApiError if it is nested too deep.
    """

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(item) for item in part]
        if not isinstance(part, dict):
            return part
        changed = {key: moved(value) for key, value in part.items()}
        if isinstance(reference := changed.get("$ref"), str) and reference.startswith("#"):
            changed["$ref"] = place + reference[1:]
        return changed

    try:
        return moved(schema)
    except RecursionError:
        raise ApiError(400, f"the parameters of {name} are nested too deep; give less", param="tools") from None


def compile_grammar(grammar: str, tokenizer: Any, vocab_size: int) -> Compiled:
    """Compile `grammar` (see `grammar_of`) for llguidance's `tokenizer`.

    Raises ApiError if the grammar is invalid, and if no answer can follow it.
    """
    from llguidance import LLMatcher

    if grammar.startswith(_GBNF):
        grammar = _from_gbnf(grammar.removeprefix(_GBNF))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    check_matcher(matcher)
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    fill_mask(matcher, mask)  # the same for every answer, and often the slowest
    if not mask.any():
        raise refused("no text follows it")
    return Compiled(matcher, mask)


@dataclass(frozen=True, slots=True)
class Compiled:
    """matcher: at the start of an answer; copied for each. mask: [1, W] int32, of the first token."""

    matcher: Any
    mask: Array


def fill_mask(matcher: Any, mask: Array) -> None:
    """Write the mask of the next token, [1, W] int32. Raises as `check_matcher` does."""
    from llguidance import numpy

    numpy.fill_next_token_bitmask(matcher, mask, 0)
    check_matcher(matcher)


def check_matcher(matcher: Any) -> None:
    """Raise ApiError for an invalid grammar, and for a grammar that became too complex for llguidance on the way."""
    if matcher.is_error():
        raise refused(matcher.get_error())
