"""Answers that follow a JSON schema, a regular expression, a choice or a grammar, by llguidance's masks."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from qsample.runtime import CausalLM, Step
from qsample.serve.http import ApiError
from qsample.serve.trial import TokenizerArguments, Trial
from qsample.tensors import Array

_KEPT: Final = 64  # grammars
_THREADS: Final = 2  # that compile
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


class Grammars:
    """Compiled grammars of a model; the most recent are kept."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._tokenizer: Any = None
        self._reading = threading.Lock()
        self._kept: OrderedDict[str, asyncio.Future[_Compiled]] = OrderedDict()
        self._waiting: Counter[str] = Counter()  # requests, by grammar
        self._tried: dict[str, Trial] = {}  # by the grammar that each works on
        self._trials: SimpleQueue[Trial] = SimpleQueue()  # the idle ones
        for _ in range(_THREADS):
            self._trials.put(Trial(self._tokenizer_arguments))
        # A pool apart from asyncio.to_thread's: slow grammars must not delay the encoding of prompts.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="qsample-grammar")

    async def guide(self, grammar: str) -> GrammarGuide:
        """A guide for an answer, compiled on another thread, once for simultaneous requests, for as long as one waits.

        Args:
            grammar: see `grammar_of`.

        Raises ApiError if the grammar is invalid, takes too much to compile, or no answer can follow it.
        """
        if grammar not in self._kept:
            loop = asyncio.get_running_loop()
            self._kept[grammar] = loop.run_in_executor(self._threads, self._compile, grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        compiling = self._kept[grammar]
        self._waiting[grammar] += 1
        try:
            compiled = await asyncio.shield(compiling)  # others may wait for it
        except BaseException:  # the next request tries again; a cancelled request leaves it to the others
            failed = compiling.done() and (compiling.cancelled() or compiling.exception() is not None)
            left = not compiling.done() and self._waiting[grammar] == 1
            if (failed or left) and self._kept.get(grammar) is compiling:
                del self._kept[grammar]
            if left:
                compiling.cancel()
                if (trial := self._tried.get(grammar)) is not None:
                    trial.stop()
            raise
        finally:
            self._waiting[grammar] -= 1
            self._waiting += Counter()  # without zeros
        return GrammarGuide(compiled)

    def _compile(self, grammar: str) -> _Compiled:
        trial = self._trials.get()
        try:
            self._tried[grammar] = trial
            reason = trial.refusal(grammar)
        finally:
            del self._tried[grammar]
            self._trials.put(trial)
        if reason is not None:
            raise _refused(reason)
        return compile_grammar(grammar, self._llguidance_tokenizer(), self._model.interface.vocab_size)

    def _llguidance_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(**self._tokenizer_arguments()._asdict())
                except ValueError as error:
                    raise ApiError(400, f"this model's tokenizer cannot follow a grammar: {error!s:.200}") from None
            return self._tokenizer

    def _tokenizer_arguments(self) -> TokenizerArguments:
        assert self._model.tokenizer is not None  # see `check_possible`
        ends = list(self._model.package.manifest.token_ids.eos)
        return TokenizerArguments(self._model.tokenizer.to_json(), self._model.interface.vocab_size, ends)

    def check_possible(self) -> None:
        """Raise ApiError if answers of this model cannot be constrained."""
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
                "this server lacks llguidance, which an answer that follows a schema needs; install qsample[serve] on "
                "its machine",
                code="missing_module",
            )

    def close(self) -> None:
        """Compile no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._tried.values()):
            trial.stop()
        while not self._trials.empty():
            self._trials.get().stop()


def compile_grammar(grammar: str, tokenizer: Any, vocab_size: int) -> _Compiled:
    """Compile `grammar` (see `grammar_of`) for llguidance's `tokenizer`.

    Raises ApiError if the grammar is invalid, and if no answer can follow it.
    """
    from llguidance import LLMatcher

    if grammar.startswith(_GBNF):
        grammar = _from_gbnf(grammar.removeprefix(_GBNF))
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    _check(matcher)
    mask = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
    _fill(matcher, mask)  # the same for every answer, and often the slowest
    if not mask.any():
        raise _refused("no text follows it")
    return _Compiled(matcher, mask)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """matcher: at the start of an answer; copied for each. mask: [1, W] int32, of the first token."""

    matcher: Any
    mask: Array


class GrammarGuide:
    """Writes the mask of each next token of an answer; the `allowed_tokens` of a request.

    The first mask is computed early, with the grammar. Each later mask depends on the token before it, and the step
    that samples the next token needs it, because the graph filters and draws by itself: so it is written between the
    two steps. llguidance releases Python's lock meanwhile, so the event loop goes on.
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
    """Raise ApiError for an invalid grammar, and for a grammar that became too complex for llguidance on the way."""
    if matcher.is_error():
        raise _refused(matcher.get_error())


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
        raise _refused(str(error)) from None


def _refused(reason: str) -> ApiError:
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
