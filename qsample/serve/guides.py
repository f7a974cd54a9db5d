"""Answers that follow a JSON schema, a regular expression, a choice or a grammar, by llguidance's masks."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qsample.runtime import CausalLM, Step
from qsample.serve.http.errors import ApiError
from qsample.tensors import Array

Grammar = Callable[[], str]  # makes what `Grammars.guide` takes; it needs llguidance, or raises ApiError

_KEPT: Final = 64  # grammars
_THREADS: Final = 2  # that compile
# Before a grammar in GBNF, which takes long to translate: that is done where it is compiled. No other begins with it.
_GBNF: Final = "\0GBNF:"
# Blanks as json.dumps writes them. A model that may write any number of them may never stop doing so.
_JSON: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiled grammars of one model, those used last kept."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._reading = threading.Lock()
        self._kept: OrderedDict[str, asyncio.Future[_Compiled]] = OrderedDict()
        # Of their own: grammars that take long are not to hold up prompts, which asyncio.to_thread encodes.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="qsample-grammar")

    async def guide(self, grammar: str) -> GrammarGuide:
        """A guide for one answer. grammar: of `from_json_schema` and its siblings.

        It is compiled on another thread, which can take a second, once for all who ask for it at the same time. Raises
        ApiError where it is none, and where no answer can follow it.
        """
        if grammar not in self._kept:
            loop = asyncio.get_running_loop()
            self._kept[grammar] = loop.run_in_executor(self._threads, self._compile, grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        compiling = self._kept[grammar]
        try:
            compiled = await asyncio.shield(compiling)  # others may wait for it
        except BaseException:  # whatever it was, it is tried again; whoever was cancelled leaves it to the others
            failed = compiling.done() and (compiling.cancelled() or compiling.exception() is not None)
            if failed and self._kept.get(grammar) is compiling:
                del self._kept[grammar]
            raise
        return GrammarGuide(compiled)

    def _compile(self, grammar: str) -> _Compiled:
        from llguidance import LLMatcher

        if grammar.startswith(_GBNF):
            grammar = _from_gbnf(grammar.removeprefix(_GBNF))
        matcher = LLMatcher(self._llguidance_tokenizer(), grammar, log_level=0)
        _check(matcher)
        words = (self._model.interface.vocab_size + 31) // 32
        mask = np.zeros((1, words), dtype=np.int32)
        _fill(matcher, mask)  # the same for every answer, and often the one that takes longest
        if not mask.any():
            raise _refused("no text follows it")
        return _Compiled(matcher, mask)

    def _llguidance_tokenizer(self) -> Any:
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer

    def _read_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        assert self._model.tokenizer is not None  # `check_possible` saw to it
        ends = list(self._model.package.manifest.token_ids.eos)
        try:
            return LLTokenizer(
                self._model.tokenizer.to_json(), n_vocab=self._model.interface.vocab_size, eos_token=ends
            )
        except ValueError as error:
            raise ApiError(400, f"this model's tokenizer cannot be held to a grammar: {error!s:.200}") from None

    def check_possible(self) -> None:
        """Raise ApiError where no answer of this model can be held to anything."""
        package = self._model.package
        if not self._model.interface.features.allowed_tokens:
            raise ApiError(
                400,
                "this package was exported without allowed_tokens, which an answer that follows a schema needs; export "
                "it with --allowed-tokens",
            )
        if self._model.tokenizer is None:
            raise ApiError(400, "this package has no tokenizer, which an answer that follows a schema needs")
        if not package.manifest.token_ids.eos:
            raise ApiError(400, "this model has no stop token, with which an answer that follows a schema ends")
        if importlib.util.find_spec("llguidance") is None:
            raise ApiError(
                501,
                "this server lacks llguidance, which an answer that follows a schema needs; install qsample[serve] "
                "where it runs",
                code="missing_module",
            )

    def close(self) -> None:
        """Compile no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """matcher: at the start of an answer; copied for each. mask: [1, W] int32, of the first token."""

    matcher: Any
    mask: Array


class GrammarGuide:
    """Writes the mask of each next token of one answer; the `allowed_tokens` of a request.

    What can be computed early is the first mask, with the grammar. Each other one needs the token before it, and the
    step that samples the next token needs the mask, because the graph filters and draws by itself: it is written
    between the two, outside of Python's lock, so the event loop goes on.
    """

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._matcher: Any = None

    def __call__(self, step: Step | None, mask: Array) -> None:
        if step is None:
            mask[:] = self._compiled.mask
            return
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        if step.emitted[0]:
            self._matcher.consume_token(int(step.tokens[0]))
            _check(self._matcher)
            _fill(self._matcher, mask)


def _fill(matcher: Any, mask: Array) -> None:
    from llguidance import numpy

    numpy.fill_next_token_bitmask(matcher, mask, 0)
    _check(matcher)


def _check(matcher: Any) -> None:
    """Raise ApiError where a grammar is none, or became too much for llguidance on the way."""
    if matcher.is_error():
        raise _refused(matcher.get_error())


def from_json_schema(schema: Any) -> str:
    """schema: a JSON schema, true for any JSON, or one as text. Raises ApiError where it is none."""
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the schema is no JSON: {error}") from None
    if schema is not True and not isinstance(schema, dict):
        raise ApiError(400, f"the schema is {json.dumps(schema):.60}; give an object, or true for any JSON")
    return _made(LLMatcher.grammar_from_json_schema, {} if schema is True else schema, defaults=_JSON)


def from_regex(expression: str) -> str:
    """expression: of Rust's regex crate, for the whole answer."""
    from llguidance import LLMatcher

    return _made(LLMatcher.grammar_from_regex, expression)


def from_choice(choices: list[str]) -> str:
    """One of several texts, word for word."""
    if "" in choices:
        raise ApiError(400, "a choice is empty; give texts of one character or more")
    return _lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def from_lark(grammar: str) -> str:
    """grammar: Lark's notation, as llguidance reads it; or GBNF, llama.cpp's."""
    return _GBNF + grammar if "::=" in grammar else _lark(grammar)


def _from_gbnf(grammar: str) -> str:
    from llguidance import gbnf_to_lark

    try:
        return _lark(gbnf_to_lark.gbnf_to_lark(grammar))
    except ApiError:
        raise
    except Exception as error:
        raise ApiError(400, f"the grammar is no GBNF: {error!s:.200}") from None


def _lark(grammar: str) -> str:
    from llguidance import LLMatcher

    return _made(LLMatcher.grammar_from_lark, grammar)


def _made(make: Callable[..., str], value: Any, **options: Any) -> str:
    try:
        return make(json.dumps(value) if isinstance(value, dict) else value, **options)
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from None


def _refused(reason: str) -> ApiError:
    text = " ".join(reason.split())
    return ApiError(400, f"the answer cannot be held to that: {text:.300}", code="invalid_grammar")
