"""Answers that follow a JSON schema, a regular expression, a choice or a grammar, by llguidance's masks."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Any, Final

from qsample.errors import QsampleError
from qsample.runtime import CausalLM, Step
from qsample.runtime.text.tokenizer import TOKENIZER_FILE
from qsample.serve.http.errors import ApiError
from qsample.tensors import Array

_KEPT: Final = 64  # grammars
# Blanks as json.dumps writes them. A model that may write any number of them may never stop doing so.
_JSON: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiled grammars of one model, those used last kept."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()

    async def guide(self, grammar: str) -> Guide:
        """A guide for one answer. grammar: of `from_json_schema` and its siblings.

        It is compiled on another thread, which can take a second. Raises ApiError where it is none, and where the
        package or the environment cannot follow it.
        """
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
        else:
            matcher = await asyncio.to_thread(self._compile, grammar)
            self._kept[grammar] = matcher
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return Guide(self._kept[grammar].deep_copy())

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._llguidance_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            text = " ".join(matcher.get_error().split())
            raise ApiError(400, f"the answer cannot be held to that: {text:.300}", code="invalid_grammar")
        return matcher

    def _llguidance_tokenizer(self) -> Any:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            package = self._model.package
            text = package.file(TOKENIZER_FILE).read_text(encoding="utf-8")
            ends = list(package.manifest.token_ids.eos)
            try:
                self._tokenizer = LLTokenizer(text, n_vocab=self._model.interface.vocab_size, eos_token=ends or None)
            except ValueError as error:
                raise ApiError(400, f"this model's tokenizer cannot be held to a grammar: {error!s:.200}") from None
        return self._tokenizer

    def check_possible(self) -> None:
        """Raise ApiError where no answer of this model can be held to anything."""
        if not self._model.interface.features.allowed_tokens:
            raise ApiError(
                400,
                "this package was exported without allowed_tokens, which an answer that follows a schema needs; export "
                "it with --allowed-tokens",
            )
        if self._model.tokenizer is None:
            raise ApiError(400, "this package has no tokenizer, which an answer that follows a schema needs")
        try:
            import llguidance  # noqa: F401
        except ModuleNotFoundError:
            raise ApiError(
                400, "this server lacks llguidance, which an answer that follows a schema needs; install qsample[serve]"
            ) from None


class Guide:
    """Writes the mask of each next token of one answer; the `allowed_tokens` of a request."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __call__(self, step: Step | None, mask: Array) -> None:
        from llguidance import numpy

        if step is not None and step.emitted[0]:
            self._matcher.consume_token(int(step.tokens[0]))
        if self._matcher.is_error():
            raise QsampleError(f"the grammar cannot go on: {self._matcher.get_error():.200}")
        numpy.fill_next_token_bitmask(self._matcher, mask, 0)


def from_json_schema(schema: Any) -> str:
    """schema: a JSON schema, true for any JSON, or one as text. Raises ApiError where the text is none."""
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ApiError(400, f"the schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        schema = {} if schema is True else {"not": {}}
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON)
    return grammar


def from_regex(expression: str) -> str:
    """expression: of Rust's regex crate, for the whole answer."""
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_regex(expression)
    return grammar


def from_choice(choices: list[str]) -> str:
    """One of several texts, word for word."""
    if "" in choices:
        raise ApiError(400, "a choice is empty; give texts of one character or more")
    return from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def from_lark(grammar: str) -> str:
    """grammar: Lark's notation, as llguidance reads it; or GBNF, llama.cpp's."""
    from llguidance import LLMatcher, gbnf_to_lark

    if "::=" in grammar:
        try:
            grammar = gbnf_to_lark.gbnf_to_lark(grammar)
        except Exception as error:
            raise ApiError(400, f"the grammar is no GBNF: {error!s:.200}") from None
    made: str = LLMatcher.grammar_from_lark(grammar)
    return made
