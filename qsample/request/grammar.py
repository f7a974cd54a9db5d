"""Grammars on the host: the form that an answer has to follow, its compilation by llguidance, and the
masks of each answer.

Forms that are regular need no masks: `structured` makes tables of them, which the graph follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

import numpy as np

from qsample.contract.arrays import Array
from qsample.contract.tensors import RUNNING
from qsample.errors import ArgumentError

if TYPE_CHECKING:
    from qsample.runtime import Step

# JSON is written with the blanks of json.dumps. A model that may write any number of blanks may
# never stop writing them.
_JSON_OPTIONS: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class Form(NamedTuple):
    """The form that an answer has to follow.

    The value of each kind:

    - "json_schema": a schema, the text of a schema, or true for any JSON;
    - "regex": an expression of Rust's regex crate that the whole answer matches;
    - "choice": a list of texts;
    - "grammar": a grammar in Lark's notation as llguidance reads it, or in llama.cpp's GBNF;
    - "call", "calls": a mapping from the names of functions to the schemas of their arguments. The
      answer is a list of a single call, or of several.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "call", "calls"]
    value: Any


class InvalidGrammarError(ArgumentError):
    """No answer can follow a grammar, or the grammar is too large to compile."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The text of a grammar.

    Attributes:
        text: the grammar as llguidance's LLMatcher takes it, or GBNF.
        is_gbnf: whether the text is GBNF. Its translation takes long, so the thread that compiles
            the grammar translates it.
    """

    text: str
    is_gbnf: bool = False


def grammar_of(form: Form) -> Grammar:
    """The grammar of a form, for `Grammars.guide`. It needs llguidance.

    Raises:
        ArgumentError: the form is invalid.
    """
    from llguidance import LLMatcher

    kind, value = form
    match kind:
        case "regex":
            return Grammar(_converted(LLMatcher.grammar_from_regex, value))
        case "grammar":
            if "::=" in value:
                return Grammar(value, is_gbnf=True)
            return Grammar(_converted(LLMatcher.grammar_from_lark, value))
        case "choice":
            return Grammar(_converted(LLMatcher.grammar_from_lark, _lark_of_choice(value)))
        case "call" | "calls":
            lark = _lark_of_calls(value, several=kind == "calls")
            return Grammar(_converted(LLMatcher.grammar_from_lark, lark))
        case "json_schema":
            schema = json.dumps(_parsed_schema(value))
            return Grammar(
                _converted(LLMatcher.grammar_from_json_schema, schema, defaults=_JSON_OPTIONS)
            )


def check_form(form: Form) -> None:
    """Raise ArgumentError for an invalid form, before a model is there."""
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(_for_llguidance(grammar_of(form)))
    if problem:
        raise invalid_grammar(problem)


def _lark_of_choice(texts: list[str]) -> str:
    if "" in texts:
        raise ArgumentError("a choice is empty; give texts of at least a character")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _lark_of_calls(functions: Mapping[str, Any], several: bool) -> str:
    """A list of calls in Lark's notation. Each schema is a separate document, so that references to
    its parts stay valid."""
    calls = []
    for name, schema in functions.items():
        start = json.dumps(f'{{"name": "{name}", "parameters": ')
        arguments = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
        calls.append(f'{start} %json {arguments} "}}"')
    more_calls = ' (", " call)*' if several else ""
    return f'start: "[" call{more_calls} "]"\ncall: {" | ".join(calls)}'


def _parsed_schema(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"the schema is not valid JSON: {error}") from None
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise ArgumentError(
            f"the schema is {json.dumps(value):.60}; give an object, or true for any JSON"
        )
    return value


def _for_llguidance(grammar: Grammar) -> str:
    """The text of a grammar as LLMatcher takes it."""
    from llguidance import LLMatcher, gbnf_to_lark

    if not grammar.is_gbnf:
        return grammar.text
    try:
        lark = gbnf_to_lark.gbnf_to_lark(grammar.text)
    except Exception as error:
        raise ArgumentError(f"the grammar is not valid GBNF: {error!s:.200}") from None
    return _converted(LLMatcher.grammar_from_lark, lark)


def _converted(convert: Callable[..., str], text: str, **options: Any) -> str:
    """The result of one of LLMatcher's conversions to a grammar."""
    try:
        return convert(text, **options)
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(str(error)) from None


def invalid_grammar(reason: str) -> InvalidGrammarError:
    """The error of a grammar that is invalid or too large."""
    text = " ".join(reason.split())
    return InvalidGrammarError(f"no answer can follow that form: {text:.300}")


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at the start of an answer.

    Attributes:
        matcher: llguidance's matcher. Each answer uses a copy of it.
        mask: [1, W] int32, the mask of the first token.
    """

    matcher: Any
    mask: Array


def compile_grammar(grammar: Grammar, tokenizer: Any, vocab_size: int) -> CompiledGrammar:
    """Compile a grammar.

    Args:
        grammar: the grammar.
        tokenizer: llguidance's tokenizer of the model.
        vocab_size: the number of tokens of the model.

    Raises:
        ArgumentError: the grammar is invalid, or no answer can follow it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _for_llguidance(grammar), log_level=0)
    check_matcher(matcher)
    # The first mask is the same for every answer, and often the slowest.
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    fill_mask(matcher, mask)
    if not mask.any():
        raise invalid_grammar("no text follows it")
    return CompiledGrammar(matcher, mask)


def fill_mask(matcher: Any, mask: Array) -> None:
    """Write the mask of the next token.

    Args:
        matcher: llguidance's matcher.
        mask: [1, W] int32, the mask to write.

    Raises:
        InvalidGrammarError: as `check_matcher`.
    """
    from llguidance import numpy

    numpy.fill_next_token_bitmask(matcher, mask, 0)
    check_matcher(matcher)


def check_matcher(matcher: Any) -> None:
    """Raise InvalidGrammarError if the grammar is invalid, or became too complex for llguidance in
    the course of an answer."""
    if matcher.is_error():
        raise invalid_grammar(matcher.get_error())


class TokenizerArguments(TypedDict):
    """The arguments of llguidance.LLTokenizer.

    Attributes:
        tokenizer: the content of tokenizer.json.
        n_vocab: the number of tokens of the model.
        eos_token: the ids of the model's stop tokens.
    """

    tokenizer: str
    n_vocab: int
    eos_token: list[int]


class GrammarGuide:
    """Writes the mask of each next token of an answer. It is the `allowed_tokens` of a request.

    The first mask is computed with the grammar. Each later mask depends on the token before it, and
    the step that samples the next token needs it, because the graph filters and draws by itself: so
    it is written between the two steps. llguidance releases Python's lock meanwhile, so an event
    loop goes on.
    """

    def __init__(self, compiled: CompiledGrammar, row: int = 0) -> None:
        """
        Args:
            compiled: the grammar of the answer.
            row: the row of the answer in its batch.
        """
        self._compiled = compiled
        self._row = row
        self._matcher: Any = None

    def __call__(self, step: Step | None, mask: Array) -> None:
        """Write the mask of the next token.

        Args:
            step: the step that sampled the last token; None before the first token.
            mask: [1, W] int32, the mask to write.
        """
        if step is None:
            mask[:] = self._compiled.mask
            return
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        if step.emitted[self._row] and step.status[self._row] == RUNNING:
            self._matcher.consume_token(int(step.tokens[self._row]))
            check_matcher(self._matcher)
            fill_mask(self._matcher, mask)
